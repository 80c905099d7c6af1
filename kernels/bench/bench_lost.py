"""Time of an FP8 product by the share of its rows that FP8 cannot hold, beside bfloat16's.

    python -m mxjax.kernels.bench.bench_lost [--shapes 16384x2048x3072 …] [--shares 0 0.01 0.1] [--out FILE]

A shape is m x n x k; the first two defaults are Dgrad of attention's fused product in llama3.2-1b with
4 x 4096 tokens and in 125m with 64 x 512. A lost row of the gradient, in E5M2, has a group of columns 2**40
above its others, which meets zeros: a product that was not computed again is wrong. Lost rows are drawn, or
with `--together` the first ones. Every result is compared with the definition before it is timed. Prints a
table for each shape, and JSON as the last line.
"""

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from mxjax.devices import current_target
from mxjax.formats import BLOCK
from mxjax.fp8_carriers import group_of
from mxjax.implementations import compiler_options
from mxjax.kernels.bench.dot_cases import TOLERANCE, distance
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kmajor import KMajor, decode
from mxjax.product import contract
from mxjax.recipes import get_policy
from mxjax.tables import table

SHAPES = ("16384x2048x3072", "32768x768x2304")
SHARES = (0, 0.001, 0.01, 0.1, 1)
ABOVE = 40
"""Binades between a lost row's first group and its others."""
BASELINE = "jnp.dot, bfloat16"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the shapes that the command line names; exits with 1 if a product of ours failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_lost", description=__doc__)
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=list(map(shape_of, SHAPES)))
    parser.add_argument("--shares", nargs="+", type=share_of, default=SHARES, help="of rows, from 0 to 1")
    parser.add_argument("--together", action="store_true", help="lose the first rows, not drawn ones")
    numbers = ("M", "N", "K", "WARPS", "STAGES")
    parser.add_argument("--tiles", nargs=5, type=int, metavar=numbers, help="of the rows computed again")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if current_target() is None:
        raise SystemExit("bench_lost needs a GPU and Triton: install mxjax[cuda]")
    if options.tiles:
        from mxjax.kernels.matmul import correct, tiles

        correct.GATHERED = tiles.Tiles(*options.tiles)
    report = Report("mxjax.kernels.bench.bench_lost", arguments, options)
    for shape in options.shapes:
        bench_shape(report, shape, options.shares, options.together)
    report.print()


def shape_of(text: str) -> tuple[int, int, int]:
    """Reads MxNxK; k must be a multiple of the block, and at least three blocks."""
    m, n, k = map(int, text.split("x"))
    if min(m, n) < 1 or k < 3 * BLOCK or k % BLOCK:
        raise argparse.ArgumentTypeError(f"{text}: k must be a multiple of {BLOCK} from {3 * BLOCK} on")
    return m, n, k


def share_of(text: str) -> float:
    """Reads a number from 0 to 1."""
    if not 0 <= float(text) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return float(text)


def bench_shape(report: Report, shape: tuple[int, int, int], shares: Sequence[float], together: bool) -> None:
    """Measures one shape at all shares of lost rows, and prints its table."""
    results: dict[str, Timing | Absent] = {BASELINE: time_baseline(report, shape)}
    for share in shares:
        results[line_of(share)] = time_share(report, shape, share, together)
    timed = {name: t for name, t in results.items() if isinstance(t, Timing)}
    first = next((t for name, t in timed.items() if name != BASELINE), None)
    rows = [
        [name, *(f"{1e6 * seconds:.1f}" for seconds in t), f"{t.median / first.median:.2f}" if first else "-"]
        for name, t in timed.items()
    ]
    print(f"\n{' x '.join(map(str, shape))}\n")
    print(table(" | us | p10 | p90 | of the first share", rows, padded=True), flush=True)
    print_absent(results.values())


def line_of(share: float) -> str:
    """Returns the name of a share's line."""
    return f"{share:g} lost"


def time_baseline(report: Report, shape: tuple[int, int, int]) -> Timing | Absent:
    """Times the product of random numbers in bfloat16."""
    m, n, k = shape
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (m, k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (k, n), jnp.bfloat16)
    return _timed(report, BASELINE, {"shape": shape}, jax.jit(jnp.dot), x, w)


def time_share(report: Report, shape: tuple[int, int, int], share: float, together: bool) -> Timing | Absent:
    """Times the product with a share of lost rows, after it was compared with the definition."""
    lhs, rhs, lost = make_operands(shape, share, together)
    record = {"shape": shape, "share": share, "rows": lost, "together": together}
    return _timed(report, line_of(share), record, fp8_product(), lhs, rhs, wanted=in_float32)


def make_operands(shape: tuple[int, int, int], share: float, together: bool) -> tuple[KMajor, KMajor, int]:
    """Returns packed operands and the number of lost rows of the first: their first group is far above."""
    m, n, k = shape
    group = group_of(k // BLOCK)
    keys, lost = jax.random.split(jax.random.key(1), 5), round(share * m)
    lhs, rhs = (
        KMajor(
            jax.random.bits(keys[i], (rows, k // 2), jnp.uint8),
            jax.random.randint(keys[i + 2], (rows, k // BLOCK), 125, 129).astype(jnp.uint8),
        )
        for i, rows in enumerate((m, n))
    )
    rows = jnp.arange(m) if together else jax.random.permutation(keys[4], m)
    scales = lhs.packed[1].at[rows[:lost], :group].add(ABOVE)
    elements = rhs.elements.at[:, : group * BLOCK // 2].set(0)
    return KMajor(lhs.elements, scales), KMajor(elements, rhs.scales), lost


def fp8_product() -> Callable[[KMajor, KMajor], jax.Array]:
    """Returns the jitted product as Dgrad computes it: of a gradient in E5M2 and a weight in E4M3."""
    from mxjax.kernels.matmul import fp8_matmul

    def product(lhs: KMajor, rhs: KMajor) -> jax.Array:
        return fp8_matmul.matmul(*lhs.packed, *rhs.packed, jnp.bfloat16, ("e5m2", "e4m3")).value(jnp.bfloat16)

    return jax.jit(product, compiler_options=compiler_options([get_policy("wgrad")], "fp8_carriers"))


@jax.jit
def in_float32(lhs: KMajor, rhs: KMajor) -> jax.Array:
    """Returns the product of the operands' values in float32."""
    return contract(decode(lhs), -1, decode(rhs), -1, lax.Precision.HIGHEST)


def _timed(
    report: Report, name: str, record: dict, run: Callable, *operands, wanted: Callable | None = None
) -> Timing | Absent:
    """Times a product, or returns the reason why there is no time."""
    try:
        if report.is_late:
            raise TimeoutError(LATE)
        if wanted is not None:
            far = float(distance(run(*operands), wanted(*operands)))
            assert far < TOLERANCE, f"the result differs from the definition by {far}"
        result = measure(run, *operands, rounds=report.rounds)
    except Exception as error:  # keep the other cases
        ours = wanted is not None and not report.is_late
        result = Absent(name, first_line(error), ours)
    numbers = result._asdict() if isinstance(result, Timing) else {}
    report.add(result, name=name, **record, **numbers)
    return result


if __name__ == "__main__":
    main()
