"""The weights that the Fprop multiplies, as MXFP4 codes and scale bytes by Hugging Face's names.

A layer whose policy rounds its weight in the Fprop gives exactly the values that the Fprop multiplies. Blocks
of several rows, or longer than 32, repeat their scale. One layer is quantized at a time.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mxjax
from models import decoder
from models.configs import DecoderConfig
from models.huggingface.architectures import shape_of, views
from mxjax import Operand
from mxjax.numerics.blocks import spread
from mxjax.numerics.formats import BLOCK
from mxjax.numerics.scales import ScaleRule
from mxjax.policy.layers import LayerPolicies

_MATRICES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
"""Hugging Face's names of the matrices in each of our layers."""
_EXPERTS = {"mlp.gate_up": ("mlp.experts.gate_up_proj",), "mlp.down": ("mlp.experts.down_proj",)}
"""Those of gpt-oss, whose experts share a tensor and alone are packed."""


class QuantizedWeight(NamedTuple):
    """A matrix in MXFP4, or those of all experts, with an axis before.

    Attributes:
      codes: uint8 [out, in], an E2M1 code from 0 to 15 in each byte.
      scales: uint8 [out, in / 32], E8M0 bytes.
    """

    codes: np.ndarray
    scales: np.ndarray

    @property
    def packed(self) -> np.ndarray:
        """The codes in uint8 [out, in / 2], with element 2i in the low nibble."""
        return self.codes[..., ::2] | (self.codes[..., 1::2] << 4)

    @classmethod
    def unpacked(cls, packed: np.ndarray, scales: np.ndarray) -> "QuantizedWeight":
        """Inverts `packed`."""
        codes = np.stack([packed & 15, packed >> 4], axis=-1)
        return cls(codes.reshape(*packed.shape[:-1], -1), scales)

    def values(self) -> np.ndarray:
        """Returns the values in float32 [out, in], which are exact; scale byte 255 is NaN."""
        elements = self.codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        exponents = np.repeat(self.scales.astype(np.int32) - 127, BLOCK, axis=-1)
        nan = np.repeat(self.scales == 255, BLOCK, axis=-1)
        with np.errstate(over="ignore"):  # the largest scale times 6 is infinite
            return np.where(nan, np.float32(np.nan), np.ldexp(elements, np.where(nan, 0, exponents)))


def choose_operands(
    config: DecoderConfig, layers: LayerPolicies | None, rule: ScaleRule | None
) -> tuple[dict[str, Operand], str]:
    """Returns how to quantize the weights, by the names of our layers, and a line that says so.

    Layers whose Fprop multiplies weights in MXFP4 are quantized as it does. If there are none, all linear
    layers of the blocks are rounded to nearest.

    Args:
      layers: the run's policies at the exported step; None for weights that were imported.
      rule: the scale rule to use instead of the Fprop's, without its rotation, rounding and blocks.
    Raises:
      ValueError: the Fprop multiplies weights that MXFP4 does not represent, and `rule` is None; or those of
        one of the two layers of a block's experts alone, which no layout has.
    """
    packed = tuple(_matrices(config))
    found = {
        name: policy.fprop
        for name, policy in (layers.items() if layers else ())
        if policy.fprop.rhs.format == "mxfp4"
        and name.endswith(packed if config.tied or config.experts else (*packed, "head"))
    }
    if config.experts and (rest := [n for n in found if _other_layer(n) not in found]):
        raise ValueError(
            f"--quantize: the Fprop rounds {rest[0]} to MXFP4 and {_other_layer(rest[0])} not; "
            "gpt-oss's layout packs both or neither"
        )
    if not found:
        rule = rule or "floor"
        names = [f"blocks.{i}.{name}" for i in range(config.n_layers) for name in packed]
        line = f"no Fprop of the run rounds weights to MXFP4: rounded to nearest now, scale rule {rule}"
        return dict.fromkeys(names, Operand(scale_rule=rule)), line
    if rule is not None:
        line = f"weights rounded to nearest by scale rule {rule}, not as the run's Fprop did"
        return dict.fromkeys(found, Operand(scale_rule=rule)), line
    for name, gemm in found.items():
        block, rhs = gemm.rhs.block_shape, gemm.rhs
        length = BLOCK if block is None else block[1] if isinstance(block, tuple) else block
        problems = {
            f"rotates weights by {gemm.rotation}, so consumers must rotate activations": gemm.rotation,
            "rounds weights stochastically": rhs.rounding != "nearest",
            f"divides weights by the prescale {rhs.prescale}": rhs.prescale,
            f"has blocks of {length}": length % BLOCK,
        }
        if why := next((text for text, holds in problems.items() if holds), None):
            raise ValueError(
                f"--quantize: the Fprop of {name} {why}, which no format holds; "
                "add --scale-rule floor to round the unrotated weights to nearest instead"
            )
    tied = config.tied and layers and layers["head"].fprop.rhs.format == "mxfp4"
    rest = "; the head, tied to the embedding, is not quantized" if tied else ""
    rules = ", ".join(sorted({gemm.rhs.scale_rule for gemm in found.values()}))
    return {
        name: gemm.rhs for name, gemm in found.items()
    }, f"weights as the run's Fprop, scale rule {rules}{rest}"


def _matrices(config: DecoderConfig) -> Mapping[str, tuple[str, ...]]:
    """Returns Hugging Face's names of the matrices that are packed, by our layers."""
    return _MATRICES if config.experts is None else _EXPERTS


def _other_layer(name: str) -> str:
    """Returns the name of the other layer of a block's experts."""
    block, _, layer = name.rpartition(".")
    return f"{block}.{'down' if layer == 'gate_up' else 'gate_up'}"


def names_of(config: DecoderConfig, operands: Mapping[str, Operand]) -> list[str]:
    """Returns Hugging Face's names of the matrices that `operands` quantize, without `.weight`."""
    found, matrices = [], _matrices(config)
    for name in operands:
        _, _, rest = name.partition("blocks.")
        block, _, layer = rest.partition(".")
        found += [f"model.layers.{block}.{matrix}" for matrix in matrices[layer]] if rest else ["lm_head"]
    return found


def names_of_others(config: DecoderConfig, operands: Mapping[str, Operand]) -> list[str]:
    """Returns Hugging Face's names of the linear modules, or modules of experts, that are not quantized."""
    blocks = range(config.n_layers)
    if config.experts is not None:
        return [f"model.layers.{i}.mlp.experts" for i in blocks if f"blocks.{i}.mlp.down" not in operands]
    matrices = [matrix for found in _MATRICES.values() for matrix in found]
    every = [f"model.layers.{i}.{matrix}" for i in blocks for matrix in matrices]
    packed = set(names_of(config, operands))
    return [name for name in (*every, "lm_head") if name not in packed]


def quantized_weights(
    config: DecoderConfig, params: decoder.Params, operands: Mapping[str, Operand]
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yields the matrices that `operands` quantize, by Hugging Face's names without `.weight`.

    Raises:
      ValueError: a matrix has an input that is no multiple of 32, or holds NaN or infinity.
    """
    one = dataclasses.replace(config, n_layers=1, windows=config.windows[:1])
    for i in range(config.n_layers):
        block = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], params["blocks"])
        parts = {}
        for layer in _matrices(config):
            if operand := operands.get(f"blocks.{i}.{layer}"):
                module, matrix = layer.split(".")
                parts[layer] = _quantize(f"blocks.{i}.{layer}", block[module][matrix][0], operand)
        codes, scales = (
            views(one, dict(params) | {"blocks": _with_weights(block, parts, part)}) for part in (0, 1)
        )
        for matrix in (matrix for layer in parts for matrix in _matrices(config)[layer]):
            view = f"model.layers.0.{matrix}{'' if config.experts else '.weight'}"
            yield f"model.layers.{i}.{matrix}", _weight(view, codes[view], scales[view])
    if operand := operands.get("head"):
        codes, scales = _quantize("head", params["head"], operand)
        yield "lm_head", _weight("lm_head.weight", codes.T, scales.T)


def _weight(name: str, codes: np.ndarray, scales: np.ndarray) -> QuantizedWeight:
    shape = shape_of(name, codes)
    codes, scales = (part.reshape(shape) for part in (codes, scales))
    if not name.endswith(".weight"):  # gpt-oss's experts are [expert, in, out]
        codes, scales = codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    return QuantizedWeight(codes, scales[..., ::BLOCK])


def _with_weights(block: Mapping[str, Any], parts: Mapping[str, Any], part: int) -> dict[str, Any]:
    """Returns the parameters of one block with parts of its quantized weights in place of the weights."""
    found = {module: dict(matrices) for module, matrices in block.items()}
    for name, values in parts.items():
        module, matrix = name.split(".")
        found[module][matrix] = values[part][None]
    return found


def _quantize(name: str, w: np.ndarray, operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes of w [..., in, out], and the scale byte of each element."""
    if w.shape[-2] % BLOCK:
        raise ValueError(
            f"--quantize needs inputs in multiples of {BLOCK}; those of {name} are {w.shape[-2]}"
        )
    q = mxjax.quantize(jnp.asarray(w), operand, axis=-2)
    assert q.scales is not None
    scales = np.asarray(q.scales).view(np.uint8)
    if (scales == 255).any():
        raise ValueError(f"{name} holds NaN or infinity, which MXFP4 checkpoints cannot represent")
    codes = np.asarray(q.elements).view(np.uint8) & 15
    return codes, np.asarray(spread(jnp.asarray(scales), w.shape, q.block_shape, q.axis))
