"""Time of fused causal attention with every candidate block, beside cuDNN's and XLA's.

    python -m mxjax.kernels.bench.bench_attention [--shapes 2x8192x32x8x128 …] [--first] [--out FILE]

A shape is BxSxNxGxH: q is [B, S, N, H], k and v are [B, S, G, H]. Results are compared with a float32
reference, and runs with each other, before they are timed. First each kernel runs alone with all of its
candidates, or with `--first` with the one in use, then whole attention with the fastest of each. The rate
counts 2 products forward, 5 backward; a backward kernel alone counts its own, 4 and 3. Prints one table a
shape, and JSON as the last line.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from mxjax.devices import current_target
from mxjax.kernels.attention.blocks import HEAD_SIZES, Blocks, Kernels
from mxjax.kernels.bench.attention_cases import (
    AttentionCase,
    Shape,
    kernel_cases,
    record_of,
    run_case,
    whole_cases,
)
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.tables import table

SHAPES = [Shape(2, 8192, 32, 8, 128), Shape(64, 512, 12, 12, 64)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the shapes that the command line names; exits with 1 if a kernel of ours failed."""
    parser = argparse.ArgumentParser(
        prog="python -m mxjax.kernels.bench.bench_attention", description=__doc__
    )
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxSxNxGxH")
    parser.add_argument("--first", action="store_true", help="only the blocks that the library uses")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if current_target() is None:
        raise SystemExit("bench_attention needs a GPU and Triton: install mxjax[cuda] or mxjax[rocm]")
    report = Report("mxjax.kernels.bench.bench_attention", arguments, options)
    for shape in options.shapes:
        bench_shape(report, shape, options.first)
    report.print()


def parse_shape(text: str) -> Shape:
    """Returns the shape of a text like 2x8192x32x8x128."""
    try:
        shape = Shape(*(int(n) for n in text.split("x")))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 2x8192x32x8x128") from error
    if min(shape) < 1 or shape.h not in HEAD_SIZES or shape.n % shape.g:
        raise argparse.ArgumentTypeError(f"{text!r} needs N a multiple of G, and H of {HEAD_SIZES}")
    return shape


def bench_shape(report: Report, shape: Shape, first: bool) -> None:
    """Measures the cases of a shape, with all candidates or the first, and prints their table."""
    records: list[dict[str, Any]] = []
    absent: list[Absent] = []

    def add(case: AttentionCase) -> None:
        result = time_case(case, report)
        record = record_of(case, None if isinstance(result, Absent) else result)
        report.add(result, **record)
        if isinstance(result, Absent):
            absent.append(result)
        else:
            records.append(record)

    for case in kernel_cases(shape, first=first):
        add(case)
    fastest = fastest_blocks(records)
    if fastest is not None:
        for case in whole_cases(shape, fastest):
            add(case)
    print(f"\nq {[shape.b, shape.s, shape.n, shape.h]}, {shape.g} heads of keys\n")
    print(table(HEADER, rows(records), padded=True), flush=True)
    print_absent(absent)


def time_case(case: AttentionCase, report: Report) -> tuple[Any, float] | Absent:
    """Checks and times a case, or returns why not."""
    if report.is_late:
        return Absent(case.name, LATE)
    try:
        return run_case(case, report.rounds)
    except Exception as error:  # keep the other cases
        return Absent(case.name, first_line(error), ours=not isinstance(case.by, str))


def fastest_blocks(records: Sequence[Mapping[str, Any]]) -> Kernels | None:
    """Returns the fastest block of each kernel, or None if one has none."""
    found = []
    for which in Kernels._fields:
        timed = [r for r in records if r["which"] == which and "blocks" in r]
        if not timed:
            return None
        found.append((Blocks(*min(timed, key=lambda r: r["median"])["blocks"]),))
    return Kernels(*found)


HEADER = " | microseconds | p10 | p90 | TFLOP/s | of cuDNN's speed | error"


def rows(records: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """Returns the rows of a shape's table."""
    cudnn = {r["which"]: r["median"] for r in records if r["by"] == "cudnn"}
    return [
        [
            r["name"],
            *(f"{1e6 * r[key]:.1f}" for key in ("median", "p10", "p90")),
            f"{1e-12 * r['flops'] / r['median']:.0f}",
            f"{cudnn[r['which']] / r['median']:.2f}" if r["which"] in cudnn else "",
            f"{r['error']:.1e}",
        ]
        for r in records
    ]


if __name__ == "__main__":
    main()
