"""Quantization to block formats and back: the definitions that kernels reproduce bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped
from numpy.lib.array_utils import normalize_axis_index

from mxjax.numerics.array import MXArray, float4_codes
from mxjax.numerics.blocks import BlockShape, block_max, block_std, resolve_block_shape, spread
from mxjax.numerics.float_scales import SMALLEST_BLOCK_MAX, divide, quantize_by_minifloats, tensor_max
from mxjax.numerics.formats import Element, Format, FormatName, get_format
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import KeyWords
from mxjax.numerics.rounding import Rounding, round_elements
from mxjax.numerics.scales import ScaleRule, block_scale, divide_by_scale, quest_scale
from mxjax.runtime.arguments import check_axis, check_tensor
from mxjax.runtime.keys import check_one_key


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

    A tensor's or block's only scale, in float32 (FP8, `fp4_vector`, `fp4_e1m2`), is computed by its inverse
    `r = largest / max(abs(block))`: `elements = round(prescale * (block * r))` and `scale = 1 / r`, each step
    rounded to float32, as in Transformer Engine and torchao.

    Args:
      x: tensor in float32, bfloat16 or float16; the computation is in float32.
      format: name in `mxjax.FORMATS`, or an `mxjax.Operand`, which has all options of its own.
      axis: axis along which elements share scales, the one a GEMM contracts. It may have any length; the
        last block may be short.
      scale_rule: see `mxjax.numerics.scales.block_scale`; it applies only to formats with E8M0 scales.
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


def quantize_unpacked(
    x: Shaped[Array | np.ndarray, "*shape"],
    operand: Operand,
    axis: int,
    key: jax.Array | KeyWords | None,
    scale: Float32[Array, ""] | None = None,
) -> MXArray:
    """Returns x quantized as `operand` says, with blocks along `axis` and elements in float32.

    This is `quantize` without its last step, because GEMMs read values. `key` is for stochastic rounding of
    elements, and of scales under EDEN. `scale` is the tensor's delayed scale.
    """
    f = get_format(operand.format)
    axis = normalize_axis_index(axis, x.ndim) - x.ndim
    block_shape = resolve_block_shape(f, operand.block_shape, x.ndim, axis)
    if operand.needs_key and key is None:
        raise ValueError("quantize rounds stochastically and needs key=; pass jax.random.key(0)")
    if operand.is_delayed and scale is None:
        raise ValueError(
            f"{operand} needs the scales of earlier steps, which mxjax.dot takes as scales=; "
            "use scaling='current'"
        )
    if f.element is None:
        return MXArray(jnp.asarray(x, f.dtype), None, None, f.name, axis, block_shape)
    x = jnp.asarray(x, jnp.float32)
    if f.scale_element is not None:
        elements, scales, tensor_scale = quantize_by_minifloats(x, f, operand, block_shape, axis, key)
        scales = scales.astype(f.scale_element.dtype)
    else:
        scales, tensor_scale, scaled = _divide_by_scales(
            x, f, f.element, operand.scale_rule, block_shape, axis, scale
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


def _store(values: Float[Array, "*shape"], dtype: DTypeLike) -> Shaped[Array, "*shape"]:
    """Returns values in dtype, which represents them exactly."""
    if dtype != jnp.float4_e2m1fn:
        return values.astype(dtype)
    return lax.bitcast_convert_type(float4_codes(values).astype(jnp.uint4), dtype)


def _divide_by_scales(
    x: Float32[Array, "*shape"],
    f: Format,
    element: Element,
    rule: ScaleRule,
    block_shape,
    axis: int,
    delayed=None,
):
    """Returns the scales of x's blocks or None, the tensor's or None, and x divided by them."""
    if f.scale == "none":  # as in Transformer Engine and torchao: multiply by max / amax
        per_unit = divide(jnp.float32(element.max), tensor_max(x)) if delayed is None else delayed
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
