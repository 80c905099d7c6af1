"""Bytes that a linear layer's GEMMs and quantization passes move: shared by the models of machines."""

import mxjax
from mxjax.kernels import shapes

OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32}
"""Bytes an element of a GEMM's operand, scales included, by format."""


def kind_of(policy: str, gemm: str) -> str:
    """Returns the format, a key of OPERAND_BYTES, in which a GEMM of a policy multiplies."""
    name = getattr(mxjax.get_policy(policy), gemm).lhs.format
    return "fp8" if name.startswith("fp8") else name


def gemm_bytes(shape: shapes.GemmShape, kind: str) -> float:
    """Returns the bytes of both operands and of the result, float32 in Wgrad and else bfloat16."""
    result = 4 if shape.name.endswith("wgrad") else 2
    return (shape.m + shape.n) * shape.k * OPERAND_BYTES[kind] + shape.m * shape.n * result


def pass_bytes(tensor: shapes.TensorShape, kind: str, fp8_reads: int = 2) -> float:
    """Returns the bytes that quantizing a tensor reads and writes.

    MXFP4 reads once and writes both operands. FP8 with current scaling reads once for the largest magnitude
    and once to convert; both GEMMs share one operand. BF16 casts the weights. Weights are float32, others
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
