"""Weights that oscillate between two values of their 4-bit format are snapped to the one they have.

An element near the boundary of two values crosses it back and forth while its float32 weight hardly moves.
In each period of steps the distances are added up that the weight moves and that its quantized value moves.
Then, where the second is `ratio` times the first or more, the weight becomes its quantized value.

Sources: primus/backends/megatron/core/optimizer/weight_deosc.py of AMD-AGI/Primus at fd1eeab, and OsciReset
of TetraJet-v2 (arXiv 2510.27527), olmo2-training/olmo/quantization_real/oscillation_reset.py of
thu-ml/TetraJet-v2-NVFP4Training at ca5953f, which looks at a part of each period. Both keep the weights of
the last step. Here they are the optimizer's, and both steps are quantized anew. Primus at 08e8166 keeps them
in BF16, so that a weight moves from its rounded value; the quantized one is exact there.
"""

import dataclasses
import functools
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from models.block import DENSE
from models.gemms import LINEAR_LAYERS
from mxjax.numerics.array import dequantize
from mxjax.numerics.formats import get_format
from mxjax.numerics.operand import Operand
from mxjax.numerics.quantize import quantize_unpacked
from mxjax.policy import Policy
from mxjax.policy.layers import LayerPolicies
from training.flags.ranges import COUNT, POSITIVE

_SMALLEST = 1e-12  # as in the source


class Deoscillation(NamedTuple):
    """When weights are snapped.

    Attributes:
      ratio: the quantized value's distance over the weight's, from which on an element oscillates.
      period: steps from one snap to the next.
      start: step that the first period follows.
      window: steps at the beginning of a period over which distances are added up; weights are snapped in the
        step after them, or in the last of the period. 0: all.
      bf16: whether a step's distance begins at the weight's value in bfloat16.
    """

    ratio: float
    period: int
    start: int
    window: int = 0
    bf16: bool = False

    @property
    def first_snap(self) -> int:
        """The first step after which weights are snapped."""
        return self.start + min((self.window or self.period) + 1, self.period)


class DeoscillationState(NamedTuple):
    """The state of `snap_oscillating`.

    Attributes:
      step: number of updates, without skipped steps.
      weight: the distance that each parameter has moved in this period.
      quantized: the distance that its quantized value has moved.
    """

    step: Int32[Array, ""]
    weight: Any
    quantized: Any


def parse_deoscillation(text: str) -> Deoscillation:
    """Returns the values of `RATIO:PERIOD:START`, `:WINDOW` and `:bf16` after it or not, e.g. "3:200:1500".

    Raises:
      ValueError: malformed text, or a value out of range.
    """
    found = re.fullmatch(r"(\d+\.?\d*):(\d{1,10}):(\d{1,10})(?::(\d{1,10}))?(:bf16)?", text)
    steps = [int(word or 0) for word in found.groups()[1:4]] if found else []
    setting = found and Deoscillation(float(found[1]), *steps, bf16=bool(found[5]))
    if (
        setting is None
        or not POSITIVE.contains(setting.ratio)
        or not COUNT.contains(setting.period)
        or not COUNT.contains(setting.first_snap)
        or setting.window > setting.period
    ):
        raise ValueError(
            "--deoscillate takes RATIO:PERIOD:START, a positive ratio and period, and maybe :WINDOW, at most "
            "the period, then maybe :bf16; e.g. 3:200:1500 or 8:200:15000:50, with steps below 2**31 and a "
            f"ratio in float32; got {text!r}"
        )
    return setting


def check_policies(phases: Sequence[LayerPolicies]) -> None:
    """Raises ValueError unless each phase has weights in 4 bits, all rounded to nearest without rotation."""
    for number, layers in enumerate(phases, 1):
        phase = f" in phase {number} of {len(phases)}" if len(phases) > 1 else ""
        linear = (policy for name, policy in layers.items() if name.endswith(LINEAR_LAYERS))
        fprops = [policy.fprop for policy in linear if _operand(policy)]
        if not fprops:
            raise ValueError(
                f"--deoscillate has no effect{phase}: no weight of the blocks is in 4 bits; change "
                "--policy or --layers, e.g. 'blocks[-1].*=primus_turbo'"
            )
        if any(fprop.rotation or fprop.rhs.needs_key for fprop in fprops):
            raise ValueError(
                f"--deoscillate needs weights whose Fprop rounds to nearest without rotation{phase}; change "
                "--policy"
            )


def snap_oscillating(
    setting: Deoscillation,
    layers: LayerPolicies,
    numbers: Mapping[str, Sequence[int]] = types.MappingProxyType({}),
) -> optax.GradientTransformation:
    """Returns the last part of an optimizer, which snaps the weights of `models.decoder` that oscillate.

    Updates of elements that do not oscillate stay as they are, bit for bit. The others lead to the quantized
    value up to the rounding of one float32 addition, which is exact between half and twice the old value.

    Args:
      layers: the policies whose Fprop quantizes the weights.
      numbers: of blocks of two kinds, from `models.block.block_numbers`.
    """

    def init(params):
        zeros = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return DeoscillationState(jnp.zeros((), jnp.int32), *zeros)

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("an optimizer that snaps weights needs them: pass params to its update")
        step, before, after = state.step + 1, params, optax.apply_updates(params, updates)
        place = jnp.where(step > setting.start, (step - setting.start - 1) % setting.period + 1, 0)
        window = setting.window or setting.period
        observed = (place >= 1) & (place <= window)
        ends = place == min(window + 1, setting.period)

        def observe():
            new, old = (quantized_weights(w, layers, numbers) for w in (after, before))
            start = jax.tree.map(lambda w: w.astype(jnp.bfloat16), before) if setting.bf16 else before
            moved = jax.tree.map(add, state.weight, start, after)
            moved_quantized = jax.tree.map(add, state.quantized, old, new)
            snapped = jax.tree.map(snap, after, new, moved, moved_quantized)
            return snapped, *jax.tree.map(lambda d: jnp.where(ends, 0, d), (moved, moved_quantized))

        def add(total, before, after):
            return jnp.where(observed, total + jnp.abs(after - before), total)

        def snap(w, q, moved, moved_quantized):
            return jnp.where(ends & oscillates(moved, moved_quantized, setting.ratio), q, w)

        snapped, *distances = lax.cond(
            observed | ends, observe, lambda: (after, state.weight, state.quantized)
        )
        updates = jax.tree.map(
            lambda u, w, a, s: jnp.where(s == a, u, s - w), updates, before, after, snapped
        )
        return updates, DeoscillationState(step, *distances)

    return optax.GradientTransformation(init, update)


def oscillates(
    moved: Float32[Array, "*shape"], moved_quantized: Float32[Array, "*shape"], ratio: float
) -> Bool[Array, "*shape"]:
    """Returns whether elements oscillate, from a period's distances; False for those that never moved."""
    return (moved > 0) & (moved_quantized / jnp.maximum(moved, _SMALLEST) >= ratio)


def quantized_weights(
    params: Any, layers: LayerPolicies, numbers: Mapping[str, Sequence[int]] = types.MappingProxyType({})
) -> Any:
    """Returns the parameters as the Fprop multiplies them, unchanged where it does not take 4 bits."""

    def quantized(path, w):
        parameter = ".".join(str(key.key) for key in path).removeprefix("blocks.")
        if (name := parameter.replace(DENSE, "mlp")) not in LINEAR_LAYERS:
            return w
        of_stack = numbers.get(parameter.partition(".")[0], range(w.shape[0]))
        operands = [_operand(layers[f"blocks.{i}.{name}"]) for i in of_stack]
        for operand in dict.fromkeys(operands):
            if operand is not None:
                mine = jnp.array([other == operand for other in operands])
                mine = mine.reshape(-1, *(1 for _ in w.shape[1:]))
                # Layer by layer, as the Fprop does: a tensor scale belongs to one layer's weight.
                w = jnp.where(mine, jax.vmap(functools.partial(_seen, operand))(w), w)
        return w

    return jax.tree.map_with_path(quantized, params)


def _seen(operand: Operand, w: jax.Array) -> jax.Array:
    return dequantize(quantize_unpacked(w, operand, -2, None))


def _operand(policy: Policy) -> Operand | None:
    """Returns how the Fprop quantizes the weight, None if not to 4 bits."""
    operand = policy.fprop.rhs
    element = get_format(operand.format).element
    return dataclasses.replace(operand, source="original") if element and element.bits == 4 else None
