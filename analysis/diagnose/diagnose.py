"""The whole diagnosis of one model on several batches, as nested dicts of numbers for JSON."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from analysis.diagnose.capture import Pass, make_gradients, make_pass
from analysis.diagnose.measures import LayerMeasures, OperandMeasures, measure_layer
from analysis.diagnose.plots import draw
from analysis.diagnose.split import Grams, split
from analysis.diagnose.wgrad import VARIANTS, gradient_grams, total, wgrad_grams
from analysis.evaluate import EvalConfig
from analysis.restore import Restored
from models import decoder
from models.configs import DecoderConfig
from models.gemms import linear_weights
from models.lora import merged
from mxjax.policy import OPERANDS, Gemm
from mxjax.policy.layers import LayerPolicies
from mxjax.products.implementations import Implementation, compiler_options
from mxjax.recipes import get_policy
from training.files import write_atomically
from training.log.metrics import json_line
from training.process.environment import facts
from training.process.start import check_extra

Batch = Int32[np.ndarray, "batch length"]


@dataclasses.dataclass(frozen=True)
class DiagnoseConfig(EvalConfig):
    """A diagnosis of the errors of a model's GEMMs. A flag that is not given takes the run's value."""

    batches: int | None = 8
    """Number of batches, at least 3."""
    out: pathlib.Path | None = None
    """Also write diagnosis.json, heat maps by layer and histograms into this folder (extra plot)."""


def check_folder(out: pathlib.Path | None) -> None:
    """Makes the folder for a diagnosis, if one is wanted, and checks that plots can be drawn.

    Raises:
      MissingExtraError: matplotlib is not installed.
      OSError: the folder cannot be made.
    """
    if out is not None:
        check_extra("plot", "--out", "matplotlib")
        out.mkdir(parents=True, exist_ok=True)


def diagnose_model(
    restored: Restored, batches: Sequence[Batch], say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Returns the diagnosis of a restored model, the size of what it read, and the versions that ran it."""
    config, model, params, _, phase, implementation, documents = restored
    params = merged(params)  # the GEMMs of whole weights are measured
    training = {"documents": documents, "z_loss": config.optimizer.z_loss}
    found = diagnose(model, params, phase.layers, implementation, batches, say=say, **training)
    shape = {"batches": len(batches), "tokens": sum(batch[:, 1:].size for batch in batches)}
    return shape | found | {"versions": facts()}


def write(found: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes diagnosis.json and draws the plots into a folder; returns the plots' paths."""
    write_atomically(folder / "diagnosis.json", json_line(found) + "\n")
    return draw(found, folder)


def diagnose(
    model: DecoderConfig,
    params: decoder.Params,
    policies: LayerPolicies,
    implementation: Implementation | None,
    batches: Sequence[Batch],
    variants: Mapping[str, Gemm] = VARIANTS,
    say: Callable[[str], None] = lambda _: None,
    **training: Any,
) -> dict[str, Any]:
    """Returns the measures of every linear layer of the blocks, and the split of the gradients' errors.

    Each batch runs forward and backward under `policies`, and under `bf16` for the gradients to compare with.

    Args:
      batches: token ids of at least three batches of one shape.
      variants: what to compare Wgrad under.
      say: receives a line on what is measured next.
      training: what else the training's loss depends on; see `make_pass`.
    Returns: "layers" by layer (see `_layer_numbers`), "gradient" (errors of whole gradients) and "wgrad" (by
      variant), these two by "all", by linear layer and by layer; see `analysis.diagnose.split.Split`.
    Raises:
      ValueError: fewer than three batches, or batches of several shapes.
    """
    check_batches(batches)
    key = jax.random.key(0)  # random bits differ from batch to batch
    exact_policies = decoder.layer_policies(model, get_policy("bf16"))
    run = make_pass(model, policies, implementation, **training)
    run_exact = make_gradients(model, exact_policies, implementation, **training)
    keys = [jax.random.fold_in(key, i) for i in range(len(batches))]
    say(f"passes of {len(batches)} batches under the policy, and their gradients under bf16")
    # To the host, where the passes of all batches have room.
    passes = [jax.device_get(run(params, batch, k)) for batch, k in zip(batches, keys, strict=True)]
    exact = [
        jax.device_get(run_exact(params, batch, k).gradients) for batch, k in zip(batches, keys, strict=True)
    ]
    say("errors of every layer's GEMMs")
    layers = _layers(passes, params, policies, implementation, keys)
    say(f"Wgrad in {len(variants)} variants")
    wgrad = {name: _splits(g) for name, g in wgrad_grams(passes, key, variants).items()}
    gradient = _splits(gradient_grams([p.gradients for p in passes], exact))
    return {"layers": layers, "gradient": gradient, "wgrad": wgrad}


def check_batches(batches: Sequence[Batch]) -> None:
    """Raises ValueError unless there are at least three batches of one shape."""
    shapes = {batch.shape for batch in batches}
    if len(batches) < 3 or len(shapes) > 1:
        raise ValueError(
            f"diagnose needs at least 3 batches of one shape, got {len(batches)} batches of {len(shapes)} "
            f"shape{'s' * (len(shapes) != 1)}; change --batches or --batch-size, or give more data"
        )


def totals(found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a diagnosis without the numbers of single layers."""
    wgrad = {variant: splits["all"] for variant, splits in found["wgrad"].items()}
    rest = {name: value for name, value in found.items() if name != "layers"}
    return rest | {"gradient": found["gradient"]["all"], "wgrad": wgrad}


def _layers(
    passes: Sequence[Pass],
    params: decoder.Params,
    policies: LayerPolicies,
    implementation: Implementation | None,
    keys: Sequence[jax.Array],
) -> dict[str, Any]:
    """Returns each layer's measures, in means over the batches."""
    found = {}
    for name, w in linear_weights(params["blocks"]).items():
        for i in range(len(w)):
            layer = f"blocks.{i}.{name}"
            measure = _measure(policies[layer], implementation)
            ours = [p.tensors[name] for p in passes]
            measured = [measure(t.x[i], w[i], t.dy[i], key) for t, key in zip(ours, keys, strict=True)]
            mean = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), 0), *jax.device_get(measured))
            found[layer] = _layer_numbers(mean)
    return found


@functools.cache
def _measure(policy, implementation):
    """Returns `measure_layer` jitted for a policy, which layers with the same policy and shapes share."""
    return jax.jit(
        lambda x, w, dy, key: measure_layer(x, w, dy, policy, key, implementation),
        compiler_options=compiler_options([policy, get_policy("fp32")], implementation),
    )


def _layer_numbers(m: LayerMeasures) -> dict[str, Any]:
    """Returns a layer's measures: for each GEMM the errors of "product" and of both operands.

    An operand also has its shape before and after rotation, "scales" (the lowest exponent and the share of
    blocks by exponent from there) and "mantissas" (share of blocks). "token_mean" has x and dy.
    """
    result: dict[str, Any] = {"token_mean": {"x": float(m.x_mean), "dy": float(m.dy_mean)}}
    gemms = zip(OPERANDS.items(), m.errors, m.operands, strict=True)
    for (gemm, names), errors, operands in gemms:
        result[gemm] = {"product": _floats(errors.product)}
        for name, error, operand in zip(names, (errors.lhs, errors.rhs), operands, strict=True):
            result[gemm][name] = _floats(error) | _operand_numbers(operand)
    return result


def _operand_numbers(m: OperandMeasures) -> dict[str, Any]:
    shapes = {"before_rotation": _floats(m.before), "after_rotation": _floats(m.after)}
    used = np.flatnonzero(m.scales)
    if not len(used):
        return shapes
    first, last = int(used[0]), int(used[-1])
    return shapes | {
        "scales": {"lowest": first - 127, "share": _shares(np.asarray(m.scales)[first : last + 1])},
        "mantissas": _shares(np.asarray(m.mantissas)),
    }


def _splits(grams: Mapping[str, Grams]) -> dict[str, Any]:
    """Returns the splits over all layers, over the layers of one kind, and of each layer."""
    kinds = dict.fromkeys(name.split(".", 2)[2] for name in grams)
    parts = {"all": total(grams)} | {kind: total(grams, kind) for kind in kinds} | dict(grams)
    return {name: {key: e._asdict() for key, e in split(g)._asdict().items()} for name, g in parts.items()}


def _shares(counts: np.ndarray) -> list[float]:
    whole = float(np.sum(counts))
    return [round(float(c) / whole, 6) if whole else math.nan for c in counts]


def _floats(numbers) -> dict[str, float]:
    return {name: float(value) for name, value in numbers._asdict().items()}
