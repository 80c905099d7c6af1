"""`normed_dot`: RMSNorm and the product after it, with the norm computed where its result is quantized."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mxjax.arguments import check_arrays
from mxjax.batching import product_of
from mxjax.dot import check_key
from mxjax.estimators import gradients_read_tensors
from mxjax.gemm_input import GemmInput
from mxjax.implementations import Implementation, implementations_of
from mxjax.matmul import Options, backward, forward, value_of
from mxjax.normed import Norm, check_norm, normed, rms_norm
from mxjax.policy import Policy
from mxjax.prepare import prepares_computed
from mxjax.primitive import as_primitive
from mxjax.weight_layout import Layout, varying_as


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
) -> Float[Array, "*batch d_out"] | None:
    """Returns rms_norm(x, norm) @ w in x's dtype, or None where no kernel computes the norm.

    It returns what `mxjax.dot` of `mxjax.normed.rms_norm` does, except that the norm's values may differ by a
    unit in the last place of bfloat16 before they are quantized, where a gradient is taken.

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
    check_key(policy, key)
    gemms = implementations_of(policy, implementation)._replace(layout=layout)
    options = Options(policy, gemms, (x.dtype, x.dtype, w.dtype))
    if not kernels_take(x, w) or not fuses_norm(options, x.size // d_in, d_in):
        return None
    key = key if policy.needs_key else None
    arrays = jax.tree.leaves((x, w, norm.scale, key))
    x, w, scale = (varying_as(t, *arrays) for t in (x, w, norm.scale))
    y = _normed_product(NormedOptions(options, norm.eps), x.reshape(-1, d_in), w, scale, key)
    return y.reshape(*x.shape[:-1], d_out)


def kernels_take(x: jax.Array, *weights: jax.Array) -> bool:
    """Whether kernels compute operands from these arrays: in bfloat16, not empty, not on Explicit meshes."""
    explicit = any(jax.typeof(t).sharding.mesh.explicit_axes for t in (x, *weights))
    return not explicit and x.dtype == jnp.bfloat16 and x.size > 0


def fuses_norm(options: Options, tokens: int, width: int) -> bool:
    """Whether a kernel computes the norm before a product here.

    It does on Hopper, for operands that its quantizer packs and nothing else reads.

    Args:
      tokens, width: the shape of the norm's result.
    """
    policy, gemms, *_ = options
    if gradients_read_tensors(policy)[0] or policy.wgrad.lhs.source != "original":
        return False
    rows = gemms.fprop, GemmInput(-1, policy.fprop.lhs, policy.fprop.rotation)
    columns = gemms.wgrad, GemmInput(-2, policy.wgrad.lhs, policy.wgrad.rotation)
    return prepares_computed(rows, columns, tokens, width)


def norm_gradients(dy: jax.Array, x: jax.Array, scale: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of x and of the scale from that of the norm's result."""
    dx, d_scale = jax.vjp(lambda x, scale: rms_norm(x, Norm(scale, eps)), x, scale)[1](dy)
    return dx, d_scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed_matmul(options: NormedOptions, x, w, scale, key):
    y, _ = forward(options.product, normed(x, Norm(scale, options.eps)), w, key, keep=False)
    return value_of(options.product, y, w)


def _fwd(options: NormedOptions, x, w, scale, key):
    y, residuals = forward(options.product, normed(x, Norm(scale, options.eps)), w, key, keep=True)
    return value_of(options.product, y, w), (x, scale, residuals)


def _bwd(options: NormedOptions, kept, dy):
    x, scale, residuals = kept
    dx, dw = backward(options.product, residuals, dy)
    dx = varying_as(dx.value(options.product.dtypes[1]), dy)
    dx, d_scale = norm_gradients(dx, x, scale, options.eps)
    return dx, dw, d_scale, None


_normed_matmul.defvjp(_fwd, _bwd)


def _batch(options: NormedOptions, operands, axes) -> tuple[jax.Array, int]:
    """Maps the product: it decides by itself whether the mapped axis joins the tokens."""

    def apart(x, w, scale, key):
        return product_of(options.product, rms_norm(x, Norm(scale, options.eps)), w, key)

    return jax.vmap(apart, axes)(*operands), 0


_normed_product = as_primitive("mxjax_normed_product", _normed_matmul, _batch)
