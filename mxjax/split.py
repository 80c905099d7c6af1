"""Operands split in two: a part that is quantized, and a rest that is multiplied apart in float32.

| split | the rest | its product |
| --- | --- | --- |
| none | nothing | |
| mean | the mean over the tokens, one row | rank one |
| outliers | what exceeds the quantiles of each token | sparse; here as a dense product |
| clip | what exceeds them, dropped | none |

Only tensors that have tokens are split: x and dy, whose tokens are the axis before the last. One token is its
own mean: then nothing is left to quantize, and the product is that of float32.
Sources: mean, arXiv 2603.10444; outliers, arXiv 2501.17116, section 3.2; clip, Azure/MS-AMP.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from mxjax.operand import Operand
from mxjax.policy import Gemm
from mxjax.product import contract


class Split(NamedTuple):
    """A tensor as the sum of two.

    Attributes:
      part: the tensor to quantize.
      rest: the tensor to multiply apart, with one row if it is the same for all tokens; None if nothing is.
    """

    part: Float[Array, "*batch m k"]
    rest: Float32[Array, "*batch rows k"] | None


def split(x: Float[Array, "*batch m k"], operand: Operand) -> Split:
    """Returns x split as the operand says; their sum is x up to float32's rounding, but for `clip`."""
    match operand.split:
        case "none":
            return Split(x, None)
        case "mean":
            x = x.astype(jnp.float32)
            mean = jnp.sum(x, axis=-2, keepdims=True) / max(x.shape[-2], 1)
            return Split(x - mean, mean)
        case "outliers" | "clip":
            x = x.astype(jnp.float32)
            part = jnp.clip(x, *_quantiles(x, operand.quantile)) if x.size else x
            return Split(part, x - part if operand.split == "outliers" else None)


def multiplies_apart(gemm: Gemm) -> bool:
    """Whether `product_apart` adds anything."""
    return any(operand.split in ("mean", "outliers") for operand in (gemm.lhs, gemm.rhs))


def product_apart(
    lhs: Float[Array, "..."], lhs_axis: int, rhs: Float[Array, "..."], rhs_axis: int, gemm: Gemm
) -> Float32[Array, "..."]:
    """Returns `rest(lhs) @ rhs + part(lhs) @ rest(rhs)` in float32, contracting the axes given.

    The product of the quantized parts lacks this. It has one row if it is the same for all tokens.
    """
    left, right = split(lhs, gemm.lhs), split(rhs, gemm.rhs)
    terms = []
    if left.rest is not None:
        terms.append(_contract(left.rest, lhs_axis, rhs, rhs_axis))
    if right.rest is not None:
        terms.append(_contract(left.part, lhs_axis, right.rest, rhs_axis))
    return sum(terms[1:], terms[0])


def _contract(lhs, lhs_axis: int, rhs, rhs_axis: int) -> Float32[Array, "..."]:
    """Contracts two axes; one row for all tokens is multiplied by the sum of the other's."""
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    if lhs.shape[lhs_axis] == 1:
        rhs = jnp.sum(rhs, axis=rhs_axis, keepdims=True)
    elif rhs.shape[rhs_axis] == 1:
        lhs = jnp.sum(lhs, axis=lhs_axis, keepdims=True)
    return contract(lhs, lhs_axis, rhs, rhs_axis, lax.Precision.HIGHEST)


def _quantiles(x: Float32[Array, "*batch m k"], quantile: float) -> tuple[Float32[Array, "*batch m 1"], ...]:
    """Returns the values at the lower and the upper quantile of each token, without interpolation."""
    ordered = jnp.sort(x, axis=-1)
    n = x.shape[-1]
    lower, upper = int((1 - quantile) * n), min(int(quantile * n), n - 1)
    return tuple(lax.slice_in_dim(ordered, i, i + 1, axis=-1) for i in (lower, upper))
