"""`dot`: a linear layer's matrix product whose three GEMMs run in the precision that a policy names."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from mxjax.formats import get_format
from mxjax.hadamard import random_signs, rotate
from mxjax.policy import Gemm, Operand, Policy, Rotation
from mxjax.quantize import MXArray, block_values, dequantize, pad, quantize_unpacked
from mxjax.recipes import get_policy

Implementation = Literal["reference", "xla", "fp8", "scaled_dot", "triton"]
AnyArray = jax.Array | np.ndarray
DimensionNumbers = tuple  # ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as in jax.lax

_RUNS_HERE = ("reference", "xla")
_log = logging.getLogger("mxjax")


def dot(
    x: Shaped[AnyArray, "*batch d_in"],
    w: Shaped[AnyArray, "*d_in_d_out"],
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "*batch _"]:
    """Returns `x @ w`, with each of the three GEMMs (forward and gradients) in the policy's precision.

    Equivalent, for one GEMM and up to the order of float32 sums, to

        lhs, rhs = (rotate(pad(t), axis=contracted) for t in (x, w))      # if the policy rotates
        dequantize(quantize(lhs, axis=-1)) @ dequantize(quantize(rhs, axis=0))

    where the axis that a GEMM contracts (see `mxjax.policy`) is the one that is blocked and rotated,
    filled up with zeros where the block or the rotation does not divide it, which changes nothing.
    Wgrad contracts the tokens: all leading axes of x, flattened.

    Args:
      x: activations, float32, bfloat16 or float16.
      w: weights, any of these; quantized from this dtype, so give it the float32 master weights.
      policy: a `Policy` or the name of one.
      key: needed by policies that draw random bits. The same key draws the same bits: fold in the step
        and the layer.
      implementation: "reference" (float32 products of dequantized operands, the definition), "xla"
        (bfloat16 products, which hold the values exactly, accumulated in float32), or None for the
        fastest that runs here.
      preferred_element_type: dtype of the result; default, that of `jnp.result_type(x, w)`.

    Gradients have the dtypes of x and w, products accumulate in float32. There is no second derivative.

    Special values: a block with NaN or infinity makes the results that it enters NaN.
    Raises:
      ValueError: shapes that do not match, an unknown policy or implementation, or a policy that draws
        random bits without a key.
      TypeError: x or w is not floating point.
      NotImplementedError: an implementation that does not run here; a second derivative.
    Source: arXiv 2605.09825, section 3; arXiv 2502.20586, algorithm 3.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"dot needs x [..., d_in] and w [d_in, d_out], got {x.shape} and {w.shape}")
    contract_last = (((x.ndim - 1,), (0,)), ((), ()))
    return dot_general(
        x,
        w,
        contract_last,
        None,
        preferred_element_type,
        policy=policy,
        key=key,
        implementation=implementation,
    )


def dot_general(
    lhs: Shaped[AnyArray, "..."],
    rhs: Shaped[AnyArray, "..."],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "..."]:
    """Returns `jax.lax.dot_general` of lhs (as x) and rhs (as w), quantized by a policy as in `dot`.

    Any contracting and batch axes; several contracting axes are flattened, in the order given, into
    the one that is blocked. The result has batch, lhs's free, then rhs's free axes.

    Args:
      precision: passed to the products; it matters only where a policy keeps operands in float32.
      Others: as `dot` and `jax.lax.dot_general`.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    policy = get_policy(policy) if isinstance(policy, str) else policy
    _check(lhs, rhs, policy, key)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if [[lhs.shape[i] for i in axes] for axes in (lhs_contract, lhs_batch)] != [
        [rhs.shape[i] for i in axes] for axes in (rhs_contract, rhs_batch)
    ]:
        raise ValueError(f"dot_general: {lhs.shape} and {rhs.shape} do not match along {dimension_numbers}")
    lhs_free = _remaining_axes(lhs, lhs_contract, lhs_batch)
    rhs_free = _remaining_axes(rhs, rhs_contract, rhs_batch)
    x = _group_axes(lhs, lhs_batch, lhs_free, lhs_contract)
    w = _group_axes(rhs, rhs_batch, rhs_contract, rhs_free)
    dtype = jnp.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
    y: jax.Array = _matmul(policy, _choose(implementation), dtype, precision, x, w, key)
    shape = [lhs.shape[i] for i in (*lhs_batch, *lhs_free)] + [rhs.shape[i] for i in rhs_free]
    return y.reshape(shape)


def make_dot_general(
    policy: Policy | str,
    *,
    key: jax.Array | Callable[[], jax.Array] | None = None,
    implementation: Implementation | None = None,
) -> Callable[..., jax.Array]:
    """Returns a `dot_general` for `flax.nnx.Linear(dot_general=...)` and `flax.linen.Dense(dot_general=...)`.

    Args:
      key: for policies that draw random bits: a key, or a function that returns one at each call, such
        as `lambda: rngs.mxjax()` in NNX and `lambda: self.make_rng("mxjax")` in Linen.
      Others: as `dot`.
    """

    def dot_general_with_policy(
        lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None
    ):
        if out_sharding is not None:
            raise NotImplementedError("out_sharding: use jax.lax.with_sharding_constraint on the result")
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            policy=policy,
            key=key() if callable(key) else key,
            implementation=implementation,
        )

    return dot_general_with_policy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _matmul(policy: Policy, implementation, dtype, precision, x, w, key) -> jax.Array:
    """Returns x [*b, m, k] @ w [*b, k, n], by the policy's Fprop."""
    return _gemm(implementation, dtype, precision, policy.fprop, x, -1, w, -2, _fold(key, 0))


def _matmul_fwd(policy, implementation, dtype, precision, x, w, key):
    x = lax.optimization_barrier(x)  # several passes read it: computing it again in each costs more
    return _matmul(policy, implementation, dtype, precision, x, w, key), (x, w, key)


def _matmul_bwd(policy, implementation, dtype, precision, residuals, dy):
    x, w, key = residuals
    dy = lax.optimization_barrier(dy)
    x_seen = _source(policy.wgrad.lhs, x, policy.fprop.lhs, -1, _fold(key, 0, 0))
    w_seen = _source(policy.dgrad.rhs, w, policy.fprop.rhs, -2, _fold(key, 0, 1))
    dx = _gemm(implementation, x.dtype, precision, policy.dgrad, dy, -1, w_seen, -1, _fold(key, 1))
    dw = _gemm(implementation, w.dtype, precision, policy.wgrad, x_seen, -2, dy, -2, _fold(key, 2))
    return dx, dw, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 5, 7))
def _gemm(implementation, dtype, precision, gemm: Gemm, lhs, lhs_axis, rhs, rhs_axis, key):
    """Returns the product over lhs_axis and rhs_axis, of operands quantized along them, in `dtype`."""
    signs = _signs(gemm.rotation, _fold(key, 2))
    lhs = quantize_operand(_first_order_only(lhs), lhs_axis, gemm.lhs, gemm.rotation, signs, _fold(key, 0))
    rhs = quantize_operand(_first_order_only(rhs), rhs_axis, gemm.rhs, gemm.rotation, signs, _fold(key, 1))
    multiply = {"reference": _multiply_reference, "xla": _multiply_xla}[implementation]
    return multiply(lhs, lhs_axis, rhs, rhs_axis, precision).astype(dtype)


def quantize_operand(
    x: Float[Array, "..."],
    axis: int,
    operand: Operand,
    rotation: Rotation | None,
    signs: Float[Array, " size"] | None,
    key: jax.Array | None,
) -> MXArray:
    """Returns what a GEMM multiplies for x: rotated and quantized along `axis` (elements in float32)."""
    if rotation is not None:
        x = rotate(pad(x, axis % x.ndim, rotation.size), rotation.size, axis=axis, signs=signs)
    return quantize_unpacked(
        x,
        operand.format,
        axis=axis,
        scale_rule=operand.scale_rule,
        rounding=operand.rounding,
        block_shape=operand.block_shape,
        prescale=operand.prescale,
        key=key if operand.rounding == "stochastic" else None,
    )


def _multiply_reference(lhs: MXArray, lhs_axis, rhs: MXArray, rhs_axis, precision):
    """The definition: float32 products of the dequantized operands."""
    del precision
    return _contract(dequantize(lhs), lhs_axis, dequantize(rhs), rhs_axis, lax.Precision.HIGHEST)


def _multiply_xla(lhs: MXArray, lhs_axis, rhs: MXArray, rhs_axis, precision):
    """The same values in bfloat16, which holds elements times block scales exactly; factors go last."""
    keep = any(get_format(q.format).dtype == jnp.float32 for q in (lhs, rhs))
    dtype = jnp.float32 if keep else jnp.bfloat16
    precision = lax.Precision.HIGHEST if keep and precision is None else precision
    left, right = (block_values(q).astype(dtype) for q in (lhs, rhs))
    y = _contract(left, lhs_axis, right, rhs_axis, precision)
    for factor in (lhs.factor, rhs.factor):
        y = y if factor is None else y * factor
    return y


def _contract(lhs, lhs_axis, rhs, rhs_axis, precision):
    """Returns the product over the two axes (negative), batched over axes before the last two, in float32."""
    batch = tuple(range(lhs.ndim - 2))
    dims = (((lhs.ndim + lhs_axis,), (rhs.ndim + rhs_axis,)), (batch, batch))
    return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=jnp.float32)


def _source(wanted: Operand, x, fprop: Operand, axis, key):
    """Returns x as the backward pass takes it: as it is, or as the Fprop's quantization left it."""
    if wanted.source == "original":
        return x
    return dequantize(quantize_operand(_first_order_only(x), axis, fprop, None, None, key))


def _signs(rotation: Rotation | None, key):
    if rotation is None or rotation.signs == "none":
        return None
    return random_signs(jax.random.key(rotation.seed) if rotation.signs == "fixed" else key, rotation.size)


def _fold(key, *indices: int):
    """Returns the key for one use, or None without a key. A pure function, so that remat replays the bits."""
    if key is None:
        return None
    return functools.reduce(jax.random.fold_in, indices, key)


@jax.custom_jvp
def _first_order_only(x):
    return x


@_first_order_only.defjvp
def _raise_on_second_derivative(primals, tangents):
    raise NotImplementedError(
        "mxjax.dot has no second derivative: quantization is piecewise constant. "
        "Use policy-free products (jnp.dot) where you need one."
    )


def _check(lhs, rhs, policy: Policy, key) -> None:
    for name, x in (("lhs (x)", lhs), ("rhs (w)", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"mxjax.dot needs floating-point operands, but {name} is {x.dtype}; cast it first"
            )
    if policy.needs_key and key is None:
        drawing = ", ".join(name for name, gemm in policy.gemms.items() if gemm.needs_key)
        raise ValueError(
            f"the policy draws random bits in {drawing} and needs key=; "
            "pass jax.random.key(0), folded with the step and the layer"
        )


def _choose(implementation: Implementation | None) -> Implementation:
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


def _remaining_axes(x, contract, batch) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i not in (*contract, *batch))


def _group_axes(x, batch, *groups):
    """Returns x transposed and reshaped to one axis a group, behind one for the batch axes, if any."""
    x = x.transpose(*batch, *(i for group in groups for i in group))
    shape = [math.prod(x.shape[: len(batch)])] if batch else []
    start = len(batch)
    for group in groups:
        shape.append(math.prod(x.shape[start : start + len(group)]))
        start += len(group)
    return x.reshape(shape)
