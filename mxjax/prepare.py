"""Preparation of a tensor for the GEMMs that read it: an `MXArray`, or a `KMajor` for kernels.

On GPUs one kernel quantizes a tensor for both of its GEMMs in one read. Elsewhere the definitions give the
same bits.
"""

from collections.abc import Sequence
from typing import Literal

import jax
from jaxtyping import Array, Float

from mxjax.devices import current_target
from mxjax.gemm_input import GemmInput, quantize_input
from mxjax.implementations import ON_PACKED, How
from mxjax.kmajor import KMajor, pack_by_definition
from mxjax.quantize import MXArray

Prepared = MXArray | KMajor


def prepare(x: Float[Array, "*batch r c"], wanted: Sequence[tuple[How, GemmInput]]) -> Sequence[Prepared]:
    """Returns x as each GEMM multiplies it, from one read of x where a kernel can."""
    inputs = [how for _, how in wanted]
    implementations = {implementation for implementation, _ in wanted}
    if implementations.issubset(ON_PACKED):
        return pack_operands(x, *inputs)
    if implementations == {"xla"}:
        values = value_operands(x, *inputs)
        if values is not None:
            return values
    return [
        pack_operands(x, how)[0] if implementation in ON_PACKED else quantize_input(x, how)
        for implementation, how in wanted
    ]


def pack_operands(x: Float[Array, "*b r c"], *inputs: GemmInput) -> list[KMajor]:
    """Returns x packed for each input; each axis has at most one."""
    if not _kernel_runs(x, inputs):
        return [pack_by_definition(x, how) for how in inputs]
    return _by_kernel(x, inputs, "packed")


def value_operands(x: Float[Array, "*b r c"], *inputs: GemmInput) -> list[KMajor] | None:
    """Returns x quantized and dequantized to bfloat16 by the kernel, or None where it does not run."""
    if not _kernel_runs(x, inputs) or not all(how.operand.is_packable for how in inputs):
        return None
    return _by_kernel(x, inputs, "bf16")


def _kernel_runs(x: jax.Array, inputs: Sequence[GemmInput]) -> bool:
    if current_target() is None or not x.size:
        return False
    from mxjax.kernels.quantize.launches import LARGEST_ROTATION, LONGEST_AXIS

    return max(x.shape[-2:]) < LONGEST_AXIS and all(how.rotation_size <= LARGEST_ROTATION for how in inputs)


def _by_kernel(x: jax.Array, inputs: Sequence[GemmInput], form: Literal["packed", "bf16"]) -> list[KMajor]:
    from mxjax.kernels.quantize.quantizer import quantize_operands

    return quantize_operands(x, inputs, form)
