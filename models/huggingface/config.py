"""Conversion between `LlamaConfig` and config.json, as transformers 4 and 5 write it.

Settings that change the model's values and are not supported raise an error. Those known to change none
(caches, dropout, token ids) are ignored. So are unknown ones, with a warning.

Source: transformers' configuration_llama.py and modeling_rope_utils.py, 4.57 and 5.23.
"""

import logging
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from models.configs import LlamaConfig, RopeScaling

_log = logging.getLogger(__name__)

# The only supported value of each field, which is also its default.
_ONLY: Mapping[str, Any] = {
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "is_causal": True,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "quantization_config": None,
}
_OF_OTHERS = (
    *("sliding_window", "use_sliding_window", "sliding_window_pattern", "attention_chunk_size"),
    *("qk_norm", "use_qk_norm", "qk_layernorm", "clip_qkv", "use_parallel_residual"),
    *("bias", "use_bias", "qkv_bias", "attention_out_bias", "lm_head_bias"),
    *("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("scale_emb", "scale_depth", "dim_model_base", "rope_interleave", "rope_interleaved"),
    *("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank", "num_nextn_predict_layers"),
    *("use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder", "per_layer_config"),
)
"""Fields of other families. transformers' Llama ignores most, and whoever sets them means another model."""
_PER_LAYER: Mapping[str, Any] = {
    "layer_types": "full_attention",
    "mlp_layer_types": "dense",
    "no_rope_layers": 1,
}
"""Lists with an entry a layer, and the only supported entry."""
_READ = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"),
    *("rms_norm_eps", "initializer_range", "rope_theta", "rope_scaling", "rope_parameters"),
    "original_max_position_embeddings",
)
_WITHOUT_EFFECT = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "name_or_path", "auto_map"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_implementation"),
    *("use_cache", "pretraining_tp", "max_window_layers", "chunk_size_feed_forward", "is_decoder"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "use_return_dict"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    *("max_length", "min_length", "do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams"),
    *("repetition_penalty", "length_penalty", "num_return_sequences", "tokenizer_class", "prefix"),
    *("is_llama_config", "transformers.js_config"),
)
"""Fields of labels, generation, dropout and files: they do not change a Llama's logits."""
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
        hint = "; a Mistral without a sliding_window is one: write 'llama'" if kind == "mistral" else ""
        raise ValueError(f"config.json: model_type is {short(kind)}; only 'llama' can be imported{hint}")
    _check_features(raw)
    if not isinstance(tied := raw.get("tie_word_embeddings", False), bool):
        raise ValueError(f"config.json: tie_word_embeddings must be true or false, got {short(tied)}")
    read_context(raw)  # the model does not use it
    theta, scaling = _read_rope(raw)
    heads, width = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    if heads % (groups := _size(raw, "num_key_value_heads", heads)):
        raise ValueError(
            f"config.json: num_attention_heads {heads} is no multiple of {groups} key/value heads"
        )
    if raw.get("head_dim") is None and width % heads:
        raise ValueError(
            f"config.json: hidden_size {width} is no multiple of num_attention_heads {heads}; add head_dim"
        )
    if (head_dim := _size(raw, "head_dim", width // heads)) % 2:
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


def read_context(raw: Mapping[str, Any]) -> int | None:
    """Returns the longest sequence that a config.json names, if it does; raises ValueError for no length."""
    name = "max_position_embeddings"
    return None if raw.get(name) is None else _size(raw, name)


def _check_features(raw: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that makes another model; warns of fields that nothing here knows."""
    for name, only in _ONLY.items():
        if raw.get(name) not in (None, only):
            raise _unsupported(name, raw[name], f"only {only!r} is supported")
    for name, only in _PER_LAYER.items():
        layers = raw.get(name) or []
        if not isinstance(layers, list) or any(layer != only for layer in layers):
            raise _unsupported(name, layers, f"only {only!r} in every layer is supported")
    unused = ("sliding_window", "sliding_window_pattern") if raw.get("use_sliding_window") is False else ()
    for name in _OF_OTHERS:
        if raw.get(name) and name not in unused:
            raise _unsupported(name, raw[name], "it is not supported")
    known = {*_ONLY, *_PER_LAYER, *_OF_OTHERS, *_READ, *_WITHOUT_EFFECT}
    if unknown := sorted(n for n in raw if raw[n] and n not in known and not n.startswith("_")):
        _log.warning(
            "config.json: %s: unknown fields, ignored; check that the model needs none",
            short(unknown),
        )


def _unsupported(name: str, value: object, why: str) -> ValueError:
    return ValueError(
        f"config.json: {name} is {short(value)}, and {why}; "
        "remove it if the model was trained without it, else it cannot be imported"
    )


def _size(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Returns a positive integer; null is the default if there is one."""
    value = raw.get(name)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config.json: {name} is missing")
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
    rope, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for given in (rope, older):
        if not isinstance(given, dict):
            raise ValueError(f"config.json: rope scaling must be an object, got {short(given)}")
    if rope and rope | older != rope:
        raise ValueError(
            "config.json: rope_parameters and rope_scaling differ; remove the one that is not the model's"
        )
    rope = rope or older
    theta = _positive(rope if "rope_theta" in rope else raw, "rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(f"config.json: rope type {short(kind)} is not supported; 'default' and 'llama3' are")
    fields = set(_LLAMA3) if kind == "llama3" else set()
    given = {name for name, value in rope.items() if value is not None}
    if unknown := given - fields - _ROPE_FIELDS:
        raise ValueError(f"config.json: rope type {short(kind)} does not take {short(sorted(unknown))}")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("config.json: rotating a part of each head (partial_rotary_factor) is not supported")
    if kind == "default":
        return theta, None
    if missing := fields - given:
        raise ValueError(f"config.json: rope type 'llama3' lacks {', '.join(sorted(missing))}")
    values: dict[str, Any] = {ours: _positive(rope, name) for name, ours in _LLAMA3.items()}
    values["original_context"] = _size(rope, "original_max_position_embeddings")
    if raw.get("original_max_position_embeddings") not in (None, values["original_context"]):
        raise ValueError(
            "config.json: original_max_position_embeddings differs from that of the rope scaling"
        )
    if not values["low_freq_factor"] < values["high_freq_factor"]:
        raise ValueError("config.json: low_freq_factor must be less than high_freq_factor")
    return theta, RopeScaling(**values)
