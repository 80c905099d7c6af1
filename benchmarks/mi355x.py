"""A roofline for AMD MI355X: the time of a Llama 3.1 8B training step on one GPU, by arithmetic.

    python -m benchmarks.mi355x [--write] [--builds DIR]

Published and measured rates give the times of GEMMs and of passes over memory. The machine code of the gfx950
kernels gives the instructions of quantizers and attention: docs/results/gfx950-*.json, which `--builds DIR`
makes anew from the folder that `mxjax.kernels.cases --out DIR` wrote. Parts of a step are added up; nothing
overlaps. Prints the tables, and JSON last; `--write` puts the tables into docs/mi355x.md. Nobody has measured
these kernels on an MI355X.
"""

import argparse
import functools
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

import mxjax
from models.configs import get_config
from mxjax.kernels.cases import shapes
from mxjax.runtime.tables import insert, table

ROOT = pathlib.Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "mi355x.md", ROOT / "docs" / "results"
POLICIES = ("bf16", "fp8", "wgrad_hadamard", "full_hadamard")
MODEL, SEQUENCE, TOKENS = get_config("llama3.1-8b"), 8192, 8192
DEVICES = 8  # over which the optimizer's state is sharded

UNITS, SIMDS, WAVE, CLOCK = 256, 4, 64, 2.4e9
ISSUE_CYCLES = 4  # a SIMD of 16 lanes issues an instruction for 64 lanes in 4 cycles
EXP_CYCLES = 4 * ISSUE_CYCLES  # transcendental instructions have a quarter of the rate
MATRIX_FLOPS = {"bf16": 4096, "fp8": 8192, "mxfp4": 16384}  # of a compute unit in a cycle
MFMA_CYCLES = 2 * 32 * 32 * 16 * SIMDS / MATRIX_FLOPS["bf16"]  # v_mfma_f32_32x32x16_bf16
PEAK = {kind: flops * UNITS * CLOCK for kind, flops in MATRIX_FLOPS.items()}
HBM = 8e12
VECTOR_RATE = UNITS * SIMDS * WAVE / ISSUE_CYCLES * CLOCK  # lane instructions a second
# FLOP/s and bytes a second that others measured; docs/mi355x.md says who.
MEASURED = {"bf16": 1628.0e12, "fp8": 3564.1e12, "mxfp4": 3975.7e12}
ATTENTION, MEMORY = 2105e12 / 2, 4.5e12
AITER = {
    (8192, 4096, 14336): 5068e12,
    (8192, 28672, 4096): 4436e12,
    (8192, 4096, 4096): 3918e12,
    (8192, 6144, 4096): 3869e12,
}
"""FLOP/s of AITER's MXFP4 GEMMs with a bfloat16 result, by m, n and k."""
MLPERF = {"full_hadamard": 37490, "fp8": 31390}
"""Tokens/s of each of eight MI355X: MLPerf Training 6.0 in MXFP4 with H16, and 5.1 in FP8."""
MLPERF_SEQUENCES = 4  # of each GPU in a step: an optimizer's step for four of ours

OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32}
"""Bytes an element of a GEMM's operand, scales included, by format."""


class Rates(NamedTuple):
    """Assumed rates.

    Attributes:
      gemm: FLOP/s by format.
      aiter: whether MXFP4's GEMMs take AITER's time for their shape.
      attention: FLOP/s of causal attention, without the masked half.
      memory: bytes a second.
      fp8_reads: reads of a tensor that is quantized to FP8: 2 with current scaling, 1 with delayed scaling.
    """

    name: str
    gemm: dict[str, float]
    aiter: bool = False
    attention: float = ATTENTION
    memory: float = MEMORY
    fp8_reads: int = 2


CASES = (
    Rates("peak", PEAK, attention=PEAK["bf16"], memory=HBM),
    Rates("best measured", MEASURED, aiter=True),
    Rates("hipBLASLt", MEASURED),
    Rates("best, FP8 delayed scaling", MEASURED, aiter=True, fp8_reads=1),
    Rates("hipBLASLt, FP8 delayed scaling", MEASURED, fp8_reads=1),
)

# A product of causal attention takes S^2 d FLOPs a sequence; two products forward, five backward.
ATTENTION_FLOPS = 7.0 * SEQUENCE * MODEL.n_heads * MODEL.head_dim * MODEL.n_layers  # a token

Build = dict[str, Any]
Builds = Mapping[str, Build]


def kind_of(policy: str, gemm: str) -> str:
    """Returns the format, a key of OPERAND_BYTES, in which a GEMM of a policy multiplies."""
    name = getattr(mxjax.get_policy(policy), gemm).lhs.format
    return "fp8" if name.startswith("fp8") else name


def gemm_bytes(shape: shapes.GemmShape, kind: str) -> float:
    """Returns the bytes of both operands and of the result, float32 in Wgrad and else bfloat16."""
    result = 4 if shape.name.endswith("wgrad") else 2
    return (shape.m + shape.n) * shape.k * OPERAND_BYTES[kind] + shape.m * shape.n * result


def gemm_seconds(shape: shapes.GemmShape, kind: str, rates: Rates) -> float:
    """Returns the larger of the matrix cores' time and the time to move operands and result once."""
    if kind == "mxfp4" and rates.aiter:
        return float(_aiter_terms(shape) @ _aiter_fit())
    return max(2 * shape.m * shape.n * shape.k / rates.gemm[kind], gemm_bytes(shape, kind) / rates.memory)


def _aiter_terms(shape: shapes.GemmShape) -> np.ndarray:
    """Returns what the time of AITER's GEMM is linear in: FLOPs, bytes of the result, and one launch."""
    result = 4 if shape.name.endswith("wgrad") else 2
    return np.array([2.0 * shape.m * shape.n * shape.k, shape.m * shape.n * result, 1.0])


@functools.cache
def _aiter_fit() -> np.ndarray:
    """Returns seconds a FLOP, a byte and a launch, with the least squares of AITER's relative errors."""
    terms = np.array([_aiter_terms(shapes.GemmShape("measured", *sizes)) for sizes in AITER])
    seconds = terms[:, 0] / list(AITER.values())
    return np.linalg.lstsq(terms / seconds[:, None], np.ones(len(seconds)), rcond=None)[0]


def pass_bytes(tensor: shapes.TensorShape, kind: str, fp8_reads: int = 2) -> float:
    """Returns the bytes that quantizing a tensor reads and writes.

    MXFP4 reads once and writes both operands. FP8 with current scaling reads once for the largest magnitude
    and once to convert; both GEMMs share one operand. BF16 casts the weights. Weights are float32, others
    bfloat16.
    """
    is_weight = tensor.name.endswith("weight")
    read = 4 if is_weight else 2
    each = {
        "bf16": 6 if is_weight else 0,
        "fp8": fp8_reads * read + 1,
        "mxfp4": read + 2 * OPERAND_BYTES["mxfp4"],
    }
    return each[kind] * tensor.rows * tensor.columns


def quantizer_name(tensor: shapes.TensorShape, policy: str) -> str:
    """Returns the name of the build that quantizes a tensor along rows and columns for its two GEMMs."""
    p, which = mxjax.get_policy(policy), tensor.name.split(".")[-1]
    uses = {"activation": (p.fprop, p.wgrad), "gradient": (p.dgrad, p.wgrad), "weight": (p.dgrad, p.fprop)}
    rows, columns = (f"-h{use.rotation.size}" if use.rotation else "" for use in uses[which])
    size, dtype = f"{tensor.rows}x{tensor.columns}", "float32" if which == "weight" else "bfloat16"
    return f"quantize_{size}_{dtype}_rows_packed{rows}_columns_packed{columns}"


def quantize_seconds(tensor: shapes.TensorShape, policy: str, builds: Builds, rates: Rates) -> float:
    """Returns the larger of the times to move bytes and to issue vector instructions."""
    kind, vector = kind_of(policy, "fprop"), 0.0
    if kind == "mxfp4":
        build = builds[quantizer_name(tensor, policy)]
        count = sum(build["kernel"].get(name, 0) for name in ("vector", "convert", "accumulator_move"))
        tile = build["constants"]["BLOCK_R"] * build["constants"]["BLOCK_C"]
        vector = count * build["warps"] * WAVE / tile * tensor.rows * tensor.columns / VECTOR_RATE
    return max(pass_bytes(tensor, kind, rates.fp8_reads) / rates.memory, vector)


def linear_seconds(policy: str, tokens: int, builds: Builds, rates: Rates) -> dict[str, float]:
    """Returns the times of all linear layers of the blocks, forward and backward."""
    kinds = [(shape, kind_of(policy, shape.name.split(".")[-1])) for shape in shapes.gemms(tokens)]
    passes = (quantize_seconds(tensor, policy, builds, rates) for tensor in shapes.tensors(tokens))
    times = {"GEMMs": sum(gemm_seconds(*k, rates) for k in kinds), "quantization": sum(passes)}
    return {name: time * MODEL.n_layers for name, time in times.items()}


def other_seconds(tokens: int, rates: Rates) -> dict[str, float]:
    """Returns the times that no policy changes: attention, head, passes over memory, optimizer."""
    m = MODEL
    d, f, rope = m.d_model, m.d_ff, 2 * (m.n_heads + m.n_kv_heads) * m.head_dim
    # Elements read and written a token by norms, residual sums, RoPE and the gated MLP, forward and backward.
    moved = (4 * d + 6 * d + rope + 3 * f) + (6 * d + 6 * d + rope + 5 * f)
    return {
        "attention": ATTENTION_FLOPS * tokens / rates.attention,
        "head": 6 * tokens * m.d_model * m.vocab_size / rates.gemm["bf16"],
        "elementwise": 2 * moved * tokens * m.n_layers / rates.memory,
        # float32: gradient, weight, two moments read; the last three written; the gradient read for its norm.
        "optimizer": 32 * m.n_params / DEVICES / rates.memory,
    }


def step_seconds(policy: str, tokens: int, builds: Builds, rates: Rates) -> dict[str, float]:
    """Returns the times of the parts of a training step."""
    return linear_seconds(policy, tokens, builds, rates) | other_seconds(tokens, rates)


def attention_seconds(builds: Iterable[Build], overlap: bool) -> float:
    """Returns a step's seconds in the Triton kernels of attention, by the instructions of their main loops.

    With `overlap` matrix instructions hide all others, which is a lower bound; without it, they take turns.
    """
    seconds, scores = 0.0, MODEL.n_heads * TOKENS * SEQUENCE / 2 * MODEL.n_layers
    for build in builds:
        matrix = other = 0.0
        for opcode, count in build["main_loop"].items():
            if opcode.startswith("v_mfma"):
                matrix += count * MFMA_CYCLES
            else:
                other += count * (EXP_CYCLES if opcode.startswith("v_exp") else ISSUE_CYCLES)
        cycles = (max(matrix, other) if overlap else matrix + other) * build["warps"] / SIMDS
        seconds += scores / (build["constants"]["BLOCK_Q"] * build["constants"]["BLOCK_K"]) * cycles
    return seconds / (UNITS * CLOCK)


def steps_table(builds: Builds) -> str:
    """Returns the parts of a step in milliseconds, and its tokens/s."""
    parts: dict[str, float] = {}
    rows = []
    for policy, rates in [(p, CASES[1]) for p in POLICIES[:3]] + [("wgrad_hadamard", CASES[2])]:
        parts = step_seconds(policy, TOKENS, builds, rates)
        total = sum(parts.values())
        times = [f"{t * 1e3:.1f}" for t in (*parts.values(), total)]
        rows.append([f"{policy}, {rates.name}", *times, f"{TOKENS / total:,.0f}"])
    return table(f"policy, rates | {' | '.join(parts)} | step | tokens/s", rows)


def gains_table(builds: Builds) -> str:
    """Returns wgrad_hadamard's gain over fp8 in a step."""
    rows = []
    for rates in CASES:
        fp8, ours = (sum(step_seconds(p, TOKENS, builds, rates).values()) for p in ("fp8", "wgrad_hadamard"))
        rows.append([rates.name, f"{fp8 / ours - 1:+.1%}"])
    return table("rates | gain", rows)


def mlperf_table(builds: Builds) -> str:
    """Returns the tokens/s that the model gives MLPerf's runs, beside those measured."""
    rows = []
    for policy, measured in MLPERF.items():
        parts = step_seconds(policy, TOKENS, builds, CASES[1])
        parts["optimizer"] /= MLPERF_SEQUENCES
        rate = TOKENS / sum(parts.values())
        rows.append([policy, f"{rate:,.0f}", f"{measured:,}", f"{rate / measured - 1:+.0%}"])
    return table("policy | computed, tokens/s | measured | computed over measured", rows)


def attention_table(attention: Builds, builds: Builds) -> str:
    """Returns a step's attention under wgrad_hadamard at the best measured rates, by kernel."""
    parts = step_seconds("wgrad_hadamard", TOKENS, builds, CASES[1])
    rest = sum(parts.values()) - parts["attention"]
    kernels = {
        "AITER, as measured by others": parts["attention"],
        "Triton, instructions overlap": attention_seconds(attention.values(), overlap=True),
        "Triton, instructions take turns": attention_seconds(attention.values(), overlap=False),
    }
    rows = [[name, f"{1e3 * t:.1f}", f"{1e3 * (t + rest):.1f}"] for name, t in kernels.items()]
    return table("attention by | ms | step, ms", rows)


def tables() -> dict[str, str]:
    """Returns the tables by name, which is also that of their markers in the page."""
    builds, attention = load("builds"), load("attention")
    named = {"steps": steps_table(builds), "gains": gains_table(builds)}
    return named | {"mlperf": mlperf_table(builds), "attention": attention_table(attention, builds)}


def load(name: str) -> dict[str, Build]:
    """Returns builds of docs/results by their names."""
    return {b["name"]: b for b in json.loads((RESULTS / f"gfx950-{name}.json").read_text())}


def store(folder: pathlib.Path) -> None:
    """Writes docs/results/gfx950-*.json from the folder that `mxjax.kernels.cases` wrote."""
    records = {p.stem: json.loads(p.read_text()) for p in sorted((folder / "gfx950").glob("*.json"))}
    sizes = shapes.TOKENS
    names = [quantizer_name(t, p) for p in POLICIES[2:] for n in sizes for t in shapes.tensors(n)]
    attention = [name for name in records if re.match(rf"attention_.*x{SEQUENCE}x", name)]
    for file, chosen in (("builds", names), ("attention", attention)):
        text = ",\n".join(json.dumps(summarize(records[name])) for name in dict.fromkeys(chosen))
        (RESULTS / f"gfx950-{file}.json").write_text(f"[\n{text}\n]\n")


def summarize(record: Build) -> Build:
    """Returns the numbers that the model takes from a record of `mxjax.kernels.cases`."""
    kept = {name: record[name] for name in ("name", "constants", "warps")}
    if record["name"].startswith("attention"):
        return kept | {"main_loop": record["main_loop"]["opcodes"]}
    return kept | {"kernel": record["whole_kernel"]["classes"]}


def main() -> None:
    """Prints the tables, and writes them if the command line says so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mi355x", description=__doc__)
    parser.add_argument("--builds", type=pathlib.Path, help="folder that mxjax.kernels.cases wrote")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/mi355x.md")
    options = parser.parse_args()
    if options.builds:
        store(options.builds)
    named = tables()
    if options.write:
        PAGE.write_text(insert(PAGE.read_text(), named))
    for name, content in named.items():
        print(f"{name}\n\n{content}\n")
    print(json.dumps(named))


if __name__ == "__main__":
    main()
