"""Operands split in two: a part that is quantized, and a rest that is multiplied apart in float32.

On GPUs by `mxjax.operands.product.contract_by_halves`.

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
from jaxtyping import Array, Float, Float32, Int32

from mxjax.numerics.operand import Operand
from mxjax.operands.product import contract_float32
from mxjax.policy.policy import Gemm


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
            part = (jnp.clip(x, *_quantiles(x, operand.quantile)) if x.size else x).astype(jnp.float32)
            return Split(part, x.astype(jnp.float32) - part if operand.split == "outliers" else None)


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
    return contract_float32(lhs, lhs_axis, rhs, rhs_axis)


def _quantiles(x: Float[Array, "*batch m k"], quantile: float) -> tuple[Float[Array, "*batch m 1"], ...]:
    """Returns the values at the lower and the upper quantile of each token, without interpolation."""
    n = x.shape[-1]
    lower, upper = int((1 - quantile) * n), min(int(quantile * n), n - 1)
    ranks = jnp.array([lower, upper])[:, *[None] * x.ndim]
    return tuple(_order_statistics(x, ranks))


def _order_statistics(
    x: Float[Array, "*batch m k"], ranks: Int32[Array, " n *ones"]
) -> Float[Array, "n *batch m 1"]:
    """Returns the elements at these ranks, counted from 0, along the last axis; NaN comes last.

    Bit by bit, each a count over x, which is faster than sorting on GPUs and CPUs.
    """
    width = 8 * x.dtype.itemsize
    unsigned = jnp.dtype(f"uint{width}")
    sign = unsigned.type(1 << (width - 1))
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), unsigned)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)  # unsigned integers in the order of x

    def one_bit(i, found):
        larger = found | (sign >> i.astype(unsigned))
        below = jnp.sum(ordered[None] < larger, axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.where(below <= ranks, larger, found)

    first = ordered[..., :1]
    nothing = jnp.stack([first ^ first] * len(ranks))  # under shard_map this varies as the loop's results do
    found = lax.fori_loop(0, width, one_bit, nothing)
    return lax.bitcast_convert_type(jnp.where(found >= sign, found ^ sign, ~found), x.dtype)
