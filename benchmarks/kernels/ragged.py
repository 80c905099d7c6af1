"""Time of `mxjax.ragged_dot` forward and backward at the width of Mixtral 8x7B, beside bfloat16.

    python -m benchmarks.kernels.ragged [--rows 32768] [--sizes even …] [--policies …] [--out FILE]
    python -m benchmarks.kernels.ragged --experts 128 --widths 2048 768 --rows 131072

Eight experts, 4096 -> 14336 (arXiv 2401.04088, table 1), or 128 of Qwen3-30B-A3B, eight for a token (arXiv
2505.09388). "even" gives each expert as many rows; "skewed" gives the largest 1.9 times the mean, and "zipf"
each its share by Zipf's law; "half" gives half of the rows to an eighth of the experts, and "one" all. The
baseline and ceiling is one GEMM an expert in bfloat16, of static sizes. `jax.lax.ragged_dot` is listed as XLA
runs it, which is dense over all experts, and by cuDNN; `torch._grouped_mm` where PyTorch is installed. JAX's
results are compared with the baseline before they are timed, ours also with the reference on a part of the
tensors. Prints a table for each distribution of rows, and JSON last.
"""

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.kernels.dot import Tensors, both_ways, compare_part, make_tensors, step_case
from benchmarks.kernels.peers import grouped_by_torch
from mxjax.kernels.selftest.measured import Case, Report, add_arguments, time_cases
from mxjax.products.implementations import Implementation, compiler_options
from mxjax.products.ragged import ragged_dot
from mxjax.recipes import get_policy

SHARES = {
    "even": [1] * 8,
    "skewed": [30, 28, 22, 16, 12, 8, 6, 4],
    "half": [7, 1, 1, 1, 1, 1, 1, 1],
    "one": [1, 0, 0, 0, 0, 0, 0, 0],
}
"""The rows of each eighth of the experts, in proportion."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases that the command line names; exits with 1 if one of ours failed."""
    module = "benchmarks.kernels.ragged"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    parser.add_argument("--rows", type=int, default=32768, help="rows of all experts")
    parser.add_argument("--widths", nargs=2, type=int, default=[4096, 14336], help="d_in and d_out")
    parser.add_argument("--experts", type=int, default=8, help="a multiple of 8")
    names = [*SHARES, "zipf"]
    parser.add_argument("--sizes", nargs="+", default=names, choices=names)
    parser.add_argument("--policies", nargs="*", default=["wgrad", "wgrad_hadamard"])
    parser.add_argument("--implementations", nargs="*", default=["xla", "fp8_carriers"])
    parser.add_argument("--cache", help="folder of JAX's compilation cache")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", options.cache)
    report = Report(module, arguments, options)
    tensors = make_tensors(options.rows, *options.widths, options.experts)
    for name in options.sizes:
        sizes = sizes_of(name, options.rows, options.experts)
        title = f"{name}: rows of the experts {sizes.tolist()}"
        time_cases(report, title, "FLOP", cases(name, tensors, options))
    report.print()


def sizes_of(name: str, rows: int, experts: int) -> np.ndarray:
    """Returns the rows of each expert, `rows` in all."""
    shares = 1 / np.arange(1, experts + 1) if name == "zipf" else np.repeat(SHARES[name], experts // 8)
    ends = np.round(np.cumsum(shares) * rows / np.sum(shares))
    return np.diff(ends, prepend=0).astype(np.int32)


def cases(name: str, tensors: Tensors, options: argparse.Namespace) -> Iterator[Case]:
    """Yields the baseline, JAX's own products, and ours."""
    x, w, _ = tensors
    sizes = sizes_of(name, len(x), len(w))
    work = 6.0 * x.shape[0] * w.shape[1] * w.shape[2]
    fields = {"distribution": name, "sizes": sizes.tolist()}
    baseline = jax.jit(functools.partial(both_ways, lambda x, w: by_experts(x, w, sizes)))
    wanted = baseline(*tensors)

    case = functools.partial(step_case, tensors, wanted, work, fields)
    yield case("a GEMM an expert, static sizes, bfloat16", baseline, is_ceiling=True)
    yield case("jax.lax.ragged_dot, bfloat16", by_lax(sizes, cudnn=False), ours=False)
    yield case("jax.lax.ragged_dot by cuDNN, bfloat16", by_lax(sizes, cudnn=True), ours=False)
    peer = functools.partial(grouped_by_torch, x.shape, w.shape, sizes)
    yield Case("torch._grouped_mm, bfloat16", peer, work, ours=False, fields=fields)
    part = sizes_of(name, min(len(x), 512), len(w))
    for policy in options.policies:
        for by in options.implementations:
            compare = functools.partial(
                compare_part, ours(policy, by, part), _reference(policy, tuple(part)), tensors
            )
            yield case(f"mxjax {policy}, {by}", ours(policy, by, sizes), compare)


def ours(policy: str, implementation: Implementation, sizes: np.ndarray) -> Callable:
    """Returns the forward and backward pass of `ragged_dot`."""
    options = {"policy": policy, "implementation": implementation, "key": jax.random.key(1)}
    product = functools.partial(ragged_dot, preferred_element_type=jnp.bfloat16, **options)
    return _given(product, sizes, compiler_options([get_policy(policy)], implementation))


@functools.cache
def _reference(policy: str, sizes: tuple[int, ...]) -> Callable:
    return ours(policy, "reference", np.array(sizes, np.int32))


def by_lax(sizes: np.ndarray, cudnn: bool) -> Callable:
    """Returns the pass by JAX's own product; `cudnn`: by XLA's ragged instruction, which cuDNN then runs."""
    flags = {"xla_gpu_experimental_use_ragged_dot_fusion": True} if cudnn else None
    step = _given(lambda x, w, sizes: lax.ragged_dot(x, w.astype(x.dtype), sizes), sizes, flags)

    def run(*tensors):
        jax.config.update("jax_ragged_dot_use_ragged_dot_instruction", cudnn)
        try:
            return step(*tensors)
        finally:
            jax.config.update("jax_ragged_dot_use_ragged_dot_instruction", False)  # the default

    return run


def _given(product: Callable, sizes: np.ndarray, flags: dict | None) -> Callable:
    def step(x, w, dy, sizes):
        return both_ways(lambda x, w: product(x, w, sizes), x, w, dy)

    dynamic, given = jax.jit(step, compiler_options=flags), jnp.array(sizes)
    return lambda x, w, dy: dynamic(x, w, dy, given)


def by_experts(x: jax.Array, w: jax.Array, sizes: np.ndarray) -> jax.Array:
    """Returns the baseline's product: a GEMM for each expert."""
    parts = zip(jnp.split(x, np.cumsum(sizes)[:-1]), w.astype(x.dtype), strict=True)
    return jnp.concatenate([rows @ matrix for rows, matrix in parts])


if __name__ == "__main__":
    main()
