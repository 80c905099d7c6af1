"""Conversion between `DecoderConfig` and config.json, as transformers 4 and 5 write it.

`models.huggingface.architectures` has the supported architectures and their own fields.

Settings that change the model's values and are not supported raise an error. Those known to change none
(caches, dropout, token ids) are ignored. So are unknown ones, with a warning.

Source: transformers' configuration_*.py and modeling_rope_utils.py, 4.57 and 5.23.
"""

import dataclasses
import logging
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from models.configs import ClampedSwiGLU, DecoderConfig, ExpertsConfig, RopeScaling, Yarn
from models.huggingface.architectures import ARCHITECTURES, model_type
from models.huggingface.fields import (
    coefficient,
    positive,
    read_dense,
    read_rope_layers,
    read_windows,
    size,
    switch,
    unsupported,
    window_fields,
)

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
    "router_jitter_noise": 0.0,
    "decoder_sparse_step": 1,
}
_OTHER_ARCHITECTURES: Mapping[str, str] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3"), "multi-head latent attention"),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba2"), "mamba layers"),
    **dict.fromkeys(("nemotron_h", "granitemoehybrid", "falcon_h1"), "mamba layers"),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "kimi_linear", "minimax", "rwkv"), "linear attention"),
}
"""Parts of other architectures that no decoder here has, by model_type."""
_OTHER_PARTS: Mapping[str, str] = {
    "kv_lora_rank": "multi-head latent attention",
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), "mamba layers"),
    "linear_conv_kernel_dim": "linear attention",
}
"""The same by fields, of architectures that are not listed."""
_OF_OTHERS = (
    *("sliding_window", "use_sliding_window", "sliding_window_pattern", "attention_chunk_size"),
    *("qk_norm", "use_qk_norm", "qk_layernorm", "clip_qkv", "use_parallel_residual"),
    *("bias", "use_bias", "qkv_bias", "attention_out_bias", "lm_head_bias"),
    *("attention_multiplier", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("scale_emb", "scale_depth", "dim_model_base", "rope_interleave", "rope_interleaved"),
    *("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank", "num_nextn_predict_layers"),
    *("n_shared_experts", "shared_expert_intermediate_size", "mlp_only_layers"),
    *("use_bidirectional_attention", "add_cross_attention", "is_encoder_decoder", "per_layer_config"),
)
"""Fields of other families. transformers ignores most, and whoever sets them means another model.

An architecture's own fields, in `ARCHITECTURES`, are read and not refused.
"""
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
    *("is_llama_config", "transformers.js_config", "initial_context_length", "intermediate_size"),
    *("output_router_logits", "experts_per_token"),
)
"""Fields of labels, generation, dropout and files, or twice there: they do not change a model's logits."""
_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_context",
}
_YARN = {"factor": "factor", "original_max_position_embeddings": "original_context"}
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True, "attention_factor": None}
_ROPE_FIELDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Returns the decoder that a config.json describes, with transformers' defaults for what it leaves out.

    Raises:
      ValueError: it has another architecture, or unsupported parts; the message names them.
    """
    try:
        return _read_config(raw)
    except ValueError as error:  # of DecoderConfig too, which knows no file
        raise ValueError(f"config.json: {str(error).removeprefix('config.json: ')}") from None


def _read_config(raw: Mapping[str, Any]) -> DecoderConfig:
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        part = next((part for name, part in _OTHER_PARTS.items() if raw.get(name)), None)
        part = _OTHER_ARCHITECTURES.get(kind, part) if isinstance(kind, str) else None
        why = f"{part} cannot run here" if part else f"{', '.join(ARCHITECTURES)} can be imported"
        raise ValueError(f"config.json: model_type is {short(kind)}; {why}")
    _check_features(raw, own := ARCHITECTURES[kind].fields)
    raw = {**own, **{name: value for name, value in raw.items() if value is not None or name in _NULLS}}
    if not isinstance(tied := raw.get("tie_word_embeddings", False), bool):
        raise ValueError(f"config.json: tie_word_embeddings must be true or false, got {short(tied)}")
    read_context(raw)  # the model does not use it
    theta, scaling, yarn = _read_rope(raw)
    heads, width = size(raw, "num_attention_heads"), size(raw, "hidden_size")
    if heads % (groups := size(raw, "num_key_value_heads", heads)):
        raise ValueError(
            f"config.json: num_attention_heads {heads} is no multiple of {groups} key/value heads"
        )
    if raw.get("head_dim") is None and width % heads:
        raise ValueError(
            f"config.json: hidden_size {width} is no multiple of num_attention_heads {heads}; add head_dim"
        )
    if (head_dim := size(raw, "head_dim", width // heads)) % 2:
        raise ValueError(f"config.json: head_dim {head_dim} must be even for rotary embeddings")
    layers, bias = size(raw, "num_hidden_layers"), switch(raw, "attention_bias")
    rope_layers = read_rope_layers(raw, kind, layers)
    return DecoderConfig(
        vocab_size=size(raw, "vocab_size"),
        d_model=width,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=head_dim,
        d_ff=size(raw, "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        yarn=yarn,
        norm_eps=positive(raw, "rms_norm_eps", 1e-6),
        init_std=positive(raw, "initializer_range", 0.02),
        tied=tied,
        qkv_bias=bias or kind == "qwen2",
        out_bias=bias,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        sinks=kind == "gpt_oss",
        windows=read_windows(raw, kind, layers, rope_layers),
        experts=_read_experts(raw, kind),
        dense_d_ff=read_dense(raw, kind, layers),
        rope_layers=rope_layers,
    )


_NULLS = ("sliding_window", "rms_norm_eps", "quantization_config")
"""Fields whose null is not the default."""


def _read_experts(raw: Mapping[str, Any], kind: str) -> ExpertsConfig | None:
    if kind not in ("mixtral", "qwen3_moe", "gpt_oss"):
        return None
    name = (
        "num_experts" if raw.get("num_local_experts") is None else "num_local_experts"
    )  # as version 5 writes
    experts, active = size(raw, name), size(raw, "num_experts_per_tok")
    if active > experts:
        raise ValueError(f"config.json: num_experts_per_tok is {active} of {experts} experts")
    alpha, limit = (positive(raw, f"swiglu_{n}", 1.0) for n in ("alpha", "limit"))
    return ExpertsConfig(
        n=experts,
        active=active,
        renormalized=switch(raw, "norm_topk_prob") if kind == "qwen3_moe" else True,
        biased=kind == "gpt_oss",
        clamped=ClampedSwiGLU(alpha, limit) if kind == "gpt_oss" else None,
        balance_loss=coefficient(raw, "router_aux_loss_coef"),
        z_loss=coefficient(raw, "router_z_loss_coef"),
    )


def read_context(raw: Mapping[str, Any]) -> int | None:
    """Returns the longest sequence that a config.json names, if it does; raises ValueError for no length."""
    name = "max_position_embeddings"
    return None if raw.get(name) is None else size(raw, name)


def _check_features(raw: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that makes another model; warns of fields that nothing here knows.

    `own` are the architecture's own fields, which are read.
    """
    read = {*own}
    packed = raw.get("quantization_config")
    if raw["model_type"] == "gpt_oss" and isinstance(packed, dict) and packed.get("quant_method") == "mxfp4":
        read.add("quantization_config")
    for name, only in _ONLY.items():
        if name not in read and raw.get(name) not in (None, only):
            raise unsupported(name, raw[name], f"only {only!r} is supported")
    for name, only in _PER_LAYER.items():
        layers = raw.get(name) or []
        if name not in read and (not isinstance(layers, list) or any(layer != only for layer in layers)):
            raise unsupported(name, layers, f"only {only!r} in every layer is supported")
    unused = ("sliding_window", "sliding_window_pattern") if raw.get("use_sliding_window") is False else ()
    for name in _OF_OTHERS:
        if raw.get(name) and name not in (*unused, *read):
            raise unsupported(name, raw[name], "it is not supported")
    known = {*_ONLY, *_PER_LAYER, *_OF_OTHERS, *_READ, *_WITHOUT_EFFECT, *own}
    if unknown := sorted(n for n in raw if raw[n] and n not in known and not n.startswith("_")):
        _log.warning(
            "config.json: %s: unknown fields, ignored; check that the model needs none", short(unknown)
        )


def write_config(config: DecoderConfig, context: int) -> dict[str, Any]:
    """Returns config.json for a model trained on sequences of `context` tokens.

    It has the fields of transformers 4, which version 5 reads too. Token ids are left to the tokenizer.

    Raises:
      ValueError: no supported architecture has the parts of this model.
    """
    kind = model_type(config)
    for scaling in (config.rope_scaling, config.yarn):
        if scaling is not None:
            context = max(context, int(scaling.factor * scaling.original_context))
    raw = {
        "architectures": [ARCHITECTURES[kind].name],
        "model_type": kind,
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
        "rope_scaling": _rope_fields(config),
        "attention_bias": config.out_bias,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    raw |= window_fields(config, kind) | _expert_fields(config, kind)
    if kind == "smollm3":
        # The default padding token is beyond smaller vocabularies.
        raw |= {"no_rope_layers": list(config.rope_layers), "pad_token_id": None}
    if (read := read_config(raw)) != config:
        lost = ", ".join(_differing(config, read))
        raise ValueError(
            f"transformers has no architecture with all parts of this model; {kind}, the closest, lacks "
            f"{lost}"
        )
    return raw


def _differing(a: DecoderConfig | ExpertsConfig, b: DecoderConfig | ExpertsConfig) -> list[str]:
    names = []
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, ExpertsConfig) and isinstance(y, ExpertsConfig):
            names += [f"experts.{name}" for name in _differing(x, y)]
        elif x != y:
            names.append(field.name)
    return names


def _rope_fields(config: DecoderConfig) -> dict[str, Any] | None:
    if (scaling := config.rope_scaling) is not None:
        return {"rope_type": "llama3"} | {name: getattr(scaling, ours) for name, ours in _LLAMA3.items()}
    if (yarn := config.yarn) is None:
        return None
    found = {"rope_type": "yarn"} | {name: getattr(yarn, ours) for name, ours in _YARN.items()}
    found |= {name: getattr(yarn, name) for name in _YARN_DEFAULTS}
    return {name: value for name, value in found.items() if value is not None}


def _expert_fields(config: DecoderConfig, kind: str) -> dict[str, Any]:
    if (e := config.experts) is None:
        return {}
    name = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    found: dict[str, Any] = {name: e.n, "num_experts_per_tok": e.active}
    found["router_aux_loss_coef"] = e.balance_loss or 0.0
    if e.z_loss is not None:
        found["router_z_loss_coef"] = e.z_loss  # transformers ignores it
    if kind == "qwen3_moe":
        found |= {"moe_intermediate_size": config.d_ff, "norm_topk_prob": e.renormalized}
    if config.dense_d_ff:
        found["intermediate_size"] = max(config.dense_d_ff)
        found["mlp_only_layers"] = [i for i, width in enumerate(config.dense_d_ff) if width]
    if e.clamped is not None:
        found |= {"swiglu_alpha": e.clamped.alpha, "swiglu_limit": e.clamped.limit}
    return found


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None, Yarn | None]:
    """Returns the base of the rotary frequencies and their scaling, from the fields of either version."""
    rope, older = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    rope = {} if older and rope == ARCHITECTURES[raw["model_type"]].fields.get("rope_parameters") else rope
    for given in (rope, older):
        if not isinstance(given, dict):
            raise ValueError(f"config.json: rope scaling must be an object, got {short(given)}")
    if rope and rope | older != rope:
        raise ValueError(
            "config.json: rope_parameters and rope_scaling differ; remove the one that is not the model's"
        )
    rope = rope or older
    theta = positive(rope if "rope_theta" in rope else raw, "rope_theta", 10_000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3", "yarn"):
        raise ValueError(
            f"config.json: rope type {short(kind)} is not supported; 'default', 'llama3' and 'yarn' are"
        )
    needed = {"default": {}, "llama3": _LLAMA3, "yarn": _YARN}[kind]
    optional = set(_YARN_DEFAULTS) if kind == "yarn" else set()
    given = {name for name, value in rope.items() if value is not None}
    if unknown := given - set(needed) - optional - _ROPE_FIELDS:
        raise ValueError(f"config.json: rope type {short(kind)} does not take {short(sorted(unknown))}")
    if rope.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError("config.json: rotating a part of each head (partial_rotary_factor) is not supported")
    if kind == "default":
        return theta, None, None
    if missing := set(needed) - given:
        raise ValueError(f"config.json: rope type {kind!r} lacks {', '.join(sorted(missing))}")
    values: dict[str, Any] = {ours: positive(rope, name) for name, ours in needed.items()}
    values["original_context"] = size(rope, "original_max_position_embeddings")
    if raw.get("original_max_position_embeddings") not in (None, values["original_context"]):
        raise ValueError(
            "config.json: original_max_position_embeddings differs from that of the rope scaling"
        )
    if kind == "yarn":
        values |= {name: positive(rope, name) for name in optional & given if name != "truncate"}
        return theta, None, Yarn(**values, truncate=switch({"truncate": True} | rope, "truncate"))
    return theta, RopeScaling(**values), None
