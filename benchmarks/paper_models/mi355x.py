"""A roofline on paper for AMD MI355X: the time of a Llama 3.1 8B training step from published rates.

    python -m benchmarks.paper_models.mi355x [--builds DIR] [--write docs/mi355x.md]

Compiles the gfx950 kernels that the model needs, without a GPU, or reads the builds in the folder that
`mxjax.kernels.aot --out DIR` wrote. Prints all tables, and JSON last. `--write` puts those of
`DOCUMENTED` into docs/mi355x.md and the builds' numbers into docs/results/gfx950-builds.json.
"""

import argparse
import json
import pathlib

from benchmarks.markdown import insert
from benchmarks.paper_models.mi355x_builds import (
    compile_builds,
    find_gemm,
    find_quantizer,
    loop_cycles,
    read_builds,
    rounds,
    vector_per_element,
)
from benchmarks.paper_models.mi355x_model import (
    POLICIES,
    block_seconds,
    gain,
    quantize_seconds,
    step_seconds,
)
from benchmarks.paper_models.mi355x_rates import CASES, HBM, MEASURED, PEAK, VECTOR_RATE, gemm_seconds
from benchmarks.paper_models.roofline import pass_bytes
from mxjax.kernels import shapes
from mxjax.tables import table

DOCUMENTED = ("rates", "steps 8192", "paper")
"""The tables that docs/mi355x.md holds; the others are printed only."""
RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "gfx950-builds.json"


def rates_table() -> str:
    """Returns the peaks, the measured rates and their ratios."""
    rows = [
        [
            f"{label} matrix, TFLOP/s",
            f"{PEAK[k] / 1e12:,.1f}",
            f"{MEASURED[k] / 1e12:,.1f}",
            MEASURED[k] / PEAK[k],
        ]
        for k, label in (("bf16", "BF16"), ("fp8", "FP8"), ("mxfp4", "MXFP4"))
    ]
    slow, attention, best = MEASURED["hipblaslt_mxfp4"], MEASURED["attention"], CASES[1]
    rows += [
        [
            "the same by hipBLASLt",
            f"{PEAK['mxfp4'] / 1e12:,.1f}",
            f"{slow / 1e12:,.1f}",
            slow / PEAK["mxfp4"],
        ],
        [
            "BF16 attention, TFLOP/s",
            f"{PEAK['bf16'] / 1e12:,.1f}",
            f"{attention / 1e12:,.1f}",
            best.attention,
        ],
        ["HBM, TB/s", HBM / 1e12, MEASURED["memory"] / 1e12, best.memory],
        ["vector, 10^12 lane instructions/s", f"{VECTOR_RATE / 1e12:.1f}", "-", 1.0],
    ]
    return table("rate | peak | measured | fraction", [[*r[:3], f"{r[3]:.3f}"] for r in rows])


def kernels_table(builds: list[dict]) -> str:
    """Returns the resources of the builds, by kernel, dtype and tile."""
    groups: dict[tuple, list[dict]] = {}
    for b in builds:
        c = b["constants"]
        turns = [f"H{c[k]}" if c.get(k, 1) > 1 else "none" for k in ("ROW_ROTATION", "COLUMN_ROTATION")]
        kind = "GEMM" if "M" in c else f"quantizer, {turns[0]} and {turns[1]}"
        tile = "x".join(str(v) for k, v in c.items() if k.startswith("BLOCK"))
        groups.setdefault((kind, b["dtype"], tile), []).append(b)
    rows = []
    for (kind, dtype, tile), group in groups.items():
        r = [b["resources"] for b in group]
        spills = max(x["vgpr_spills"] + x["sgpr_spills"] + x["scratch_bytes"] for x in r)
        row = [kind, dtype, tile, len(group), group[0]["warps"], max(x["vgprs"] for x in r), spills]
        rows.append([*row, group[0]["shared_bytes"], min(x["waves_per_simd"] for x in r)])
    header = "kernel | dtype | tile | builds | waves | VGPRs | spills and scratch | LDS bytes | waves a SIMD"
    return table(header, rows)


def loop_table(builds: list[dict]) -> str:
    """Returns the cycles of the GEMMs' main loops by resource."""
    gemms = [b for b in builds if "M" in b["constants"]]
    rows = {}
    for b in gemms:
        tile = "x".join(str(v) for k, v in b["constants"].items() if k.startswith("BLOCK"))
        rows[tile, b["dtype"]] = [f"{tile} {b['dtype']}", *(f"{n:,.0f}" for n in loop_cycles(b).values())]
    return table(
        "tile, result | matrix | LDS reads | vector | instructions | bytes loaded", list(rows.values())
    )


def gemms_table(tokens: int, builds: list[dict]) -> str:
    """Returns the times of each GEMM by format."""
    rows = []
    for s in shapes.gemms(tokens):
        peak, reached = ([f"{gemm_seconds(s, k, case)[0] * 1e6:,.0f}" for k in PEAK] for case in CASES[:2])
        count, full = rounds(find_gemm(builds, s))
        limit = gemm_seconds(s, "mxfp4", CASES[0])[1]
        size = f"{s.m} x {s.n} x {s.k}"
        rows.append([s.name, size, *peak, limit, *reached, count, f"{full:.3f}"])
    kinds = "BF16 | FP8 | MXFP4"
    return table(f"GEMM | m x n x k | {kinds} | limit | {kinds} | rounds | full", rows)


def passes_table(tokens: int, builds: list[dict]) -> str:
    """Returns the times, bytes and vector instructions of each quantization pass."""
    rows = []
    for t in shapes.tensors(tokens):
        row = [t.name, f"{t.rows} x {t.columns}"]
        for policy in POLICIES[1:]:
            seconds, limit = quantize_seconds(t, policy, builds, CASES[0])
            row.append(f"{seconds * 1e6:,.1f} {limit}")
        moved = [pass_bytes(t, kind) / 1e6 for kind in ("fp8", "mxfp4")]
        counts = [vector_per_element(find_quantizer(builds, t, p)) for p in POLICIES[2:]]
        rows.append([*row, *(f"{n:,.0f}" for n in moved), *(f"{n:.1f}" for n in counts)])
    header = " | ".join(POLICIES[1:])
    return table(f"tensor | size | {header} | MB, FP8 | MB, MXFP4 | vector, wgrad | vector, full", rows)


def blocks_table(builds: list[dict]) -> str:
    """Returns the times of a block's linear layers by policy."""
    rows = []
    for tokens in shapes.TOKENS:
        for policy in POLICIES:
            row = [policy, f"{tokens:,}"]
            for case in CASES[:2]:
                parts = block_seconds(policy, tokens, builds, case)
                base = sum(block_seconds("fp8", tokens, builds, case).values())
                row += [f"{t * 1e3:.3f}" for t in parts.values()] + [f"{sum(parts.values()) / base:.3f}"]
            rows.append(row)
    each = "GEMMs | quantization | of fp8"
    return table(f"policy | tokens | {each} | {each}", rows)


def steps_table(tokens: int, builds: list[dict]) -> str:
    """Returns the times of a step's parts by policy, without lines whose times an earlier one has."""
    rows = []
    for case in CASES[:3]:
        for policy in POLICIES:
            parts = step_seconds(policy, tokens, builds, case)
            total = sum(parts.values())
            times = [*(f"{t * 1e3:.1f}" for t in (*parts.values(), total)), f"{tokens / total:,.0f}"]
            if all(times != row[2:] for row in rows):
                rows.append([policy, case.name, *times])
    names = "GEMMs | quantization | attention | head | elementwise | optimizer | step | tokens/s"
    return table(f"policy | rates | {names}", rows)


def paper_table(builds: list[dict]) -> str:
    """Returns the gain of wgrad_hadamard over fp8 beside the paper's."""
    rows = []
    for case in CASES:
        for block in (True, False):
            gains = [gain("wgrad_hadamard", tokens, builds, case, block) for tokens in shapes.TOKENS]
            rows.append([case.name, "linear layers" if block else "step", *(f"{g:+.1%}" for g in gains)])
    rows.append(["the paper, measured", "step", "+20%", ""])
    return table(f"rates | of | {' | '.join(f'{tokens:,} tokens' for tokens in shapes.TOKENS)}", rows)


def tables(builds: list[dict]) -> dict[str, str]:
    """Returns all tables by name, which is also that of their markers in the document."""
    named = {"rates": rates_table(), "kernels": kernels_table(builds), "loop": loop_table(builds)}
    for tokens in shapes.TOKENS:
        named[f"gemms {tokens}"] = gemms_table(tokens, builds)
    named["passes"] = passes_table(shapes.TOKENS[0], builds)
    named["blocks"] = blocks_table(builds)
    for tokens in shapes.TOKENS:
        named[f"steps {tokens}"] = steps_table(tokens, builds)
    return named | {"paper": paper_table(builds)}


def main() -> None:
    """Prints the tables, and writes them if the command line says so."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper_models.mi355x", description="A roofline for MI355X."
    )
    parser.add_argument("--builds", type=pathlib.Path, help="folder that mxjax.kernels.aot wrote")
    parser.add_argument("--write", type=pathlib.Path, help="document to put the tables into")
    options = parser.parse_args()
    builds = read_builds(options.builds) if options.builds else compile_builds()
    named = tables(builds)
    if options.write:
        options.write.write_text(insert(options.write.read_text(), {k: named[k] for k in DOCUMENTED}))
        RESULTS.write_text("[\n" + ",\n".join(json.dumps(b) for b in builds) + "\n]\n")
    for name, content in named.items():
        print(f"{name}\n\n{content}\n")
    gains = [
        {"rates": case.name, "policy": policy, "tokens": tokens, "gain": gain(policy, tokens, builds, case)}
        for case in CASES
        for policy in POLICIES[2:]
        for tokens in shapes.TOKENS
    ]
    print(json.dumps({"builds": len(builds), "step_gain_over_fp8": gains}))


if __name__ == "__main__":
    main()
