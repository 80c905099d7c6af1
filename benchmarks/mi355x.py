"""A roofline on paper for AMD MI355X: the time of a Llama 3.1 8B training step from published rates.

    python -m benchmarks.mi355x [--builds DIR] [--write docs/mi355x.md]

Compiles the gfx950 kernels that the model needs (no GPU is used), or reads what `mxjax.kernels.aot --out DIR`
wrote. Prints the tables of docs/mi355x.md, and JSON last. `--write` puts the tables into that document and
the builds' numbers into docs/results/gfx950-builds.json.
"""

import argparse
import json
import pathlib
import re
import tempfile
from typing import Any, NamedTuple

import mxjax
from models.configs import get_config
from mxjax.kernels import shapes
from mxjax.policy import Rotation

UNITS, SIMDS, CLOCK = 256, 4, 2.4e9
WAVE, ISSUE_CYCLES = 64, 4  # a SIMD of 16 lanes takes a vector instruction of 64 lanes in 4 cycles
LDS_BYTES = 256  # read in a cycle by a compute unit
# FLOPs in a cycle of a compute unit; times UNITS * CLOCK these are AMD's 2.5166, 5.0332, 10.0663 PFLOP/s.
MATRIX_FLOPS = {"bf16": 4096, "fp8": 8192, "mxfp4": 16384}
PEAK = {kind: flops * UNITS * CLOCK for kind, flops in MATRIX_FLOPS.items()}
HBM = 8e12
VECTOR_RATE = UNITS * SIMDS * WAVE / ISSUE_CYCLES * CLOCK  # instructions of one lane, a second
OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32}

POLICIES = ("bf16", "fp8", "wgrad_hadamard", "full_hadamard")
MODEL = get_config("llama3.1-8b")
SEQUENCE = 8192
DEVICES = 8  # that the optimizer's state is sharded over
RESULTS = pathlib.Path(__file__).parent.parent / "docs" / "results" / "gfx950-builds.json"


class Case(NamedTuple):
    """What is assumed: the fractions of the peaks that are reached, and how FP8 finds its scales.

    Attributes:
      gemm: the fraction that each kind of GEMM reaches.
      attention, memory: those of attention and of passes over memory.
      fp8_reads: of a tensor that is quantized to FP8: 2 with current scaling, 1 with delayed scaling.
    """

    name: str
    gemm: dict[str, float]
    attention: float = 1.0
    memory: float = 1.0
    fp8_reads: int = 2


# Measured TFLOP/s and bytes a second; docs/mi355x.md says by whom.
MEASURED = {"bf16": 1628.0e12, "fp8": 3564.1e12, "mxfp4": 5775e12, "hipblaslt_mxfp4": 3975.7e12}
MEASURED |= {"attention": 2105e12 / 2, "memory": 4.5e12}
_REACHED = {kind: MEASURED[kind] / PEAK[kind] for kind in PEAK}
_OTHERS = (MEASURED["attention"] / PEAK["bf16"], MEASURED["memory"] / HBM)
_HIPBLASLT = _REACHED | {"mxfp4": MEASURED["hipblaslt_mxfp4"] / PEAK["mxfp4"]}
CASES = (
    Case("peak", dict.fromkeys(PEAK, 1.0)),
    Case("best measured", _REACHED, *_OTHERS),
    Case("hipBLASLt", _HIPBLASLT, *_OTHERS),
    Case("best, FP8 delayed scaling", _REACHED, *_OTHERS, fp8_reads=1),
    Case("hipBLASLt, FP8 delayed scaling", _HIPBLASLT, *_OTHERS, fp8_reads=1),
)


def kind_of(policy: str, gemm: str) -> str:
    """Returns in which of PEAK's formats a GEMM of a policy multiplies."""
    name = getattr(mxjax.get_policy(policy), gemm).lhs.format
    return "fp8" if name.startswith("fp8") else name


def gemm_seconds(shape: shapes.GemmShape, kind: str, case: Case) -> tuple[float, str]:
    """Returns the larger of the matrix cores' time and of the time to move operands and result once."""
    matrix = 2 * shape.m * shape.n * shape.k / (PEAK[kind] * case.gemm[kind])
    memory = gemm_bytes(shape, kind) / (HBM * case.memory)
    return max((matrix, "matrix"), (memory, "HBM"))


def gemm_bytes(shape: shapes.GemmShape, kind: str) -> float:
    """Returns the bytes of both operands and of the result: bfloat16, in Wgrad float32."""
    result = 4 if shape.name.endswith("wgrad") else 2
    return (shape.m + shape.n) * shape.k * OPERAND_BYTES[kind] + shape.m * shape.n * result


def pass_bytes(tensor: shapes.TensorShape, kind: str, fp8_reads: int = 2) -> float:
    """Returns the bytes that quantizing a tensor reads and writes.

    MXFP4: one read, both operands. FP8: with current scaling one read for the largest magnitude and one to
    convert; one operand that both GEMMs share. BF16: the weights are cast. Weights are float32, the others
    bfloat16.
    """
    weight = tensor.name.endswith("weight")
    read = 4 if weight else 2
    each = {
        "bf16": 6 if weight else 0,
        "fp8": fp8_reads * read + 1,
        "mxfp4": read + 2 * OPERAND_BYTES["mxfp4"],
    }
    return each[kind] * tensor.rows * tensor.columns


def sides(tensor: shapes.TensorShape, policy: str) -> tuple[int, int]:
    """Returns the sizes of the rotations along the rows and along the columns of a tensor, 1 without."""
    p = mxjax.get_policy(policy)
    rows, columns = {
        "activation": (p.fprop, p.wgrad),
        "gradient": (p.dgrad, p.wgrad),
        "weight": (p.dgrad, p.fprop),
    }[tensor.name.split(".")[-1]]
    return _size(rows.rotation), _size(columns.rotation)


def _size(rotation: Rotation | None) -> int:
    return rotation.size if rotation else 1


def find_quantizer(builds: list[dict], tensor: shapes.TensorShape, policy: str) -> dict:
    """Returns the build that quantizes a tensor along both axes, if possible that of its own shape."""
    rows, columns = sides(tensor, policy)
    dtype = "float32" if tensor.name.endswith("weight") else "bfloat16"
    wanted = {"ROW_FORM": "packed", "COLUMN_FORM": "packed", "ROW_ROTATION": rows, "COLUMN_ROTATION": columns}
    usual = {"SIGNS": False, "STOCHASTIC": False, "SQUARE": False, "PRESCALE": 1}
    wanted |= {f"{side}_{name}": value for side in ("ROW", "COLUMN") for name, value in usual.items()}
    found = [b for b in builds if b["dtype"] == dtype and wanted.items() <= b["constants"].items()]
    if not found:
        raise LookupError(f"no gfx950 build quantizes {dtype} with rotations {rows} and {columns}")
    same = (tensor.rows, tensor.columns)
    return max(found, key=lambda b: ((b["constants"]["R"], b["constants"]["C"]) == same, b["constants"]["R"]))


def find_gemm(builds: list[dict], shape: shapes.GemmShape) -> dict:
    """Returns the build of a GEMM's shape."""
    wanted = {"M": shape.m, "N": shape.n, "K": shape.k}
    for build in builds:
        if wanted.items() <= build["constants"].items():
            return build
    raise LookupError(f"no gfx950 build multiplies {shape.m} x {shape.n} x {shape.k}")


def vector_per_element(build: dict) -> float:
    """Returns the vector instructions that a lane executes for each element of a quantizer's tile."""
    count = sum(build["kernel"].get(name, 0) for name in ("vector", "convert", "accumulator_move"))
    return count * build["warps"] * WAVE / (build["constants"]["BLOCK_R"] * build["constants"]["BLOCK_C"])


def quantize_seconds(
    tensor: shapes.TensorShape, policy: str, builds: list[dict], case: Case
) -> tuple[float, str]:
    """Returns the larger of the times to move bytes and to issue vector instructions, and which it is."""
    kind = kind_of(policy, "fprop")
    memory = pass_bytes(tensor, kind, case.fp8_reads) / (HBM * case.memory)
    vector = 0.0
    if kind == "mxfp4":
        per_element = vector_per_element(find_quantizer(builds, tensor, policy))
        vector = per_element * tensor.rows * tensor.columns / VECTOR_RATE
    return max((memory, "HBM"), (vector, "vector"))


def rounds(build: dict) -> tuple[int, float]:
    """Returns how often the compute units take a program each, and the fraction of them that is busy."""
    c = build["constants"]
    programs = -(-c["M"] // c["BLOCK_M"]) * -(-c["N"] // c["BLOCK_N"])
    return -(-programs // UNITS), programs / (-(-programs // UNITS) * UNITS)


def loop_cycles(build: dict) -> dict[str, float]:
    """Returns the cycles that a pass of a GEMM's main loop takes of each resource, and the bytes it loads."""
    c, waves, loop = build["constants"], build["warps"], build["main_loop"]
    return {
        "matrix": 2 * c["BLOCK_M"] * c["BLOCK_N"] * c["BLOCK_K"] / MATRIX_FLOPS["mxfp4"],
        "LDS": build["lds_bytes"] * WAVE * waves / LDS_BYTES,
        "vector": loop["vector"] * ISSUE_CYCLES * waves / SIMDS,
        "instructions": sum(loop.values()) * waves / SIMDS,
        "bytes loaded": (c["BLOCK_M"] + c["BLOCK_N"]) * c["BLOCK_K"] * OPERAND_BYTES["mxfp4"],
    }


def block_seconds(policy: str, tokens: int, builds: list[dict], case: Case) -> dict[str, float]:
    """Returns the times of the four linear layers of one block, forward and backward."""
    gemms = sum(
        gemm_seconds(s, kind_of(policy, s.name.split(".")[-1]), case)[0] for s in shapes.gemms(tokens)
    )
    passes = sum(quantize_seconds(t, policy, builds, case)[0] for t in shapes.tensors(tokens))
    return {"gemms": gemms, "quantization": passes}


def other_seconds(tokens: int, case: Case) -> dict[str, float]:
    """Returns the times of what no policy changes: attention, head, passes over memory, optimizer."""
    m = MODEL
    # A product of causal attention takes S^2 d FLOPs a sequence; two products forward, five backward.
    attention = 7 * SEQUENCE * tokens * m.n_heads * m.head_dim * m.n_layers
    head = 6 * tokens * m.d_model * m.vocab_size
    d, f, rope = m.d_model, m.d_ff, 2 * (m.n_heads + m.n_kv_heads) * m.head_dim
    # Elements read and written a token by norms, residual sums, RoPE and the gated MLP, forward and backward.
    moved = (4 * d + 6 * d + rope + 3 * f) + (6 * d + 6 * d + rope + 5 * f)
    return {
        "attention": attention / (PEAK["bf16"] * case.attention),
        "head": head / (PEAK["bf16"] * case.gemm["bf16"]),
        "elementwise": 2 * moved * tokens * m.n_layers / (HBM * case.memory),
        # float32: gradient, weight, two moments read; the last three written; the gradient read for its norm.
        "optimizer": 32 * m.n_params / DEVICES / (HBM * case.memory),
    }


def step_seconds(policy: str, tokens: int, builds: list[dict], case: Case) -> dict[str, float]:
    """Returns the times of the parts of a training step."""
    block = block_seconds(policy, tokens, builds, case)
    return {name: time * MODEL.n_layers for name, time in block.items()} | other_seconds(tokens, case)


def needed(builds: list[dict]) -> list[dict]:
    """Returns the builds that the model reads, each once."""
    found = [find_gemm(builds, s) for tokens in shapes.TOKENS for s in shapes.gemms(tokens)]
    for policy in ("wgrad_hadamard", "full_hadamard"):
        found += [find_quantizer(builds, t, policy) for n in shapes.TOKENS for t in shapes.tensors(n)]
    return list({build["name"]: build for build in found}.values())


def summarize(description: dict[str, Any]) -> dict[str, Any]:
    """Returns what the model reads of a build that `mxjax.kernels.aot` describes."""
    opcodes = description["main_loop"]["opcodes"]
    widths = [(re.match(r"ds_read(2\w*)?_[bui](\d+)", name), count) for name, count in opcodes.items()]
    return {
        "name": description["name"],
        "dtype": next(a["dtype"] for a in description["arguments"] if a["name"] in ("x", "out")),
        "constants": description["constants"],
        "warps": description["warps"],
        "shared_bytes": description["shared_bytes"],
        "resources": description["resources"],
        "main_loop": description["main_loop"]["classes"],
        "kernel": description["whole_kernel"]["classes"],
        "lds_bytes": sum((2 if m[1] else 1) * int(m[2]) // 8 * count for m, count in widths if m),
    }


def read_builds(folder: pathlib.Path) -> list[dict]:
    """Returns the needed ones of the builds under a folder that `mxjax.kernels.aot` wrote."""
    paths = sorted((folder / "gfx950").glob("*.json"))
    return needed([summarize(json.loads(path.read_text())) for path in paths])


def compile_builds() -> list[dict]:
    """Compiles the needed builds in a temporary folder."""
    from mxjax.kernels import aot

    modules, candidates = {}, []
    for module in aot.MODULES:
        for b in aot.list_builds(module, "gfx950"):
            modules[b.name] = module
            dtype = (b.signature.get("x") or b.signature["out"]).dtype
            candidates.append({"name": b.name, "dtype": dtype, "constants": b.constants})
    jobs = [(modules[b["name"]], "gfx950", b["name"]) for b in needed(candidates)]
    with tempfile.TemporaryDirectory() as folder:
        done, failed = aot.build_all(jobs, pathlib.Path(folder), jobs=2)
    if failed:
        raise RuntimeError(f"not compiled: {failed}")
    return needed([summarize(d) for d in done])


def table(header: str, rows: list[list[Any]]) -> str:
    """Returns a Markdown table; the first column is text."""
    names = header.split(" | ")
    lines = [names, ["---"] + ["---:"] * (len(names) - 1), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def rates_table() -> str:
    rows = [
        [
            f"{label} matrix, TFLOP/s",
            f"{PEAK[k] / 1e12:,.1f}",
            f"{MEASURED[k] / 1e12:,.1f}",
            MEASURED[k] / PEAK[k],
        ]
        for k, label in (("bf16", "BF16"), ("fp8", "FP8"), ("mxfp4", "MXFP4"))
    ]
    slow, attention = MEASURED["hipblaslt_mxfp4"], MEASURED["attention"]
    rows += [
        [
            "the same by hipBLASLt",
            f"{PEAK['mxfp4'] / 1e12:,.1f}",
            f"{slow / 1e12:,.1f}",
            slow / PEAK["mxfp4"],
        ],
        ["BF16 attention, TFLOP/s", f"{PEAK['bf16'] / 1e12:,.1f}", f"{attention / 1e12:,.1f}", _OTHERS[0]],
        ["HBM, TB/s", HBM / 1e12, MEASURED["memory"] / 1e12, _OTHERS[1]],
        ["vector, 10^12 lane instructions/s", f"{VECTOR_RATE / 1e12:.1f}", "-", 1.0],
    ]
    return table("rate | peak | measured | fraction", [[*r[:3], f"{r[3]:.3f}"] for r in rows])


def kernels_table(builds: list[dict]) -> str:
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
    gemms = [b for b in builds if "M" in b["constants"]]
    rows = {}
    for b in gemms:
        tile = "x".join(str(v) for k, v in b["constants"].items() if k.startswith("BLOCK"))
        rows[tile, b["dtype"]] = [f"{tile} {b['dtype']}", *(f"{n:,.0f}" for n in loop_cycles(b).values())]
    return table(
        "tile, result | matrix | LDS reads | vector | instructions | bytes loaded", list(rows.values())
    )


def gemms_table(tokens: int, builds: list[dict]) -> str:
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
    rows = []
    for case in CASES[:3]:
        for policy in POLICIES:
            parts = step_seconds(policy, tokens, builds, case)
            total = sum(parts.values())
            row = [policy, case.name, *(f"{t * 1e3:.1f}" for t in parts.values())]
            rows.append([*row, f"{total * 1e3:.1f}", f"{tokens / total:,.0f}"])
    names = "GEMMs | quantization | attention | head | elementwise | optimizer | step | tokens/s"
    return table(f"policy | rates | {names}", rows)


def gain(policy: str, tokens: int, builds: list[dict], case: Case, block: bool = False) -> float:
    """Returns by how much more steps, or blocks' linear layers, a policy does in a time than fp8."""
    seconds = block_seconds if block else step_seconds
    fp8, other = (sum(seconds(p, tokens, builds, case).values()) for p in ("fp8", policy))
    return fp8 / other - 1


def paper_table(builds: list[dict]) -> str:
    rows = []
    for case in CASES:
        for block in (True, False):
            row = [case.name, "linear layers" if block else "step"]
            for policy in POLICIES[2:]:
                row += [f"{gain(policy, tokens, builds, case, block):+.1%}" for tokens in shapes.TOKENS]
            rows.append(row)
    rows.append(["the paper, measured", "step", "+20%", "", "+20%", ""])
    each = [f"{policy}, {tokens:,}" for policy in POLICIES[2:] for tokens in shapes.TOKENS]
    return table(f"rates | of | {' | '.join(each)}", rows)


def tables(builds: list[dict]) -> dict[str, str]:
    """Returns the document's tables by the names of their markers."""
    named = {"rates": rates_table(), "kernels": kernels_table(builds), "loop": loop_table(builds)}
    for tokens in shapes.TOKENS:
        named[f"gemms {tokens}"] = gemms_table(tokens, builds)
    named["passes"] = passes_table(shapes.TOKENS[0], builds)
    named["blocks"] = blocks_table(builds)
    for tokens in shapes.TOKENS:
        named[f"steps {tokens}"] = steps_table(tokens, builds)
    return named | {"paper": paper_table(builds)}


def insert(text: str, named: dict[str, str]) -> str:
    """Returns a document with the text between each pair of markers replaced."""
    for name, content in named.items():
        start, end = f"<!-- {name} -->", f"<!-- end {name} -->"
        text, count = re.subn(
            f"{start}.*?{end}", lambda _, c=content, s=start, e=end: f"{s}\n{c}\n{e}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"the document has {count} pairs of markers named {name!r}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mi355x", description="A roofline for MI355X.")
    parser.add_argument("--builds", type=pathlib.Path, help="folder that mxjax.kernels.aot wrote")
    parser.add_argument("--write", type=pathlib.Path, help="document to put the tables into")
    options = parser.parse_args()
    builds = read_builds(options.builds) if options.builds else compile_builds()
    named = tables(builds)
    if options.write:
        options.write.write_text(insert(options.write.read_text(), named))
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
