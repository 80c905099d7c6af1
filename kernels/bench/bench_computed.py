"""Time of quantizing what RMSNorm, SwiGLU or its gradient gives on Hopper: by one kernel, or by two.

    python -m mxjax.kernels.bench.bench_computed [--shapes 32768x2048 …] [--out FILE]

The two are XLA's and the quantizer's. A shape is r x c of the norm's or SwiGLU's result. Products have
factors as FP8 carriers leave them. Both sides are packed, columns after H16, as `wgrad_hadamard` does.
"differs" is the share of stored bytes unlike those of the two kernels: values may differ by a unit in the
last place. More than 0.1 % is an error. Four tensors run in one program. Prints a table for each shape, and
JSON as the last line.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax.computed import Computed
from mxjax.devices import current_target
from mxjax.formats import BLOCK
from mxjax.gated import Gated, GatedGradient
from mxjax.gemm_input import GemmInput
from mxjax.kernels.bench.bench_quantize import TENSORS, arrays, parse_shape
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kernels.quantize.computed import quantize_computed
from mxjax.kernels.quantize.launches import takes_computed
from mxjax.normed import Norm, normed
from mxjax.policy import Rotation
from mxjax.prepare import pack_operands
from mxjax.product import Product
from mxjax.tables import table

INPUTS = GemmInput(-1), GemmInput(-2, rotation=Rotation(16))
MOST_DIFFERENT = 1e-3


class Result(NamedTuple):
    """A case's time, and the share of its bytes that differ."""

    name: str
    timing: Timing
    differs: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the shapes that the command line names; exits with 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_computed", description=__doc__)
    shapes = [(32768, 2048), (16384, 8192)]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, help="ROWSxCOLUMNS")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    target = current_target()
    if not all(c % BLOCK == 0 and takes_computed(INPUTS, target, r, 2 * c) for r, c in options.shapes):
        raise SystemExit("bench_computed needs a Hopper GPU, and columns that are a multiple of 32")
    report = Report("mxjax.kernels.bench.bench_computed", arguments, options)
    for shape in options.shapes:
        results = []
        for kind in ("norm", "result", "gradient"):
            operands = [make_operand(kind, shape, seed) for seed in range(TENSORS)]
            for name, function in CASES.items():
                result = run(f"{kind}, {name}", function, operands, report)
                results.append(result)
                numbers = {} if isinstance(result, Absent) else result.timing._asdict()
                differs = {} if isinstance(result, Absent) else {"differs": result.differs}
                report.add(result, shape="x".join(map(str, shape)), name=result.name, **numbers, **differs)
        print(f"\n{' x '.join(map(str, shape))}\n")
        rows = [
            [r.name, *(f"{1e6 * t:.0f}" for t in r.timing), f"{r.differs:.1e}"]
            for r in results
            if isinstance(r, Result)
        ]
        print(table(" | us | p10 | p90 | differs", rows, padded=True), flush=True)
        print_absent(results)
    report.print()


def make_operand(kind: str, shape: tuple[int, int], seed: int) -> Computed:
    """Returns a random operand of this shape; its gradient's elements are near 2**-9."""
    r, c = shape
    keys = iter(jax.random.split(jax.random.key(seed), 6))

    def product(n: int, scale: float) -> Product:
        factors = [jnp.exp2(jax.random.randint(next(keys), (m,), -2, 3).astype(jnp.float32)) for m in (r, n)]
        return Product(scale * jax.random.normal(next(keys), (r, n), jnp.bfloat16), (factors[0], factors[1]))

    if kind == "norm":
        x = jax.random.normal(next(keys), (r, c), jnp.bfloat16)
        return normed(x, Norm(1 + jax.random.normal(next(keys), (c,)) / 4, 1e-5))
    first = product(2 * c, 1.0)
    return Gated(first) if kind == "result" else GatedGradient(first, product(c, 2.0**-9))


def in_two(x: Computed) -> object:
    """Quantizes the values that XLA computes and stores."""
    return pack_operands(jax.lax.optimization_barrier(x.value()), *INPUTS)


def in_one(x: Computed) -> object:
    """Quantizes as training does on Hopper."""
    return quantize_computed(x, *INPUTS)


CASES: dict[str, Callable[[Computed], object]] = {
    "XLA's values alone": lambda x: x.value(),
    "then the quantizer": in_two,
    "in one kernel": in_one,
}


def run(
    name: str, function: Callable[[Computed], object], operands: list[Computed], report: Report
) -> Result | Absent:
    """Times a case, or returns the reason why there is no time."""
    try:
        if report.is_late:
            return Absent(name, LATE)
        differs = 0.0
        if function is in_one:
            got, wanted = (arrays(jax.jit(f)(operands[0])) for f in (in_one, in_two))
            unlike = sum(int(jnp.sum(a != b)) for a, b in zip(got, wanted, strict=True))
            differs = unlike / sum(a.size for a in wanted)
            assert differs < MOST_DIFFERENT, f"{differs:.1e} of the bytes differ"
        program = jax.jit(lambda xs: [function(x) for x in xs])
        timing = measure(program, operands, rounds=report.rounds)
        return Result(name, Timing(*(t / TENSORS for t in timing)), differs)
    except Exception as error:  # keep the other cases
        return Absent(name, first_line(error), ours=True)


if __name__ == "__main__":
    main()
