"""One GEMM of two prepared operands. Implementations multiply differently, but always the same values."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mxjax.numerics.array import MXArray, block_values, dequantize
from mxjax.numerics.formats import E2M1, E4M3, get_format
from mxjax.numerics.scales import power_of_two
from mxjax.operands.carriers import Carrier, carry
from mxjax.operands.kernel_operand import KernelOperand, decode
from mxjax.operands.product import Product, contract, contract_float32, contract_fp8
from mxjax.products.implementations import GemmImplementation
from mxjax.products.prepare import Prepared
from mxjax.runtime.devices import current_target, on_gpu
from mxjax.runtime.mesh import Layout, bytes_to_multiply, sums_on_each_device, to_multiply, varying_as


def multiply(
    lhs: Prepared,
    rhs: Prepared,
    implementation: GemmImplementation,
    dtype: DTypeLike,
    precision: lax.PrecisionLike,
    carriers: tuple[Carrier, Carrier],
    layout: Layout | None = None,
) -> Product:
    """Returns the product of two operands, contracting the axes along which they were prepared.

    Axes before the last two are batch axes. On a mesh, rhs is gathered quantized, as `layout` says.

    Args:
      dtype: dtype in which the product will be read.
      carriers: FP8 carriers of lhs and rhs, for "fp8_carriers".
    """
    match lhs, rhs:
        case KernelOperand(), KernelOperand() if implementation == "fp8_tensor":
            return multiply_fp8_tensors(lhs, rhs, dtype, layout)
        case KernelOperand(run_scales=jax.Array()), KernelOperand(run_scales=jax.Array()):
            return Product(_multiply_runs(lhs, rhs, dtype, layout))
        case KernelOperand(scales=None), KernelOperand():
            product = Product(_multiply_bfloat16(lhs, rhs, dtype, precision, layout))
            return _with_factors(product, lhs, rhs, dtype)
        case KernelOperand(), KernelOperand():
            product = _multiply_packed(lhs, rhs, implementation, dtype, precision, carriers, layout)
            return _with_factors(product, lhs, rhs, dtype)
        case MXArray(), MXArray() if implementation == "reference":
            return Product(_multiply_reference(lhs, rhs, layout).astype(dtype))
        case MXArray(), MXArray():
            raw = _multiply_xla(lhs, rhs, dtype, precision, layout)
        case _:
            raise TypeError(
                f"multiply needs two KernelOperand or two MXArray, got {type(lhs)} and {type(rhs)}"
            )
    for factor in (_factor(lhs, -1), _factor(rhs, -2)):
        raw = raw if factor is None else raw * factor
    return Product(raw.astype(dtype))


def _with_factors(product: Product, lhs: KernelOperand, rhs: KernelOperand, dtype: DTypeLike) -> Product:
    """Returns a product with the factors of its operands, one for each.

    Where the GEMM rounded its sums to bfloat16, what reads the product applies them, in float32.
    """
    raw, factors = product
    if lhs.factor is None and rhs.factor is None:
        return product if factors else Product(raw.astype(dtype))
    of_lhs, of_rhs = (1.0 if q.factor is None else q.factor for q in (lhs, rhs))
    if raw.dtype != jnp.bfloat16:
        raw = raw * of_lhs * of_rhs
        return Product(raw, factors) if factors else Product(raw.astype(dtype))
    ones = jnp.ones((1,) * (raw.ndim - 1), jnp.float32)
    rows, columns = factors or (ones, ones)
    return Product(raw, (rows * of_lhs, columns * of_rhs))


def _factor(q: MXArray, axis: int) -> jax.Array | float | None:
    """Returns an operand's factor as its product takes it; vectors have one for each row or column.

    Args:
      axis: axis of length one, along which the factors of a vector operand are the same in the product.
    """
    if not isinstance(q.factor, jax.Array) or q.factor.ndim < 2 or q.axis == axis:
        return q.factor
    return jnp.swapaxes(q.factor, -1, -2)


def _multiply_bfloat16(
    lhs: KernelOperand, rhs: KernelOperand, dtype: DTypeLike, precision, layout: Layout | None
) -> jax.Array:
    """Multiplies K-major operands that a kernel dequantized, without their factors."""
    right, result = to_multiply(rhs.elements, layout), _result_dtype(dtype, precision, layout)
    return contract(lhs.elements, -1, right, -1, precision, result)


def _multiply_runs(
    lhs: KernelOperand, rhs: KernelOperand, dtype: DTypeLike, layout: Layout | None
) -> jax.Array:
    """Multiplies K-major operands with a scale for each run."""
    from mxjax.kernels.matmul.scaled_blocks import matmul

    assert lhs.run_scales is not None
    assert rhs.run_scales is not None
    scales = to_multiply(rhs.run_scales, None if layout is None else layout.transposed)
    return matmul(lhs.elements, lhs.run_scales, to_multiply(rhs.elements, layout), scales, dtype)


def _multiply_packed(
    lhs: KernelOperand,
    rhs: KernelOperand,
    implementation: GemmImplementation,
    dtype: DTypeLike,
    precision: lax.PrecisionLike,
    carriers: tuple[Carrier, Carrier],
    layout: Layout | None,
) -> Product:
    """Multiplies packed operands without their factors."""
    target = current_target()
    if implementation == "scaled_dot" and target is None:
        lhs, rhs = _with_normal_scales(lhs), _with_normal_scales(rhs)  # before gathering: shard by shard
    elements, scales = rhs.packed
    elements, scales = bytes_to_multiply(elements, layout), to_multiply(scales, layout)
    rhs = dataclasses.replace(rhs, elements=elements, scales=scales)
    if 0 in (*lhs.elements.shape, *rhs.elements.shape):
        return Product(contract(decode(lhs), -1, decode(rhs), -1, precision))
    if lhs.factor is not None or rhs.factor is not None:
        dtype = _result_dtype(dtype, precision, layout)
    elif dtype != jnp.bfloat16:
        dtype = jnp.float32
    if implementation == "scaled_dot":
        return Product(_multiply_scaled_dot(lhs, rhs, dtype))
    if implementation in ("triton", "aiter"):
        from mxjax.kernels.matmul import fp4_gemm

        tiles = fp4_gemm.AITER if implementation == "aiter" else None
        return Product(fp4_gemm.matmul(*lhs.packed, *rhs.packed, dtype, tiles))
    if target is not None and target.has_fp8:
        from mxjax.kernels.matmul import fp8_matmul

        return fp8_matmul.matmul(*lhs.packed, *rhs.packed, dtype, carriers)
    return _multiply_fp8_carriers(lhs, rhs, dtype, carriers)


def _multiply_reference(lhs: MXArray, rhs: MXArray, layout: Layout | None) -> jax.Array:
    """Multiplies the dequantized operands in float32: the definition."""
    right = to_multiply(dequantize(rhs), layout)
    return contract(dequantize(lhs), lhs.axis, right, rhs.axis, lax.Precision.HIGHEST)


def _multiply_xla(lhs: MXArray, rhs: MXArray, dtype, precision, layout: Layout | None) -> jax.Array:
    """Multiplies the operands without their factors."""
    if _are_exact_in_fp8(lhs, rhs):
        left, right = (q.elements.astype(E4M3.dtype) for q in (lhs, rhs))
        return contract(left, lhs.axis, to_multiply(right, layout), rhs.axis, lax.Precision.HIGHEST)
    left, right, exact = xla_operands(lhs, rhs, precision)
    right = to_multiply(right, layout)
    # The format `fp32` is what the others are compared with: it stays plain float32.
    if left.dtype == jnp.float32 and precision is None and "fp32" not in (lhs.format, rhs.format):
        left, right = map(lax.optimization_barrier, (left, right))  # computed once, though read several times
        return contract_float32(left, lhs.axis, right, rhs.axis)
    in_bfloat16 = left.dtype == jnp.bfloat16 and lhs.factor is None and rhs.factor is None
    result = _result_dtype(dtype, exact, layout) if in_bfloat16 else jnp.float32
    return contract(left, lhs.axis, right, rhs.axis, exact, result)


def _are_exact_in_fp8(lhs: MXArray, rhs: MXArray) -> bool:
    """Whether both are vectors of E2M1 and FP8 units run here: E4M3 represents their elements."""
    formats, target = (get_format(q.format) for q in (lhs, rhs)), current_target()
    vectors = all(f.is_vector and f.element is E2M1 for f in formats)
    return vectors and lhs.elements.ndim == 2 and on_gpu() and target is not None and target.has_fp8


def _result_dtype(dtype: DTypeLike, precision: lax.PrecisionLike, layout: Layout | None) -> DTypeLike:
    """Returns the dtype of a GEMM's result that will be read in `dtype`.

    It is bfloat16 on GPUs, if no sums over devices remain: XLA would often convert a float32 result in a pass
    of its own. A GEMM sums in float32 all the same; where cuBLAS splits a long contraction, it may add the
    parts in bfloat16, which any `precision` but the default prevents.
    """
    rounds = precision in (None, lax.Precision.DEFAULT) and sums_on_each_device(layout)
    return jnp.bfloat16 if rounds and on_gpu() and dtype == jnp.bfloat16 else jnp.float32


def xla_operands(
    lhs: MXArray, rhs: MXArray, precision: lax.PrecisionLike
) -> tuple[jax.Array, jax.Array, lax.PrecisionLike]:
    """Returns elements times block scales, without factors, and the precision of their product.

    They are in bfloat16, which represents them exactly, or in float32 if one of the formats is `fp32` or has
    float32 scales along the contracted axis.
    """
    keep = not all(get_format(q.format).fits_bfloat16 for q in (lhs, rhs))
    dtype = jnp.float32 if keep else jnp.bfloat16
    precision = lax.Precision.HIGHEST if keep and precision is None else precision
    return block_values(lhs).astype(dtype), block_values(rhs).astype(dtype), precision


def _multiply_fp8_carriers(lhs: KernelOperand, rhs: KernelOperand, dtype, carriers) -> Product:
    """Multiplies in FP8, or in bfloat16 if a carrier loses an element: the definition of the kernels."""
    left, right = carry(lhs, carriers[0]), carry(rhs, carriers[1])
    fits = left.fits & right.fits

    def in_bfloat16():
        return contract(decode(lhs), -1, decode(rhs), -1, None).astype(dtype)

    y = lax.cond(fits, lambda: contract_fp8(left.elements, right.elements, dtype), in_bfloat16)
    exponents = (carried.unit.astype(jnp.int32) - 127 for carried in (left, right))
    rows, columns = (power_of_two(jnp.where(fits, exponent, 0)) for exponent in exponents)
    return Product(y, (rows, columns))


def multiply_fp8_tensors(
    lhs: KernelOperand,
    rhs: KernelOperand,
    dtype: DTypeLike,
    layout: Layout | None = None,
    *,
    whole_sums: bool = False,
) -> Product:
    """Multiplies in FP8, with the scales of both tensors. A product in float32 has no factors left.

    Where a GPU's GEMM may round its float32 sums to bfloat16 it does, without the scales: XLA applies them in
    what reads the product, in float32. It takes scales into a GEMM too, but that writes float32 then, which
    would be converted in a pass of its own, or has the scales rounded to bfloat16.

    Args:
      whole_sums: whether each device is known to compute whole sums, as under `jax.shard_map`.
    """
    left, right = lhs.elements, bytes_to_multiply(rhs.elements, layout)
    factors = [jnp.asarray(q.factor, jnp.float32) for q in (lhs, rhs)]
    if on_gpu() and dtype == jnp.bfloat16 and (whole_sums or sums_on_each_device(layout)):
        rows, columns = (f.reshape((1,) * (left.ndim - 1)) for f in factors)
        return Product(contract_fp8(left, right, jnp.bfloat16), (rows, columns))
    if not on_gpu():
        y = contract_fp8(left, right, jnp.float32) * factors[0] * factors[1]
    else:
        left, right = (t.astype(jnp.float32) * f for t, f in zip((left, right), factors, strict=True))
        y = contract(left, -1, right, -1, lax.Precision.HIGHEST, jnp.float32)
    return Product(y.astype(dtype))


def _multiply_scaled_dot(lhs: KernelOperand, rhs: KernelOperand, dtype: DTypeLike) -> jax.Array:
    """Multiplies by XLA's block-scaled product."""
    (left, left_scale), (right, right_scale) = _as_mx_dtypes(lhs), _as_mx_dtypes(rhs)
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


def _with_normal_scales(q: KernelOperand) -> KernelOperand:
    """Returns the same normal values without the scale 2**-127, which is subnormal: XLA flushes it on CPUs.

    Half an element, on twice the scale, is exact for those whose value is at least 2**-126. The others are
    subnormal, which every implementation flushes on CPUs.
    """
    if q.scales is None or 0 in q.elements.shape:
        return q
    elements, scales = q.packed

    def halved(code):
        return jnp.where((code & 7) >= 4, code - 2, 0)

    halves = halved(elements & 15) | halved(elements >> 4) << 4
    blocks = elements.reshape(*scales.shape, -1), halves.reshape(*scales.shape, -1)
    elements = jnp.where((scales == 0)[..., None], blocks[1], blocks[0]).reshape(elements.shape)
    return dataclasses.replace(q, elements=elements, scales=jnp.maximum(scales, 1))


def _as_mx_dtypes(q: KernelOperand) -> tuple[jax.Array, jax.Array]:
    """Returns elements in float4_e2m1fn and scales in float8_e8m0fnu, as XLA takes them."""
    elements, scales = q.packed
    shape = (*elements.shape[:-1], 2 * elements.shape[-1])
    elements = lax.bitcast_convert_type(elements, jnp.float4_e2m1fn).reshape(shape)
    return elements, lax.bitcast_convert_type(scales, jnp.float8_e8m0fnu)
