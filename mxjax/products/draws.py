"""`uses_of_policy`: a policy's GEMMs as uses of their operands, with what they draw from the key.

Words and signs are those that `jax.random` draws. Each hash costs XLA 150 operations, and as many again
wherever it is fused. Therefore all GEMMs of a pass draw at once, and on GPUs a kernel draws what kernels
read.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, UInt32

from mxjax.numerics.delayed import Scales
from mxjax.numerics.hadamard import fixed_signs, random_signs
from mxjax.numerics.philox import KeyWords, key_words
from mxjax.operands.use import Form, OperandUse
from mxjax.policy.policy import OPERANDS, Gemm, Policy, Rotation
from mxjax.products.implementations import GemmImplementations, form_of
from mxjax.runtime.devices import current_target
from mxjax.runtime.keys import as_key, fold_each, over_keys


class GemmUses(NamedTuple):
    """The uses of a GEMM's two operands."""

    lhs: OperandUse
    rhs: OperandUse


class PolicyUses(NamedTuple):
    """The uses of x and w by the Fprop, of dy and w by the Dgrad, of x and dy by the Wgrad."""

    fprop: GemmUses
    dgrad: GemmUses
    wgrad: GemmUses


CONTRACTED = ((-1, -2), (-1, -1), (-2, -2))
"""What Fprop, Dgrad and Wgrad contract of lhs and rhs, which are stored as x [tokens, d_in], w [d_in, d_out]
and dy [tokens, d_out]."""


def uses_of_policy(
    policy: Policy,
    implementations: GemmImplementations,
    key: jax.Array | None,
    scales: Scales | None = None,
) -> PolicyUses:
    """Returns the uses of all operands of a policy, with the random bits of a dot's key and its scales."""
    gemms = tuple(policy.gemms.values())
    keys = None if key is None else fold_each(key, 0, 3)
    forms: list[Form | None] = [form_of(implementation) for implementation in implementations]
    by_kernel = [gemm.needs_key and forms[i] in ("packed", "bf16") for i, gemm in enumerate(gemms)]
    words = draw_words(gemms, key) if any(by_kernel) else None
    drawn = _draw_each(gemms, keys)
    fprop, dgrad, wgrad = (
        _uses(
            gemms[i],
            *CONTRACTED[i],
            drawn[i],
            forms[i],
            None if words is None or not by_kernel[i] else words[i],
        )
        for i in range(3)
    )
    if policy.dgrad.rhs.source == "dequantized":
        dgrad = dgrad._replace(rhs=dgrad.rhs._replace(reads=fprop.rhs))
    if policy.wgrad.lhs.source == "dequantized":
        wgrad = wgrad._replace(lhs=wgrad.lhs._replace(reads=fprop.lhs))
    found = PolicyUses(fprop, dgrad, wgrad)
    return found if scales is None else _with_scales(found, scales)


def _with_scales(uses: PolicyUses, scales: Scales) -> PolicyUses:
    """Returns the uses with the delayed scale of each tensor whose operand takes one."""

    def scaled(use: OperandUse, tensor: str) -> OperandUse:
        return use._replace(scale=getattr(scales, tensor)) if use.operand.is_delayed else use

    pairs = zip(uses, OPERANDS.values(), strict=True)
    return PolicyUses(*(GemmUses(*map(scaled, gemm, tensors)) for gemm, tensors in pairs))


def uses_of(gemm: Gemm, lhs_axis: int, rhs_axis: int, key: jax.Array | None) -> GemmUses:
    """Returns the uses of one GEMM's operands; `key` is the GEMM's own."""
    [drawn] = _draw_each([gemm], None if key is None else as_key(key)[None])
    return _uses(gemm, lhs_axis, rhs_axis, drawn)


class _Drawn(NamedTuple):
    """Random words of a GEMM's two operands, and its rotation's signs and permutation if they are redrawn."""

    lhs: KeyWords | None = None
    rhs: KeyWords | None = None
    signs: Float32[Array, " size"] | None = None
    order: jax.Array | None = None


def _uses(
    gemm: Gemm,
    lhs_axis: int,
    rhs_axis: int,
    drawn: _Drawn,
    form: Form | None = None,
    words: UInt32[Array, "2 6"] | None = None,
) -> GemmUses:
    signs = _fixed_signs(gemm.rotation) if drawn.signs is None else drawn.signs
    order = _fixed_order(gemm.rotation) if drawn.order is None else drawn.order
    lhs_words, rhs_words = (None, None) if words is None else words
    return GemmUses(
        OperandUse(lhs_axis, gemm.lhs, gemm.rotation, signs, drawn.lhs, lhs_words, form, order),
        OperandUse(rhs_axis, gemm.rhs, gemm.rotation, signs, drawn.rhs, rhs_words, form, order),
    )


def _fixed_signs(rotation: Rotation | None) -> Float32[Array, " size"] | None:
    """Returns the signs of a rotation that draws none from a key: None, its own, or those of its seed."""
    if rotation is None or rotation.signs == "none":
        return None
    if rotation.values is not None:
        return jnp.asarray(rotation.values, jnp.float32)
    assert rotation.signs == "fixed"
    return jnp.asarray(fixed_signs(rotation.seed, rotation.size))


def _fixed_order(rotation: Rotation | None) -> jax.Array | None:
    """Returns the key of a rotation's permutation that is drawn from its seed, apart from its signs."""
    if rotation is None or rotation.order != "fixed":
        return None
    return fold_each(jax.random.key(rotation.seed, impl="threefry2x32"), 1, 2)[0]


def _draw_each(gemms: Sequence[Gemm], keys: jax.Array | None) -> list[_Drawn]:
    """Draws the random words and signs of each GEMM from its own key in `keys`; none without keys."""
    if keys is None or not any(gemm.needs_key for gemm in gemms):
        return [_Drawn()] * len(gemms)
    keys = fold_each(keys, 0, 3)
    of_operands, of_signs = keys[:, :2], keys[:, 2]
    words = over_keys(key_words, of_operands[..., None])
    if any(o.eden is not None or o.four_over_six is not None for gemm in gemms for o in (gemm.lhs, gemm.rhs)):
        words = jnp.concatenate([words, over_keys(key_words, fold_each(of_operands, 1, 3))], axis=2)
    words = lax.optimization_barrier(words)
    signs = {
        n: lax.optimization_barrier(over_keys(functools.partial(random_signs, n=n), of_signs))
        for n in {gemm.redrawn_signs for gemm in gemms if gemm.redrawn_signs}
    }
    drawn = []
    for i, gemm in enumerate(gemms):
        lhs, rhs = (KeyWords(words[i, k]) for k in range(2))
        of_rotation = signs[gemm.redrawn_signs][i] if gemm.redrawn_signs else None
        order = fold_each(of_signs[i], 1, 2)[0] if gemm.redraws_order else None
        drawn.append(_Drawn(lhs, rhs, of_rotation, order) if gemm.needs_key else _Drawn())
    return drawn


def draw_words(gemms: Iterable[Gemm], key: jax.Array | None) -> UInt32[Array, "3 2 6"] | None:
    """Returns the words of `OperandUse.words` for lhs and rhs of Fprop, Dgrad and Wgrad, from the dot's key.

    None without a key or a GPU, and where the kernel's bits are not JAX's: for a generator other than
    Threefry, without `jax_threefry_partitionable`. Neither with `jax_enable_x64`, where it is untried.
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
