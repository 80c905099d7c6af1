"""Time of `mxjax.ragged_dot` forward and backward at the width of Mixtral 8x7B, beside bfloat16.

    python -m mxjax.kernels.bench.bench_ragged [--rows 32768] [--sizes even …] [--policies …] [--out FILE]
    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false python -m … --fast   # in less than two minutes on an H200

Eight experts, 4096 -> 14336 (arXiv 2401.04088, table 1). "even" gives each expert as many rows; "skewed"
gives the largest 1.9 times the mean; "half" gives half of the rows to one expert, and "one" all. The baseline
in bfloat16 is one GEMM an expert, of static sizes. `jax.lax.ragged_dot` is listed as XLA runs it, which is
dense over all experts, and by cuDNN. Results are compared before they are timed: all with the baseline,
fp8_carriers also with xla. Prints a table for each distribution of rows, and JSON as the last line.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mxjax.implementations import Implementation, compiler_options
from mxjax.kernels.bench.dot_cases import LARGEST_DIFFERENCE, TOLERANCE, both_ways, distance
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.ragged import ragged_dot
from mxjax.recipes import get_policy
from mxjax.tables import table

SHARES = {
    "even": [1] * 8,
    "skewed": [30, 28, 22, 16, 12, 8, 6, 4],
    "half": [7, 1, 1, 1, 1, 1, 1, 1],
    "one": [1, 0, 0, 0, 0, 0, 0, 0],
}
"""The rows of each expert, in proportion."""
BASELINE = "a GEMM an expert, static sizes, bfloat16"
Tensors = tuple[jax.Array, jax.Array, jax.Array]  # x, w, dy


class Case(NamedTuple):
    """A product to measure.

    Attributes:
      run: takes x, w, dy and the sizes and returns y, dx and dw.
      like: name of the case with which it must agree.
      timed: whether its time is wanted, beside its results.
    """

    name: str
    run: Callable
    like: str | None = None
    timed: bool = True


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases that the command line names; exits with 1 if one of ours failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_ragged", description=__doc__)
    parser.add_argument("--rows", type=int, default=32768, help="rows of all experts")
    parser.add_argument("--widths", nargs=2, type=int, default=[4096, 14336], help="d_in and d_out")
    parser.add_argument("--sizes", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--policies", nargs="*", default=["wgrad", "wgrad_hadamard"])
    parser.add_argument("--implementations", nargs="*", default=["xla", "fp8_carriers"])
    parser.add_argument(
        "--fast",
        action="store_true",
        help="time the baseline and fp8_carriers alone; xla runs once, for the comparison",
    )
    parser.add_argument("--cache", help="folder of JAX's compilation cache")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", options.cache)
    report = Report("mxjax.kernels.bench.bench_ragged", arguments, options)
    tensors = make_tensors(options.rows, *options.widths)
    dynamic = list(dynamic_cases(options.policies, options.implementations, options.fast))
    for name in options.sizes:
        sizes = sizes_of(name, options.rows)
        static = static_cases(sizes, options.policies, options.implementations, options.fast)
        bench(report, name, sizes, tensors, [baseline(sizes), *dynamic, *static])
    report.print()


def sizes_of(name: str, rows: int) -> np.ndarray:
    """Returns the rows of each expert, `rows` in all."""
    ends = np.cumsum(SHARES[name]) * rows // sum(SHARES[name])
    return np.diff(ends, prepend=0).astype(np.int32)


def make_tensors(rows: int, d_in: int, d_out: int) -> Tensors:
    """Returns x, w and dy as in training: bfloat16 activations and gradients, float32 weights."""
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, d_in), jnp.bfloat16)
    w = 0.02 * jax.random.normal(keys[1], (8, d_in, d_out), jnp.float32)
    return x, w, 1e-4 * jax.random.normal(keys[2], (rows, d_out), jnp.bfloat16)


def bench(report: Report, name: str, sizes: np.ndarray, tensors: Tensors, cases: Sequence[Case]) -> None:
    """Measures all cases at one distribution of rows and prints the table."""
    results: dict[str, Timing | Absent] = {}
    wanted = {BASELINE, *(case.like for case in cases)}
    expected: dict[str | None, Sequence[jax.Array]] = {}
    for case in cases:
        try:
            if report.is_late:
                raise TimeoutError(LATE)
            arguments = *tensors, jnp.array(sizes)
            products = jax.block_until_ready(case.run(*arguments))
            check(case.name, products, expected.get(case.like, ()), TOLERANCE)
            check(case.name, products, expected.get(BASELINE, ()), LARGEST_DIFFERENCE)
            if case.name in wanted:
                expected[case.name] = products
            del products
            if not case.timed:
                continue
            results[case.name] = measure(case.run, *arguments, rounds=report.rounds)
        except Exception as error:  # keep the other cases
            ours = case.name.startswith("mxjax") and not report.is_late
            results[case.name] = Absent(case.name, first_line(error), ours)
        found = results[case.name]
        numbers = found._asdict() if isinstance(found, Timing) else {}
        report.add(found, name=case.name, sizes=sizes.tolist(), distribution=name, **numbers)
    print_table(f"{name}: rows of the experts {sizes.tolist()}", results)


def check(case: str, products: Sequence[jax.Array], expected: Sequence[jax.Array], bound: float) -> None:
    """Raises AssertionError if y, dx or dw differs from an expected one by the bound."""
    for got, wanted in zip(products, expected, strict=False):
        far = float(distance(got, wanted))
        assert far < bound, f"{case} differs from what it must agree with by {far}"


def print_table(title: str, results: dict[str, Timing | Absent]) -> None:
    """Prints the times of all cases, and why others are absent."""
    timed = {case: t for case, t in results.items() if isinstance(t, Timing)}
    first = next(iter(timed.values()), Timing(0, 0, 0))
    rows = [
        [case, *(f"{1e3 * seconds:.2f}" for seconds in t), f"{t.median / first.median:.2f}"]
        for case, t in timed.items()
    ]
    print(f"\n{title}\n")
    print(table(" | ms | p10 | p90 | of the first", rows, padded=True), flush=True)
    print_absent(results.values())


def baseline(sizes: np.ndarray) -> Case:
    """Returns the case with which all are compared."""
    return Case(BASELINE, both(lambda x, w, _: in_bfloat16(x, w, sizes)))


def static_cases(sizes: np.ndarray, policies, implementations, fast: bool) -> Iterator[Case]:
    """Yields our cases whose programs hold the sizes."""
    if "fp8_carriers" in implementations and not fast:
        for policy in policies:
            run = ours(policy, "fp8_carriers", sizes)
            yield Case(f"mxjax {policy}, fp8_carriers, static sizes", run, f"mxjax {policy}, xla")


def dynamic_cases(policies, implementations, fast: bool) -> Iterator[Case]:
    """Yields the cases whose sizes are an argument."""
    if not fast:
        yield Case("jax.lax.ragged_dot, bfloat16", both(lax_ragged))
        yield Case("jax.lax.ragged_dot by cuDNN, bfloat16", by_cudnn(lax_ragged))
    for policy in policies:
        xla = f"mxjax {policy}, xla"
        if "xla" in implementations:
            yield Case(xla, ours(policy, "xla"), timed=not fast)
        if "fp8_carriers" in implementations:
            yield Case(f"mxjax {policy}, fp8_carriers", ours(policy, "fp8_carriers"), xla)


def ours(policy: str, how: Implementation, static: np.ndarray | None = None) -> Callable:
    """Returns the jitted forward and backward pass of `ragged_dot`, of static sizes if given."""

    def product(x, w, sizes):
        return ragged_dot(
            x,
            w,
            sizes if static is None else static,
            policy=policy,
            key=jax.random.key(1),
            implementation=how,
            preferred_element_type=jnp.bfloat16,
        )

    return both(product, compiler_options([get_policy(policy)], how))


def both(product: Callable, flags: dict | None = None) -> Callable:
    """Returns the jitted forward and backward pass of a product of x, w and sizes."""

    def run(x, w, dy, sizes):
        return both_ways(lambda x, w: product(x, w, sizes), x, w, dy)

    return jax.jit(run, compiler_options=flags)


def by_cudnn(product: Callable) -> Callable:
    """Returns `both` with XLA's ragged instruction, which its flag gives to cuDNN."""
    run = both(product, {"xla_gpu_experimental_use_ragged_dot_fusion": True})

    def with_instruction(*arguments):
        jax.config.update("jax_ragged_dot_use_ragged_dot_instruction", True)
        try:
            return run(*arguments)
        finally:
            jax.config.update("jax_ragged_dot_use_ragged_dot_instruction", False)  # the default

    return with_instruction


def in_bfloat16(x, w, sizes: np.ndarray):
    """Returns the baseline's product: a GEMM for each expert."""
    ends = np.cumsum(sizes)
    parts = [
        x[end - size : end] @ w[i].astype(x.dtype)
        for i, (end, size) in enumerate(zip(ends, sizes, strict=True))
    ]
    return jnp.concatenate(parts)


def lax_ragged(x, w, sizes):
    """Returns JAX's own ragged product."""
    return lax.ragged_dot(x, w.astype(x.dtype), sizes)


if __name__ == "__main__":
    main()
