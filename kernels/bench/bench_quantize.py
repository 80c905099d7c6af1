"""Bandwidth of the quantizer kernel beside device copies, jax.numpy as XLA fuses it, and others' casts.

    python -m mxjax.kernels.bench.bench_quantize [--shapes 8192x14336 …] [--only H16 copy] [--out FILE]

Before a result is timed, it is compared with the definition at the same shape. The kernel's must have equal
bits; for other libraries, "differs" is the share of elements unlike mxjax's under the same scale rule. Bytes
count each array read or written once. Our cases, jax.numpy's and XLA's copies run 4 calls on 4 tensors in one
program, because a training step does not pay for starting programs either; other libraries' casts and torch's
copy run one call after another. A cast that cannot run here is listed with the reason.
Prints one table a shape, and JSON as the last line.
"""

import argparse
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax.devices import current_target
from mxjax.gemm_input import GemmInput
from mxjax.kernels.bench import peers
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kmajor import KMajor, decode, pack_by_definition
from mxjax.operand import Operand
from mxjax.policy import Rotation
from mxjax.prepare import pack_operands, value_operands
from mxjax.tables import table

H16, H32, H64, H128 = Rotation(16), Rotation(32), Rotation(64), Rotation(128)
PLAIN = Operand()
SQUARE = Operand(block_shape=(32, 32))
STOCHASTIC = Operand(rounding="stochastic")


TENSORS = 4  # in one program


class Case(NamedTuple):
    """A function of x to time, the bytes that it must read and write, and the result that it must have."""

    name: str
    function: Callable[[jax.Array], object]
    x: jax.Array
    bytes: int
    wanted: Callable[[], object]


class Result(NamedTuple):
    """A case's time, and the share of its result that differs from mxjax's."""

    name: str
    bytes: int
    timing: Timing
    differs: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases that the command line names and prints them; exits with 1 if one of ours failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_quantize", description=__doc__)
    shapes = [(8192, 14336), (16384, 4096)]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, help="ROWSxCOLUMNS")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of the cases to run")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    # torch has its own share of the memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    report = Report("mxjax.kernels.bench.bench_quantize", arguments, options)
    for rows, columns in options.shapes:
        shape = f"{rows}x{columns}"
        x = jax.random.normal(jax.random.key(0), (rows, columns), jnp.bfloat16)
        results = []
        for name, run in runs(x, report.rounds):
            if any(part in name for part in options.only):
                result = Absent(name, LATE) if report.is_late else run()
                results.append(result)
                report.add(result, shape=shape, name=name, **numbers(result))
        print(f"\n{shape} bfloat16\n")
        print_results(results)
    report.print()


def parse_shape(text: str) -> tuple[int, int]:
    """Returns the rows and columns of a text like 8192x14336."""
    try:
        rows, columns = (int(n) for n in text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 8192x14336") from error
    return rows, columns


def runs(x: jax.Array, rounds: int) -> Iterator[tuple[str, Callable[[], Result | Absent]]]:
    """Yields every case's name and the function that checks and times it."""
    for case in cases(x):
        yield case.name, functools.partial(run_case, case, rounds)
    for name, make in peers.casts(x).items():
        yield name, functools.partial(run_peer, name, make, rounds)


def cases(x: jax.Array) -> Iterator[Case]:
    """Yields the copies, and the variants of the kernel and of jax.numpy."""
    yield Case("copy (memcpy)", jnp.copy, x, 2 * x.nbytes, lambda: x)
    yield Case("copy (-x)", jnp.negative, x, 2 * x.nbytes, lambda: -x)
    for name, rotation in (("", None), (" H16", H16)):
        rows, columns = use(-1, rotation), use(-2, rotation)
        yield packing(f"rows{name}", x, rows)
        yield packing(f"columns{name}", x, columns)
        yield packing(f"both{name}", x, rows, columns)
    rows, columns = use(-1, None), use(-2, H16)
    yield packing("both, H16 on columns", x, rows, columns)
    yield packing("columns H32", x, use(-2, H32))
    yield packing("columns H64", x, use(-2, H64))
    yield packing("rows H128", x, use(-1, H128))
    yield packing("columns H128", x, use(-2, H128))
    yield packing("rows, stochastic", x, use(-1, None, STOCHASTIC))
    yield packing("columns, stochastic", x, use(-2, None, STOCHASTIC))
    yield packing("both, columns stochastic", x, use(-1, None), use(-2, None, STOCHASTIC))
    yield packing("both, stochastic", x, use(-1, None, STOCHASTIC), use(-2, None, STOCHASTIC))
    yield packing("both, H64, stochastic", x, use(-1, H64, STOCHASTIC), use(-2, H64, STOCHASTIC))
    yield packing("both, 32x32 blocks", x, use(-1, None, SQUARE), use(-2, None, SQUARE))
    wide = jax.random.normal(jax.random.key(1), x.shape, jnp.float32)
    yield packing("both, of float32", wide, use(-1, None), use(-2, None))
    if current_target() is not None:
        wanted = functools.partial(values_by_definition, x, rows, columns)
        yield Case(
            "both, H16 on columns, to bfloat16",
            lambda x: value_operands(x, rows, columns),
            x,
            3 * x.nbytes,
            wanted,
        )
    for name, uses in (
        ("rows", [use(-1, None)]),
        ("rows H16", [use(-1, H16)]),
        ("both, H16 on columns", [rows, columns]),
    ):
        case = packing(f"{name}, jax.numpy", x, *uses)
        yield case._replace(function=lambda x, uses=uses: by_definition(x, *uses))


def use(axis: int, rotation: Rotation | None, operand: Operand = PLAIN) -> GemmInput:
    """Returns an MXFP4 operand by `floor`, blocked along axis."""
    return GemmInput(axis, operand, rotation, None, jax.random.key(axis + 2))


def packing(name: str, x: jax.Array, *uses: GemmInput) -> Case:
    """Returns the case of packing x for the uses."""
    size = x.nbytes + len(uses) * (x.size // 2 + x.size // 32)
    wanted = functools.partial(by_definition, x, *uses)
    return Case(name, lambda x: pack_operands(x, *uses), x, size, wanted)


def by_definition(x: jax.Array, *uses: GemmInput) -> tuple[KMajor, ...]:
    """Returns x packed for the uses, without the kernel."""
    return tuple(_definition(how.axis, how.rotation, how.operand)(x) for how in uses)


@functools.cache
def _definition(axis: int, rotation: Rotation | None, operand: Operand) -> Callable[[jax.Array], KMajor]:
    return jax.jit(functools.partial(pack_by_definition, how=use(axis, rotation, operand)))


def values_by_definition(x: jax.Array, *uses: GemmInput) -> list[jax.Array]:
    """Returns x's dequantized values for the uses, without the kernel."""
    return [decode(packed) for packed in by_definition(x, *uses)]


def run_case(case: Case, rounds: int) -> Result | Absent:
    """Returns a case's time if its result is right bit for bit."""
    try:
        results = arrays(jax.jit(case.function)(case.x))
        for got, wanted in zip(results, arrays(case.wanted()), strict=True):
            if got.shape != wanted.shape:
                return Absent(case.name, f"shape {got.shape} instead of {wanted.shape}", ours=True)
            if differing := int(jnp.sum(got != wanted)):
                return Absent(
                    case.name, f"{differing} of {wanted.size} differ from the definition", ours=True
                )
        program = jax.jit(lambda xs: [case.function(x) for x in xs])
        xs = [jnp.roll(case.x, i, 0) for i in range(TENSORS)]
        timing = measure(program, xs, rounds=rounds)
        return Result(case.name, case.bytes, Timing(*(t / TENSORS for t in timing)), 0.0)
    except Exception as error:  # keep the other cases
        return Absent(case.name, first_line(error), ours=True)


def arrays(result: object) -> list[jax.Array]:
    """Returns the arrays of a result, without its factors."""
    return [a for a in jax.tree.leaves(result) if isinstance(a, jax.Array)]


def run_peer(name: str, make: Callable[[], peers.Cast], rounds: int) -> Result | Absent:
    """Returns the time of another library's cast, or why there is none."""
    try:
        cast = make()
        differs = cast.differs(cast.run())
        timing = measure(cast.run, rounds=rounds, wait=cast.wait)
    except Exception as error:  # the error is the result
        return Absent(name, first_line(error))
    return Result(name, cast.bytes, timing, differs)


def numbers(result: Result | Absent) -> dict[str, object]:
    """Returns a case's numbers for the JSON, in bytes and seconds; none if it did not run."""
    if isinstance(result, Absent):
        return {}
    return {"bytes": result.bytes, "differs": result.differs, **result.timing._asdict()}


def print_results(results: Sequence[Result | Absent]) -> None:
    """Prints the table, with rates relative to the fastest copy."""
    timed = [r for r in results if isinstance(r, Result)]
    copy = max((r.bytes / r.timing.median for r in timed if r.name.startswith("copy")), default=0.0)
    rows = []
    for r in timed:
        rate = r.bytes / r.timing.median
        of_copy = f"{rate / copy:.2f}" if copy else ""
        microseconds = (f"{1e6 * t:.0f}" for t in r.timing)
        rows.append([r.name, *microseconds, f"{rate / 1e12:.2f}", of_copy, f"{r.differs:.1e}"])
    print(table(" | us | p10 | p90 | TB/s | of the copy | differs", rows, padded=True), flush=True)
    print_absent(results)


if __name__ == "__main__":
    main()
