"""What an error of the gradient leaves of the descent of an optimizer that normalizes its steps.

Batch a has the gradient g_a, computed as c_a. Adam's step divides the mean of past gradients by their root
mean square, weight by weight. A batch b judges the step of the others,

    u_b = mean c_a / sqrt(mean c_a**2) over a != b        descent_b = <g_b, u_b>

by which a small step along -u_b lowers its loss. Errors that average out raise the root mean square, and so
shorten the step; errors that repeat turn it. As a part of the descent of the exact gradients, this counts
both as the optimizer does, which relative errors do not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from training.diagnosis.capture import Gradients
from training.paired_statistics import Estimate, jackknife


class Descents(NamedTuple):
    """The descent that each batch sees, of the computed gradients and of the exact ones."""

    computed: Float[np.ndarray, "batches"]
    exact: Float[np.ndarray, "batches"]


def descents(found: Sequence[Gradients], exact: Sequence[Gradients]) -> Descents:
    """Returns the descents over all layers.

    Args:
      found: the computed gradients of each batch, on the host or, which is faster, on the device.
      exact: those without errors.
    """
    of_layer = jax.jit(_descents)
    sums = np.zeros((2, len(exact)))
    for name in exact[0]:
        for i in range(len(exact[0][name])):
            computed, g = (jnp.stack([gradients[name][i] for gradients in side]) for side in (found, exact))
            sums += np.asarray(jax.device_get(of_layer(computed, g)), np.float64)
    return Descents(*sums)


def share(found: Descents) -> Estimate:
    """Returns the computed gradients' part of the exact ones' descent, with a jackknife over the batches."""
    without = [
        np.delete(found.computed, i).sum() / np.delete(found.exact, i).sum() for i in range(len(found.exact))
    ]
    return jackknife(float(found.computed.sum() / found.exact.sum()), without)


def _descents(computed: Float32[Array, "batches ..."], exact: Float32[Array, "batches ..."]) -> list[Array]:
    others = len(exact) - 1
    return [jax.vmap(_seen_by, (None, 0, 0))(_sums(c), c, exact) / others**0.5 for c in (computed, exact)]


def _sums(c: Float32[Array, "batches ..."]) -> tuple[Array, Array]:
    return c.sum(0), jnp.square(c).sum(0)


def _seen_by(sums: tuple[Array, Array], c: Float32[Array, "..."], g: Float32[Array, "..."]) -> Array:
    """Returns <g, u> for the step u of all batches but that of c and g, times the root of their number."""
    first, second = sums[0] - c, jnp.maximum(sums[1] - jnp.square(c), 0)
    return jnp.sum(g * first * jax.lax.rsqrt(second + jnp.finfo(jnp.float32).tiny))
