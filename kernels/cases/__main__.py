"""Compiles every kernel for the shapes of Llama 3.1 8B, on a machine with or without a GPU.

    python -m mxjax.kernels.cases --target gfx950 --target sm_100 --out DIR

Writes for each build DIR/<target>/<name>.hsaco (or .cubin), its assembly (.amdgcn, or .ptx and .sass), and
its record as .json (`mxjax.kernels.cases.record`): how to launch it, and what it computes.
Prints a table, and a JSON summary as the last line.

Among the names, `gemm_BxMxNxK_DTYPE` is `out[b] = lhs[b] @ rhs[b].T`; `grouped_rows_GxMxNxK` and
`grouped_sums_GxMxNxK` are Fprop or Dgrad and Wgrad of G experts; `quantize_RxC_DTYPE_rows_SIDE_columns_SIDE`
quantizes along rows, columns or both, and a side is its form (`packed`, `bf16`) and its options.
"""

from mxjax.kernels.cases.compile import main

if __name__ == "__main__":
    main()
