"""What an error of the gradient leaves of the descent of an optimizer that normalizes its steps.

Batch a has the gradient g_a, computed as c_a. Adam's step, but for its epsilon and for clipping, is the mean
of past gradients over their root mean square, weight by weight. A batch b judges the step of the others:

    u_b = mean c_a / sqrt(mean c_a**2) over a != b        descent_b = <g_b, u_b>

by which a small step along -u_b lowers its loss. Errors that average out raise the root mean square, and so
shorten the step; errors that repeat turn it, and may lengthen it. So the descent is also reported for the
length of the step. Both depend on how much the batches' own gradients scatter, so on their size and number.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from analysis.diagnose.capture import Gradients
from analysis.statistics import Estimate, jackknife
from mxjax.products.implementations import compiler_options
from mxjax.recipes import get_policy

LEAST_BATCHES = 4
"""Without one of three batches, a step would be one gradient's signs."""


class Descent(NamedTuple):
    """Sums over the judging batches, of all batches first, and then without each of them in turn.

    Attributes:
      along: <g_b, u_b>.
      square: <u_b, u_b>.
    """

    along: Float[np.ndarray, " samples"]
    square: Float[np.ndarray, " samples"]


class Shares(NamedTuple):
    """A descent as a part of that of the exact gradients, with jackknife intervals over the batches.

    Attributes:
      descent: of the steps as they are.
      descent_for_length: of steps of the same length.
    """

    descent: Estimate
    descent_for_length: Estimate


def descent(found: Sequence[Gradients], exact: Sequence[Gradients]) -> Descent:
    """Returns the descent of the computed gradients, over all layers.

    Args:
      found: the computed gradients of each batch, on the host or, which is faster, on the device.
      exact: those without errors, which judge.
    Raises:
      ValueError: fewer than four batches.
    """
    if len(exact) < LEAST_BATCHES:
        raise ValueError(
            f"a descent needs at least {LEAST_BATCHES} batches, got {len(exact)}; raise --batches"
        )
    options = compiler_options([get_policy("fp32")], None)  # or XLA tunes Triton's GEMMs for minutes
    of_layer, sums = jax.jit(_of_layer, compiler_options=options), np.zeros((2, 1 + len(exact)))
    for name in exact[0]:
        for i in range(len(exact[0][name])):
            computed, g = (jnp.stack([gradients[name][i] for gradients in side]) for side in (found, exact))
            sums += np.asarray(jax.device_get(of_layer(computed, g)), np.float64)
    return Descent(*sums)


def shares(ours: Descent, base: Descent) -> Shares:
    """Returns ours as parts of another descent of the same batches; NaN where that one goes upwards."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(base.along > 0, ours.along / base.along, np.nan)
        length = np.sqrt(ours.square / base.square)
    return Shares(*(jackknife(float(r[0]), r[1:].tolist()) for r in (ratio, ratio / length)))


def _of_layer(
    c: Float32[Array, "batches ..."], g: Float32[Array, "batches ..."]
) -> Float32[Array, "2 samples"]:
    c, g = (x.reshape(len(x), -1) for x in (c, g))
    kept = np.concatenate([np.ones((1, len(c))), 1 - np.eye(len(c))]).astype(np.float32)
    return jax.lax.map(lambda of: jnp.stack(_sums(c, g, of)), kept).T


def _sums(
    c: Float32[Array, "batches weights"],
    g: Float32[Array, "batches weights"],
    kept: Float32[Array, " batches"],
) -> tuple[Array, Array]:
    """Returns the sums of <g_b, u_b> and <u_b, u_b> over the batches whose `kept` is 1, of these batches."""
    others = kept[None] * (1 - jnp.eye(len(c)))
    # Sums of the others alone: differences from the sum of all could cancel.
    first, second = (jnp.matmul(others, x, precision=jax.lax.Precision.HIGHEST) for x in (c, jnp.square(c)))
    u = jnp.where(second > 0, first * jax.lax.rsqrt(jnp.where(second > 0, second, 1)), 0)
    u = u * (kept / jnp.sqrt(kept.sum() - 1))[:, None]
    return jnp.sum(g * u), jnp.sum(jnp.square(u))
