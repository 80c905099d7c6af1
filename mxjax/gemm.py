"""One GEMM: its operands rotated and quantized along the contracted axis, then multiplied.

The implementations differ in how they multiply, never in the values that they multiply.
"""

import functools
import logging
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from mxjax.blocks import pad
from mxjax.formats import get_format
from mxjax.hadamard import random_signs, rotate
from mxjax.policy import Gemm, Operand, Rotation
from mxjax.quantize import MXArray, block_values, dequantize, quantize_unpacked

Implementation = Literal["reference", "xla", "fp8", "scaled_dot", "triton"]

_RUNS_HERE = ("reference", "xla")
_log = logging.getLogger("mxjax")


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 5, 7), static_argnames="sharding")
def run_gemm(
    implementation: Implementation,
    dtype: DTypeLike,
    precision: lax.PrecisionLike,
    gemm: Gemm,
    lhs: Float[Array, "*batch _ _"],
    lhs_axis: int,
    rhs: Float[Array, "*batch _ _"],
    rhs_axis: int,
    key: jax.Array | None,
    sharding: NamedSharding | None = None,
) -> Float[Array, "*batch _ _"]:
    """Returns the product over lhs_axis and rhs_axis (-1 or -2), of operands quantized along them.

    Axes before the last two are batch axes. The result has lhs's, then rhs's other axis, in `dtype`, and
    on a mesh with Explicit axes the `sharding` given, which it needs where the contracted axis is sharded.

    Raises:
      NotImplementedError: when it is differentiated, which only a second derivative of `dot` does.
    """
    signs = draw_signs(gemm.rotation, fold(key, 2))
    lhs, rhs = first_order_only(lhs), first_order_only(rhs)
    left = quantize_operand(lhs, lhs_axis, gemm.lhs, gemm.rotation, signs, fold(key, 0))
    right = quantize_operand(rhs, rhs_axis, gemm.rhs, gemm.rotation, signs, fold(key, 1))
    multiply = {"reference": _multiply_reference, "xla": _multiply_xla}[implementation]
    return multiply(left, lhs_axis, right, rhs_axis, precision, sharding).astype(dtype)


def quantize_operand(
    x: Float[Array, "..."],
    axis: int,
    operand: Operand,
    rotation: Rotation | None,
    signs: Float[Array, " size"] | None,
    key: jax.Array | None,
) -> MXArray:
    """Returns what a GEMM multiplies for x: rotated and quantized along `axis` (elements in float32)."""
    return quantize_unpacked(
        rotate_operand(x, axis, rotation, signs),
        operand.format,
        axis=axis,
        scale_rule=operand.scale_rule,
        rounding=operand.rounding,
        block_shape=operand.block_shape,
        prescale=operand.prescale,
        key=key if operand.rounding == "stochastic" else None,
    )


def explicit_sharding(x: jax.Array) -> NamedSharding | None:
    """Returns x's sharding where it is part of its type (a mesh with Explicit axes), else None."""
    sharding = jax.typeof(x).sharding
    return sharding if sharding.mesh.are_all_axes_explicit and sharding.mesh.axis_names else None


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
    return dequantize(quantize_operand(first_order_only(x), axis, fprop, None, None, key))


def _multiply_reference(lhs: MXArray, lhs_axis, rhs: MXArray, rhs_axis, precision, sharding):
    """The definition: float32 products of the dequantized operands."""
    del precision
    return _contract(dequantize(lhs), lhs_axis, dequantize(rhs), rhs_axis, lax.Precision.HIGHEST, sharding)


def _multiply_xla(lhs: MXArray, lhs_axis, rhs: MXArray, rhs_axis, precision, sharding):
    """The same values in bfloat16, which holds elements times block scales exactly; factors go last."""
    keep = any(get_format(q.format).dtype == jnp.float32 for q in (lhs, rhs))
    dtype = jnp.float32 if keep else jnp.bfloat16
    precision = lax.Precision.HIGHEST if keep and precision is None else precision
    left, right = (block_values(q).astype(dtype) for q in (lhs, rhs))
    y = _contract(left, lhs_axis, right, rhs_axis, precision, sharding)
    for factor in (lhs.factor, rhs.factor):
        y = y if factor is None else y * factor
    return y


def _contract(lhs, lhs_axis, rhs, rhs_axis, precision, sharding):
    """Returns the product over the two axes (negative), batched over axes before the last two, in float32."""
    batch = tuple(range(lhs.ndim - 2))
    dims = (((lhs.ndim + lhs_axis,), (rhs.ndim + rhs_axis,)), (batch, batch))
    return lax.dot_general(
        lhs, rhs, dims, precision=precision, preferred_element_type=jnp.float32, out_sharding=sharding
    )


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


def choose_implementation(implementation: Implementation | None) -> Implementation:
    """Returns the implementation named, or for None the fastest that runs here, which is logged once.

    Raises:
      ValueError: there is none of that name.
      NotImplementedError: it does not run here.
    """
    if implementation is None:
        _log_choice("xla")
        return "xla"
    if implementation not in get_args(Implementation):
        names = ", ".join(get_args(Implementation))
        raise ValueError(f"unknown implementation {implementation!r}; use one of {names}, or None")
    if implementation not in _RUNS_HERE:
        raise NotImplementedError(
            f"implementation {implementation!r} does not run here yet; use one of {', '.join(_RUNS_HERE)}, "
            "or None for the fastest"
        )
    return implementation


@functools.cache
def _log_choice(implementation: str) -> None:
    _log.info("mxjax.dot runs its GEMMs by implementation=%r", implementation)
