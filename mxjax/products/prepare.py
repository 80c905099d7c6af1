"""Preparation of a tensor for the GEMMs that read it: an `MXArray`, or a `KernelOperand` for kernels.

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
from mxjax.numerics.operand import Operand
from mxjax.operands.computed import Computed
from mxjax.operands.kernel_operand import KernelOperand, decode, pack_by_definition
from mxjax.operands.use import OperandUse, as_backward_sees, quantize_use
from mxjax.products.implementations import ON_PACKED, GemmImplementation
from mxjax.runtime.devices import current_target
from mxjax.runtime.primitives import first_order_only

Prepared = MXArray | KernelOperand
Form = Literal["packed", "bf16"]


def prepare(
    x: Float[Array, "*batch r c"] | Computed, wanted: Sequence[tuple[GemmImplementation, OperandUse]]
) -> Sequence[Prepared]:
    """Returns x as each GEMM multiplies it, from one read of x where a kernel can.

    The GEMM alone decides between `MXArray` and `KernelOperand`, so that its two operands are always alike.
    """
    if isinstance(x, Computed):
        if len(wanted) == 2:
            from mxjax.kernels.quantize.quantizer import quantize_computed

            [(_, rows), (_, columns)] = wanted
            return quantize_computed(x, rows, columns)
        x = x.value()
    forms: list[Form | None] = [_form(implementation) for implementation, _ in wanted]
    if len(set(forms)) == 1:
        return _in_form(forms[0], x, [use for _, use in wanted])
    return [_in_form(form, x, [use])[0] for form, (_, use) in zip(forms, wanted, strict=True)]


def prepares_gated(
    rows: tuple[GemmImplementation, OperandUse],
    columns: tuple[GemmImplementation, OperandUse],
    r: int,
    c: int,
) -> bool:
    """Whether a kernel prepares `Gated` [r, c], and `GatedGradient` of it, for these two GEMMs here."""
    # Gate and up projection share no block of the gradient's rows.
    return c % BLOCK == 0 and prepares_computed(rows, columns, r, 2 * c)


def prepares_computed(
    rows: tuple[GemmImplementation, OperandUse],
    columns: tuple[GemmImplementation, OperandUse],
    r: int,
    c: int,
) -> bool:
    """Whether a kernel prepares a `Computed` tensor [r, c] for these two GEMMs here."""
    (row_gemm, row_input), (column_gemm, column_input) = rows, columns
    target = current_target()
    if target is None or not {row_gemm, column_gemm} <= set(ON_PACKED):
        return False
    from mxjax.kernels.quantize.launches import takes_computed

    return takes_computed((row_input, column_input), target, r, c)


def pack_operands(x: Float[Array, "*b r c"], *uses: OperandUse) -> list[KernelOperand]:
    """Returns x packed for each input; each axis has at most one."""
    if not _kernel_runs(x, uses, "packed"):
        return [pack_by_definition(x, use) for use in uses]
    return _by_kernel(x, uses, "packed")


def value_operands(x: Float[Array, "*b r c"], *uses: OperandUse) -> list[KernelOperand]:
    """Returns x quantized for each input and dequantized to bfloat16; each axis has at most one."""
    if not _kernel_runs(x, uses, "bf16"):
        packed = [pack_by_definition(x, use) for use in uses]
        return [KernelOperand(decode(q), None, q.prescale) for q in packed]
    return _by_kernel(x, uses, "bf16")


def seen_by_backward(
    x: Float[Array, "*batch r c"], wanted: Operand, use: OperandUse, implementation: GemmImplementation
) -> Float[Array, "*batch _ _"]:
    """Returns `as_backward_sees(x, wanted, use)`, from the kernel if it quantizes x for the Fprop.

    Args:
      implementation: the Fprop's.
    """
    by_kernel = _form(implementation) is not None and _kernel_runs(x, [use], "bf16")
    if wanted.source == "original" or not by_kernel:
        return as_backward_sees(x, wanted, use)
    [q] = _by_kernel(first_order_only(x), [use], "bf16")
    values = q.elements if use.axis == -1 else q.elements.swapaxes(-1, -2)
    length = -(-x.shape[use.axis] // use.rotation_size) * use.rotation_size
    values = lax.slice_in_dim(values, 0, length, axis=use.axis)
    return values if q.factor is None else values.astype(jnp.float32) * q.factor


def _form(implementation: GemmImplementation) -> Form | None:
    """Returns the form of a GEMM's K-major operands, or None if it takes `MXArray`."""
    if implementation in ON_PACKED:
        return "packed"
    return "bf16" if implementation == "xla_by_kernel" else None


def _in_form(form: Form | None, x: jax.Array, uses: Sequence[OperandUse]) -> Sequence[Prepared]:
    match form:
        case "packed":
            return pack_operands(x, *uses)
        case "bf16":
            return value_operands(x, *uses)
        case None:
            return [quantize_use(x, use) for use in uses]


def _kernel_runs(x: jax.Array, uses: Sequence[OperandUse], form: Form) -> bool:
    target = current_target()
    if target is None or not x.size:
        return False
    from mxjax.kernels.quantize.launches import LARGEST_ROTATION, fit

    rows, columns = ({use.axis: use for use in uses}.get(axis) for axis in (-1, -2))
    rotates = all(use.rotation_size <= LARGEST_ROTATION for use in uses)
    return rotates and fit((rows, columns), form, target, x.shape, x.dtype)


def _by_kernel(x: jax.Array, uses: Sequence[OperandUse], form: Form) -> list[KernelOperand]:
    from mxjax.kernels.quantize.quantizer import quantize_operands

    return quantize_operands(x, uses, form)
