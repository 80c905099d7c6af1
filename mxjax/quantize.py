"""Quantization to block formats and back: the definitions that kernels reproduce bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped, UInt8
from numpy.lib.array_utils import normalize_axis_index

from mxjax.arguments import check_axis, check_has_axis, check_tensor
from mxjax.blocks import BlockShape, block_max, block_std, pad, resolve_block_shape, spread
from mxjax.formats import E2M1, Element, Format, FormatName, get_format
from mxjax.keys import check_one_key
from mxjax.minifloat_scales import quantize_by_minifloats
from mxjax.operand import Operand
from mxjax.parts import check_parts
from mxjax.philox import KeyWords
from mxjax.rounding import Rounding, round_elements
from mxjax.scales import ScaleRule, block_scale, divide_by_scale, multiply_by_scale, quest_scale
from mxjax.tensor_scales import SMALLEST_BLOCK_MAX, divide, tensor_max


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


def quantize(
    x: Shaped[Array | np.ndarray, "*shape"],
    format: FormatName | Operand = "mxfp4",
    *,
    axis: int = -1,
    scale_rule: ScaleRule = "floor",
    rounding: Rounding = "nearest",
    block_shape: BlockShape = None,
    prescale: float | None = None,
    key: jax.Array | None = None,
) -> MXArray:
    """Returns x in a block format, with blocks along `axis`.

    For each block: `scale = block_scale(max(abs(block)), scale_rule)`, then
    `elements = round(prescale * block / scale)`, saturating at the format's largest magnitude.

    Args:
      x: tensor in float32, bfloat16 or float16; the computation is in float32.
      format: name in `mxjax.FORMATS`, or an `mxjax.Operand`, which has all options of its own.
      axis: axis along which elements share scales, the one a GEMM contracts. It may have any length; the
        last block may be short.
      scale_rule: see `mxjax.scales.block_scale`; it applies only to formats with E8M0 scales.
      rounding: "nearest" (ties to even) or "stochastic", which needs `key`.
      block_shape: number of elements along `axis` that share a scale, or a pair (r, b): r along the other of
        the last two axes, b along `axis`. Default: the format's own, 1 x 32 for MX and 1 x 16 for NVFP4.
      prescale: factor that shrinks the elements, not the scale. With 3/4, `floor` clips nothing and
        stochastic rounding is unbiased. `dequantize` undoes it.
      key: JAX random key. An element's random bits depend only on the key and on its position. Under vmap and
        shard_map the position counts within the mapped part: give each part its own key.
    Special values: an all-zero block has scale byte 0. A block that contains NaN or infinity has scale byte
      255 and elements 0, and dequantizes to NaN. Magnitudes too small for the scale 2**-127 become 0. With a
      tensor scale (FP8, NVFP4), one NaN or infinity makes the whole tensor NaN, and elements that are
      subnormal in float32 count as zero. If all magnitudes are below 2**-100, the scale is that for 2**-100:
      they lose accuracy and at last become zero. For a block with one float32 scale (`fp4_vector`,
      `fp4_e1m2`) that bound is 2**-122, and one NaN or infinity makes the block NaN. An NVFP4 block becomes
      zero if its maximum is so far below the tensor's that its E4M3 scale is zero; a UE5M3 scale is then 1.
    Derivatives: zero, as of any rounding. For a straight-through gradient of the values q that `dequantize`
      returns, write `lax.stop_gradient(q) + (x - lax.stop_gradient(x))`. `mxjax.dot` needs no such thing.
    Raises:
      ValueError: unknown format, rule or rounding; stochastic rounding without a key; bad block_shape; an
        axis that x does not have.
      TypeError: x is no array or not floating point; key is not one JAX key.
    Source: OCP MX v1.0, section 6.3; arXiv 2605.09825, appendix.
    """
    check_tensor("quantize", x)
    check_axis("quantize", axis)
    operand = Operand(block_shape=block_shape, scale_rule=scale_rule, rounding=rounding, prescale=prescale)
    if not isinstance(format, Operand):
        operand = dataclasses.replace(operand, format=format)
    elif operand == Operand():
        operand = format
    else:
        raise ValueError(f"quantize takes the options of the operand {format}; leave the others out")
    if key is not None:
        check_one_key(key)
    return _quantize(x, operand, axis, key)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(x: Shaped[Array | np.ndarray, "*shape"], operand: Operand, axis: int, key) -> MXArray:
    q = quantize_unpacked(x, operand, axis, key)
    return dataclasses.replace(q, elements=_store(q.elements, get_format(operand.format).dtype))


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
    values = block_values(q)
    return (values if q.factor is None else values * q.factor).astype(dtype)


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
    """Returns the dtype of an array, or the type of anything else."""
    return str(getattr(x, "dtype", type(x).__name__))


def pack_codes(codes: UInt8[Array, "*shape"], axis: int) -> UInt8[Array, "*packed"]:
    """Packs 4-bit codes, one in each byte, to two in each along `axis` (counted from 0); see `pack`."""
    codes = pad(codes, axis, 2)
    pairs = codes.reshape(*codes.shape[:axis], codes.shape[axis] // 2, 2, *codes.shape[axis + 1 :])
    low, high = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
    return low | (high << 4)


def quantize_unpacked(
    x: Shaped[Array | np.ndarray, "*shape"], operand: Operand, axis: int, key: jax.Array | KeyWords | None
) -> MXArray:
    """Returns x quantized as `operand` says, with blocks along `axis` and elements in float32.

    This is `quantize` without its last step, because GEMMs read values. `key` is for stochastic rounding of
    elements, and of scales under EDEN.
    """
    f = get_format(operand.format)
    axis = normalize_axis_index(axis, x.ndim) - x.ndim
    block_shape = resolve_block_shape(f, operand.block_shape, x.ndim, axis)
    if operand.needs_key and key is None:
        raise ValueError("quantize rounds stochastically and needs key=; pass jax.random.key(0)")
    if f.element is None:
        return MXArray(jnp.asarray(x, f.dtype), None, None, f.name, axis, block_shape)
    x = jnp.asarray(x, jnp.float32)
    if f.scale_element is not None:
        elements, scales, tensor_scale = quantize_by_minifloats(x, f, operand, block_shape, axis, key)
        scales = scales.astype(f.scale_element.dtype)
    else:
        scales, tensor_scale, scaled = _divide_by_scales(
            x, f, f.element, operand.scale_rule, block_shape, axis
        )
        elements = round_elements(scaled, f.element, operand.rounding, operand.prescale, key, axis)
    return MXArray(elements, scales, tensor_scale, f.name, axis, block_shape, operand.prescale)


def scaled_values(
    x: Shaped[Array | np.ndarray, "*shape"], operand: Operand, axis: int
) -> Float32[Array, "*shape"]:
    """Returns x divided by its scales, as `quantize_unpacked` rounds it, without the operand's prescale."""
    f = get_format(operand.format)
    assert f.element is not None
    axis = normalize_axis_index(axis, x.ndim) - x.ndim
    block_shape = resolve_block_shape(f, operand.block_shape, x.ndim, axis)
    x = jnp.asarray(x, jnp.float32)
    return _divide_by_scales(x, f, f.element, operand.scale_rule, block_shape, axis)[2]


def block_values(q: MXArray) -> Float32[Array, "*shape"]:
    """Returns elements * scales, without `factor`, in float32.

    bfloat16 represents them exactly, except for formats without `fits_bfloat16`, where float32 scales are
    included, and for magnitudes below its range (2**-133).
    """
    values = q.elements.astype(jnp.float32)
    if q.scales is None or get_format(q.format).is_vector:
        return values
    if q.scales.dtype == jnp.float8_e8m0fnu:
        byte = lax.bitcast_convert_type(q.scales, jnp.uint8).astype(jnp.int32)
        return multiply_by_scale(values, spread(byte, values.shape, q.block_shape, q.axis))
    values = values * spread(q.scales.astype(jnp.float32), values.shape, q.block_shape, q.axis)
    outer_block = get_format(q.format).outer_block
    if not outer_block or q.tensor_scale is None:
        return values
    return values * spread(q.tensor_scale, values.shape, (1, outer_block), q.axis)


def float4_codes(values: Float[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Returns the 4-bit codes, one in each byte, of values that E2M1 represents; NaN becomes 0."""
    # Arithmetic, because XLA's conversion to float4 takes twice as long on the CPU.
    magnitude = jnp.abs(values)
    code = jnp.where(magnitude < 2, 2 * magnitude, jnp.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4))
    code = jnp.where(magnitude <= E2M1.max, code, 0).astype(jnp.uint8)
    return lax.optimization_barrier(code | jnp.where(jnp.signbit(values), 8, 0).astype(jnp.uint8))


def _store(values: Float[Array, "*shape"], dtype: DTypeLike) -> Shaped[Array, "*shape"]:
    """Returns values in dtype, which represents them exactly."""
    if dtype != jnp.float4_e2m1fn:
        return values.astype(dtype)
    return lax.bitcast_convert_type(float4_codes(values).astype(jnp.uint4), dtype)


def _divide_by_scales(
    x: Float32[Array, "*shape"], f: Format, element: Element, rule: ScaleRule, block_shape, axis: int
):
    """Returns the scales of x's blocks or None, the tensor's or None, and x divided by them."""
    if f.scale == "none":  # as in Transformer Engine and torchao: multiply by max / amax
        per_unit = divide(jnp.float32(element.max), tensor_max(x))
        return None, 1 / per_unit, x * per_unit
    if f.scale == "fp32":
        scales, scaled = _divide_by_float32(x, element, block_shape, axis)
        return scales, None, scaled
    if rule == "quest":
        byte = quest_scale(block_std(x, block_shape, axis))
    else:
        byte = block_scale(block_max(x, block_shape, axis), rule, element)
    scaled = divide_by_scale(x, spread(byte.astype(jnp.int32), x.shape, block_shape, axis))
    return lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu), None, scaled


def _divide_by_float32(
    x: Float32[Array, "*shape"], element: Element, block_shape, axis: int
) -> tuple[Float32[Array, "*blocks"], Float32[Array, "*shape"]]:
    """Returns the scales that make each block's largest magnitude the element's, and x divided by them."""
    amax = jnp.maximum(block_max(x, block_shape, axis), jnp.float32(SMALLEST_BLOCK_MAX))
    # XLA flushes subnormals, and 3.5 divided by float32's largest number is one: halve such blocks first.
    halved = amax > 2.0**126
    per_unit = divide(jnp.full_like(amax, element.max), jnp.where(halved, amax * 0.5, amax))
    x = jnp.where(spread(halved, x.shape, block_shape, axis), x * 0.5, x)
    scales = jnp.where(halved, 2 / per_unit, 1 / per_unit)
    return scales, x * spread(per_unit, x.shape, block_shape, axis)
