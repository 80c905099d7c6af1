"""The operands of GEMMs, as a policy describes them: which tensor, rotated and quantized along which axis."""

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Float32

from mxjax.blocks import pad
from mxjax.hadamard import random_signs, rotate
from mxjax.policy import Gemm, Operand, Rotation
from mxjax.quantize import MXArray, dequantize, quantize_unpacked


class Use(NamedTuple):
    """How one GEMM takes a tensor.

    Attributes:
      axis: the one that it contracts, -1 or -2, along which the tensor is rotated and quantized.
      signs: of the rotation, or None for all +1.
      key: for random bits, or None.
    """

    axis: int
    operand: Operand
    rotation: Rotation | None
    signs: Float32[Array, " size"] | None
    key: jax.Array | None


def uses_of(gemm: Gemm, lhs_axis: int, rhs_axis: int, key: jax.Array | None) -> tuple[Use, Use]:
    """Returns how a GEMM takes its two operands; `key` is the GEMM's own."""
    signs = draw_signs(gemm.rotation, fold(key, 2))
    return (
        Use(lhs_axis, gemm.lhs, gemm.rotation, signs, fold(key, 0)),
        Use(rhs_axis, gemm.rhs, gemm.rotation, signs, fold(key, 1)),
    )


def quantize_operand(x: Float[Array, "..."], use: Use) -> MXArray:
    """Returns what a GEMM multiplies for x: rotated and quantized along its axis (elements in float32)."""
    o = use.operand
    return quantize_unpacked(
        rotate_operand(x, use.axis, use.rotation, use.signs),
        o.format,
        axis=use.axis,
        scale_rule=o.scale_rule,
        rounding=o.rounding,
        block_shape=o.block_shape,
        prescale=o.prescale,
        key=use.key if o.rounding == "stochastic" else None,
    )


def rotate_operand(
    x: Float[Array, "..."], axis: int, rotation: Rotation | None, signs: Float[Array, " size"] | None
) -> Float[Array, "..."]:
    """Returns x rotated along `axis`, filled up with zeros to a multiple of the rotation's size."""
    if rotation is None:
        return x
    return rotate(pad(x, axis % x.ndim, rotation.size), rotation.size, axis=axis, signs=signs)


def as_backward_sees(
    x: Float[Array, "..."], wanted: Operand, fprop: Operand, axis: int, key: jax.Array | None
) -> Float[Array, "..."]:
    """Returns x as the backward pass takes it: as it is, or as the Fprop's quantization left it."""
    if wanted.source == "original":
        return x
    return dequantize(quantize_operand(first_order_only(x), Use(axis, fprop, None, None, key)))


def draw_signs(rotation: Rotation | None, key: jax.Array | None) -> Float32[Array, " size"] | None:
    """Returns the signs of a rotation: none, the fixed ones of its seed, or those that `key` draws."""
    if rotation is None or rotation.signs == "none":
        return None
    if rotation.signs == "fixed":  # whatever generator JAX is set to
        key = jax.random.key(rotation.seed, impl="threefry2x32")
    assert key is not None
    return random_signs(key, rotation.size)


def fold(key: jax.Array | None, *indices: int) -> jax.Array | None:
    """Returns the key for one use, or None without a key. A pure function, so that remat replays the bits."""
    if key is None:
        return None
    return functools.reduce(jax.random.fold_in, indices, key)


@jax.custom_jvp
def first_order_only(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns x, and raises NotImplementedError when that is differentiated."""
    return x


@first_order_only.defjvp
def _raise_on_second_derivative(primals, tangents):
    raise NotImplementedError(
        "mxjax.dot has no second derivative: quantization is piecewise constant. "
        "Use policy-free products (jnp.dot) where you need one."
    )
