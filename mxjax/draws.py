"""Random words of a policy's GEMMs, drawn on GPUs by one kernel, as `jax.random` draws them.

XLA takes minutes to fuse a model's training step in which each operand's random bits have a chain of hashes
of their own.
"""

from collections.abc import Iterable

import jax
from jaxtyping import Array, UInt32

from mxjax.devices import current_target
from mxjax.policy import Gemm


def draw_words(gemms: Iterable[Gemm], key: jax.Array | None) -> UInt32[Array, "3 2 6"] | None:
    """Returns the words of `GemmInput.words` for lhs and rhs of Fprop, Dgrad and Wgrad, from the dot's key.

    None without a key or a GPU, and where the kernel's bits are not JAX's: for a generator other than
    Threefry, without `jax_threefry_partitionable`, and with `jax_enable_x64`.
    """
    target, config = current_target(), jax.config
    if key is None or target is None or target.backend == "interpreter":
        return None
    if str(jax.random.key_impl(key)) != "threefry2x32":
        return None
    if not config.jax_threefry_partitionable or config.jax_enable_x64:
        return None
    from mxjax.kernels.quantize.draws import draw

    return draw(jax.random.key_data(key), tuple(_redrawn_signs(gemm) for gemm in gemms))


def _redrawn_signs(gemm: Gemm) -> int:
    """Returns how many signs the GEMM's rotation draws from the key, at least 1."""
    rotation = gemm.rotation
    return rotation.size if rotation is not None and rotation.signs == "redrawn" else 1
