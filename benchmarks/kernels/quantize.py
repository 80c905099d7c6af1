"""Bandwidth of the quantizer kernel beside device copies, jax.numpy as XLA fuses it, and others' casts.

    python -m benchmarks.kernels.quantize [--shapes 8192x14336 …] [--only H16 copy] [--out FILE]

Before a case is timed, its result is compared with the definition at the same shape. Ours must have equal
bits; the "error" of other libraries is the share of elements unlike mxjax's under the same scale rule. Bytes
count each array read or written once; the ceiling is the fastest copy. Our cases, jax.numpy's and XLA's
copies run 4 calls on 4 tensors in one program, because a training step does not pay for starting programs
either. Prints one table a shape, and JSON as the last line.
"""

import argparse
import functools
import os
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from benchmarks.kernels import peers
from mxjax.kernels.selftest.measured import Case, Checked, Report, add_arguments, time_cases
from mxjax.numerics.operand import Operand
from mxjax.operands.kernel_operand import KernelOperand, decode, pack_by_definition
from mxjax.operands.use import OperandUse
from mxjax.policy import Rotation
from mxjax.products.prepare import prepare
from mxjax.runtime.devices import current_target

PLAIN = Operand()
SQUARE = Operand(block_shape=(32, 32))
STOCHASTIC = Operand(rounding="stochastic")
TENSORS = 4  # in one program

Use = tuple[int, int | None, Operand]  # the blocked axis, the rotation's size, and how to round
ROWS, COLUMNS = (-1, None, PLAIN), (-2, None, PLAIN)
ROWS_H16, COLUMNS_H16 = (-1, 16, PLAIN), (-2, 16, PLAIN)
ROWS_SR, COLUMNS_SR = (-1, None, STOCHASTIC), (-2, None, STOCHASTIC)
PACKINGS: dict[str, list[Use]] = {
    "rows": [ROWS],
    "columns": [COLUMNS],
    "both": [ROWS, COLUMNS],
    "rows H16": [ROWS_H16],
    "columns H16": [COLUMNS_H16],
    "both H16": [ROWS_H16, COLUMNS_H16],
    "both, H16 on columns": [ROWS, COLUMNS_H16],
    "columns H32": [(-2, 32, PLAIN)],
    "columns H64": [(-2, 64, PLAIN)],
    "rows H128": [(-1, 128, PLAIN)],
    "columns H128": [(-2, 128, PLAIN)],
    "rows, stochastic": [ROWS_SR],
    "columns, stochastic": [COLUMNS_SR],
    "both, columns stochastic": [ROWS, COLUMNS_SR],
    "both, stochastic": [ROWS_SR, COLUMNS_SR],
    "both, H64, stochastic": [(-1, 64, STOCHASTIC), (-2, 64, STOCHASTIC)],
    "both, 32x32 blocks": [(-1, None, SQUARE), (-2, None, SQUARE)],
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases that the command line names; exits with 1 if one of ours failed."""
    module = "benchmarks.kernels.quantize"
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=__doc__)
    shapes = [(8192, 14336), (16384, 4096)]
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=shapes, help="ROWSxCOLUMNS")
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of the cases to run")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves memory to torch
    report = Report(module, arguments, options)
    for rows, columns in options.shapes:
        x = jax.random.normal(jax.random.key(0), (rows, columns), jnp.bfloat16)
        wanted = (case for case in cases(x) if any(part in case.name for part in options.only))
        time_cases(report, f"{rows}x{columns} bfloat16", "B", wanted)
    report.print()


def parse_shape(text: str) -> tuple[int, int]:
    """Returns the rows and columns of a text like 8192x14336."""
    try:
        rows, columns = (int(n) for n in text.split("x"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 8192x14336") from error
    return rows, columns


def cases(x: jax.Array) -> Iterator[Case]:
    """Yields the copies, the variants of the kernel and of jax.numpy, and other libraries' casts."""
    yield _case("copy (memcpy)", jnp.copy, x, 2 * x.nbytes, lambda: x, is_ceiling=True)
    yield _case("copy (-x)", jnp.negative, x, 2 * x.nbytes, lambda: -x, is_ceiling=True)
    for name, uses in PACKINGS.items():
        yield _packing(name, x, uses, prepare)
    wide = jax.random.normal(jax.random.key(1), x.shape, jnp.float32)
    yield _packing("both, of float32", wide, [ROWS, COLUMNS], prepare)
    if current_target() is not None:
        uses = [operand_use(*use) for use in (ROWS, COLUMNS_H16)]

        def values() -> list[jax.Array]:
            return [decode(packed) for packed in by_definition(x, uses)]

        name = "both, H16 on columns, to bfloat16"
        yield _case(
            name, lambda x: prepare(x, [use._replace(form="bf16") for use in uses]), x, 3 * x.nbytes, values
        )
    for name in ("rows", "rows H16", "both, H16 on columns"):
        yield _packing(f"{name}, jax.numpy", x, PACKINGS[name], by_definition)
    fields = {"shape": "x".join(map(str, x.shape))}
    for name, (work, make) in peers.casts(x).items():
        yield Case(name, make, work, ours=False, is_ceiling="copy" in name, fields=fields)


def operand_use(axis: int, size: int | None, operand: Operand) -> OperandUse:
    """Returns an MXFP4 operand by `floor`, blocked along an axis."""
    rotation = Rotation(size) if size else None
    return OperandUse(axis, operand, rotation, None, jax.random.key(axis + 2), form="packed")


def by_definition(x: jax.Array, uses: Sequence[OperandUse]) -> tuple[KernelOperand, ...]:
    """Returns x packed for the uses, without the kernel."""
    return tuple(pack_by_definition(x, use) for use in uses)


def _packing(name: str, x: jax.Array, uses: Sequence[Use], pack: Callable) -> Case:
    operands = [operand_use(*use) for use in uses]
    work = x.nbytes + len(uses) * (x.size // 2 + x.size // 32)
    wanted = functools.partial(jax.jit(lambda x: by_definition(x, operands)), x)
    return _case(name, lambda x: pack(x, operands), x, work, wanted)


def _case(name: str, function: Callable, x: jax.Array, work: float, wanted: Callable, **more) -> Case:
    def check() -> Checked:
        pairs = zip(_arrays(jax.jit(function)(x)), _arrays(wanted()), strict=True)
        for got, expected in pairs:
            assert got.shape == expected.shape, f"shape {got.shape} instead of {expected.shape}"
            wrong = int(jnp.sum(got != expected))
            assert not wrong, f"{wrong} of {expected.size} differ from the definition"
        program = jax.jit(lambda xs: [function(x) for x in xs])
        return Checked(functools.partial(program, [jnp.roll(x, i, 0) for i in range(TENSORS)]), calls=TENSORS)

    return Case(name, check, work, fields={"shape": "x".join(map(str, x.shape))}, **more)


def _arrays(result: object) -> list[jax.Array]:
    """Returns the arrays of a result, without its factors."""
    return [a for a in jax.tree.leaves(result) if isinstance(a, jax.Array)]


if __name__ == "__main__":
    main()
