"""Compiles every kernel for the shapes of Llama 3.1 8B, on a machine with or without a GPU.

    python -m mxjax.kernels.cases --target gfx950 --target sm_100 --out DIR

Writes for each build DIR/<target>/<name>.hsaco (or .cubin), its assembly (.amdgcn, or .ptx and .sass), and
its record as .json (`mxjax.kernels.cases.record`): how to launch it, and what it computes.
Prints a table, and a JSON summary as the last line.
"""

from mxjax.kernels.cases.compile import main

if __name__ == "__main__":
    main()
