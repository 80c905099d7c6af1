"""Products fused with what precedes them: `normed_dot` (RMSNorm) and `fused_mlp` (RMSNorm, SwiGLU between
two).

The norm's result, silu(gate) * up and, where a kernel can, the gradient of the first product are computed
where they are quantized, so that none of them is stored.
"""

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

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
    d_in = x.shape[-1]
    if w.ndim != 2 or w.shape[0] != d_in:
        raise ValueError(f"normed_dot needs x [..., d_in] and w [d_in, d_out], got {x.shape} and {w.shape}")
    products = _products(x, [w], [policy], [key], implementation, [layout], [scales])
    if not kernels_take(x, w) or not fuses_norm(products[0], x.size // d_in, d_in):
        return None
    return _run(products, x, norm, [w], [key], [scales])


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
    policy = options.policy
    return not gradients_read_tensors(policy)[0] and prepares_computed(*_uses_of_x(options), tokens, width)


def _uses_of_x(options: Options) -> tuple[OperandUse, OperandUse]:
    """Returns the uses of x by the Fprop and by the Wgrad, without keys and signs."""
    policy, gemms, *_ = options
    rows = OperandUse(-1, policy.fprop.lhs, policy.fprop.rotation, form=form_of(gemms.fprop))
    reads = rows if policy.wgrad.lhs.source == "dequantized" else None
    wgrad = policy.wgrad.lhs, policy.wgrad.rotation
    return rows, OperandUse(-2, *wgrad, form=form_of(gemms.wgrad), reads=reads)


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
    products = _products(x, weights, policies, keys, implementation, layouts, scales)
    if not kernels_take(x, *weights) or not _fuses(products[0], products[1], x.size // d_in, width):
        return None
    if norm is not None and not fuses_norm(products[0], x.size // d_in, d_in):
        x, norm = rms_norm(x, norm), None
    return _run(products, x, norm, weights, keys, scales)


def _products(
    x: jax.Array,
    weights: Sequence[jax.Array],
    policies: Sequence[Policy],
    keys: Sequence[jax.Array | None],
    implementation: Implementation | None,
    layouts: Sequence[Layout | None],
    scales: Sequence[Scales | None],
) -> tuple[Options, ...]:
    """Returns the options of each product, checked."""
    for policy, key, delayed in zip(policies, keys, scales, strict=True):
        check_key(policy, key, delayed)
    return tuple(
        Options(policy, implementations_of(policy, implementation), (x.dtype, x.dtype, w.dtype), None, layout)
        for policy, layout, w in zip(policies, layouts, weights, strict=True)
    )


def _fuses(of_up: Options, of_down: Options, tokens: int, width: int) -> bool:
    """Whether a kernel computes SwiGLU here.

    It does on Hopper, for operands that nothing else reads, and not where a mesh shards the MLP's width: for
    those that its quantizer packs, from products whose factors are powers of two, and for those in FP8 with
    delayed scales, from products with one factor.

    Args:
      tokens, width: the shape of silu(gate) * up.
    """
    if not width or gradients_read_tensors(of_down.policy)[0]:
        return False
    if not all(sums_on_each_device(options.layout) for options in (of_up, of_down)):
        return False
    rows, columns = _uses_of_x(of_down)
    return _kernels_read([(of_up, "fprop")], rows) and prepares_gated(rows, columns, tokens, width)


def _fuses_gradient(of_up: Options, of_down: Options, tokens: int, width: int) -> bool:
    """Whether a kernel computes SwiGLU's gradient too, where one computes SwiGLU; see `_fuses`."""
    policy, gemms, *_ = of_up
    rows = OperandUse(-1, policy.dgrad.lhs, policy.dgrad.rotation, form=form_of(gemms.dgrad))
    columns = OperandUse(-2, policy.wgrad.rhs, policy.wgrad.rotation, form=form_of(gemms.wgrad))
    read = _kernels_read([(of_up, "fprop"), (of_down, "dgrad")], rows)
    return read and prepares_gated(rows, columns, tokens, width)


def _kernels_read(products: Sequence[tuple[Options, Literal["fprop", "dgrad"]]], use: OperandUse) -> bool:
    """Whether the kernels that compute an operand for a use take these GEMMs' products with their factors."""
    for options, name in products:
        gemm = options.policy.gemms[name]
        if gemm.lhs.prescale or gemm.rhs.prescale:
            return False
        implementation = getattr(options.gemms, name)
        # Products of blocks of 16 have the scales of their tensors as factors.
        if implementation == "xla_by_kernel" or (implementation == "fp8_tensor") != (use.form == "fp8"):
            return False
    return True


class FusedOptions(NamedTuple):
    """The static arguments of one product, or of two with SwiGLU between; hashable.

    Attributes:
      eps: of the norm; 0 without one.
      gradient: whether a kernel computes SwiGLU's gradient.
    """

    products: tuple[Options, ...]
    eps: float
    gradient: bool


def _run(
    products: tuple[Options, ...],
    x: jax.Array,
    norm: Norm | None,
    weights: Sequence[jax.Array],
    keys: Sequence[jax.Array | None],
    scales: Sequence[Scales | None],
) -> jax.Array:
    """Returns the last product [..., d_out] of x [..., d_in] after the norm, if there is one."""
    scale, eps = norm or (None, 0.0)
    drawn = tuple(key if p.policy.needs_key else None for p, key in zip(products, keys, strict=True))
    delayed = tuple(s if p.policy.delayed else None for p, s in zip(products, scales, strict=True))
    arrays = jax.tree.leaves((x, weights, scale, drawn))
    x, given, scale = jax.tree.map(lambda t: varying_as(t, *arrays), (x, tuple(weights), scale))
    x_rows = x.reshape(-1, x.shape[-1])
    gradient = len(products) == 2 and _fuses_gradient(*products, len(x_rows), weights[-1].shape[0])
    options = FusedOptions(products, eps, gradient)
    y = _fused_products(options, x_rows, given, scale, drawn, delayed)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _forward(options: FusedOptions, x, weights, scale, keys, scales, *, keep: bool):
    """Returns the last product's value, and what the backward pass reads: x, the first of two, residuals."""
    tensor = x if scale is None else normed(x, Norm(scale, options.eps))
    made, residuals = [], []
    for product, w, key, delayed in zip(options.products, weights, keys, scales, strict=True):
        y, kept = forward(product, tensor, w, key, delayed, keep=keep)
        made.append(y)
        residuals.append(kept.with_weight(w))
        tensor = Gated(y)
    of_norm = None if scale is None else (x, scale)
    return value_of(options.products[-1], made[-1], weights[-1]), (of_norm, made[:-1], residuals)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options: FusedOptions, x, weights, scale, keys, scales):
    return _forward(options, x, weights, scale, keys, scales, keep=False)[0]


def _fused_bwd(options: FusedOptions, kept, dy):
    of_norm, made, residuals = kept
    dx, dw, amax = backward(options.products[-1], residuals[-1], dy)
    d_weights, largest = (dw,), (amax,)
    if made:
        gradient = GatedGradient(made[0], dx)
        given = gradient if options.gradient else gradient.value()
        dx, dw, amax = backward(options.products[0], residuals[0], given)
        d_weights, largest = (dw, *d_weights), (amax, *largest)
    dx, d_scale = varying_as(dx.value(options.products[0].dtypes[1]), dy), None
    if of_norm is not None:
        norm = functools.partial(_rms_norm, eps=options.eps)
        dx, d_scale = jax.vjp(norm, *of_norm)[1](dx)
    return dx, d_weights, d_scale, None, largest


_fused.defvjp(functools.partial(_forward, keep=True), _fused_bwd)


def _rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return rms_norm(x, Norm(scale, eps))


def _fused_batch(options: FusedOptions, operands, axes) -> tuple[jax.Array, int]:
    """Maps the products one by one: each decides by itself whether the mapped axis joins the tokens."""

    def apart(x, weights, scale, keys, scales):
        def product(i, x, w):
            return linear(options.products[i], x, w, keys[i], scales[i])

        x = x if scale is None else _rms_norm(x, scale, options.eps)
        if len(weights) == 2:
            x = recomputed(swiglu)(product(0, x, weights[0]))
        return product(-1, x, weights[-1])

    return jax.vmap(apart, axes)(*operands), 0


_fused_products = as_primitive("mxjax_fused_products", _fused, _fused_batch)
