"""Outlier channels: the input channels of each layer that a second policy multiplies, see `mxjax.mixed_dot`.

For some steps the norms of each linear layer's input channels are added up. From then on those with the
largest sums are the outliers: the policies' table names their policy `LAYER.outliers`. The sums, which say
what the channels are, belong to the optimizer's state: they are saved, and kept in a skipped step, as Adam's
moments are.

Source: olmo2-training/olmo/quantization_real of thu-ml/TetraJet-v2-NVFP4Training at ca5953f, linear_mix.py
lines 84-132, calibrate.py lines 11-34. There the norms are of each device's part of a microbatch, in x's
dtype, and are added up; here they are of a microbatch on all devices, in float32, and averaged.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32

from models.block import AXES, LINEAR_LAYERS, OUTLIERS, linear_weights
from models.configs import LlamaConfig
from models.llama import abstract_params
from models.sharding import RULES
from mxjax.formats import get_format
from mxjax.layer_stats import ChannelNorms
from mxjax.layers import LayerPolicies
from mxjax.mixed_dot import Channels, channels_by_norm, outlier_count
from mxjax.policy import Policy


class OutlierSetting(NamedTuple):
    """How outliers are chosen, and when.

    Attributes:
      fraction: share of a layer's input channels.
      start: step after which norms are added up.
      steps: number of steps that add up norms.
      multiple: the number of outliers is rounded up to a multiple of this.
    """

    fraction: float
    start: int
    steps: int
    multiple: int = 128

    @property
    def first_step(self) -> int:
        """The first step that multiplies the outliers apart."""
        return self.start + self.steps + 1


class OutlierError(ValueError):
    """There are no norms by which outlier channels could be chosen."""


class OutlierState(NamedTuple):
    """The state of an optimizer, with the sums of norms by name of the layer, stacked over blocks."""

    optimizer: Any
    norms: dict[str, Float32[Array, "layers d_in"]]


def parse_outliers(text: str) -> OutlierSetting:
    """Returns the values of `FRACTION:START:STEPS` or `FRACTION:START:STEPS:MULTIPLE`, e.g. "0.1:502:50".

    Raises:
      ValueError: malformed text, or a value out of range.
    """
    found = re.fullmatch(r"(0?\.\d+):(\d+):(\d+)(?::(\d+))?", text)
    setting = found and OutlierSetting(float(found[1]), int(found[2]), int(found[3]), int(found[4] or 128))
    if setting is None or not all(setting[i] for i in (0, 2, 3)) or setting.first_step >= 2**31:
        raise ValueError(
            "--outlier-channels takes FRACTION:START:STEPS, a fraction between 0 and 1 and a positive number "
            "of steps, all before step 2**31, and maybe a positive :MULTIPLE, e.g. 0.1:502:50; got "
            f"{text!r}"
        )
    return setting


def add_outliers(layers: LayerPolicies, policy: Policy) -> LayerPolicies:
    """Returns the table with `policy` for the outliers of each linear layer that reads x in 4 bits."""
    added = [f"{name}{OUTLIERS}" for name, own in layers.items() if _is_mixed(name, own)]
    return LayerPolicies.of(dict(layers.items()) | dict.fromkeys(added, policy))


def drop_unmixed(layers: LayerPolicies) -> LayerPolicies:
    """Returns the table without the outliers' policies of layers that no longer read x in 4 bits."""
    unmixed = {f"{name}{OUTLIERS}" for name, policy in layers.items() if not _is_mixed(name, policy)}
    return LayerPolicies.of({name: policy for name, policy in layers.items() if name not in unmixed})


def remove_outliers(layers: LayerPolicies) -> LayerPolicies:
    """Returns the table without the outliers' policies."""
    return LayerPolicies.of({n: policy for n, policy in layers.items() if not n.endswith(OUTLIERS)})


def has_outliers(layers: LayerPolicies) -> bool:
    """Whether the outliers of any layer have a policy."""
    return any(name.endswith(OUTLIERS) for name in layers.names)


def check_outliers(
    setting: OutlierSetting, model: LlamaConfig, tables: Sequence[LayerPolicies], mesh: Mapping[str, int]
) -> None:
    """Raises ValueError unless the layers that read x in 4 bits have both outliers and other channels.

    A mesh that shards the input channels of a weight must shard both sets into equal parts.
    """
    named = (layer for layers in tables for layer in layers.items())
    mixed = {name.split(".", 2)[2] for name, policy in named if _is_mixed(name, policy)}
    if not mixed:
        raise ValueError(
            "--outlier-channels has no effect: no linear layer of the blocks reads x in 4 bits; change "
            "--policy, e.g. to tetrajet_v2"
        )
    for name, (_, d_in) in input_shapes(model).items():
        outliers = outlier_count(d_in, setting.fraction, setting.multiple)
        if name in mixed and not 0 < outliers < d_in:
            raise ValueError(
                f"--outlier-channels makes {outliers} of the {d_in} input channels of {name} outliers, in "
                f"multiples of {setting.multiple}; name another FRACTION or MULTIPLE, as "
                "FRACTION:START:STEPS:MULTIPLE"
            )
        axis = RULES[AXES[name][0]]
        parts = mesh[str(axis)] if axis else 1
        if name in mixed and (outliers % parts or d_in % parts):
            raise ValueError(
                f"--mesh {axis}={parts} cannot split the {outliers} outliers and {d_in - outliers} other "
                f"channels of {name} into equal parts; choose another MULTIPLE of --outlier-channels"
            )


def input_shapes(model: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Returns the number of blocks and of input channels of each linear layer."""
    return {name: w.shape[:2] for name, w in linear_weights(abstract_params(model)["blocks"]).items()}


def empty_norms(model: LlamaConfig) -> dict[str, ChannelNorms]:
    """Returns a slot for each linear layer, which the model fills with norms."""
    return {name: ChannelNorms(jnp.zeros(shape)) for name, shape in input_shapes(model).items()}


def choose_channels(
    norms: Mapping[str, Float32[Array, "layers d_in"]], setting: OutlierSetting
) -> dict[str, Channels]:
    """Returns the channels of each layer, from the sums of their norms."""
    return {
        name: channels_by_norm(x, outlier_count(x.shape[-1], setting.fraction, setting.multiple))
        for name, x in norms.items()
    }


def check_norms(norms: Mapping[str, Float32[Array, "layers d_in"]]) -> None:
    """Raises OutlierError unless norms of each layer have been added up."""
    empty = [name for name, x in norms.items() if not jnp.all(jnp.any(x > 0, axis=-1))]
    if empty:
        raise OutlierError(
            f"the input channels of {', '.join(empty)} have no norms to choose outliers by: every step that "
            "--outlier-channels names for that was skipped, or x was 0; begin a run with other flags"
        )


def with_outlier_channels(
    optimizer: optax.GradientTransformation, setting: OutlierSetting, model: LlamaConfig
) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer with the sums of norms in its state.

    Its `update` takes `step=`, the run's step from 1, and `observed=`, the gradients of `empty_norms`, and
    adds them up in the steps of the setting. Without `observed` the sums stay.
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params):
        return OutlierState(optimizer.init(params), {n: slot.x for n, slot in empty_norms(model).items()})

    def update(updates, state, params=None, *, step=None, observed=None, **extra):
        updates, inner = optimizer.update(updates, state.optimizer, params, **extra)
        if observed is None or step is None:
            return updates, state._replace(optimizer=inner)
        recorded = (step > setting.start) & (step < setting.first_step)
        norms = {name: jnp.where(recorded, x + observed[name].x, x) for name, x in state.norms.items()}
        return updates, OutlierState(inner, norms)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_mixed(name: str, policy: Policy) -> bool:
    """Whether a policy's layer is linear and its Fprop reads x in 4 bits."""
    element = get_format(policy.fprop.lhs.format).element
    return name.endswith(LINEAR_LAYERS) and element is not None and element.bits == 4
