"""The weights that the Fprop multiplies, as FP4 codes and scale bytes by Hugging Face's names.

A layer whose policy rounds its weight in the Fprop gives exactly the values that the Fprop multiplies, unless
adapters are merged into it. Blocks of several rows, or longer than the format's, repeat their scale. One
layer is quantized at a time.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mxjax
from models import decoder
from models.block import part
from models.configs import DecoderConfig
from models.huggingface.architectures import model_type, shape_of, views
from mxjax import Gemm, Operand
from mxjax.numerics.blocks import spread
from mxjax.numerics.formats import get_format
from mxjax.numerics.scales import ScaleRule
from mxjax.policy.layers import LayerPolicies

_MATRICES = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
"""Hugging Face's names of the matrices in each of our layers."""
_GPT_OSS = {"mlp.gate_up": ("mlp.experts.gate_up_proj",), "mlp.down": ("mlp.experts.down_proj",)}
"""Those of gpt-oss, whose experts share a tensor and alone are packed."""
_EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""The module of experts that have matrices of their own, and the names of gate, up and down."""


FP4 = Literal["mxfp4", "nvfp4"]
"""The formats of packed weights, as `mxjax.FORMATS` names them."""


class QuantizedWeight(NamedTuple):
    """A matrix in MXFP4 or NVFP4, or those of all experts, with an axis before.

    Attributes:
      codes: uint8 [out, in], an E2M1 code from 0 to 15 in each byte.
      scales: uint8 [out, in / 32], E8M0 bytes; or [out, in / 16], E4M3 bytes of NVFP4.
      divisor: NVFP4's float32 divisor of the scales, the inverse of the tensor's scale; None in MXFP4.
    """

    codes: np.ndarray
    scales: np.ndarray
    divisor: np.float32 | None = None

    @property
    def packed(self) -> np.ndarray:
        """The codes in uint8 [out, in / 2], with element 2i in the low nibble."""
        return self.codes[..., ::2] | (self.codes[..., 1::2] << 4)

    @classmethod
    def unpacked(
        cls, packed: np.ndarray, scales: np.ndarray, divisor: np.float32 | None = None
    ) -> "QuantizedWeight":
        """Inverts `packed`."""
        codes = np.stack([packed & 15, packed >> 4], axis=-1)
        return cls(codes.reshape(*packed.shape[:-1], -1), scales, divisor)

    def values(self) -> np.ndarray:
        """Returns the values in float32 [out, in]: exact in MXFP4, rounded once in NVFP4.

        Special values: NaN where the scale is NaN.
        """
        elements = self.codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        scales = np.repeat(self.scales, elements.shape[-1] // self.scales.shape[-1], axis=-1)
        if self.divisor is not None:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # of damaged files
                return elements * scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) / self.divisor
        nan = scales == 255
        with np.errstate(over="ignore"):  # the largest scale times 6 is infinite
            exponents = np.where(nan, 0, scales.astype(np.int32) - 127)
            return np.where(nan, np.float32(np.nan), np.ldexp(elements, exponents))


def choose_operands(
    config: DecoderConfig,
    layers: LayerPolicies | None,
    rule: ScaleRule | None,
    number: FP4 = "mxfp4",
    adapted: bool = False,
) -> tuple[dict[str, Operand], str]:
    """Returns how to quantize the weights, by the names of our layers, and a line that says so.

    Layers whose Fprop multiplies weights in this format are quantized as it does. If there are none, all
    linear layers of the blocks are rounded to nearest.

    Args:
      layers: the run's policies at the exported step; None for weights that were imported.
      rule: MXFP4's scale rule to use instead of the Fprop's, without its rotation, rounding and blocks.
      adapted: the weights hold merged adapters, which the Fprop multiplies apart, in bfloat16.
    Raises:
      ValueError: the Fprop multiplies weights that packed files do not represent, and `rule` is None; or, in
        this format, those of one of the two layers of gpt-oss's experts alone.
    """
    packed, own = tuple(_matrices(config)), model_type(config) == "gpt_oss"
    found = {
        name: policy.fprop
        for name, policy in (layers.items() if layers else ())
        if policy.fprop.rhs.format == number
        and name.endswith(packed if config.tied or own else (*packed, "head"))
    }
    if own and (rest := [n for n in found if _other_layer(n) not in found]):
        raise ValueError(
            f"--quantize: the Fprop rounds {rest[0]} to MXFP4 and {_other_layer(rest[0])} not; "
            "gpt-oss's layout packs both or neither"
        )
    if not found:
        operand = Operand(number, scale_rule=rule or "floor")
        names = [f"blocks.{i}.{name}" for i in range(config.n_layers) for name in packed]
        line = f"no Fprop of the run rounds weights to {number.upper()}: rounded to nearest now"
        line += f", scale rule {operand.scale_rule}" if number == "mxfp4" else ""
        return dict.fromkeys(names, operand), line
    if rule is not None:
        line = f"weights rounded to nearest by scale rule {rule}, not as the run's Fprop did"
        return dict.fromkeys(found, Operand(scale_rule=rule)), line
    for name, gemm in found.items():
        _check_representable(name, gemm)
    tied = config.tied and layers and layers["head"].fprop.rhs.format == number
    rest = "; the head, tied to the embedding, is not quantized" if tied else ""
    rules = ", ".join(sorted({gemm.rhs.scale_rule for gemm in found.values()}))
    line = "adapters merged, then rounded anew" if adapted else "weights as the run's Fprop"
    line += f", scale rule {rules}" if number == "mxfp4" else ""
    return {name: gemm.rhs for name, gemm in found.items()}, line + rest


def _check_representable(name: str, gemm: Gemm) -> None:
    """Raises ValueError unless packed files hold the weights that the Fprop of a layer multiplies."""
    rhs, block, unit = gemm.rhs, gemm.rhs.block_shape, get_format(gemm.rhs.format).block
    length = unit if block is None else block[1] if isinstance(block, tuple) else block
    problems = {
        f"rotates weights by {gemm.rotation}, so consumers must rotate activations": gemm.rotation,
        "rounds weights stochastically": rhs.needs_key,
        f"divides weights by the prescale {rhs.prescale}": rhs.prescale,
        f"has blocks of {length}": length % unit,
    }
    if why := next((text for text, holds in problems.items() if holds), None):
        instead = "--scale-rule floor" if rhs.format == "mxfp4" else "--quantize mxfp4"
        raise ValueError(
            f"--quantize: the Fprop of {name} {why}, which no format holds; "
            f"use {instead} to round the unrotated weights to nearest instead"
        )


def _matrices(config: DecoderConfig) -> Mapping[str, tuple[str, ...]]:
    """Returns Hugging Face's names of the matrices that are packed, by our layers."""
    if config.experts is None:
        return _MATRICES
    if (kind := model_type(config)) == "gpt_oss":
        return _GPT_OSS
    module, names = _EXPERTS[kind]
    of_experts = [[f"{module}.experts.{j}.{name}" for name in names] for j in range(config.experts.n)]
    gate_up = tuple(name for gate, up, _ in of_experts for name in (gate, up))
    return _MATRICES | {"mlp.gate_up": gate_up, "mlp.down": tuple(down for _, _, down in of_experts)}


def _other_layer(name: str) -> str:
    block, _, layer = name.rpartition(".")
    return f"{block}.{'down' if layer == 'gate_up' else 'gate_up'}"


def names_of(config: DecoderConfig, layers: Iterable[str]) -> list[str]:
    """Returns Hugging Face's names of the matrices in our layers, without `.weight`."""
    found, matrices = [], functools.cache(lambda block: {**_MATRICES, **_matrices(block)})
    for name in layers:
        _, _, rest = name.partition("blocks.")
        block, _, layer = rest.partition(".")
        own = matrices(config.block(int(block)))[layer] if rest else ()
        found += [f"model.layers.{block}.{matrix}" for matrix in own] if rest else ["lm_head"]
    return found


def names_of_others(config: DecoderConfig, operands: Mapping[str, Operand]) -> list[str]:
    """Returns Hugging Face's names of the linear modules, or modules of experts, that are not quantized."""
    blocks = range(config.n_layers)
    if model_type(config) == "gpt_oss":
        return [f"model.layers.{i}.mlp.experts" for i in blocks if f"blocks.{i}.mlp.down" not in operands]

    @functools.cache
    def matrices(kind: DecoderConfig) -> list[str]:
        gate = [f"{_EXPERTS[model_type(kind)][0]}.gate"] if kind.experts else []
        return [matrix for found in _matrices(kind).values() for matrix in found] + gate

    packed = set(names_of(config, operands))
    every = [f"model.layers.{i}.{matrix}" for i in blocks for matrix in matrices(config.block(i))]
    return [name for name in (*every, "lm_head") if name not in packed]


def quantized_weights(
    config: DecoderConfig, params: decoder.Params, operands: Mapping[str, Operand]
) -> Iterator[tuple[str, QuantizedWeight]]:
    """Yields the matrices that `operands` quantize, by Hugging Face's names without `.weight`.

    Raises:
      ValueError: a matrix has an input that is no multiple of the block, or holds NaN or infinity.
    """
    for i in range(config.n_layers):
        one = dataclasses.replace(config.block(i), n_layers=1, windows=config.windows[:1], rope_layers=())
        block, matrices = part(config, params["blocks"], i, i + 1), _matrices(one)
        parts = {}
        for layer in matrices:
            if operand := operands.get(f"blocks.{i}.{layer}"):
                module, matrix = layer.split(".")
                parts[layer] = _quantize(f"blocks.{i}.{layer}", block[module][matrix][0], operand)
        codes, scales = (
            views(one, dict(params) | {"blocks": _with_weights(block, parts, which)}) for which in (0, 1)
        )
        for layer, (_, _, divisor) in parts.items():
            for matrix in matrices[layer]:
                view = f"model.layers.0.{matrix}{'.weight' * (model_type(config) != 'gpt_oss')}"
                yield f"model.layers.{i}.{matrix}", _weight(view, codes[view], scales[view], divisor)
    if operand := operands.get("head"):
        codes, scales, divisor = _quantize("head", params["head"], operand)
        yield "lm_head", _weight("lm_head.weight", codes.T, scales.T, divisor)


def _weight(name: str, codes: np.ndarray, scales: np.ndarray, divisor: np.float32 | None) -> QuantizedWeight:
    shape, block = shape_of(name, codes), get_format("mxfp4" if divisor is None else "nvfp4").block
    codes, scales = (part.reshape(shape) for part in (codes, scales))
    if not name.endswith(".weight"):  # gpt-oss's experts are [expert, in, out]
        codes, scales = codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    return QuantizedWeight(codes, scales[..., ::block], divisor)


def _with_weights(block: Mapping[str, Any], parts: Mapping[str, Any], which: int) -> dict[str, Any]:
    """Returns the parameters of one block with parts of its quantized weights in place of the weights."""
    found = {module: dict(matrices) for module, matrices in block.items()}
    for name, values in parts.items():
        module, matrix = name.split(".")
        found[module][matrix] = values[which][None]
    return found


def _quantize(name: str, w: np.ndarray, operand: Operand) -> tuple[np.ndarray, np.ndarray, np.float32 | None]:
    """Returns the codes of w [..., in, out], the scale byte of each element, and NVFP4's divisor or None."""
    block = get_format(operand.format).block
    if w.shape[-2] % block:
        raise ValueError(
            f"--quantize needs inputs in multiples of {block}; those of {name} are {w.shape[-2]}"
        )
    q = mxjax.quantize(jnp.asarray(w), operand, axis=-2)
    assert q.scales is not None
    if not np.isfinite(np.asarray(q.scales).astype(np.float32)).all():
        raise ValueError(f"{name} holds NaN or infinity, which FP4 checkpoints cannot represent")
    codes = np.asarray(q.elements).view(np.uint8) & 15
    scales = spread(jnp.asarray(np.asarray(q.scales).view(np.uint8)), w.shape, q.block_shape, q.axis)
    divisor = None if q.tensor_scale is None else np.float32(1 / np.float64(q.tensor_scale))
    return codes, np.asarray(scales), divisor
