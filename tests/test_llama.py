"""The Llama against transformers' LlamaForCausalLM (golden file), and its policies against one another."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import llama
from models.configs import LlamaConfig, RopeScaling
from models.llama import layer_policies

GOLDEN = pathlib.Path(__file__).parent / "golden" / "llama.npz"
SMALL = LlamaConfig(64, 32, 3, 4, 2, 16, 96)


def golden_config(raw: dict) -> LlamaConfig:
    rope = raw["rope_parameters"]
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        d_model=raw["hidden_size"],
        n_layers=raw["num_hidden_layers"],
        n_heads=raw["num_attention_heads"],
        n_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        d_ff=raw["intermediate_size"],
        rope_theta=rope["rope_theta"],
        rope_scaling=RopeScaling(
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        ),
        norm_eps=raw["rms_norm_eps"],
    )


def group_qkv(q, k, v, config: LlamaConfig) -> np.ndarray:
    """Our column order: the query heads of a key/value head, its key, its value."""
    d, g, h = config.d_model, config.n_kv_heads, config.head_dim
    parts = (q.T.reshape(d, g, -1, h), k.T.reshape(d, g, 1, h), v.T.reshape(d, g, 1, h))
    return np.concatenate(parts, axis=2).reshape(d, -1)


def golden_params(golden, config: LlamaConfig) -> dict:
    def layers(name):
        return [golden[f"state/model.layers.{i}.{name}.weight"] for i in range(config.n_layers)]

    def stacked(name):
        return np.stack([w.T for w in layers(name)])

    qkv = zip(*(layers(f"self_attn.{n}_proj") for n in "qkv"), strict=True)
    gate_up = zip(layers("mlp.gate_proj"), layers("mlp.up_proj"), strict=True)
    return {
        "embedding": golden["state/model.embed_tokens.weight"],
        "blocks": {
            "attention_norm": {"scale": np.stack(layers("input_layernorm"))},
            "attention": {
                "qkv": np.stack([group_qkv(*heads, config) for heads in qkv]),
                "out": stacked("self_attn.o_proj"),
            },
            "mlp_norm": {"scale": np.stack(layers("post_attention_layernorm"))},
            "mlp": {
                "gate_up": np.stack([np.concatenate([g.T, u.T], axis=1) for g, u in gate_up]),
                "down": stacked("mlp.down_proj"),
            },
        },
        "norm": {"scale": golden["state/model.norm.weight"]},
        "head": golden["state/lm_head.weight"].T,
    }


def logits(config, params, tokens, policies, **options):
    def run(params, tokens, key):
        return llama.apply(config, params, tokens, policies=policies, key=key, **options)

    return jax.jit(run)(params, tokens, jax.random.key(7))


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as f:
        return dict(f)


@pytest.mark.parametrize("attention", ["fused", "through dot_general"])
def test_logits_equal_transformers(golden, attention):
    config = golden_config(json.loads(str(golden["config"])))
    rules = [("*", "fp32")]
    if attention == "through dot_general":  # a float32 product, but not of the fused kind
        rules.append(("*.attention.scores", unfused_fp32()))
    policies = layer_policies(config, "fp32", rules)
    params = jax.tree.map(jnp.asarray, golden_params(golden, config))
    ours = logits(config, params, jnp.asarray(golden["tokens"]), policies, dtype=jnp.float32)
    assert np.max(np.abs(ours - golden["logits"])) < 1e-5


def unfused_fp32():
    import dataclasses

    import mxjax

    fp32 = mxjax.get_policy("fp32")
    operand = mxjax.Operand("fp32", source="dequantized")  # the same values under another name
    return dataclasses.replace(fp32, dgrad=mxjax.Gemm(fp32.dgrad.lhs, operand))


def test_loss_and_gradients_equal_transformers(golden):
    config = golden_config(json.loads(str(golden["config"])))
    policies = layer_policies(config, "fp32", [("*", "fp32")])
    params = jax.tree.map(jnp.asarray, golden_params(golden, config))
    tokens = jnp.asarray(golden["tokens"])

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        out = llama.apply(config, params, tokens, policies=policies, dtype=jnp.float32)
        logp = jax.nn.log_softmax(out[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1))

    value, grads = loss(params)
    np.testing.assert_allclose(value, golden["loss"], rtol=1e-6)
    theirs = golden["grad/model.embed_tokens.weight"]
    np.testing.assert_allclose(grads["embedding"], theirs, atol=2e-6)
    theirs = golden["grad/model.layers.2.mlp.down_proj.weight"].T
    np.testing.assert_allclose(grads["blocks"]["mlp"]["down"][2], theirs, atol=2e-6)
