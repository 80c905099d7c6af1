"""What a linear layer's GEMMs and quantization passes move, by format: shared by the models of machines."""

import mxjax
from mxjax.kernels import shapes

OPERAND_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32}
"""Of an element of a GEMM's operand, scales included."""


def kind_of(policy: str, gemm: str) -> str:
    """Returns in which of OPERAND_BYTES' formats a GEMM of a policy multiplies."""
    name = getattr(mxjax.get_policy(policy), gemm).lhs.format
    return "fp8" if name.startswith("fp8") else name


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
