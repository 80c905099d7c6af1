"""`mixed_dot`: a product in which some input channels, the outliers, have a policy of their own.

A channel is an element of d_in. Each set of channels is multiplied as in `dot`, and the products are added.
TetraJet-v2 keeps the channels with the largest activations in MXFP8 and the others in NVFP4.

Source: arXiv 2510.27527, and olmo2-training/olmo/quantization_real/linear_mix.py of
github.com/thu-ml/TetraJet-v2-NVFP4Training at ca5953f. Lines 134-252 are the three GEMMs, 61-65
`outlier_count`, 95-104 `channels_by_norm`. There y is the sum of both products, and each set has its own
rows of dw. dx is one product, so both policies there have the same Dgrad; here it is one for each set.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from mxjax.arguments import check_arrays
from mxjax.dot import AnyArray, check_floating, dot, result_dtype
from mxjax.implementations import Implementation
from mxjax.keys import fold
from mxjax.policy import Policy
from mxjax.recipes import as_policy
from mxjax.weight_layout import Layout

_OUTLIERS = 3  # in the key; 0 to 2 are the GEMMs of the ordinary channels


class Channels(NamedTuple):
    """The input channels of a layer in two sets, which together hold each channel once.

    Their order is that in which channels are quantized: neighbours share scales.

    Attributes:
      ordinary: channels in the layer's policy.
      outliers: channels in the outliers' policy.
    """

    ordinary: Int[AnyArray, "*layers ordinary"]
    outliers: Int[AnyArray, "*layers outliers"]


def mixed_dot(
    x: Shaped[AnyArray, "*batch d_in"],
    w: Shaped[AnyArray, "..."],
    channels: Channels,
    *,
    policy: Policy | str,
    outlier_policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    preferred_element_type: DTypeLike | None = None,
    layout: Layout | None = None,
) -> Float[Array, "*batch _"]:
    """Returns `x @ w` with the outlier channels in a policy of their own, forward and backward.

    Equivalent, with the result's dtype for each of the products and their sum, to

        a, b = channels
        y = dot(x[..., a], w[a], policy=policy, key=key)
        y += dot(x[..., b], w[b], policy=outlier_policy, key=fold_in(key, 3))

    and to one `dot`, with `key` itself, if one of the sets is empty.

    Args:
      channels: the two sets of channels; their sizes are static, their values may be traced.
      policy: policy of the ordinary channels.
      outlier_policy: policy of the outliers.
      Others: see `dot`.

    dy is quantized for each of the policies, with independent random bits.
    Sharding: meshes with Auto axes. x's and w's shards of d_in are exchanged if a mesh axis shards it.
    Raises:
      ValueError: shapes that do not match, or channels, where not traced, that are not each channel once.
      TypeError: channels are not integers, or x or w is not an array. Others: see `dot`.
    """
    policy, outlier_policy = as_policy(policy), as_policy(outlier_policy)
    check_arrays("mixed_dot", x=x, w=w)
    check_floating(x, w, preferred_element_type)
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"mixed_dot needs x [..., d_in] and w [d_in, d_out], got {x.shape} and {w.shape}")
    _check_channels(channels, w.shape[0])
    x, w = jnp.asarray(x), jnp.asarray(w)
    dtype = result_dtype(x, w) if preferred_element_type is None else preferred_element_type

    def product(channels, policy, key):
        x_part, w_part = _take(x, channels, -1), _take(w, channels, 0)
        options = {"implementation": implementation, "preferred_element_type": dtype, "layout": layout}
        return dot(x_part, w_part, policy=policy, key=key, **options)

    if channels.outliers.size == 0:
        return product(channels.ordinary, policy, key)
    if channels.ordinary.size == 0:
        return product(channels.outliers, outlier_policy, key)
    y = product(channels.ordinary, policy, key)
    return y + product(channels.outliers, outlier_policy, fold(key, _OUTLIERS))


def channels_by_norm(norms: Float[Array, "*layers d_in"], outliers: int) -> Channels:
    """Returns the channels with the largest norms as outliers; both sets begin with their largest.

    Args:
      norms: a norm of each channel; equal ones keep their order, NaN comes last.
      outliers: number of outliers, from 0 to d_in.
    Raises:
      ValueError: there are not so many channels.
    """
    if not 0 <= outliers <= norms.shape[-1]:
        raise ValueError(f"channels_by_norm needs 0 to {norms.shape[-1]} outliers, got {outliers}")
    order = jnp.argsort(-norms, axis=-1, stable=True).astype(jnp.int32)
    return Channels(order[..., outliers:], order[..., :outliers])


def outlier_count(d_in: int, fraction: float, multiple: int = 128) -> int:
    """Returns the number of outliers: the fraction of d_in, rounded down and then up to a multiple.

    At most the largest multiple that d_in holds. The authors' code rounds to 128 so that no GEMM is padded;
    by its comment the paper has `round(fraction * d_in)`.

    Raises:
      ValueError: fraction is not within 0 to 1, or multiple is not positive.
    """
    if not 0 <= fraction <= 1 or multiple < 1:
        raise ValueError(
            f"outlier_count needs a fraction from 0 to 1 and a multiple from 1, got {fraction}, {multiple}"
        )
    wanted = -(-int(d_in * fraction) // multiple) * multiple
    return min(d_in // multiple * multiple, wanted)


def _take(x: jax.Array, channels: Int[AnyArray, " n"], axis: int) -> jax.Array:
    """Returns x's channels along an axis; as each occurs once, the gradient is a scatter without sums."""
    index = (..., channels) if axis == -1 else (channels,)
    return x.at[index].get(unique_indices=True, mode="promise_in_bounds")


def _check_channels(channels: Channels, d_in: int) -> None:
    """Raises TypeError or ValueError unless the channels are two sets of integers that share d_in."""
    if not isinstance(channels, Channels) or not all(
        hasattr(c, "ndim") and jnp.issubdtype(c.dtype, jnp.integer) for c in channels
    ):
        raise TypeError(f"mixed_dot needs mxjax.Channels of two integer arrays, got {channels!r:.80}")
    if any(c.ndim != 1 for c in channels) or sum(c.size for c in channels) != d_in:
        shapes = [c.shape for c in channels]
        raise ValueError(
            f"mixed_dot needs channels of one axis that together hold d_in = {d_in}, got shapes {shapes}"
        )
    if any(isinstance(c, Tracer) for c in channels):
        return
    if not np.array_equal(np.sort(np.concatenate(channels)), np.arange(d_in)):
        raise ValueError(
            f"mixed_dot needs each channel from 0 to {d_in - 1} once in channels, got {channels!r:.80}"
        )
