"""Hugging Face configurations: read, written and refused."""

import dataclasses
import json

import pytest
from support.llamas import golden_raw

from models.config_file import from_dict
from models.configs import DecoderConfig, ExpertsConfig, get_config, to_dict
from models.huggingface.config import read_config, write_config


def test_meta_s_llama_2_needs_no_rope_fields():
    """meta-llama/Llama-2-7b-hf's config.json: no head_dim, rope_theta or attention_bias."""
    raw = json.loads("""{
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "use_cache": true,
        "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
        "pretraining_tp": 1, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16", "num_experts": 0,
        "sliding_window": 4096, "use_sliding_window": false, "vocab_size": 32000}""")
    config = read_config(raw)
    assert config == DecoderConfig(32_000, 4096, 32, 32, 32, 128, 11_008, rope_theta=10_000.0)
    assert config.n_params == 6_738_415_616  # the size of that checkpoint


GRANITE = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
SMOLLM3 = {"model_type": "smollm3"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; llama, qwen2, .* can be imported"),
        ({"model_type": "deepseek_v3"}, "'deepseek_v3'; multi-head latent attention cannot run here"),
        ({"model_type": "jamba"}, "'jamba'; mamba layers cannot run here"),
        ({"model_type": "new", "kv_lora_rank": 512}, "'new'; multi-head latent attention cannot"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts is 8, and it is not supported; remove"),
        ({"num_experts": 8}, "num_experts is 8"),
        (MIXTRAL | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8 experts"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        (QWEN3_MOE | {"mlp_only_layers": [2]}, r"mlp_only_layers must list some of 2 layers.*\[2\]"),
        (QWEN3_MOE | {"decoder_sparse_step": 3}, "mlp_only_layers and decoder_sparse_step leave no layer"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, and only 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], and it is not supported"),
        (SMOLLM3 | {"no_rope_layers": [1]}, r"1 \(rotated\) or 0 for each of 2 layers, got \[1\]"),
        (SMOLLM3 | {"no_rope_layers": [1, 2]}, r"no_rope_layers must have 1 \(rotated\) or 0"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob must be true or false"),
        ({"model_type": "gpt_oss", "layer_types": ["chunked_attention"]}, "layer_types is"),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention"]}, "1 entries for 2 layers"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"use_qk_norm": True}, "use_qk_norm is True"),
        ({"qk_norm": True}, "qk_norm is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*'full_attention' in"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, and only 1.0"),
        ({"is_causal": False}, "is_causal is False"),
        *(({name: 0.5}, f"{name} is 0.5") for name in GRANITE),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({"hidden_size": 130, "head_dim": None}, "130 is no multiple of num_attention_heads 4; add head_dim"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers must be"),
        ({"num_key_value_heads": 3}, "no multiple of 3 key/value heads"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks high_freq_factor, low_freq"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"does not take \['full_attention'\]"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": 3}, "must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling differ"),
        ({"original_max_position_embeddings": 32}, "differs from that of the rope"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(golden_raw() | change)


@pytest.mark.parametrize("fields", [{"mlp_only_layers": [0, 2]}, {"decoder_sparse_step": 2}])
def test_layers_without_experts_are_those_of_qwen3_moe(fields):
    """As in Qwen3MoeDecoderLayer: experts are in layers that are not listed and end a step."""
    sizes = {"num_hidden_layers": 4, "moe_intermediate_size": 24, "intermediate_size": 80}
    config = read_config(golden_raw() | QWEN3_MOE | sizes | fields)
    assert (config.d_ff, config.dense_d_ff) == (24, (80, 0, 80, 0))
    assert read_config(write_config(config, 64)) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_every_fourth_layer_of_smollm3_does_not_rotate_and_alone_has_a_window():
    raw = golden_raw() | SMOLLM3 | {"num_hidden_layers": 8, "use_sliding_window": True, "sliding_window": 16}
    config = read_config(raw)
    assert config.rope_layers == (1, 1, 1, 0, 1, 1, 1, 0)
    assert config.windows == (0, 0, 0, 16, 0, 0, 0, 16)
    assert read_config(write_config(config, 64)) == config
    assert read_config(raw | {"no_rope_layers": [1] * 8, "use_sliding_window": False}).rope_layers == ()


def test_values_that_change_nothing_are_taken_and_unknown_fields_are_named(caplog):
    """Fields of Mistral, Qwen 2 and 3 and Granite by which they are a Llama."""
    raw = golden_raw() | dict.fromkeys(GRANITE, 1.0) | {"attention_multiplier": None, "attention_bias": False}
    raw |= {"layer_types": ["full_attention"] * 2, "sliding_window": None, "partial_rotary_factor": None}
    raw |= {"max_window_layers": 28, "use_sliding_window": False, "qk_norm": False, "attention_dropout": 0.1}
    assert read_config(raw) == read_config(golden_raw())
    assert not caplog.messages
    assert read_config(raw | {"alibi": True, "rotary_pct": 0.25, "_kept": 1}) == read_config(golden_raw())
    assert caplog.messages == [
        "config.json: ['alibi', 'rotary_pct']: unknown fields, ignored; check that the model needs none"
    ]


def test_both_fields_of_rope_may_say_the_same():
    """rope_scaling has no rope_theta, which rope_parameters holds too."""
    rope = golden_raw()["rope_parameters"]
    older = {name: value for name, value in rope.items() if name != "rope_theta"}
    assert older
    assert read_config(golden_raw() | {"rope_scaling": older}) == read_config(golden_raw())


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "change",
    [
        *({"rms_norm_eps": value} for value in ("x", None, -1e-5, 0, float("nan"), float("inf"), True, [1])),
        *({"initializer_range": value} for value in (-1, "0.02", 1e300)),
        *({"vocab_size": value} for value in (True, 2**31, 10**4000, 32.0, "32")),
        *({"num_key_value_heads": value} for value in (-2, 0, 2.0)),
        *({"head_dim": value} for value in (-8, 0, "8")),
        *({"max_position_embeddings": value} for value in ("x", -1, [2])),
        {"tie_word_embeddings": "false"},
        *({"rope_parameters": {"rope_theta": value}} for value in (0, -1, "x", None, 10**400)),
        *({"rope_parameters": LLAMA3 | {"factor": value}} for value in (0, "8", [8])),
        *({"rope_parameters": LLAMA3 | {"low_freq_factor": value}} for value in (0, 4.0, 5.0)),
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16.5}},
    ],
    ids=lambda change: repr(change)[:60],
)
def test_a_value_that_cannot_be_is_named(change):
    [(name, value)] = change.items()
    if isinstance(value, dict):
        name = next(n for n, v in value.items() if LLAMA3.get(n) != v)
    with pytest.raises(ValueError, match=f"config.json: {name} must be") as caught:
        read_config(golden_raw("llama3") | change)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    "change",
    [
        {"qkv_bias": True, "windows": (8,) * 4, "qk_norm": True},
        {"sinks": True},
        {"experts": ExpertsConfig(8, 2, shared=1)},
        {"experts": ExpertsConfig(8, 2, scores="sigmoid", balance_rate=1e-3)},
    ],
    ids=str,
)
def test_parts_that_no_architecture_has_are_not_exported(change):
    config = dataclasses.replace(get_config("tiny"), **change)
    with pytest.raises(ValueError, match="no architecture with all parts of this model"):
        write_config(config, 2048)


def test_an_export_names_the_parts_that_no_architecture_has():
    config = get_config("mixtral-8x7b")
    config = dataclasses.replace(config, sinks=True, experts=dataclasses.replace(config.experts, shared=1))
    with pytest.raises(ValueError, match=r"mixtral, the closest, lacks sinks, experts\.shared$"):
        write_config(config, 64)
