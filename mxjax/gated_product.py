"""`fused_mlp`: a gated MLP, with SwiGLU and the norm before it computed where they are quantized.

Neither silu(gate) * up nor the gradient of the first product is then stored: a kernel makes them from the
products that they depend on.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jaxtyping import Array, Float

from mxjax.arguments import check_arrays
from mxjax.batching import product_of
from mxjax.dot import check_key
from mxjax.estimators import gradients_read_tensors
from mxjax.gated import Gated, GatedGradient, swiglu
from mxjax.gemm_input import GemmInput
from mxjax.implementations import How, Implementation, implementations_of
from mxjax.matmul import Options, backward, forward, value_of
from mxjax.normed import Norm, check_norm, normed, rms_norm
from mxjax.normed_product import fuses_norm, kernels_take, norm_gradients
from mxjax.policy import Policy
from mxjax.prepare import prepares_gated
from mxjax.primitive import as_primitive
from mxjax.remat import keep_products
from mxjax.weight_layout import Layout, sums_on_each_device, varying_as

Use = tuple[How, GemmInput]


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
) -> Float[Array, "*batch d_out"] | None:
    """Returns swiglu(x @ gate_up) @ down in x's dtype, or None where no kernel computes SwiGLU.

    It returns what two calls of `mxjax.dot` with `mxjax.gated.swiglu` between do, except that SwiGLU's values
    and the norm's may differ by a unit in the last place of bfloat16 before they are quantized, where a
    gradient is taken.
    A gradient that overflows between in XLA's order of products, or is subnormal, may be finite or zero here.

    Args:
      x: activations; all but bfloat16 return None.
      weights: gate_up, which has the gate's columns first, and down.
      policies, keys, layouts: of both products; see `mxjax.dot`.
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
    for policy, key in zip(policies, keys, strict=True):
        check_key(policy, key)
    up, down = (
        Options(
            policy,
            implementations_of(policy, implementation)._replace(layout=layout),
            (x.dtype, x.dtype, w.dtype),
        )
        for policy, layout, w in zip(policies, layouts, weights, strict=True)
    )
    if not kernels_take(x, *weights) or not _fuses(up, down, x.size // d_in, width):
        return None
    if norm is not None and not fuses_norm(up, x.size // d_in, d_in):
        x, norm = rms_norm(x, norm), None
    scale, eps = norm or (None, 0.0)
    drawn = tuple(key if policy.needs_key else None for policy, key in zip(policies, keys, strict=True))
    arrays = jax.tree.leaves((x, weights, scale, drawn))
    x, weights, scale = jax.tree.map(lambda t: varying_as(t, *arrays), (x, tuple(weights), scale))
    y = _gated_product(GatedOptions(up, down, eps), x.reshape(-1, d_in), weights, scale, drawn)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _fuses(of_up: Options, of_down: Options, tokens: int, width: int) -> bool:
    """Whether kernels compute SwiGLU here.

    They do on Hopper, for operands that its quantizer packs and nothing else reads, from products without
    the factor of a prescale, and not where a mesh shards the MLP's width.

    Args:
      tokens, width: the shape of silu(gate) * up.
    """
    (up, up_gemms, *_), (down, down_gemms, *_) = of_up, of_down
    if not width or gradients_read_tensors(down)[0] or down.wgrad.lhs.source != "original":
        return False
    if any(operand.prescale for gemm in (up.fprop, down.dgrad) for operand in (gemm.lhs, gemm.rhs)):
        return False
    if not all(sums_on_each_device(gemms.layout) for gemms in (up_gemms, down_gemms)):
        return False
    result: tuple[Use, Use] = (
        (down_gemms.fprop, GemmInput(-1, down.fprop.lhs, down.fprop.rotation)),
        (down_gemms.wgrad, GemmInput(-2, down.wgrad.lhs, down.wgrad.rotation)),
    )
    gradient: tuple[Use, Use] = (
        (up_gemms.dgrad, GemmInput(-1, up.dgrad.lhs, up.dgrad.rotation)),
        (up_gemms.wgrad, GemmInput(-2, up.wgrad.rhs, up.wgrad.rotation)),
    )
    return all(prepares_gated(*uses, tokens, width) for uses in (result, gradient))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_matmuls(options: GatedOptions, x, weights, scale, keys):
    tensor = x if scale is None else normed(x, Norm(scale, options.eps))
    y, _ = forward(options.up, tensor, weights[0], keys[0], keep=False)
    y, _ = forward(options.down, Gated(y), weights[1], keys[1], keep=False)
    return value_of(options.down, y, weights[1])


def _fwd(options: GatedOptions, x, weights, scale, keys):
    tensor = x if scale is None else normed(x, Norm(scale, options.eps))
    product, of_up = forward(options.up, tensor, weights[0], keys[0], keep=True)
    y, of_down = forward(options.down, Gated(product), weights[1], keys[1], keep=True)
    of_norm = None if scale is None else (x, scale)
    return value_of(options.down, y, weights[1]), (of_norm, product, of_up, of_down)


def _bwd(options: GatedOptions, residuals, dy):
    of_norm, product, of_up, of_down = residuals
    gradient, d_down = backward(options.down, of_down, dy)
    dx, d_up = backward(options.up, of_up, GatedGradient(product, gradient))
    dx, d_scale = varying_as(dx.value(options.up.dtypes[1]), dy), None
    if of_norm is not None:
        x, scale = of_norm
        dx, d_scale = norm_gradients(dx, x, scale, options.eps)
    return dx, (d_up, d_down), d_scale, None


_gated_matmuls.defvjp(_fwd, _bwd)


def _batch(options: GatedOptions, operands, axes) -> tuple[jax.Array, int]:
    """Maps the products one by one: each decides by itself whether the mapped axis joins the tokens."""

    def apart(x, weights, scale, keys):
        x = x if scale is None else rms_norm(x, Norm(scale, options.eps))

        def gated(x, w):
            return swiglu(product_of(options.up, x, w, keys[0]))

        return product_of(options.down, keep_products(gated)(x, weights[0]), weights[1], keys[1])

    return jax.vmap(apart, axes)(*operands), 0


_gated_product = as_primitive("mxjax_gated_product", _gated_matmuls, _batch)
