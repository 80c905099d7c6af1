"""Operands that the quantizer kernel computes itself: the results of RMSNorm and SwiGLU, and SwiGLU's
gradient.

`mxjax.products.prepare` passes a `Computed` to a kernel that reads the tensors it is made of, so that its
values never reach memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from mxjax.operands.product import Product
from mxjax.runtime.arguments import check_arrays


class Normed(NamedTuple):
    """x times a factor for each row, 1 over its root mean square, and a scale for each column.

    Attributes:
      x: [*batch, r, c], before the norm.
      factors: [*batch, r].
      scale: [c].
    """

    x: Float[Array, "*batch r c"]
    factors: Float32[Array, "*batch r"]
    scale: Float32[Array, " c"]

    def value(self) -> Float[Array, "*batch r c"]:
        """Returns the values in x's dtype; the scale is rounded to it first."""
        y = self.x.astype(jnp.float32) * self.factors[..., None]
        return y.astype(self.x.dtype) * jnp.broadcast_to(self.scale, y.shape).astype(self.x.dtype)


class Norm(NamedTuple):
    """An RMSNorm: the scale of each column, and what is added to a row's mean square."""

    scale: Float32[Array, " c"]
    eps: float


def normed(x: Float[Array, "*batch c"], norm: Norm) -> Normed:
    """Returns x after the norm, not yet computed."""
    y = x.astype(jnp.float32)
    return Normed(x, jax.lax.rsqrt(jnp.mean(y * y, axis=-1) + norm.eps), norm.scale)


def rms_norm(x: Float[Array, "*batch c"], norm: Norm) -> Float[Array, "*batch c"]:
    """Returns x after the norm: root-mean-square normalization in float32, in x's dtype.

    Source: arXiv 1910.07467, equation 4.
    """
    return _rms_norm(x, norm.scale, norm.eps)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _rms_norm(x, scale, eps: float):
    """Keeps only x for the backward pass, which recomputes the float32 tensors quickly."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    # Broadcast before the cast, so that the scale's gradient is summed in float32, across devices too.
    return y.astype(x.dtype) * jnp.broadcast_to(scale, x.shape).astype(x.dtype)


def check_norm(name: str, x: Float[Array, "*batch c"], norm: Norm) -> None:
    """Raises ValueError unless the scale is of x's last axis, TypeError unless it is an array."""
    check_arrays(name, x=x, scale=norm.scale)
    if norm.scale.shape != x.shape[-1:]:
        raise ValueError(f"{name} needs a scale {x.shape[-1:]} for x {x.shape}, got {norm.scale.shape}")


class Gated(NamedTuple):
    """silu(gate) * up, [*batch, r, c], of a product [*batch, r, 2 c] that holds gate, then up."""

    product: Product

    def value(self) -> Float[Array, "*batch r c"]:
        """Returns the values in the product's dtype."""
        return swiglu(self.product.value(self.product.raw.dtype))


class GatedGradient(NamedTuple):
    """The gradient of a product [*batch, r, 2 c] from that of its silu(gate) * up [*batch, r, c]."""

    product: Product
    gradient: Product

    def value(self) -> Float[Array, "*batch r two_c"]:
        """Returns the values in the product's dtype."""
        dtype = self.product.raw.dtype
        [values] = jax.vjp(swiglu, self.product.value(dtype))[1](self.gradient.value(dtype))
        return values


def swiglu(gate_up: Float[Array, "*batch two_c"]) -> Float[Array, "*batch c"]:
    """Returns silu(gate) * up, computed in float32 and rounded to the dtype of its argument, [gate, up].

    Source: arXiv 2002.05202, equation 6, without biases.
    """
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate_up.dtype)


Computed = Normed | Gated | GatedGradient
