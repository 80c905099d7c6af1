"""Bandwidth of the quantizer kernel beside a device copy and beside jax.numpy as XLA fuses it.

    python -m mxjax.kernels.bench_quantize [--shapes 8192x14336 16384x4096] [--out FILE]

Each variant is first compared with the definition, bit for bit. Bytes are those read and written once.
Prints a table, and as its last line JSON.
"""

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.gemm import prepare
from mxjax.kernels.timing import Timing, measure, print_json, print_table
from mxjax.operands import Use
from mxjax.packed import pack_by_definition, pack_operands
from mxjax.policy import Operand, Rotation

H16 = Rotation(16)


class Case(NamedTuple):
    """One line of the table: what runs, and the bytes that it must read and write."""

    name: str
    run: Callable
    bytes: int
    check: Callable | None = None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench_quantize", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["8192x14336", "16384x4096"], help="ROWSxCOLUMNS")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args(arguments)
    records = []
    for shape in options.shapes:
        rows, columns = (int(n) for n in shape.split("x"))
        x = jax.random.normal(jax.random.key(0), (rows, columns), jnp.bfloat16)
        copy = 0.0
        table = []
        for case in cases(x):
            if case.check is not None:
                case.check(x)
            timing = measure(case.run, x)
            rate = case.bytes / timing.median
            copy = max(copy, rate) if case.name.startswith("copy") else copy
            records.append({"shape": shape, "name": case.name, "bytes": case.bytes, **timing._asdict()})
            table.append(row(case, timing, rate / copy))
        print(f"\n{shape} bfloat16\n")
        print_table(["", "us", "p10", "p90", "TB/s", "of the copy"], table)
    print()
    print_json({"records": records})
    if options.out:
        options.out.write_text(json.dumps(records, indent=1) + "\n")


def row(case: Case, timing: Timing, of_copy: float) -> list[str]:
    rate = f"{case.bytes / timing.median / 1e12:.2f}"
    return [case.name, *(f"{1e6 * t:.0f}" for t in timing), rate, f"{of_copy:.2f}"]


def cases(x: jax.Array) -> Iterator[Case]:
    """Yields the copies first, then the kernel's variants, then jax.numpy's."""
    read = x.nbytes
    packed = x.size // 2 + x.size // 32
    yield Case("copy (memcpy)", jnp.copy, 2 * read)
    yield Case("copy (-x)", jax.jit(jnp.negative), 2 * read)
    for name, rotation in (("", None), (" H16", H16)):
        rows, columns = use(-1, rotation), use(-2, rotation)
        yield case_of(f"rows{name}", [rows], read + packed)
        yield case_of(f"columns{name}", [columns], read + packed)
        yield case_of(f"both{name}", [rows, columns], read + 2 * packed)
    yield case_of("both, H16 on columns", [use(-1, None), use(-2, H16)], read + 2 * packed)
    stochastic = use(-2, None, "stochastic")
    yield case_of("columns stochastic", [stochastic], read + packed)
    values = jax.jit(lambda x: prepare(x, (("xla", use(-1, None)), ("xla", use(-2, H16)))))
    yield Case("both, H16 on columns, to bfloat16", values, 3 * read)
    for name, rotation in (("", None), (" H16", H16)):
        yield Case(
            f"rows{name}, jax.numpy",
            jax.jit(functools.partial(pack_by_definition, use=use(-1, rotation))),
            read + packed,
        )


def use(axis: int, rotation: Rotation | None, rounding="nearest") -> Use:
    """Returns an MXFP4 operand by `floor`, blocked along axis."""
    return Use(axis, Operand(rounding=rounding), rotation, None, jax.random.key(axis + 2))


def case_of(name: str, uses: list[Use], size: int) -> Case:
    """Returns the case of packing a tensor for the uses."""
    run = jax.jit(lambda x: pack_operands(x, *uses))
    return Case(name, run, size, functools.partial(check, run, uses))


def check(run: Callable, uses: list[Use], x: jax.Array) -> None:
    """Raises AssertionError unless the kernel's bits are the definition's, on a part of x."""
    part = x[:1000, :1100]
    for got, how in zip(run(part), uses, strict=True):
        wanted = jax.jit(functools.partial(pack_by_definition, use=how))(part)
        np.testing.assert_array_equal(got.scales, wanted.scales)
        np.testing.assert_array_equal(got.elements, wanted.elements)


if __name__ == "__main__":
    main()
