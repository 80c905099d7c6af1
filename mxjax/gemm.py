"""One GEMM: its operands as an implementation wants them, then multiplied.

The implementations differ in how they multiply, never in the values that they multiply.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from mxjax.formats import get_format
from mxjax.fp8_carriers import Carrier, carry
from mxjax.implementations import ON_PACKED, How
from mxjax.operands import Use, quantize_operand
from mxjax.packing import Packed, Values, decode, kernel_target, pack_operands, power_of_two, value_operands
from mxjax.quantize import MXArray, block_values, dequantize
from mxjax.weight_layout import Layout, to_multiply, varying_as

Prepared = MXArray | Values | Packed


def prepare(x: Float[Array, "*batch r c"], uses: Sequence[tuple[How, Use] | None]) -> tuple[Any, ...]:
    """Returns x `Prepared` as each use wants it, in one read where a kernel makes them all; None for None."""
    wanted = [use for use in uses if use is not None]
    if wanted and all(how in ON_PACKED for how, _ in wanted):
        return pack_operands(x, *(use and use[1] for use in uses))
    if wanted and all(how == "xla" for how, _ in wanted):
        values = value_operands(x, *(use and use[1] for use in uses))
        if values is not None:
            return values
    return tuple(None if use is None else _prepare_one(x, *use) for use in uses)


def _prepare_one(x, how: How, use: Use) -> Prepared:
    if how in ON_PACKED:
        [packed] = pack_operands(x, use)
        assert packed is not None
        return packed
    return quantize_operand(x, use)


class Product(NamedTuple):
    """A product of two operands as the matrix units leave it.

    Attributes:
      raw: [*batch, m, n].
      factors: of its rows and of its columns, by whose products it is to be multiplied: powers of two, with
        exponents from -63 to 63; None for ones.
    """

    raw: Float[Array, "*batch m n"]
    factors: tuple[Float32[Array, "*batch m"], Float32[Array, "*batch n"]] | None = None

    def value(self, dtype: DTypeLike) -> Float[Array, "*batch m n"]:
        """Returns the product in dtype."""
        if self.factors is None:
            return self.raw.astype(dtype)
        rows, columns = self.factors
        return (self.raw.astype(jnp.float32) * (rows[..., :, None] * columns[..., None, :])).astype(dtype)


def multiply(
    how: How,
    dtype: DTypeLike,
    precision: lax.PrecisionLike,
    lhs: Prepared,
    rhs: Prepared,
    carriers: tuple[Carrier, Carrier],
    layout: Layout | None = None,
) -> Product:
    """Returns the product of two prepared operands over the axes that they were prepared along, for dtype.

    Axes before the last two are batch axes. On a mesh rhs is gathered as its `layout` says, in the form in
    which it is multiplied.
    """
    if isinstance(rhs, Packed):
        elements, scales = (to_multiply(t, layout) for t in (rhs.elements, rhs.scales))
        rhs = dataclasses.replace(rhs, elements=elements, scales=scales)
    match lhs, rhs:
        case Packed(), Packed() if 0 in (*lhs.elements.shape, *rhs.elements.shape):
            y = _contract(decode(lhs), -1, decode(rhs), -1, precision)
        case Packed(), Packed():
            run = {"fp8": _multiply_fp8, "scaled_dot": _multiply_scaled_dot, "triton": _multiply_triton}[how]
            exact = lhs.factor is None and rhs.factor is None and dtype in (jnp.bfloat16, jnp.float32)
            y = run(lhs, rhs, dtype if exact else jnp.float32, carriers)
        case Values(), Values():
            y = _contract(lhs.elements, -1, to_multiply(rhs.elements, layout), -1, precision)
        case MXArray(), MXArray():
            if how == "reference":
                return Product(_multiply_reference(lhs, rhs, layout).astype(dtype))
            tensors = how == "fp8_tensor"
            y = (
                _multiply_fp8_tensors(lhs, rhs, layout)
                if tensors
                else _multiply_xla(lhs, rhs, precision, layout)
            )
        case _:
            raise TypeError(f"operands prepared alike are needed, got {type(lhs)} and {type(rhs)}")
    raw, factors = y if isinstance(y, Product) else (y, None)
    for factor in (lhs.factor, rhs.factor):
        raw = raw if factor is None else raw * factor
    return Product(raw, factors) if factors else Product(raw.astype(dtype))


def _multiply_reference(lhs: MXArray, rhs: MXArray, layout):
    """The definition: float32 products of the dequantized operands."""
    right = to_multiply(dequantize(rhs), layout)
    return _contract(dequantize(lhs), lhs.axis, right, rhs.axis, lax.Precision.HIGHEST)


def _multiply_xla(lhs: MXArray, rhs: MXArray, precision, layout):
    """The values in bfloat16, which holds elements times block scales exactly; without the factors."""
    keep = any(get_format(q.format).dtype == jnp.float32 for q in (lhs, rhs))
    dtype = jnp.float32 if keep else jnp.bfloat16
    precision = lax.Precision.HIGHEST if keep and precision is None else precision
    left, right = (block_values(q).astype(dtype) for q in (lhs, rhs))
    return _contract(left, lhs.axis, to_multiply(right, layout), rhs.axis, precision)


def _multiply_fp8(lhs: Packed, rhs: Packed, dtype, carriers):
    """In FP8, or in bfloat16 when the scales of an operand's row span more than its carrier holds."""
    target = kernel_target()
    if target is not None and target.has_fp8:
        from mxjax.kernels.matmul import fp8_matmul

        return fp8_matmul.matmul(lhs.elements, lhs.scales, rhs.elements, rhs.scales, dtype, carriers)
    left, right = carry(lhs, carriers[0]), carry(rhs, carriers[1])
    fits = left.fits & right.fits

    def in_bfloat16():
        return _contract(decode(lhs), -1, decode(rhs), -1, None).astype(dtype)

    y = lax.cond(fits, lambda: contract_fp8(left.elements, right.elements, dtype), in_bfloat16)
    rows, columns = (power_of_two(jnp.where(fits, carried.exponent, 0)) for carried in (left, right))
    return Product(y, (rows, columns))


def _multiply_fp8_tensors(lhs: MXArray, rhs: MXArray, layout):
    """In FP8, without the scales of the tensors."""
    left, right = (q.elements.astype(get_format(q.format).dtype) for q in (lhs, rhs))
    right = to_multiply(right, layout)
    left, right = (t if q.axis == -1 else t.swapaxes(-1, -2) for t, q in ((left, lhs), (right, rhs)))
    return contract_fp8(left, right, jnp.float32)


def contract_fp8(lhs, rhs, dtype):
    """Returns lhs @ rhs.T of FP8 operands. HIGHEST: accumulated in no fewer bits than float32 has."""
    return _contract(lhs, -1, rhs, -1, lax.Precision.HIGHEST, dtype)


def _multiply_scaled_dot(lhs: Packed, rhs: Packed, dtype, carriers):
    del carriers
    sides = []
    for q in (lhs, rhs):
        shape = (*q.elements.shape[:-1], 2 * q.elements.shape[-1])
        elements = lax.bitcast_convert_type(q.elements, jnp.float4_e2m1fn).reshape(shape)
        sides.append((elements, lax.bitcast_convert_type(q.scales, jnp.float8_e8m0fnu)))
    (left, left_scale), (right, right_scale) = sides
    batch = tuple(range(left.ndim - 2))
    y = lax.scaled_dot(
        left,
        right,
        lhs_scale=left_scale,
        rhs_scale=right_scale,
        dimension_numbers=(((left.ndim - 1,), (right.ndim - 1,)), (batch, batch)),
        preferred_element_type=dtype,
    )
    return varying_as(y, left, right)


def _multiply_triton(lhs: Packed, rhs: Packed, dtype, carriers):
    del carriers
    from mxjax.kernels.matmul.fp4_gemm import matmul

    return matmul(lhs.elements, lhs.scales, rhs.elements, rhs.scales, dtype)


def _contract(lhs, lhs_axis, rhs, rhs_axis, precision, dtype=jnp.float32):
    """Returns the product over the two axes (negative), batched over axes before the last two."""
    batch = tuple(range(lhs.ndim - 2))
    dims = (((lhs.ndim + lhs_axis,), (rhs.ndim + rhs_axis,)), (batch, batch))
    return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)
