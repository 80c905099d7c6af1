"""Time of the FP4 GEMM with every candidate tile at Llama 3.1 8B's shapes, and the tile table.

    python -m mxjax.kernels.bench.bench_gemm [--tokens 8192] [--gemms mlp.down.fprop …] [--table FILE]

Every result is checked bit for bit, five times, before its case is timed. The baselines are `jnp.dot` of the
same values in bfloat16 and in FP8, by cuBLAS or hipBLASLt. The fastest candidate of each GEMM goes into the
table from which the library then chooses (`mxjax.kernels.matmul.tile_table`). Prints one table a GEMM, and
JSON as the last line. `python -m mxjax.kernels.selftest` does the same, and survives a kernel that crashes.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mxjax.devices import INTERPRETER, Target, current_target
from mxjax.kernels.bench.gemm_cases import BASELINES, GemmCase, gemm_cases, run_case
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.kernels.bench.timing import Timing
from mxjax.kernels.matmul.tile_table import VARIABLE, default_path, write_table
from mxjax.kernels.matmul.tiles import Tiles
from mxjax.kernels.shapes import GemmShape, gemms
from mxjax.tables import table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the GEMMs that the command line names; exits with 1 if a candidate failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_gemm", description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192])
    names = [shape.name for shape in gemms(1)]
    parser.add_argument("--gemms", nargs="+", default=names, choices=names, metavar="GEMM")
    parser.add_argument("--table", type=Path, help="file of the tile table; default: the user's cache")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    target = current_target()
    if target is None:
        raise SystemExit("bench_gemm needs a GPU and Triton: install mxjax[cuda] or mxjax[rocm]")
    report = Report("mxjax.kernels.bench.bench_gemm", arguments, options)
    records = []
    for tokens in options.tokens:
        for shape in gemms(tokens):
            if shape.name in options.gemms:
                records += bench_shape(report, shape, target)
    path = options.table or (default_path(target.arch) if target != INTERPRETER else None)
    if path is not None and save_table(path, target, report.content, records):
        print(f"\ntile table: {path} (the library reads it; set {VARIABLE}= to do without)")
    report.print()


def bench_shape(report: Report, shape: GemmShape, target: Target) -> list[dict[str, Any]]:
    """Measures all cases of a GEMM, prints their table and returns their records."""
    records, absent = [], []
    for case in gemm_cases([shape], target):
        result = time_case(case, report)
        record = record_of(case, result if isinstance(result, Timing) else None)
        report.add(result, **record)
        if isinstance(result, Timing):
            records.append(record)
        else:
            absent.append(result)
    print(f"\n{shape.name}: [{shape.m}, {shape.k}] @ [{shape.k}, {shape.n}]\n")
    print(table(HEADER, rows(records), padded=True), flush=True)
    print_absent(absent)
    return records


def time_case(case: GemmCase, report: Report) -> Timing | Absent:
    """Checks and times a case, or returns why not."""
    if report.is_late:
        return Absent(case.name, LATE)
    try:
        return run_case(case, report.rounds)
    except Exception as error:  # keep the other cases
        return Absent(case.name, first_line(error), ours=isinstance(case.by, Tiles))


def record_of(case: GemmCase, timing: Timing | None) -> dict[str, Any]:
    """Returns a case as JSON can hold it: `save_table` and `rows` read it; times are in seconds."""
    shape, tiles = case.shape, case.by if isinstance(case.by, Tiles) else None
    return {
        "name": case.name,
        "of": shape.name,
        "gemm": [shape.m, shape.n, shape.k, shape.batch],
        "by": case.by if isinstance(case.by, str) else "mxjax",
        "tile": list(tiles.name) if tiles else None,
        **(timing._asdict() if timing else {}),
    }


HEADER = " | microseconds | p10 | p90 | TFLOP/s | of jnp.dot, bfloat16"


def rows(records: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """Returns the rows of a GEMM's table."""
    base = [record["median"] for record in records if record["by"] == BASELINES[0]]
    return [
        [
            record["name"].partition(", ")[2],
            *(f"{1e6 * record[key]:.1f}" for key in ("median", "p10", "p90")),
            f"{teraflops(record):.0f}",
            f"{record['median'] / base[0]:.2f}" if base else "",
        ]
        for record in records
    ]


def teraflops(record: Mapping[str, Any]) -> float:
    """Returns 10**12 multiplications and additions a second."""
    m, n, k, batch = record["gemm"]
    return 2e-12 * m * n * k * batch / record["median"]


def save_table(
    path: Path, target: Target, about: Mapping[str, Any], records: Iterable[Mapping[str, Any]]
) -> bool:
    """Writes the fastest candidate of each GEMM to a tile table, if there is any; returns whether it did."""
    fastest: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for record in records:
        gemm = tuple(record["gemm"])
        if record["tile"] and (gemm not in fastest or record["median"] < fastest[gemm]["median"]):
            fastest[gemm] = record
    kept = {name: value for name, value in about.items() if name in ("device", "jax", "packages", "commit")}
    entries = [
        {"gemm": r["gemm"], "tile": r["tile"], "name": r["of"], "seconds": r["median"]}
        for r in fastest.values()
    ]
    if entries:
        write_table(path, target.arch, kept, entries)
    return bool(entries)


if __name__ == "__main__":
    main()
