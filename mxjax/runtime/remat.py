"""Rematerialization: which values a block keeps for its backward pass and which it recomputes.

The modes, from most to least memory; `rematerialize` wraps a block in one:

  none  everything that the backward pass reads
  dots  the results of the matrix products and of attention; norms, activations, rotations and
        quantization are recomputed
  fp4   the packed operands of the MXFP4 products, 17/32 byte for each element of activations and weights,
        and attention's result where the backward pass reads it; the products are recomputed. Where the
        gradient reads x and w themselves, as in `quartet`, only the Fprop's operands can be kept, if they
        are packed: those of `quartet` are not
  full  the block's input

Stochastic rounding is a function of the key, so every mode draws the same bits. Results differ only because
XLA fuses recomputations differently.

Tags identify values: models use `tag_attention`, `mxjax.dot` uses `tag_product` and `tag_operand`.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Remat = Literal["none", "dots", "fp4", "full"]

_PRODUCT, _ATTENTION, _OPERAND = "mxjax.product", "mxjax.attention", "mxjax.operand"
_KEPT = {"dots": {_PRODUCT, _ATTENTION}, "fp4": {_OPERAND, _ATTENTION}}
# cuDNN's attention is kept with its softmax statistics: its backward pass needs both.
_CUDNN = "dot_product_attention_fwd_wrapper"


def tag_product[T](y: T) -> T:
    """Returns the result of a matrix product (or its arrays), tagged."""
    return checkpoint_name(y, _PRODUCT)


def tag_attention[T](y: T) -> T:
    """Returns the result of attention, tagged. cuDNN's needs no tag: its primitive identifies it."""
    return checkpoint_name(y, _ATTENTION)


def tag_operand[T](packed: T) -> T:
    """Returns a packed operand (or any arrays), tagged."""
    return checkpoint_name(packed, _OPERAND)


def rematerialize(function: Callable, mode: Remat, *, in_loop: bool) -> Callable:
    """Returns the function, rematerialized as `mode` says.

    Args:
      in_loop: whether it is a loop's body, where the compiler cannot undo the recomputation.
    """
    if mode == "none":
        return function
    policy = None if mode == "full" else _policy(frozenset(_KEPT[mode]))
    return jax.checkpoint(function, policy=policy, prevent_cse=not in_loop)


def keep_products[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Returns the function, keeping only tagged values and its arguments for the backward pass."""
    kept = _policy(frozenset().union(*_KEPT.values()))
    return jax.checkpoint(function, policy=kept, prevent_cse=False)


def recomputed(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Returns an elementwise function of gate and up, the halves of a product's columns, whose gradient
    recomputes all from that product.

    Choices that XLA cannot foresee hide the product. Otherwise it would find the recomputation's common
    subexpressions, also those of the two halves, and keep them in float32. A barrier before the product or
    the incoming gradient would keep their own last passes from being fused.
    """

    @jax.custom_vjp
    def call(x):
        return function(x)

    def backward(x, dy):
        never = lax.optimization_barrier(jnp.zeros((), jnp.bool_))
        gate, up = (jax.vjp(function, jnp.where(never, i, x))[1](dy)[0] for i in range(2))
        half = x.shape[-1] // 2
        return (jnp.concatenate([gate[..., :half], up[..., half:]], axis=-1),)

    call.defvjp(lambda x: (function(x), x), backward)
    return call


def _policy(names: frozenset[str]) -> Callable[..., Any]:
    by_name = jax.checkpoint_policies.save_only_these_names(*names)

    def policy(primitive, *avals, **params):
        return primitive.name == _CUDNN or by_name(primitive, *avals, **params)

    return policy
