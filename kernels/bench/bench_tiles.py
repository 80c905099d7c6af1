"""Time of the FP4 GEMM by tile on this GPU: what `tiles.py` chooses from, and candidates that it lacks.

    python -m mxjax.kernels.bench.bench_tiles [--tokens 8192] [--linears mlp.down …] [--out FILE]

Each candidate computes Fprop of a linear layer of Llama 3.1 8B, and every result is compared with that of the
tile that the shape chooses, which must be equal bit for bit: scale bytes from 126 to 128 make all sums exact.
Prints a table for each shape, and JSON as the last line. For gfx950 `benchmarks.paper_models.gemm_cycles`
counts the cycles of the same candidates without a GPU.
"""

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mxjax.devices import current_target
from mxjax.formats import BLOCK
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kernels.matmul.fp4_gemm import launch
from mxjax.kernels.matmul.tiles import OPTIONS, TILES, Tiles, choose_tiles, fits, table_of
from mxjax.kernels.shapes import LINEARS, TOKENS, GemmShape
from mxjax.kernels.tables import table


class Candidate(NamedTuple):
    """Tiles, and the options of the compiler's backend in which they differ from `tiles.OPTIONS`."""

    tiles: Tiles
    options: Mapping[str, object] = {}


_WIDE = {"waves_per_eu": 1, "llvm_fn_attrs": ""}  # 512 registers a lane, as two kinds of 256
MORE = {
    "gfx950": (
        Candidate(Tiles(256, 256, 256, warps=4, stages=2, cost=1.0, exact=True), _WIDE),
        Candidate(Tiles(256, 128, 256, warps=8, stages=2, cost=0.6, exact=True)),
        Candidate(Tiles(256, 128, 256, warps=8, stages=3, cost=0.6, exact=True)),
        Candidate(Tiles(256, 128, 256, warps=4, stages=3, cost=0.6, exact=True)),
    )
}
"""Candidates that `tiles.TILES` lacks, by its keys; the last one spills registers."""


def candidates(kind: str) -> list[Candidate]:
    """Returns the candidates of a key of `tiles.TILES`."""
    return [*map(Candidate, TILES[kind]), *MORE.get(kind, ())]


def name_of(tiles: Tiles) -> str:
    """Returns tile, waves or warps, and stages in one word."""
    return f"{tiles.m}x{tiles.n}x{tiles.k}-w{tiles.warps}-s{tiles.stages}"


def make_operands(shape: GemmShape) -> tuple[jax.Array, ...]:
    """Draws packed operands and scale bytes with which float32 holds every partial sum."""
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = []
    for rows, pair in ((shape.m, keys[:2]), (shape.n, keys[2:])):
        drawn.append(jax.random.bits(pair[0], (1, rows, shape.k // 2), jnp.uint8))
        scales = jax.random.randint(pair[1], (1, rows, shape.k // BLOCK), 126, 129, jnp.int32)
        drawn.append(scales.astype(jnp.uint8))
    return tuple(drawn)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the candidates at the shapes of the command line; exits with 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_tiles", description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--linears", nargs="+", default=list(LINEARS), choices=list(LINEARS))
    add_arguments(parser)
    options = parser.parse_args(arguments)
    report = Report("mxjax.kernels.bench.bench_tiles", arguments, options)
    for tokens in options.tokens:
        for linear in options.linears:
            d_in, d_out = LINEARS[linear]
            bench_shape(report, GemmShape(linear, tokens, d_out, d_in))
    report.print()


def bench_shape(report: Report, shape: GemmShape) -> None:
    """Measures all candidates at one shape and prints the table."""
    target = current_target()
    kind, operands = table_of(target), make_operands(shape)
    chosen = choose_tiles(shape.m, shape.n, shape.k, 1, target)
    run = functools.partial(launch, dtype=jnp.bfloat16, target=target)
    wanted = jax.jit(functools.partial(run, tiles=chosen))(*operands)
    rows, results = [], []
    for candidate in candidates(kind):
        tiles, name = candidate.tiles, name_of(candidate.tiles)
        multiply = jax.jit(
            functools.partial(run, tiles=tiles, options=OPTIONS.get(kind, {}) | dict(candidate.options))
        )
        if fits(tiles, shape.m, shape.n, shape.k):
            result = time_tiles(name, multiply, operands, wanted, report)
        else:
            result = Absent(name, "the tile does not divide the shape")
        results.append(result)
        record: dict[str, object] = {"name": name, "shape": shape._asdict(), "chosen": tiles == chosen}
        if isinstance(result, Timing):
            rate = 2e-12 * shape.m * shape.n * shape.k / result.median
            record |= result._asdict() | {"tflops": rate}
            mark = "yes" if tiles == chosen else ""
            rows.append([name, mark, *(f"{1e6 * t:,.0f}" for t in result), f"{rate:,.0f}"])
        report.add(result, **record)
    print(f"\n{shape.name}: {shape.m} x {shape.n} x {shape.k}\n")
    print(table("tile | chosen | us | p10 | p90 | TFLOP/s", rows, padded=True), flush=True)
    print_absent(results)


def time_tiles(name: str, multiply, operands, wanted: jax.Array, report: Report) -> Timing | Absent:
    """Checks a candidate's result and returns its time, or why there is none."""
    if report.is_late:
        return Absent(name, LATE)
    try:
        if not bool((multiply(*operands) == wanted).all()):
            return Absent(name, "wrong: differs from the chosen tile's result", ours=True)
        return measure(multiply, *operands, rounds=report.rounds)
    except Exception as error:  # keep the other candidates
        return Absent(name, first_line(error))


if __name__ == "__main__":
    main()
