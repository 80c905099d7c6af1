"""Delayed scaling of FP8 tensors: scales from the largest magnitudes of earlier steps.

A tensor is multiplied by a factor that is known before it, so one read both casts it and finds its largest
magnitude, which enters the history for the next steps. `mxjax.dot(scales=)` takes the factors of x, w and dy;
the gradients of these arguments are the tensors' largest magnitudes:

    histories = [first_history()] * 3
    scales = Scales(*(history.scale for history in histories))
    amax = jax.grad(loss, argnums=1)(params, scales)  # loss passes them to dot
    histories = [*map(updated, histories, amax, (448, 448, 57344))]  # after each step

Scales begin at one, so that small gradients of the first step may become zero.

Source: NVIDIA/TransformerEngine at d0067d0, `DelayedScaling` with its defaults (amax_history_len 1024,
amax_compute_algo "max", margin 0) in transformer_engine/common/recipe/__init__.py, `_default_sf_compute` and
`_default_get_amax_and_update_history` in transformer_engine/pytorch/quantization.py, and the same for JAX,
`DelayedScaleQuantizer.update` in transformer_engine/jax/quantize/quantizer.py.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from mxjax.numerics.blocks import magnitude_bits
from mxjax.numerics.float_scales import divide

HISTORY = 1024
"""The number of steps whose largest magnitudes a history keeps."""


class Scales(NamedTuple):
    """The factors by which a linear layer's tensors are multiplied before they are cast to FP8.

    Its gradient has the tensors' largest magnitudes in their places, zero where none is scaled so.
    """

    x: Float32[Array, "*layers"]
    w: Float32[Array, "*layers"]
    dy: Float32[Array, "*layers"]


class History(NamedTuple):
    """The state of one tensor, or of stacked ones.

    Attributes:
      scale: factor for the next step.
      amax: largest magnitudes of the last steps. The first place is for the next one; after it comes the
        oldest.
    """

    scale: Float32[Array, "*layers"]
    amax: Float32[Array, "*layers length"]


def first_history(*layers: int, length: int = HISTORY) -> History:
    """Returns the state before the first step: a factor of one, and no magnitudes."""
    return History(jnp.ones(layers, jnp.float32), jnp.zeros((*layers, length), jnp.float32))


def updated(
    history: History, amax: Float32[Array, "*layers"], largest: float | Float32[Array, "*#layers"]
) -> History:
    """Returns the state after a step.

    The factor becomes `largest / max(the last `length` magnitudes)`.

    Args:
      amax: the tensor's largest magnitude in this step, over all parts of a batch and all devices.
      largest: the format's largest magnitude, 448 for E4M3 and 57344 for E5M2.
    Special values: the factor stays where the largest magnitude is zero, infinite or NaN, and is float32's
      largest number where it would be infinite.
    """
    magnitudes = history.amax.at[..., 0].set(amax)
    most = jnp.max(magnitudes, axis=-1)
    found = divide(jnp.broadcast_to(jnp.float32(largest), most.shape), most)
    scale = jnp.where((most > 0) & jnp.isfinite(most), found, history.scale)
    scale = jnp.where(jnp.isinf(scale), jnp.finfo(jnp.float32).max, scale)
    return History(scale, jnp.roll(magnitudes, -1, axis=-1).at[..., 0].set(0.0))


def largest_magnitude(x: Float[Array, "*shape"]) -> Float32[Array, ""]:
    """Returns the largest magnitude of x; zero if it is empty, NaN if it holds NaN."""
    bits = jnp.max(magnitude_bits(x.astype(jnp.float32)), initial=0)
    return lax.bitcast_convert_type(bits, jnp.float32)
