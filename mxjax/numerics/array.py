"""`MXArray`: a quantized tensor, its values, and its 4-bit elements packed in bytes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped, UInt8
from numpy.lib.array_utils import normalize_axis_index

from mxjax.numerics.blocks import pad, scales_shape, spread
from mxjax.numerics.formats import E2M1, Format, FormatName, get_format
from mxjax.numerics.scales import multiply_by_scale
from mxjax.runtime.arguments import check_has_axis


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scales", "tensor_scale"],
    meta_fields=["format", "axis", "block_shape", "prescale"],
)
@dataclasses.dataclass(frozen=True, repr=False)
class MXArray:
    """A quantized tensor. Its value is elements * scales (each for its block) * tensor_scale / prescale.

    Attributes:
      elements: x's shape, in the format's dtype (`float4_e2m1fn` for MXFP4).
      scales: one for each block, in x's shape with the blocked axis (both axes for 2-D blocks) divided by the
        block and rounded up. `float8_e8m0fnu` for MX (2**(byte - 127), byte 255 is NaN), `float8_e4m3fn` for
        NVFP4, bfloat16 for UE5M3 values, float32 for vectors and `fp4_e1m2`, None for FP8 and BF16.
      tensor_scale: float32 scale of the whole tensor (NVFP4, FP8, UE5M3 with `scale_max`), or None. In
        `nvfp4_1x128` one for each 128 elements along `axis`.
      format: name of the format.
      axis: blocked axis, counted from the end (negative) so that it stays valid under vmap and scan.
      block_shape: block's size along the other of the last two axes, and along `axis`.
      prescale: factor that shrank the elements after the scale was chosen, or None.
    """

    elements: Shaped[Array, "*shape"]
    scales: Shaped[Array, "*blocks"] | None
    tensor_scale: Float32[Array, "*outer"] | None
    format: FormatName
    axis: int
    block_shape: tuple[int, int]
    prescale: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.elements.shape

    def __repr__(self) -> str:
        rows, length = self.block_shape
        blocks = f", blocks of {rows}x{length} along axis {self.axis}" if length else ""
        return f"MXArray({self.format}, shape {getattr(self.elements, 'shape', None)}{blocks})"

    @property
    def factor(self) -> Float32[Array, "*#shape"] | float | None:
        """The factor to multiply `block_values` by, or None for one.

        It is tensor_scale / prescale, or for vectors, whose scale leaves a product as a factor of its rows or
        columns, scales / prescale.
        """
        f = get_format(self.format)
        scale = self.scales if f.is_vector else self.tensor_scale
        if scale is None or f.outer_block:
            return 1 / self.prescale if self.prescale else None
        return scale / self.prescale if self.prescale else scale


def dequantize(q: MXArray, dtype: DTypeLike = jnp.float32) -> Float[Array, "*shape"]:
    """Returns the values of a quantized tensor.

    Without prescale, formats with E8M0 scales are exact in float32, and MXFP4 in bfloat16 too. A tensor scale
    or a prescale is applied with one rounding to float32.

    Special values: NaN for a block whose scale is NaN; infinity where a rule other than `floor`, or rounding
      after a prescale, took a magnitude near float32's largest up to 2**128 or more. Values that are
      subnormal in float32 are kept with E8M0 scales; a GEMM on the CPU counts them as zero.
    Raises:
      TypeError: q is no MXArray, a part of it is missing or in another dtype than its format's, or dtype is
        not floating point.
      ValueError: q's scales are not one for each block of its elements.
    """
    if not isinstance(q, MXArray):
        raise TypeError(
            f"dequantize needs the MXArray that quantize returns, got {type(q).__name__}; packed bytes have "
            "no scales: dataclasses.replace(q, elements=mxjax.unpack(packed, axis=q.axis))"
        )
    check_parts("dequantize", q)
    if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        raise TypeError(f"dequantize needs a floating-point dtype, got {jnp.dtype(dtype)}; pass jnp.float32")
    return _dequantize(q, dtype)


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(q: MXArray, dtype: DTypeLike) -> Float[Array, "*shape"]:
    factor = q.factor
    if isinstance(factor, float) and get_format(q.format).scale == "e8m0":
        return _e8m0_values(q, factor).astype(dtype)
    values = block_values(q)
    return (values if factor is None else values * factor).astype(dtype)


def pack(q: MXArray | Shaped[Array, "*shape"], *, axis: int = -1) -> UInt8[Array, "*packed"]:
    """Packs 4-bit elements along the blocked axis, two in a byte, with element 2i in the low nibble.

    Args:
      q: quantized tensor, or its `float4_e2m1fn` elements. An axis of odd length is padded with a zero.
      axis: axis to pack if `q` is elements; ignored for a quantized tensor.
    Raises:
      ValueError: the elements are no array in `float4_e2m1fn`, or have no axis.
    """
    elements, axis = (q.elements, q.axis) if isinstance(q, MXArray) else (q, axis)
    if (got := _dtype_name(elements)) != "float4_e2m1fn":
        raise ValueError(f"pack needs float4_e2m1fn elements, got {got}; quantize to mxfp4 or nvfp4")
    check_has_axis("pack", elements)
    axis = normalize_axis_index(axis, elements.ndim)
    return pack_codes(lax.bitcast_convert_type(elements, jnp.uint4).astype(jnp.uint8), axis)


def unpack(
    packed: UInt8[Array | np.ndarray, "*packed"], *, axis: int = -1, size: int | None = None
) -> Shaped[Array, "*shape"]:
    """Returns the `float4_e2m1fn` elements that `pack` packed along `axis`.

    Args:
      axis: axis that was packed; that of a quantized tensor q is `q.axis`.
      size: elements along the axis. Default: twice the bytes, which for an odd axis includes the zero that
        `pack` added.
    Raises:
      TypeError: packed is no array of uint8.
      ValueError: packed has no axis, or not the bytes of `size` elements along it.
    """
    if (got := _dtype_name(packed)) != "uint8":
        raise TypeError(f"unpack needs the uint8 array that pack returns, got {got}; pass mxjax.pack(q)")
    check_has_axis("unpack", packed)
    axis = normalize_axis_index(axis, packed.ndim)
    length = 2 * packed.shape[axis] if size is None else size
    if length < 0 or (length + 1) // 2 != packed.shape[axis]:
        raise ValueError(f"unpack got {packed.shape[axis]} bytes along axis {axis} for {length} elements")
    packed = jnp.asarray(packed)
    codes = jnp.stack([packed & 0xF, packed >> 4], axis=axis + 1).astype(jnp.uint4)
    shape = (*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
    elements = lax.bitcast_convert_type(codes.reshape(shape), jnp.float4_e2m1fn)
    return lax.slice_in_dim(elements, 0, length, axis=axis)


def _dtype_name(x: object) -> str:
    return str(getattr(x, "dtype", type(x).__name__))


def pack_codes(codes: UInt8[Array, "*shape"], axis: int) -> UInt8[Array, "*packed"]:
    """Packs 4-bit codes, one in each byte, to two in each along `axis` (counted from 0); see `pack`."""
    codes = pad(codes, axis, 2)
    pairs = codes.reshape(*codes.shape[:axis], codes.shape[axis] // 2, 2, *codes.shape[axis + 1 :])
    low, high = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | (high << 4)


def block_values(q: MXArray) -> Float32[Array, "*shape"]:
    """Returns elements * scales, without `factor`, in float32.

    bfloat16 represents them exactly, except for formats without `fits_bfloat16`, where float32 scales are
    included, and for magnitudes below its range (2**-133).
    """
    values = q.elements.astype(jnp.float32)
    if q.scales is None or get_format(q.format).is_vector:
        return values
    if q.scales.dtype == jnp.float8_e8m0fnu:
        return _e8m0_values(q)
    values = values * spread(q.scales.astype(jnp.float32), values.shape, q.block_shape, q.axis)
    outer_block = get_format(q.format).outer_block
    if not outer_block or q.tensor_scale is None:
        return values
    return values * spread(q.tensor_scale, values.shape, (1, outer_block), q.axis)


def _e8m0_values(q: MXArray, factor: float | None = None) -> Float32[Array, "*shape"]:
    """Returns elements * scales or, rounded once, elements * factor * scales.

    In this order, since elements * scales may be subnormal where the result is not, and XLA flushes that.
    """
    assert q.scales is not None
    elements = q.elements.astype(jnp.float32)
    elements = elements if factor is None else elements * factor
    byte = lax.bitcast_convert_type(q.scales, jnp.uint8).astype(jnp.int32)
    scale = spread(byte, elements.shape, q.block_shape, q.axis)
    return multiply_by_scale(elements, scale, rounds=factor is not None)


def float4_codes(values: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Returns the 4-bit codes, one in each byte, of values that E2M1 represents; NaN becomes 0."""
    # Arithmetic, because XLA's conversion to float4 takes twice as long on the CPU.
    magnitude = jnp.abs(values)
    code = jnp.where(magnitude < 2, 2 * magnitude, jnp.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    code = jnp.where(magnitude <= E2M1.max, code, 0).astype(jnp.uint8)
    return lax.optimization_barrier(code | jnp.where(jnp.signbit(values), 8, 0).astype(jnp.uint8))


def check_parts(function: str, q: Any) -> None:
    """Raises an error unless the parts of q, an `MXArray`, are those of its format and blocks.

    Raises:
      TypeError: a part is missing, there is one that the format has not, or one is in another dtype.
      ValueError: an axis counted from the front, or a part of another shape.
    """
    f = get_format(q.format)
    _check_elements(function, q, f)
    if q.axis >= 0:
        raise ValueError(
            f"{function} needs the axis of an MXArray counted from the end, got {q.axis} of {q.shape}: "
            f"write {q.axis - len(q.shape)}"
        )
    _check_scales(function, q, f)
    if f.tensor_scale and q.tensor_scale is None:
        raise TypeError(f"{function} needs the tensor_scale of {f.name}, got None")
    if q.tensor_scale is None:
        return
    shape = scales_shape(q.shape, (1, f.outer_block), q.axis) if f.outer_block else q.shape
    if not _broadcasts(q.tensor_scale.shape, shape):
        raise ValueError(
            f"{function} needs a tensor_scale that broadcasts to {shape}, got {q.tensor_scale.shape}; "
            f"of a stack that jax.vmap quantized, map {function} likewise"
        )


def _check_elements(function: str, q: Any, f: Format) -> None:
    wanted, got = jnp.dtype(f.dtype), getattr(q.elements, "dtype", None)
    if got not in (wanted, jnp.float32):  # float32 before they are stored
        hint = "; unpack them: mxjax.unpack(packed, axis=q.axis)" if got == jnp.uint8 else ""
        raise TypeError(f"{function} needs elements of {f.name} in {wanted}, got {got}{hint}")


def _check_scales(function: str, q: Any, f: Format) -> None:
    wanted = None if f.scale_dtype is None else jnp.dtype(f.scale_dtype)
    got = None if q.scales is None else q.scales.dtype
    if got != wanted:
        saved = got == jnp.uint8 and wanted is not None and wanted.itemsize == 1
        hint = f"; bytes that were saved: scales.view(jnp.{wanted})" if saved else ""
        raise TypeError(f"{function} needs scales of {f.name} in {wanted}, got {got}{hint}")
    if q.scales is None:
        return
    shape = scales_shape(q.shape, q.block_shape, q.axis)
    if q.scales.shape != shape:
        rows, length = q.block_shape
        raise ValueError(
            f"{function} needs scales {shape} for elements {q.shape} in blocks of {rows}x{length} along axis "
            f"{q.axis}, got {q.scales.shape}"
        )


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (wanted, 1) for size, wanted in pairs)
