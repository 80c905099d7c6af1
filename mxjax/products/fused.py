"""Products fused with what precedes them: `normed_dot` (RMSNorm) and `fused_mlp` (RMSNorm, SwiGLU between
two).

The norm's result, silu(gate) * up and the gradient of the first product are computed where they are
quantized, so that none of them is stored.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mxjax.numerics.delayed import Scales
from mxjax.operands.computed import Gated, GatedGradient, Norm, check_norm, normed, rms_norm, swiglu
from mxjax.operands.use import OperandUse
from mxjax.policy.policy import Policy
from mxjax.products.dot import check_key
from mxjax.products.gradients import gradients_read_tensors
from mxjax.products.implementations import Implementation, form_of, implementations_of
from mxjax.products.linear import Options, backward, forward, linear, value_of
from mxjax.products.prepare import prepares_computed, prepares_gated
from mxjax.runtime.arguments import check_arrays
from mxjax.runtime.mesh import Layout, sums_on_each_device, varying_as
from mxjax.runtime.primitives import as_primitive
from mxjax.runtime.remat import recomputed


class NormedOptions(NamedTuple):
    """The static arguments: of the product, and the norm's `eps`; hashable."""

    product: Options
    eps: float


def normed_dot(
    x: Float[Array, "*batch d_in"],
    norm: Norm,
    w: Float[Array, "d_in d_out"],
    *,
    policy: Policy,
    key: jax.Array | None,
    implementation: Implementation | None,
    layout: Layout | None,
    scales: Scales | None = None,
) -> Float[Array, "*batch d_out"] | None:
    """Returns rms_norm(x, norm) @ w in x's dtype, or None where no kernel computes the norm.

    It returns what `mxjax.dot` of `mxjax.operands.computed.rms_norm` does, except that the norm's values may
    differ by a unit in the last place of bfloat16 before they are quantized, where a gradient is taken.

    Args:
      x: activations; all but bfloat16 return None.
      norm: of x; its scale is in any dtype.
      Others: see `mxjax.dot`.
    Raises: see `mxjax.dot`.
    """
    check_arrays("normed_dot", x=x, w=w)
    check_norm("normed_dot", x, norm)
    d_in, d_out = w.shape
    if x.shape[-1] != d_in:
        raise ValueError(f"normed_dot needs x [..., d_in] and w [d_in, d_out], got {x.shape} and {w.shape}")
    check_key(policy, key, scales)
    gemms, dtypes = implementations_of(policy, implementation), (x.dtype, x.dtype, w.dtype)
    options = Options(policy, gemms, dtypes, layout=layout)
    if not kernels_take(x, w) or not fuses_norm(options, x.size // d_in, d_in):
        return None
    key = key if policy.needs_key else None
    arrays = jax.tree.leaves((x, w, norm.scale, key))
    x, w, scale = (varying_as(t, *arrays) for t in (x, w, norm.scale))
    scales = scales if policy.delayed else None
    y = _normed_product(NormedOptions(options, norm.eps), x.reshape(-1, d_in), w, scale, key, scales)
    return y.reshape(*x.shape[:-1], d_out)


def kernels_take(x: jax.Array, *weights: jax.Array) -> bool:
    """Whether kernels compute operands from these arrays: in bfloat16, not empty, not on Explicit meshes."""
    explicit = any(jax.typeof(t).sharding.mesh.explicit_axes for t in (x, *weights))
    return not explicit and x.dtype == jnp.bfloat16 and x.size > 0


def fuses_norm(options: Options, tokens: int, width: int) -> bool:
    """Whether a kernel computes the norm before a product here.

    It does on Hopper, for operands that its quantizer packs, or casts by delayed scales, and nothing else
    reads.

    Args:
      tokens, width: the shape of the norm's result.
    """
    policy, gemms, *_ = options
    if gradients_read_tensors(policy)[0] or policy.wgrad.lhs.source != "original":
        return False
    rows = OperandUse(-1, policy.fprop.lhs, policy.fprop.rotation, form=form_of(gemms.fprop))
    columns = OperandUse(-2, policy.wgrad.lhs, policy.wgrad.rotation, form=form_of(gemms.wgrad))
    return prepares_computed(rows, columns, tokens, width)


def norm_gradients(dy: jax.Array, x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of x and of the scale from that of the norm's result."""
    dx, d_scale = jax.vjp(lambda x, scale: rms_norm(x, Norm(scale, eps)), x, scale)[1](dy)
    return dx, d_scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed_matmul(options: NormedOptions, x, w, scale, key, scales):
    y, _ = forward(options.product, normed(x, Norm(scale, options.eps)), w, key, scales, keep=False)
    return value_of(options.product, y, w)


def _normed_fwd(options: NormedOptions, x, w, scale, key, scales):
    y, residuals = forward(options.product, normed(x, Norm(scale, options.eps)), w, key, scales, keep=True)
    return value_of(options.product, y, w), (x, scale, residuals.with_weight(w))


def _normed_bwd(options: NormedOptions, kept, dy):
    x, scale, residuals = kept
    dx, dw, amax = backward(options.product, residuals, dy)
    dx = varying_as(dx.value(options.product.dtypes[1]), dy)
    dx, d_scale = norm_gradients(dx, x, scale, options.eps)
    return dx, dw, d_scale, None, amax


_normed_matmul.defvjp(_normed_fwd, _normed_bwd)


def _normed_batch(options: NormedOptions, operands, axes) -> tuple[jax.Array, int]:
    """Maps the product: it decides by itself whether the mapped axis joins the tokens."""

    def apart(x, w, scale, key, scales):
        return linear(options.product, rms_norm(x, Norm(scale, options.eps)), w, key, scales)

    return jax.vmap(apart, axes)(*operands), 0


_normed_product = as_primitive("mxjax_normed_product", _normed_matmul, _normed_batch)


class GatedOptions(NamedTuple):
    """The static arguments of both products, and `eps` of the norm, 0 without one; hashable."""

    up: Options
    down: Options
    eps: float


def fused_mlp(
    x: Float[Array, "*batch d_in"],
    weights: tuple[Float[Array, "d_in two_width"], Float[Array, "width d_out"]],
    *,
    policies: Sequence[Policy],
    keys: Sequence[jax.Array | None],
    implementation: Implementation | None,
    layouts: Sequence[Layout | None],
    norm: Norm | None = None,
    scales: Sequence[Scales | None] = (None, None),
) -> Float[Array, "*batch d_out"] | None:
    """Returns swiglu(x @ gate_up) @ down in x's dtype, or None where no kernel computes SwiGLU.

    It returns what two calls of `mxjax.dot` with `mxjax.operands.computed.swiglu` between do, except that
    SwiGLU's values and the norm's may differ by a unit in the last place of bfloat16 before they are
    quantized, where a gradient is taken.
    A gradient that overflows between in XLA's order of products, or is subnormal, may be finite or zero here.

    Args:
      x: activations; all but bfloat16 return None.
      weights: gate_up, which has the gate's columns first, and down.
      policies, keys, layouts, scales: of both products; see `mxjax.dot`.
      norm: of x, before the products.
    Raises: see `mxjax.dot`.
    """
    check_arrays("fused_mlp", x=x, gate_up=weights[0], down=weights[1])
    (d_in, two_width), (width, _) = (w.shape for w in weights)
    if x.shape[-1] != d_in or two_width != 2 * width:
        raise ValueError(
            "fused_mlp needs x [..., d_in], gate_up [d_in, 2 width] and down [width, d_out], got "
            f"{x.shape}, {weights[0].shape} and {weights[1].shape}"
        )
    if norm is not None:
        check_norm("fused_mlp", x, norm)
    for policy, key, delayed in zip(policies, keys, scales, strict=True):
        check_key(policy, key, delayed)
    up, down = (
        Options(
            policy,
            implementations_of(policy, implementation),
            (x.dtype, x.dtype, w.dtype),
            layout=layout,
        )
        for policy, layout, w in zip(policies, layouts, weights, strict=True)
    )
    if not kernels_take(x, *weights) or not _fuses(up, down, x.size // d_in, width):
        return None
    if norm is not None and not fuses_norm(up, x.size // d_in, d_in):
        x, norm = rms_norm(x, norm), None
    scale, eps = norm or (None, 0.0)
    drawn = tuple(key if policy.needs_key else None for policy, key in zip(policies, keys, strict=True))
    scales = tuple(s if policy.delayed else None for policy, s in zip(policies, scales, strict=True))
    arrays = jax.tree.leaves((x, weights, scale, drawn))
    x, weights, scale = jax.tree.map(lambda t: varying_as(t, *arrays), (x, tuple(weights), scale))
    y = _gated_product(GatedOptions(up, down, eps), x.reshape(-1, d_in), weights, scale, drawn, scales)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _fuses(of_up: Options, of_down: Options, tokens: int, width: int) -> bool:
    """Whether kernels compute SwiGLU here.

    They do on Hopper, for operands that nothing else reads, and not where a mesh shards the MLP's width: for
    those that its quantizer packs, from products whose factors are powers of two, and for those in FP8 with
    delayed scales, from products with one factor.

    Args:
      tokens, width: the shape of silu(gate) * up.
    """
    (up, up_gemms, *_), (down, down_gemms, *_) = of_up, of_down
    if not width or gradients_read_tensors(down)[0] or down.wgrad.lhs.source != "original":
        return False
    if any(operand.prescale for gemm in (up.fprop, down.dgrad) for operand in (gemm.lhs, gemm.rhs)):
        return False
    in_fp8 = [gemm == "fp8_tensor" for gemm in (up_gemms.fprop, down_gemms.dgrad)]
    if any(in_fp8) != all(in_fp8) or all(in_fp8) != (form_of(down_gemms.fprop) == "fp8"):
        return False
    if not all(sums_on_each_device(options.layout) for options in (of_up, of_down)):
        return False
    result = (
        OperandUse(-1, down.fprop.lhs, down.fprop.rotation, form=form_of(down_gemms.fprop)),
        OperandUse(-2, down.wgrad.lhs, down.wgrad.rotation, form=form_of(down_gemms.wgrad)),
    )
    gradient = (
        OperandUse(-1, up.dgrad.lhs, up.dgrad.rotation, form=form_of(up_gemms.dgrad)),
        OperandUse(-2, up.wgrad.rhs, up.wgrad.rotation, form=form_of(up_gemms.wgrad)),
    )
    return all(prepares_gated(*uses, tokens, width) for uses in (result, gradient))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_matmuls(options: GatedOptions, x, weights, scale, keys, scales):
    tensor = x if scale is None else normed(x, Norm(scale, options.eps))
    y, _ = forward(options.up, tensor, weights[0], keys[0], scales[0], keep=False)
    y, _ = forward(options.down, Gated(y), weights[1], keys[1], scales[1], keep=False)
    return value_of(options.down, y, weights[1])


def _gated_fwd(options: GatedOptions, x, weights, scale, keys, scales):
    tensor = x if scale is None else normed(x, Norm(scale, options.eps))
    product, of_up = forward(options.up, tensor, weights[0], keys[0], scales[0], keep=True)
    y, of_down = forward(options.down, Gated(product), weights[1], keys[1], scales[1], keep=True)
    of_norm = None if scale is None else (x, scale)
    residuals = of_norm, product, of_up.with_weight(weights[0]), of_down.with_weight(weights[1])
    return value_of(options.down, y, weights[1]), residuals


def _gated_bwd(options: GatedOptions, residuals, dy):
    of_norm, product, of_up, of_down = residuals
    gradient, d_down, of_down_amax = backward(options.down, of_down, dy)
    dx, d_up, of_up_amax = backward(options.up, of_up, GatedGradient(product, gradient))
    dx, d_scale = varying_as(dx.value(options.up.dtypes[1]), dy), None
    if of_norm is not None:
        x, scale = of_norm
        dx, d_scale = norm_gradients(dx, x, scale, options.eps)
    return dx, (d_up, d_down), d_scale, None, (of_up_amax, of_down_amax)


_gated_matmuls.defvjp(_gated_fwd, _gated_bwd)


def _gated_batch(options: GatedOptions, operands, axes) -> tuple[jax.Array, int]:
    """Maps the products one by one: each decides by itself whether the mapped axis joins the tokens."""

    def apart(x, weights, scale, keys, scales):
        x = x if scale is None else rms_norm(x, Norm(scale, options.eps))
        gated = recomputed(swiglu)(linear(options.up, x, weights[0], keys[0], scales[0]))
        return linear(options.down, gated, weights[1], keys[1], scales[1])

    return jax.vmap(apart, axes)(*operands), 0


_gated_product = as_primitive("mxjax_gated_product", _gated_matmuls, _gated_batch)
