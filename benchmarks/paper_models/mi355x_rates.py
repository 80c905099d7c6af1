"""Rates of an MI355X: AMD's published peaks, rates that others measured, and a GEMM's time from them."""

from typing import NamedTuple

from benchmarks.paper_models.roofline import gemm_bytes
from mxjax.kernels import shapes

UNITS, SIMDS, CLOCK = 256, 4, 2.4e9
WAVE, ISSUE_CYCLES = 64, 4  # a SIMD of 16 lanes issues an instruction for 64 lanes in 4 cycles
LDS_BYTES = 256  # that a compute unit reads in a cycle
# FLOPs of a compute unit in a cycle; times UNITS * CLOCK they are AMD's 2.5166, 5.0332 and 10.0663 PFLOP/s.
MATRIX_FLOPS = {"bf16": 4096, "fp8": 8192, "mxfp4": 16384}
PEAK = {kind: flops * UNITS * CLOCK for kind, flops in MATRIX_FLOPS.items()}
HBM = 8e12
VECTOR_RATE = UNITS * SIMDS * WAVE / ISSUE_CYCLES * CLOCK  # lane instructions a second


class Case(NamedTuple):
    """Assumptions: the fractions of the peaks that are reached, and how FP8 finds its scales.

    Attributes:
      gemm: fraction of the peak for each kind of GEMM.
      attention, memory: fractions for attention and for passes over memory.
      fp8_reads: reads of a tensor that is quantized to FP8: 2 with current scaling, 1 with delayed scaling.
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


def gemm_seconds(shape: shapes.GemmShape, kind: str, case: Case) -> tuple[float, str]:
    """Returns the larger of the matrix cores' time and the time to move operands and result once."""
    matrix = 2 * shape.m * shape.n * shape.k / (PEAK[kind] * case.gemm[kind])
    memory = gemm_bytes(shape, kind) / (HBM * case.memory)
    return max((matrix, "matrix"), (memory, "HBM"))
