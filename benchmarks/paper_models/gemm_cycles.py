"""Cycles of the FP4 GEMM's main loop on one compute unit of gfx950, counted from its machine code.

    python -m benchmarks.paper_models.gemm_cycles [--write docs/gemm-schedule.md]

Compiles candidates of tiles, waves and stages without a GPU, and prints a table. `--write` puts it into the
document, and the numbers into docs/results/gfx950-gemm-cycles.json. The model:

- A wave issues its instructions in order, one every ISSUE_CYCLES.
- A matrix instruction occupies its SIMD's matrix cores for its FLOPs at the peak rate, a vector instruction
  its lanes for ISSUE_CYCLES. The four SIMDs take waves in turn. No instruction waits for a register.
- LDS serves reads in order at LDS_BYTES a cycle, and each arrives LDS_LATENCY later. Loads into LDS share
  MEMORY_BYTES a cycle and arrive MEMORY_LATENCY later. `s_waitcnt` and `s_barrier` wait as in the code.
- The rest of a tile is one latency at its begin, and its result at MEMORY_BYTES a cycle at its end.
- In the ping-pong schedule half of the waves are one barrier behind the others.

LDS_LATENCY, MEMORY_LATENCY and MEMORY_BYTES are assumptions; nobody here has measured them.
"""

import argparse
import json
import pathlib
import re
from typing import NamedTuple

from benchmarks.markdown import insert
from benchmarks.paper_models.mi355x_rates import ISSUE_CYCLES, LDS_BYTES, MATRIX_FLOPS, SIMDS, WAVE
from mxjax.devices import Target
from mxjax.kernels import shapes
from mxjax.kernels.aot import assembly
from mxjax.kernels.matmul.tiles import TILES, Tiles, candidates
from mxjax.tables import table

LDS_LATENCY, MEMORY_BYTES = 128, 64
MEMORY_LATENCIES = (800, 2000)
"""Cycles to the L2 cache and to HBM, both under load."""
MATRIX_CYCLES = 2 * 16 * 16 * 128 * SIMDS // MATRIX_FLOPS["mxfp4"]
SHAPE = shapes.gemms(shapes.TOKENS[0])[0]
RESULTS = pathlib.Path(__file__).parents[2] / "docs" / "results" / "gfx950-gemm-cycles.json"

GFX950 = Target("hip", "gfx950")
PINGPONG = "the first with ping-pong, which races"
_SMALLEST = 128  # of the sides of a tile
CANDIDATES = {
    f"{t.m}x{t.n}x{t.k}, {t.warps} waves, {t.stages} stages": t
    for t in candidates(GFX950)
    if min(t.m, t.n) >= _SMALLEST
} | {PINGPONG: TILES["gfx950"][0]}


class Step(NamedTuple):
    """An instruction of the loop: its kind, the bytes it moves for a wave, and the counters it waits for."""

    kind: str
    moved: int = 0
    waits: tuple[tuple[str, int], ...] = ()


def loop_steps(text: str) -> list[Step]:
    """Returns the steps of the loop with most matrix instructions of an AMDGCN text."""
    lines = [re.split(r";|//", line)[0].strip() for line in text.split(".Lfunc_end")[0].splitlines()]
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    loops = []
    for at, line in enumerate(lines):
        found = re.match(r"s_c?branch\w*\s+(\S+)", line)
        if found and labels[found[1]] < at:
            loops.append(lines[labels[found[1]] : at + 1])
    body = max(loops, key=lambda loop: sum(line.startswith("v_mfma") for line in loop))
    return [_step(line) for line in body if line and not line.startswith(".")]


def _step(line: str) -> Step:
    opcode = line.split()[0]
    if opcode == "s_waitcnt":
        return Step("wait", waits=tuple((name, int(n)) for name, n in re.findall(r"(\w+cnt)\((\d+)\)", line)))
    if opcode.startswith("ds_"):
        width = re.search(r"(2?)(?:st64)?_\w?(\d+)(?:_d16(?:_hi)?)?$", opcode)
        assert width, line
        return Step("lds", WAVE * int(width[2]) // 8 * (2 if width[1] else 1))
    if opcode.startswith(("buffer_load", "global_load")):
        words = re.search(r"dwordx?(\d*)$", opcode)
        return Step("load", WAVE * 4 * int(words[1] or 1) if words else WAVE)
    if opcode.startswith("v_mfma"):
        return Step("matrix")
    return Step("vector" if opcode.startswith("v_") else "barrier" if opcode == "s_barrier" else "scalar")


class _Wave:
    """A wave in the loop: when it issues next, and when what it waits for arrives."""

    def __init__(self, simd: int, program: int):
        self.simd, self.program, self.time, self.done = simd, program, 0.0, 0
        self.arrivals: dict[str, list[float]] = {"vmcnt": [], "lgkmcnt": []}


class _Unit:
    """A compute unit: when each of its resources is free."""

    def __init__(self, latency: int):
        self.queues = {"lds": ("lgkmcnt", LDS_BYTES, LDS_LATENCY), "load": ("vmcnt", MEMORY_BYTES, latency)}
        self.queue_free = dict.fromkeys(self.queues, 0.0)
        self.busy = {"matrix": MATRIX_CYCLES, "vector": ISSUE_CYCLES}
        self.lanes_free = {kind: [0.0] * SIMDS for kind in self.busy}

    def issue(self, w: _Wave, step: Step) -> None:
        """Issues a wave's step, and sets when it issues the next."""
        if step.kind in self.busy:
            free = self.lanes_free[step.kind]
            w.time = max(w.time, free[w.simd])
            free[w.simd] = w.time + self.busy[step.kind]
        elif step.kind in self.queues:
            counter, rate, latency = self.queues[step.kind]
            self.queue_free[step.kind] = max(w.time, self.queue_free[step.kind]) + step.moved / rate
            w.arrivals[counter].append(self.queue_free[step.kind] + latency)
        for counter, most in step.waits:
            done = max(0, len(w.arrivals[counter]) - most)
            w.time = max([w.time, *w.arrivals[counter][:done]])
            del w.arrivals[counter][:done]
        w.time += ISSUE_CYCLES


def pass_cycles(
    steps: list[Step], warps: int, latency: int, resident: int = 1, pingpong: bool = False, passes: int = 12
) -> float:
    """Returns the cycles of one pass of the loop by each of the resident programs, in the steady state."""
    unit, waves = _Unit(latency), [_Wave(i % SIMDS, i // warps) for i in range(warps * resident)]
    blocked = [w for w in waves[warps // 2 :] if pingpong]
    running, ends = [w for w in waves if w not in blocked], []
    while len(ends) < passes:
        w = min(running, key=lambda w: w.time)
        step = steps[w.done % len(steps)]
        unit.issue(w, step)
        w.done += 1
        if w is waves[0] and w.done % len(steps) == 0:
            ends.append(w.time)
        if step.kind == "barrier":
            running.remove(w)
            blocked.append(w)
            together = [v for v in blocked if v.program == w.program]
            if len(together) == warps:
                for v in together:
                    v.time = max(u.time for u in together)
                running += together
                blocked = [v for v in blocked if v not in together]
    half = passes // 2
    return (ends[-1] - ends[half - 1]) / (passes - half)


def unrolled(steps: list[Step], tiles: Tiles) -> int:
    """Returns how many steps along k a pass of the loop makes."""
    instructions = tiles.m * tiles.n * tiles.k // (16 * 16 * 128) // tiles.warps
    return sum(step.kind == "matrix" for step in steps) // instructions


def matrix_cycles(tiles: Tiles) -> float:
    """Returns the cycles that the matrix cores take for a step along k of the resident programs."""
    return 2 * tiles.m * tiles.n * tiles.k * tiles.resident / MATRIX_FLOPS["mxfp4"]


def tile_share(tiles: Tiles, cycles: float, latency: int) -> float:
    """Returns the fraction of the peak in a whole tile of SHAPE, whose begin and end overlap with nothing."""
    passes = SHAPE.k / tiles.k
    ends = latency + 2 * tiles.m * tiles.n * tiles.resident / MEMORY_BYTES
    return passes * matrix_cycles(tiles) / (passes * cycles + ends)


def measure(name: str) -> dict:
    """Compiles a candidate and returns its resources and the cycles of a step by memory latency."""
    from mxjax.kernels import knobs
    from mxjax.kernels.aot.compile import compile_build
    from mxjax.kernels.aot.gemm_builds import build_gemm

    tiles = CANDIDATES[name]
    build = build_gemm(SHAPE, "bfloat16", GFX950, tiles)
    settings = knobs.SETTINGS["hip"]
    knobs.SETTINGS["hip"] = {"use_block_pingpong": name == PINGPONG}
    try:
        compiled = compile_build(build, "gfx950")
    finally:
        knobs.SETTINGS["hip"] = settings
    text = compiled.asm["amdgcn"]
    steps = loop_steps(text)
    resources, lds = assembly.amd_resources(text), compiled.metadata.shared
    waves = assembly.amd_occupancy(resources["vgprs"], lds, tiles.warps)
    resident = waves * SIMDS // tiles.warps
    cycles = [
        pass_cycles(steps, tiles.warps, t, resident, pingpong=name == PINGPONG) / unrolled(steps, tiles)
        for t in MEMORY_LATENCIES
    ]
    kept = {key: resources[key] for key in ("vgprs", "vgpr_spills")}
    return {"name": name, "lds_bytes": lds, "resident": resident, "cycles": cycles, **kept}


def candidates_table(found: list[dict]) -> str:
    """Returns the table of candidates: what they take, and the share of the peak that they could reach."""
    rows = []
    for f in found:
        tiles = CANDIDATES[f["name"]]
        shipped = "yes" if tiles in TILES["gfx950"] and f["name"] != PINGPONG else ""
        row = [
            f["name"],
            shipped,
            f["vgprs"],
            f["vgpr_spills"],
            f"{f['lds_bytes'] / 1024:.1f}",
            f["resident"],
        ]
        tiles = tiles._replace(resident=f["resident"])
        for latency, cycles in zip(MEMORY_LATENCIES, f["cycles"], strict=True):
            row += [f"{cycles:,.0f}", f"{matrix_cycles(tiles) / cycles:.0%}"]
            row.append(f"{tile_share(tiles, cycles, latency):.0%}")
        rows.append(row)
    each = " | ".join(f"cycles, {t:,} | loop | tile" for t in MEMORY_LATENCIES)
    return table(f"candidate | shipped | VGPRs | spills | LDS, KiB | programs | {each}", rows)


def main() -> None:
    """Prints the table, and writes it if the command line says so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_models.gemm_cycles")
    parser.add_argument("--write", type=pathlib.Path, help="document to put the table into")
    options = parser.parse_args()
    found = [measure(name) for name in CANDIDATES]
    content = candidates_table(found)
    if options.write:
        options.write.write_text(insert(options.write.read_text(), {"candidates": content}))
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    print(content)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
