"""The time of attention in a step on MI355X: by AITER, by the Triton kernels, and by XLA, unfused.

    python -m benchmarks.paper_models.mi355x_attention [--write docs/mi355x.md]

Compiles the Triton kernels without a GPU and counts the instructions of their main loops. A pass takes at
least the larger of the matrix cores' time and the time to issue everything else, or their sum if a wave
overlaps nothing. `--write` puts the table into the document, and the counts into
docs/results/gfx950-attention.json. Nobody has measured these kernels on an MI355X.
"""

import argparse
import json
import pathlib
import tempfile
from typing import Any

from benchmarks.markdown import insert
from benchmarks.paper_models.mi355x_model import MODEL, SEQUENCE, step_seconds
from benchmarks.paper_models.mi355x_rates import (
    CASES,
    CLOCK,
    ISSUE_CYCLES,
    MATRIX_FLOPS,
    MEASURED,
    SIMDS,
    UNITS,
)
from benchmarks.paper_models.scaling_machines import MACHINES
from mxjax.kernels.aot import compile as aot
from mxjax.tables import table

TOKENS = 8192
RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "gfx950-attention.json"
BUILDS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "gfx950-builds.json"
MATRIX_CYCLES = 2 * 32 * 32 * 16 * SIMDS / MATRIX_FLOPS["bf16"]  # of a v_mfma_f32_32x32x16_bf16
EXP_CYCLES = 4 * ISSUE_CYCLES  # transcendental instructions have a quarter of the rate
H200 = next(name for name, machine in MACHINES.items() if machine.name == "H200")
TIMES = pathlib.Path(__file__).parents[2] / "docs" / "results" / "kernels-h200.json"
TIMED = {"name": "forward and backward, xla", "shape": "2x8192x32x8x128"}
"""XLA's unfused attention of 2 x 8192 tokens with Llama's heads, by `bench_attention` on an H200."""


def compile_builds() -> list[dict[str, Any]]:
    """Returns the counts of the three kernels in Llama's shape."""
    names = [b.name for b in aot.list_builds("attention_builds", "gfx950") if f"x{SEQUENCE}x" in b.name]
    jobs = [("attention_builds", "gfx950", name) for name in names]
    with tempfile.TemporaryDirectory() as folder:
        done, failed = aot.build_all(jobs, pathlib.Path(folder), jobs=2)
    if failed:
        raise RuntimeError(f"not compiled: {failed}")
    kept = ("name", "constants", "warps", "shared_bytes", "resources")
    return [{k: r[k] for k in kept} | {"main_loop": r["main_loop"]["opcodes"]} for r in done]


def tile_cycles(build: dict[str, Any]) -> tuple[float, float]:
    """Returns the cycles of a compute unit for a tile of scores: matrix instructions, and all others."""
    matrix = other = 0.0
    for opcode, count in build["main_loop"].items():
        if opcode.startswith("v_mfma"):
            matrix += count * MATRIX_CYCLES
        else:
            other += count * (EXP_CYCLES if opcode.startswith("v_exp") else ISSUE_CYCLES)
    return matrix * build["warps"] / SIMDS, other * build["warps"] / SIMDS


def kernel_seconds(builds: list[dict[str, Any]], overlap: bool) -> float:
    """Returns a step's seconds in the Triton kernels; `overlap`: matrix instructions hide the others."""
    scores = MODEL.n_heads * TOKENS * SEQUENCE / 2 * MODEL.n_layers
    seconds = 0.0
    for build in builds:
        cycles = max(tile_cycles(build)) if overlap else sum(tile_cycles(build))
        tiles = scores / (build["constants"]["BLOCK_Q"] * build["constants"]["BLOCK_K"])
        seconds += tiles * cycles / (UNITS * CLOCK)
    return seconds


def xla_seconds() -> float:
    """Returns the seconds of TIMED in the latest run."""
    runs = json.loads(TIMES.read_text())["runs"]
    records = [record for run in runs for record in run["records"]]
    return [r["median"] for r in records if TIMED.items() <= r.items() and "median" in r][-1]


def attention_table(builds: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """Returns a step's times and rates by kernel of attention; `others` are the builds of the roofline."""
    flops = 7 * SEQUENCE * TOKENS * MODEL.n_heads * MODEL.head_dim * MODEL.n_layers
    moved = xla_seconds() / 2 * MACHINES[H200].memory / MEASURED["memory"]
    kernels = {
        "AITER, as measured by others": flops / MEASURED["attention"],
        "Triton, instructions overlap": kernel_seconds(builds, overlap=True),
        "Triton, instructions take turns": kernel_seconds(builds, overlap=False),
        "XLA, unfused, from an H200": moved * MODEL.n_layers,
    }
    parts = step_seconds("wgrad_hadamard", TOKENS, others, CASES[1])
    rest = sum(seconds for name, seconds in parts.items() if name != "attention")
    rows = [
        [
            name,
            f"{flops / seconds / 1e12:,.0f}",
            f"{1e3 * seconds:,.1f}",
            f"{1e3 * (seconds + rest):,.1f}",
            f"{seconds / (seconds + rest):.0%}",
            f"{TOKENS / (seconds + rest):,.0f}",
        ]
        for name, seconds in kernels.items()
    ]
    return table("attention by | TFLOP/s | ms | step, ms | share | tokens/s", rows)


def main() -> None:
    """Prints the table, and writes it if the command line says so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_models.mi355x_attention")
    parser.add_argument("--write", type=pathlib.Path, help="document to put the table into")
    options = parser.parse_args()
    builds = compile_builds()
    content = attention_table(builds, json.loads(BUILDS.read_text()))
    if options.write:
        options.write.write_text(insert(options.write.read_text(), {"attention": content}))
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(b) for b in builds) + "\n]\n")
    print(content)


if __name__ == "__main__":
    main()
