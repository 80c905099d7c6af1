"""`einsum` of activations and a weight. The operands' places say which is which, not the result's letters."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from mxjax.policy.policy import Policy
from mxjax.products.dot import dot_general
from mxjax.products.implementations import Implementation
from mxjax.runtime.arguments import check_arrays

Axes = list[str]
"""The name of each axis: a letter, or ".0" for the last axis of an ellipsis, ".1" for the one before."""


def einsum(
    spec: str,
    x: Shaped[Array | np.ndarray, "..."],
    w: Shaped[Array | np.ndarray, "..."],
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """Returns `jnp.einsum(spec, x, w)`, with x and w quantized by a policy as in `dot`.

    Letters of both operands that the result keeps are batch axes (experts, heads): each of their matrices is
    quantized for itself. Letters of both that it drops are contracted, quantized as one axis in x's order.
    Wgrad contracts the letters that x alone has, the tokens, in x's order, whatever the result's order is.

    Do not pass `make_dot_general(...)` to `jnp.einsum(_dot_general=...)`: it swaps operands as the result's
    letters suggest, and the policy's Wgrad would run on dx.

    Args:
      spec: two operands, such as "btd,dhk->bthk" or "...d,df->...f". Without "->" the result has the letters
        that occur once, in alphabetical order. Letters that one operand alone has and the result lacks are
        summed before the product.
      x, w: activations and weight. Axes with the same letter have the same size; those of an ellipsis
        broadcast from 1.
      Others: see `dot` and `jax.lax.dot_general`.
    Raises:
      ValueError: a spec that does not fit the operands, or repeats a letter within one. Others as in `dot`.
      TypeError: spec is no string.
    """
    check_arrays("einsum", x=x, w=w)
    if not isinstance(spec, str):
        raise TypeError(f"einsum needs a spec such as 'btd,df->btf', got {spec!r:.60}")
    x_axes, w_axes, result = _parse(spec, x.ndim, w.ndim)
    x_ones, w_ones = _broadcast(
        spec, dict(zip(x_axes, x.shape, strict=True)), dict(zip(w_axes, w.shape, strict=True))
    )
    x, x_axes = _sum_out(x, x_axes, {*w_axes, *result} - x_ones)
    w, w_axes = _sum_out(w, w_axes, {*x_axes, *result} - w_ones)
    shared = [a for a in x_axes if a in w_axes]
    batch, contracted = [a for a in shared if a in result], [a for a in shared if a not in result]

    def places(names: Axes) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(x_axes.index(a) for a in names), tuple(w_axes.index(a) for a in names)

    y = dot_general(
        x,
        w,
        (places(contracted), places(batch)),
        precision,
        preferred_element_type,
        policy=policy,
        key=key,
        implementation=implementation,
    )
    made = batch + [a for a in x_axes if a not in shared] + [a for a in w_axes if a not in shared]
    return y.transpose([made.index(a) for a in result])


def _parse(spec: str, x_ndim: int, w_ndim: int) -> tuple[Axes, Axes, Axes]:
    """Returns the names of the axes of x, of w and of the result."""
    inputs, arrow, output = spec.replace(" ", "").partition("->")
    if inputs.count(",") != 1:
        raise ValueError(f"einsum needs a spec of two operands, such as 'btd,df->btf', got {spec!r}")
    x_axes, w_axes = (
        _axes(spec, letters, ndim) for letters, ndim in zip(inputs.split(","), (x_ndim, w_ndim), strict=True)
    )
    ellipsis = max(([a for a in axes if a[0] == "."] for axes in (x_axes, w_axes)), key=len)
    if not arrow:
        return x_axes, w_axes, ellipsis + sorted(a for a in {*x_axes} ^ {*w_axes} if a[0] != ".")
    if ellipsis and "..." not in output:
        raise ValueError(f"einsum got {spec!r}, whose result lacks the ellipsis of an operand")
    result = _axes(spec, output, len(output.replace("...", "")) + len(ellipsis))
    if not {*result} <= {*x_axes, *w_axes}:
        raise ValueError(f"einsum got {spec!r}, whose result has letters that no operand has")
    return x_axes, w_axes, result


def _axes(spec: str, letters: str, ndim: int) -> Axes:
    """Returns the names of an operand's `ndim` axes."""
    before, dots, after = letters.partition("...")
    named = [*before, *after]
    if not all(a.isalpha() for a in named):
        raise ValueError(f"einsum needs letters and '...', got {spec!r}")
    if len(set(named)) < len(named):
        raise ValueError(f"einsum needs letters that an operand has once, got {letters!r} in {spec!r}")
    rest = ndim - len(named)
    if rest < 0 or (rest and not dots):
        raise ValueError(f"einsum got {ndim} axes for {letters!r} in {spec!r}")
    return [*before, *(f".{i}" for i in reversed(range(rest))), *after]


def _broadcast(spec: str, x_sizes: dict[str, int], w_sizes: dict[str, int]) -> tuple[set[str], set[str]]:
    """Returns the axes of the ellipsis that are 1 long in x alone, and in w alone.

    Raises:
      ValueError: other axes of different sizes.
    """
    differ = {a for a in x_sizes.keys() & w_sizes.keys() if x_sizes[a] != w_sizes[a]}
    ones = [{a for a in differ if a[0] == "." and sizes[a] == 1} for sizes in (x_sizes, w_sizes)]
    for a in differ - ones[0] - ones[1]:
        name = "of '...'" if a[0] == "." else repr(a)
        raise ValueError(f"einsum {spec!r}: axis {name} is {x_sizes[a]} long in x and {w_sizes[a]} in w")
    return ones[0], ones[1]


def _sum_out(x: Array | np.ndarray, axes: Axes, kept: set[str]) -> tuple[jax.Array, Axes]:
    """Returns x summed over the axes that are not kept, and its remaining axes."""
    lone = tuple(i for i, a in enumerate(axes) if a not in kept)
    return jnp.sum(jnp.asarray(x), lone) if lone else jnp.asarray(x), [a for a in axes if a in kept]
