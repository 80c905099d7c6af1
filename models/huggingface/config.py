"""Conversion between `LlamaConfig` and config.json, as transformers 4 and 5 write it.

Settings that change the model's values and are not supported raise an error; others (caches, dropout, token
ids) are ignored.

Source: transformers' configuration_llama.py and modeling_rope_utils.py, 4.57 and 5.23.
"""

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from models.configs import LlamaConfig, RopeScaling

# The only supported value of each field, which is also its default.
_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_OF_OTHERS = (
    "sliding_window",
    "attention_chunk_size",
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_qk_norm",
)
"""Fields of other families. transformers' Llama ignores them, and whoever sets them means another model."""
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_config(raw: Mapping[str, Any]) -> LlamaConfig:
    """Returns the Llama that a config.json describes, with transformers' defaults for what it leaves out.

    Raises:
      ValueError: it is not a Llama, or has unsupported parts; the message names them.
    """
    kind = raw.get("model_type")
    if kind != "llama":
        raise ValueError(f"config.json: model_type is {short(kind)}; only 'llama' can be imported")
    for name, only in _ONLY.items():
        if (value := raw.get(name, only)) != only:
            raise ValueError(f"config.json: {name} is {short(value)}, and only {only!r} is supported")
    for name in _OF_OTHERS:
        if raw.get(name) and not (name == "sliding_window" and raw.get("use_sliding_window") is False):
            raise ValueError(f"config.json: {name} is {short(raw[name])}, which is not supported; remove it")
    if not isinstance(tied := raw.get("tie_word_embeddings", False), bool):
        raise ValueError(f"config.json: tie_word_embeddings must be true or false, got {short(tied)}")
    _size(raw, "max_position_embeddings", 1)  # the model does not use it
    theta, scaling = _read_rope(raw)
    heads, width = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    if heads % (groups := _size(raw, "num_key_value_heads", heads)):
        raise ValueError(
            f"config.json: num_attention_heads {heads} is no multiple of {groups} key/value heads"
        )
    if (head_dim := _size(raw, "head_dim", max(width // heads, 1))) % 2:
        raise ValueError(f"config.json: head_dim {head_dim} must be even for rotary embeddings")
    return LlamaConfig(
        vocab_size=_size(raw, "vocab_size"),
        d_model=width,
        n_layers=_size(raw, "num_hidden_layers"),
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=head_dim,
        d_ff=_size(raw, "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
        init_std=_positive(raw, "initializer_range", 0.02),
        tied=tied,
    )


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a positive integer; null is the default if there is one."""
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ValueError(f"config.json: {name} must be a positive integer below 2**31, got {short(value)}")
    return value


def _positive(raw: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Returns a positive number that float32 holds, and so does its square."""
    value = raw.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 1e-19 < value < 1e19:
        raise ValueError(f"config.json: {name} must be a positive number, got {short(value)}")
    return float(value)


def write_config(config: LlamaConfig, context: int) -> dict[str, Any]:
    """Returns config.json for a model trained on sequences of `context` tokens.

    It has the fields of transformers 4, which version 5 reads too. Token ids are left to the tokenizer.
    """
    scaling = config.rope_scaling
    if scaling is not None:
        context = max(context, int(scaling.factor * scaling.original_context))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_std,
        "rope_theta": config.rope_theta,
        "rope_scaling": None
        if scaling is None
        else {"rope_type": "llama3"} | {name: getattr(scaling, ours) for name, ours in _LLAMA3.items()},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Returns the base of the rotary frequencies and their scaling, from the fields of either version."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"config.json: rope scaling must be an object, got {short(rope)}")
    theta = _positive(rope if "rope_theta" in rope else raw, "rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: rope type {short(kind)} is not supported; 'default' and 'llama3' are")
    fields = set(_LLAMA3) if kind == "llama3" else set()
    given = {name for name, value in rope.items() if value is not None}
    if unknown := given - fields - _ROPE_FIELDS:
        raise ValueError(f"config.json: rope type {short(kind)} does not take {short(sorted(unknown))}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json: rotating a part of each head (partial_rotary_factor) is not supported")
    if kind == "default":
        return theta, None
    if missing := fields - given:
        raise ValueError(f"config.json: rope type 'llama3' lacks {', '.join(sorted(missing))}")
    values: dict[str, Any] = {ours: _positive(rope, name) for name, ours in _LLAMA3.items()}
    values["original_context"] = _size(rope, "original_max_position_embeddings")
    if not values["low_freq_factor"] < values["high_freq_factor"]:
        raise ValueError("config.json: low_freq_factor must be less than high_freq_factor")
    return theta, RopeScaling(**values)
