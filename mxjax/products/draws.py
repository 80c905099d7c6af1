"""What a policy's GEMMs draw from a key: random words and signs, as `jax.random` draws them.

Each hash costs XLA 150 operations, and as many again wherever it is fused. Therefore all GEMMs of a pass draw
at once, and on GPUs a kernel draws what kernels read.
"""

import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt32

from mxjax.numerics.hadamard import random_signs
from mxjax.numerics.philox import KeyWords, key_words
from mxjax.operands.use import Drawn, OperandUse, inputs_with
from mxjax.policy.policy import Gemm
from mxjax.runtime.devices import current_target
from mxjax.runtime.keys import as_key, fold_each, over_keys


def draw_each(gemms: Sequence[Gemm], keys: jax.Array | None) -> list[Drawn]:
    """Draws the random words and signs of each GEMM from its own key in `keys`; none without keys."""
    if keys is None or not any(gemm.needs_key for gemm in gemms):
        return [Drawn()] * len(gemms)
    keys = fold_each(keys, 0, 3)
    operands, of_signs = keys[:, :2, None], keys[:, 2]
    if any(o.eden is not None or o.four_over_six is not None for gemm in gemms for o in (gemm.lhs, gemm.rhs)):
        operands = jnp.concatenate([operands, fold_each(keys[:, :2], 1, 3)], axis=2)
    words = lax.optimization_barrier(over_keys(key_words, operands))
    signs = {
        n: lax.optimization_barrier(over_keys(functools.partial(random_signs, n=n), of_signs))
        for n in {gemm.redrawn_signs for gemm in gemms if gemm.redrawn_signs}
    }
    drawn = []
    for i, gemm in enumerate(gemms):
        lhs, rhs = (KeyWords(words[i, k]) for k in range(2))
        of_rotation = signs[gemm.redrawn_signs][i] if gemm.redrawn_signs else None
        drawn.append(Drawn(lhs, rhs, of_rotation) if gemm.needs_key else Drawn())
    return drawn


def draw_words(gemms: Iterable[Gemm], key: jax.Array | None) -> UInt32[Array, "3 2 6"] | None:
    """Returns the words of `OperandUse.words` for lhs and rhs of Fprop, Dgrad and Wgrad, from the dot's key.

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

    return draw(jax.random.key_data(key), tuple(max(gemm.redrawn_signs, 1) for gemm in gemms))


def uses_of(gemm: Gemm, lhs_axis: int, rhs_axis: int, key: jax.Array | None) -> tuple[OperandUse, OperandUse]:
    """Returns the inputs of a GEMM's two operands; `key` is the GEMM's own."""
    [drawn] = draw_each([gemm], None if key is None else as_key(key)[None])
    return inputs_with(gemm, lhs_axis, rhs_axis, drawn)
