"""Operands split in two: a part that is quantized, and a rest that is multiplied apart in float32.

On GPUs by `mxjax.operands.product.contract_by_halves`.

| split | the rest | its product |
| --- | --- | --- |
| none | nothing | |
| mean | the mean over the tokens, one row | rank one |
| mean of n tokens | that of each n neighbouring tokens, in bfloat16 | rank tokens / n |
| outliers | what exceeds the quantiles of each token | sparse; here as a dense product |
| clip | what exceeds them, dropped | none |

Only tensors that have tokens are split: x and dy, whose tokens are the axis before the last. One token is its
own mean: then nothing is left to quantize, and the product is that of float32.
Sources: mean, arXiv 2603.10444; outliers, arXiv 2501.17116, section 3.2; clip, Azure/MS-AMP.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from mxjax.numerics.blocks import pad
from mxjax.numerics.operand import Operand
from mxjax.operands.product import contract, contract_float32, contract_often_short
from mxjax.policy.policy import Gemm


class Quantiles(NamedTuple):
    """The elements of each token past which others are outliers."""

    lower: Float[Array, "*batch m 1"]
    upper: Float[Array, "*batch m 1"]


class Split(NamedTuple):
    """A tensor as the sum of two.

    Attributes:
      part: the tensor to quantize.
      rest: the tensor to multiply apart, with one row if it is the same for all tokens, or for each
        `split_tokens` of them; None if nothing is.
    """

    part: Float[Array, "*batch m k"]
    rest: Float32[Array, "*batch rows k"] | None


def split(x: Float[Array, "*batch m k"], operand: Operand, bounds: Quantiles | None = None) -> Split:
    """Returns x split as the operand says; their sum is x up to float32's rounding, but for `clip`.

    Args:
      bounds: x's quantiles, if a kernel found them.
    """
    match operand.split:
        case "none":
            return Split(x, None)
        case "mean":
            x = x.astype(jnp.float32)
            if operand.split_tokens is not None:
                mean = _summed(x, operand.split_tokens, -2) / operand.split_tokens
                mean = lax.reduce_precision(mean, exponent_bits=8, mantissa_bits=7)  # bfloat16
                return Split(x - whole_rest(mean, x.shape[-2], operand), mean)
            mean = jnp.sum(x, axis=-2, keepdims=True) / max(x.shape[-2], 1)
            return Split(x - mean, mean)
        case "outliers" | "clip":
            bounds = quantiles(x, operand.quantile) if bounds is None and x.size else bounds
            part = (jnp.clip(x, *bounds) if bounds is not None else x).astype(jnp.float32)
            return Split(part, x.astype(jnp.float32) - part if operand.split == "outliers" else None)


def multiplies_apart(gemm: Gemm) -> bool:
    """Whether `product_apart` adds anything."""
    return any(operand.split in ("mean", "outliers") for operand in (gemm.lhs, gemm.rhs))


def adds_one_row(gemm: Gemm) -> bool:
    """Whether `product_apart` is of one row for all tokens, or of rank one."""
    splits = {(operand.split, operand.split_tokens) for operand in (gemm.lhs, gemm.rhs)}
    return multiplies_apart(gemm) and splits <= {("none", None), ("mean", None)}


def product_apart(
    lhs: Float[Array, "..."],
    lhs_axis: int,
    rhs: Float[Array, "..."],
    rhs_axis: int,
    gemm: Gemm,
    bounds: tuple[Quantiles | None, Quantiles | None] = (None, None),
) -> Float32[Array, "..."]:
    """Returns `rest(lhs) @ rhs + part(lhs) @ rest(rhs)` in float32, contracting the axes given.

    The product of the quantized parts lacks this. It has one row if it is the same for all tokens. The second
    term is left out where the tokens of `part(lhs)` add up to zero but for float32's rounding.
    """
    left, right = split(lhs, gemm.lhs, bounds[0]), split(rhs, gemm.rhs, bounds[1])
    terms = []
    if gemm.lhs.split == "outliers" and bounds[0] is not None and lhs.shape[-2] > 1:

        def outliers(x, *bounds) -> Any:
            return split(x, gemm.lhs, Quantiles(*bounds)).rest

        rhs32 = rhs.astype(jnp.float32)
        terms.append(contract_often_short(outliers, (lhs, *bounds[0]), lhs_axis, rhs32, rhs_axis))
    elif left.rest is not None:
        y = _contract(left.rest, lhs_axis, rhs, rhs_axis, gemm.lhs)
        terms.append(whole_rest(y, lhs.shape[-2], gemm.lhs) if lhs_axis == -1 else y)
    cancels = gemm.lhs.split == "mean" and gemm.lhs.split_tokens is None and lhs_axis == -2
    if right.rest is not None and not (cancels and right.rest.shape[-2] == 1):
        terms.append(_contract(left.part, lhs_axis, right.rest, rhs_axis, gemm.rhs))
    return sum(terms[1:], terms[0])


def whole_rest(rest: Float32[Array, "*batch rows k"], tokens: int, operand: Operand) -> Float32[Array, "..."]:
    """Returns a rest with a row for each token; one row for all tokens stays one."""
    if operand.split_tokens is None or rest.shape[-2] == 1:
        return rest
    return jnp.repeat(rest, operand.split_tokens, axis=-2)[..., :tokens, :]


def _contract(lhs, lhs_axis: int, rhs, rhs_axis: int, operand: Operand) -> Float32[Array, "..."]:
    """Contracts two axes; one row for several tokens is multiplied by the sum of the other's.

    Args:
      operand: the one that was split.
    """
    lhs, rhs = lhs.astype(jnp.float32), rhs.astype(jnp.float32)
    left, right = lhs.shape[lhs_axis], rhs.shape[rhs_axis]
    if 1 in (left, right):
        columns = jnp.sum(lhs, axis=lhs_axis)[..., :, None]
        return columns * jnp.sum(rhs, axis=rhs_axis)[..., None, :]
    if 1 in (lhs.shape[-3 - lhs_axis], rhs.shape[-3 - rhs_axis]):  # reads a matrix once, and copies no parts
        return contract(lhs, lhs_axis, rhs, rhs_axis, lax.Precision.HIGHEST)
    if left < right:
        rhs = _summed(rhs, operand.split_tokens, rhs_axis)
    elif right < left:
        lhs = _summed(lhs, operand.split_tokens, lhs_axis)
    if operand.split == "mean":
        lhs, rhs = map(lax.optimization_barrier, (lhs, rhs))  # computed once, though read several times
    return contract_float32(lhs, lhs_axis, rhs, rhs_axis)


def _summed(x: Float32[Array, "..."], n: int | None, axis: int) -> Float32[Array, "..."]:
    """Returns the sums of each n neighbours along an axis, the last of as many as there are."""
    assert n is not None
    x = pad(x, axis % x.ndim, n)
    axis = axis % x.ndim
    runs = x.reshape(*x.shape[:axis], x.shape[axis] // n, n, *x.shape[axis + 1 :])
    return jnp.sum(runs, axis=axis + 1)


def quantiles(x: Float[Array, "*batch m k"], quantile: float) -> Quantiles:
    """Returns the elements at the lower and the upper quantile of each token, without interpolation."""
    ranks = jnp.array(quantile_ranks(x.shape[-1], quantile))[:, *[None] * x.ndim]
    return Quantiles(*_order_statistics(x, ranks))


def quantile_ranks(n: int, quantile: float) -> tuple[int, int]:
    """Returns the ranks, counted from 0, of the quantiles of n elements."""
    return int((1 - quantile) * n), min(int(quantile * n), n - 1)


def _order_statistics(
    x: Float[Array, "*batch m k"], ranks: Int32[Array, " n *ones"]
) -> Float[Array, "n *batch m 1"]:
    """Returns the elements at these ranks, counted from 0, along the last axis; NaN comes last.

    Two bits at a time, each by counts over x, which is faster than sorting on GPUs and CPUs.
    """
    width = 8 * x.dtype.itemsize
    unsigned = jnp.dtype(f"uint{width}")
    sign = unsigned.type(1 << (width - 1))
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), unsigned)
    ordered = jnp.where(bits >= sign, ~bits, bits | sign)  # unsigned integers in the order of x

    def two_bits(i, found):
        bit = sign >> (2 * i + 1).astype(unsigned)  # the lower of the two
        larger = [found + unsigned.type(n) * bit for n in (1, 2, 3)]
        below = [jnp.sum(ordered[None] < t, axis=-1, keepdims=True, dtype=jnp.int32) for t in larger]
        steps = sum((count <= ranks).astype(unsigned) for count in below)
        return found + steps * bit

    first = ordered[..., :1]
    nothing = jnp.stack([first ^ first] * len(ranks))  # under shard_map this varies as the loop's results do
    found = lax.fori_loop(0, width // 2, two_bits, nothing)
    return lax.bitcast_convert_type(jnp.where(found >= sign, found ^ sign, ~found), x.dtype)
