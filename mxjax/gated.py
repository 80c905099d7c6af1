"""SwiGLU's result and its gradient as operands of a GEMM that are computed where they are quantized.

`mxjax.prepare` passes them to a kernel that reads the products they are made of; nothing stores their values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mxjax.product import Product


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
