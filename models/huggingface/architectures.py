"""The architectures of Hugging Face's models that `models.decoder` runs: classes, fields and tensors' names.

Our matrices are [in, out] and stacked over layers; query, key and value share one, and so do gate and up
projection. Hugging Face has separate [out, in] matrices for every layer and expert. But gpt-oss's experts are
[expert, in, out], where the columns of gate and up projection take turns.

Source: transformers 5.23, modeling_*.py and conversion_mapping.py.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from models import decoder
from models.block import DENSE, block_numbers, part
from models.configs import DecoderConfig


class Architecture(NamedTuple):
    """A class of transformers, and what distinguishes its config.json.

    Attributes:
      name: the class.
      fields: those that other classes lack or have another default of, with the default.
    """

    name: str
    fields: Mapping[str, Any]


_NO_ROPE = {"no_rope_layers": None, "no_rope_layer_interval": 4}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_WINDOWS = _WINDOW | {"max_window_layers": 28, "layer_types": None}
_ROUTER = {"router_aux_loss_coef": 0.001, "router_z_loss_coef": None}
_QWEN3_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768} | _ROUTER
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2} | _ROUTER
_GPT_OSS = {"num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
ARCHITECTURES: Mapping[str, Architecture] = types.MappingProxyType(
    {
        "llama": Architecture("LlamaForCausalLM", {"attention_bias": False}),
        "qwen2": Architecture("Qwen2ForCausalLM", _WINDOWS),
        "qwen3": Architecture("Qwen3ForCausalLM", _WINDOWS | {"attention_bias": False, "head_dim": 128}),
        "smollm3": Architecture(
            "SmolLM3ForCausalLM",
            _NO_ROPE
            | {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
            | {
                "attention_bias": False,
                "num_key_value_heads": 4,
                "rope_theta": 2e6,
                "tie_word_embeddings": True,
            },
        ),
        "mistral": Architecture("MistralForCausalLM", {"sliding_window": 4096, "num_key_value_heads": 8}),
        "mixtral": Architecture(
            "MixtralForCausalLM",
            _MIXTRAL
            | {"sliding_window": None, "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
        ),
        "qwen3_moe": Architecture(
            "Qwen3MoeForCausalLM",
            _WINDOW
            | _QWEN3_MOE
            | {"norm_topk_prob": False, "num_local_experts": None, "attention_bias": False}
            | {"mlp_only_layers": (), "decoder_sparse_step": 1, "intermediate_size": 6144}
            | {"num_key_value_heads": 4},
        ),
        "gpt_oss": Architecture(
            "GptOssForCausalLM",
            _GPT_OSS
            | _ROUTER
            | {"sliding_window": 128, "layer_types": None, "attention_bias": True}
            | {"head_dim": 64, "num_key_value_heads": 8, "rope_theta": 150_000.0, "rms_norm_eps": 1e-5}
            | {"rope_parameters": _GPT_OSS_ROPE | {"original_max_position_embeddings": 4096}},
        ),
    }
)
"""The architectures by their model_type."""


def model_type(config: DecoderConfig) -> str:
    """Returns the architecture that a decoder is exported as; `write_config` checks that it has all parts."""
    if (e := config.experts) is not None:
        return "gpt_oss" if e.biased else "qwen3_moe" if config.qk_norm else "mixtral"
    if config.rope_layers:
        return "smollm3"
    if config.qk_norm:
        return "qwen3"
    if config.qkv_bias and not config.out_bias:
        return "qwen2"
    return "mistral" if config.windows else "llama"


def views(config: DecoderConfig, params: decoder.Params) -> dict[str, np.ndarray]:
    """Returns every tensor of a decoder as a view of `params`, by Hugging Face's names and in their order.

    Reshaped to `shape_of` a view is Hugging Face's tensor. Assigning to the view writes into `params`.
    Matrices of the blocks may have any number of inputs, as packed weights and adapters do.
    """
    c, blocks = config, params["blocks"]
    found = {"model.embed_tokens.weight": params["embedding"]}
    for i in range(c.n_layers):
        kind, block = c.block(i), _first(part(c, blocks, i, i + 1))
        mlp = _dense_views if kind.experts is None else _EXPERTS[model_type(kind)]
        layer = _attention_views(c, block["attention"]) | mlp(kind, block["mlp"])
        layer |= {
            "input_layernorm.weight": block["attention_norm"]["scale"],
            "post_attention_layernorm.weight": block["mlp_norm"]["scale"],
        }
        found |= {f"model.layers.{i}.{name}": view for name, view in layer.items()}
    found["model.norm.weight"] = params["norm"]["scale"]
    if not c.tied:
        found["lm_head.weight"] = params["head"].T
    return found


def shape_of(name: str, view: np.ndarray) -> tuple[int, ...]:
    """Returns the shape of a view in Hugging Face's checkpoint.

    [out, in] of a weight, whose view's last axis is the input; [n] of a norm, bias or sinks; and of gpt-oss's
    experts the view's, with the last two axes as one where gate and up projection take turns.
    """
    if ".experts.gate_up_proj" in name:
        return (*view.shape[:-2], view.shape[-2] * view.shape[-1])
    if ".experts.down_proj" in name and not name.endswith(".weight"):
        return view.shape
    if name.endswith(".weight") and view.ndim > 1:
        return (view.size // view.shape[-1], view.shape[-1])
    return (view.size,)


def largest_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of tensors which have all sizes of a decoder, for a check before it is allocated."""
    c, layer = config, "model.layers.0"
    e, numbers = c.experts, block_numbers(config)
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.d_model),
        f"{layer}.self_attn.q_proj.weight": (c.n_heads * c.head_dim, c.d_model),
        f"{layer}.self_attn.k_proj.weight": (c.n_kv_heads * c.head_dim, c.d_model),
    }
    if e is None:
        return found | {f"{layer}.mlp.gate_proj.weight": (c.d_ff, c.d_model)}
    if numbers:
        dense, layer = (f"model.layers.{numbers[module][0]}" for module in (DENSE, "mlp"))
        found[f"{dense}.mlp.gate_proj.weight"] = max(c.dense_d_ff), c.d_model
    if e.biased:
        return found | {f"{layer}.mlp.experts.gate_up_proj_bias": (e.n, 2 * c.d_ff)}
    name = "mlp.experts.{}.gate_proj" if c.qk_norm else "block_sparse_moe.experts.{}.w1"
    return found | {f"{layer}.{name.format(e.n - 1)}.weight": (c.d_ff, c.d_model)}


def _first(stacked: Mapping) -> dict:
    """Returns the first entries in nested dicts of stacked arrays, without absent ones."""
    return {
        name: _first(value) if isinstance(value, Mapping) else value[0]
        for name, value in stacked.items()
        if value is not None
    }


def _attention_views(c: DecoderConfig, attention: Mapping) -> dict[str, np.ndarray]:
    heads = c.n_heads // c.n_kv_heads
    qkv_DGRH = attention["qkv"].reshape(-1, c.n_kv_heads, heads + 2, c.head_dim)
    found = {
        f"self_attn.{name}.weight": view for name, view in _split_heads(qkv_DGRH.transpose(1, 2, 3, 0), heads)
    }
    found["self_attn.o_proj.weight"] = attention["out"].T
    if c.qkv_bias:
        bias_GRH = attention["qkv_bias"].reshape(c.n_kv_heads, heads + 2, c.head_dim)
        found |= {f"self_attn.{name}.bias": view for name, view in _split_heads(bias_GRH, heads)}
    if c.out_bias:
        found["self_attn.o_proj.bias"] = attention["out_bias"]
    if c.qk_norm:
        found |= {f"self_attn.{x}_norm.weight": attention[f"{x}_norm"]["scale"] for x in "qk"}
    if c.sinks:
        found["self_attn.sinks"] = attention["sinks"]
    return found


def _split_heads(qkv: np.ndarray, heads: int) -> list[tuple[str, np.ndarray]]:
    """Returns the query, key and value parts of [key/value heads, heads + 2, ...]."""
    return [("q_proj", qkv[:, :heads]), ("k_proj", qkv[:, heads]), ("v_proj", qkv[:, heads + 1])]


def _dense_views(c: DecoderConfig, mlp: Mapping) -> dict[str, np.ndarray]:
    gate_up_FD = mlp["gate_up"].T
    parts = {"gate_proj": gate_up_FD[: c.d_ff], "up_proj": gate_up_FD[c.d_ff :], "down_proj": mlp["down"].T}
    return {f"mlp.{name}.weight": view for name, view in parts.items()}


def _views_of_each(gate: str, names: tuple[str, str, str]) -> Callable[..., dict[str, np.ndarray]]:
    """Returns the function of a layer whose experts have tensors of their own, for gate, up and down."""

    def found(c: DecoderConfig, mlp: Mapping) -> dict[str, np.ndarray]:
        tensors = {f"{gate}.gate.weight": mlp["router"].T}
        for j in range(len(mlp["gate_up"])):
            gate_up_FD = mlp["gate_up"][j].T
            parts = gate_up_FD[: c.d_ff], gate_up_FD[c.d_ff :], mlp["down"][j].T
            tensors |= {
                f"{gate}.experts.{j}.{name}.weight": view for name, view in zip(names, parts, strict=True)
            }
        return tensors

    return found


def _gpt_oss_views(c: DecoderConfig, mlp: Mapping) -> dict[str, np.ndarray]:
    experts = len(mlp["gate_up"])
    gate_up_EDF2 = mlp["gate_up"].reshape(experts, c.d_model, 2, c.d_ff).swapaxes(2, 3)
    return {
        "mlp.router.weight": mlp["router"].T,
        "mlp.router.bias": mlp["router_bias"],
        "mlp.experts.gate_up_proj": gate_up_EDF2,
        "mlp.experts.gate_up_proj_bias": mlp["gate_up_bias"].reshape(experts, 2, c.d_ff).swapaxes(1, 2),
        "mlp.experts.down_proj": mlp["down"],
        "mlp.experts.down_proj_bias": mlp["down_bias"],
    }


_EXPERTS: Mapping[str, Callable[..., dict[str, np.ndarray]]] = types.MappingProxyType(
    {
        "mixtral": _views_of_each("block_sparse_moe", ("w1", "w3", "w2")),
        "qwen3_moe": _views_of_each("mlp", ("gate_proj", "up_proj", "down_proj")),
        "gpt_oss": _gpt_oss_views,
    }
)
