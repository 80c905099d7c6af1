"""`prepare`: a tensor as each GEMM multiplies it, an `MXArray`, or a `KernelOperand` for kernels.

On GPUs one kernel quantizes a tensor for both of its GEMMs in one read. Elsewhere the definitions give the
same bits.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from mxjax.numerics.array import MXArray
from mxjax.numerics.formats import BLOCK
from mxjax.operands.computed import Computed
from mxjax.operands.kernel_operand import (
    KernelOperand,
    bfloat16_by_definition,
    decode,
    fp8_by_definition,
    pack_by_definition,
    values_of_runs,
)
from mxjax.operands.split import split
from mxjax.operands.use import OperandUse, dequantize_use, quantize_use, to_plain
from mxjax.runtime.devices import current_target
from mxjax.runtime.primitives import first_order_only

Prepared = MXArray | KernelOperand


def prepare(x: Float[Array, "*batch r c"] | Computed, uses: Sequence[OperandUse]) -> Sequence[Prepared]:
    """Returns x as each GEMM multiplies it, from one read of x where a kernel can.

    Args:
      uses: one, or two that contract different axes.
    """
    if isinstance(x, Computed) and len(uses) == 2:
        from mxjax.kernels.quantize.fp8_computed import quantize_fp8_computed
        from mxjax.kernels.quantize.quantizer import quantize_computed

        return (quantize_fp8_computed if uses[0].form == "fp8" else quantize_computed)(x, *uses)
    x = x.value() if isinstance(x, Computed) else x
    if _quantized_twice(x, uses):
        from mxjax.kernels.quantize.quantizer import quantize_operands

        return quantize_operands(x, uses)
    first, *others = uses
    shared = all(use.form == first.form and use.reads is None for use in others)
    if others and not (shared and all(use.is_plain for use in uses)):
        return [prepare(x, [use])[0] for use in uses]
    if takes_seen(x, first):
        assert first.reads is not None
        [q] = prepare(first_order_only(x), [first.reads])
        assert isinstance(q, KernelOperand)
        return [prepare_seen(q, first)]
    x = as_read(x, first)
    uses = [with_bounds(x, use) for use in uses]
    match first.form:
        case None:
            return [quantize_use(x, use) for use in uses]
        case "fp8" if _casts_by_kernel(x, uses):
            from mxjax.kernels.quantize.fp8 import quantize_fp8

            return quantize_fp8(x, uses)
        case "fp8":
            return [fp8_by_definition(x, use) for use in uses]
        case "bf16" if first.operand.is_block16:
            return _prepare_block16(x, uses)
        case form:
            return _prepare_mxfp4(x, uses, form)


def _prepare_mxfp4(
    x: Float[Array, "*batch r c"], uses: Sequence[OperandUse], form: Literal["packed", "bf16"]
) -> list[KernelOperand]:
    """Returns x as `prepare` does, for operands that are `Operand.is_packable`."""
    if len(uses) == 1:  # of which kernels know no rotation but the Hadamard
        x, use = to_plain(x, uses[0])
        uses = [use]
    if _kernel_takes(x, uses, form):
        from mxjax.kernels.quantize.quantizer import quantize_operands

        return quantize_operands(x, uses, form)
    packed = [pack_by_definition(x, use) for use in uses]
    return packed if form == "packed" else [KernelOperand(decode(q), None, q.prescale) for q in packed]


def _quantized_twice(x: Float[Array, "*batch r c"], uses: Sequence[OperandUse]) -> bool:
    """Whether the quantizer kernel packs x for the Fprop, and what that left of x for another GEMM."""
    if len(uses) != 2 or any(use.form != "packed" for use in uses):
        return False
    fprop, other = uses
    if other.reads is None or (fprop.axis, other.axis) != (-1, -2) or not _kernel_takes(x, uses, "packed"):
        return False
    from mxjax.kernels.quantize.launches import takes_twice

    pair = fprop.options, other.options._replace(reads=fprop.options)
    return other.reads.options == fprop.options and takes_twice(pair, current_target(), x.shape, x.dtype)


def _prepare_block16(x: Float[Array, "*batch r c"], uses: Sequence[OperandUse]) -> list[KernelOperand]:
    """Returns x as `prepare` does, for operands that are `Operand.is_block16`, in bfloat16."""
    first, *others = ((use.operand.split, use.operand.quantile) for use in uses)
    if any(other != first for other in others):  # nothing to share
        return [_prepare_block16(x, [use])[0] for use in uses]
    if _kernel_takes(x, uses, "bf16"):
        from mxjax.kernels.quantize.block16 import quantize_block16

        if uses[0].operand.split == "mean":  # which the kernel subtracts
            return quantize_block16(x, uses, mean=split(x, uses[0].operand).rest)
        return quantize_block16(split(x, uses[0].operand, uses[0].bounds).part, uses)
    return [bfloat16_by_definition(x, use) for use in uses]


def takes_seen(x: Float[Array, "*batch r c"], use: OperandUse) -> bool:
    """Whether `prepare_seen` makes x's operand for a use from that of the Fprop."""
    fprop = use.reads
    if fprop is None or use.form is None or fprop.form is None:
        return False
    if not all(u.operand.is_block16 and u.operand.split == "none" for u in (use, fprop)):
        return False
    whole = x.shape[fprop.axis] % fprop.padded(1) == 0
    return whole and _kernel_takes(x, [fprop], "bf16") and _kernel_takes(x, [use], "bf16")


def prepare_seen(q: KernelOperand, use: OperandUse) -> KernelOperand:
    """Returns a tensor for a use that reads what the Fprop's quantization left of it, the operand q.

    The kernel reads q as it is, K-major and without its tensor scale.
    """
    from mxjax.kernels.quantize.block16 import quantize_block16

    assert use.reads is not None
    seen = use._replace(axis=use.axis if use.reads.axis == -1 else -3 - use.axis, reads=None)
    return quantize_block16(q.elements, [seen], q.tensor_scale, run_factors=q.run_scales)[0]


def as_read(x: Float[Array, "*batch r c"], use: OperandUse) -> Float[Array, "*batch _ _"]:
    """Returns x as a use reads it: x itself, or the values that the Fprop's quantization gave.

    Where a kernel quantizes x for the Fprop, it gives those values in bfloat16, which represents them exactly
    up to a prescale.
    """
    fprop = use.reads
    if fprop is None:
        return x
    has_rest = fprop.operand.split not in ("none", "clip")  # which the kernel leaves out
    if fprop.form in (None, "fp8") or has_rest or not _kernel_takes(x, [fprop], "bf16"):
        return dequantize_use(x, with_bounds(x, fprop))
    [q] = prepare(first_order_only(x), [fprop._replace(form="bf16")])
    assert isinstance(q, KernelOperand)
    values = q.elements if q.run_scales is None else values_of_runs(q)
    values = values if fprop.axis == -1 else values.swapaxes(-1, -2)
    length = -(-x.shape[fprop.axis] // fprop.rotation_size) * fprop.rotation_size
    values = lax.slice_in_dim(values, 0, length, axis=fprop.axis)
    return values if q.factor is None else values.astype(jnp.float32) * q.factor


def with_bounds(x: Float[Array, "*batch r c"], use: OperandUse) -> OperandUse:
    """Returns the use with the quantiles of x, which it reads, where `split` needs them and a kernel runs."""
    target = current_target()
    if use.operand.split not in ("outliers", "clip") or target is None:
        return use
    from mxjax.kernels.quantize.quantiles import quantiles, takes

    return use._replace(bounds=quantiles(x, use.operand.quantile)) if takes(x, target) else use


def once[T](x: T, uses: Sequence[OperandUse]) -> T:
    """Returns x behind a barrier, because several passes read it, and XLA would recompute it in each.

    There is none where XLA finds the largest magnitude for the kernel: `quantize_block16` or `quantize_fp8`
    then puts x and that behind one.
    """
    if isinstance(x, jax.Array) and (_casts_by_kernel(x, uses) or _has_largest_by_xla(x, uses)):
        return x
    return lax.optimization_barrier(x)


def _has_largest_by_xla(x: jax.Array, uses: Sequence[OperandUse]) -> bool:
    """Whether XLA finds the largest magnitude of x, in bfloat16, for the kernel for blocks of 16."""
    own = [use for use in uses if use.reads is None]
    plain = all(use.form == "bf16" and use.operand.is_block16 and use.operand.split == "none" for use in own)
    if not own or not plain or not _kernel_takes(x, own, "bf16"):
        return False
    if not all(takes_seen(x, use) for use in uses if use.reads is not None):
        return False
    from mxjax.kernels.quantize.block16 import largest_by_xla

    by_axis = {use.axis: use for use in own}
    return largest_by_xla((by_axis.get(-1), by_axis.get(-2)), "", x.dtype)


def _casts_by_kernel(x: jax.Array, uses: Sequence[OperandUse]) -> bool:
    """Whether the kernel for FP8 runs here and takes x for these uses."""
    target = current_target()
    if target is None or any(use.form != "fp8" or use.reads is not None for use in uses):
        return False
    from mxjax.kernels.quantize.fp8 import takes

    return takes(uses, target, x.shape)


def _kernel_takes(x: jax.Array, uses: Sequence[OperandUse], form: Literal["packed", "bf16"]) -> bool:
    """Whether the quantizer kernel runs here and takes x for these uses."""
    target = current_target()
    if target is None or not x.size or not all(use.is_plain and not use.has_places for use in uses):
        return False
    from mxjax.kernels.quantize.launches import LARGEST_ROTATION, fit

    rows, columns = ({use.axis: use for use in uses}.get(axis) for axis in (-1, -2))
    rotates = all(use.rotation_size <= LARGEST_ROTATION for use in uses)
    return rotates and fit((rows, columns), form, target, x.shape, x.dtype)


def prepares_gated(rows: OperandUse, columns: OperandUse, r: int, c: int) -> bool:
    """Whether a kernel prepares `Gated` [r, c], or the `GatedGradient` of it, for these two uses here."""
    # Gate and up projection share no block of the gradient's rows.
    return c % BLOCK == 0 and prepares_computed(rows, columns, r, 2 * c)


def prepares_computed(rows: OperandUse, columns: OperandUse, r: int, c: int) -> bool:
    """Whether a kernel prepares a `Computed` tensor [r, c] for these two uses here."""
    target = current_target()
    if target is None or rows.form != columns.form or rows.form not in ("packed", "fp8"):
        return False
    if not (rows.is_plain and columns.is_plain):
        return False
    if rows.form == "fp8":
        from mxjax.kernels.quantize.fp8_computed import takes_computed as takes_in_fp8

        return columns.reads is None and takes_in_fp8(rows, columns, target, r, c)
    from mxjax.kernels.quantize.launches import takes_computed

    return takes_computed((rows, columns), target, r, c)
