"""The random words of a policy's GEMMs, drawn on GPUs by one kernel instead of hundreds of XLA's operations.

The bits are those of JAX's keys and `jax.random`, from which kernels' inputs have them elsewhere. A dot of
three stochastic GEMMs draws 17 times from Threefry, each time in a hundred operations. XLA takes minutes to
fuse those of a model's training step.
"""

import jax
from jaxtyping import Array, UInt32

from mxjax.devices import current_target
from mxjax.policy import Gemm, Policy


def draw_words(policy: Policy, key: jax.Array | None) -> UInt32[Array, "3 2 4"] | None:
    """Returns the words of `GemmInput.words` for lhs and rhs of Fprop, Dgrad and Wgrad, from the dot's key.

    None without a key or a GPU, and where JAX's bits are others: for a generator other than Threefry, or
    without `jax_threefry_partitionable`.
    """
    target = current_target()
    if key is None or target is None or target.backend == "interpreter":
        return None
    if str(jax.random.key_impl(key)) != "threefry2x32" or not jax.config.jax_threefry_partitionable:
        return None
    from mxjax.kernels.quantize.draws import draw

    return draw(jax.random.key_data(key), tuple(_drawn_signs(gemm) for gemm in policy.gemms.values()))


def _drawn_signs(gemm: Gemm) -> int:
    """Returns how many signs the GEMM's rotation draws."""
    rotation = gemm.rotation
    return rotation.size if rotation is not None and rotation.signs == "redrawn" else 1
