"""The decoder's policies, loops and losses. `test_architectures` compares with transformers."""

import dataclasses
import functools
import os
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import layer_policies
from support.marks import parametrize
from support.programs import on_devices

import mxjax
from models import decoder, loss
from models.configs import CONFIGS, DecoderConfig, get_config
from models.gemms import LINEAR_LAYERS
from mxjax.runtime.devices import Target, use_target

SMALL = DecoderConfig(64, 32, 3, 4, 2, 16, 96)


def logits(config, params, tokens, policies, **options):
    def run(params, tokens, key):
        return decoder.apply(config, params, tokens, policies=policies, key=key, **options)

    return jax.jit(run)(params, tokens, jax.random.key(7))


@pytest.fixture(scope="module")
def params():
    return decoder.init(SMALL, jax.random.key(0))


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 24)), jnp.int32)


def gradients(params, policies, **options):
    def loss(params):
        out = decoder.apply(SMALL, params, TOKENS, policies=policies, key=jax.random.key(7), **options)
        return jnp.mean(jax.nn.logsumexp(out, axis=-1) ** 2)

    return jax.jit(jax.grad(loss))(params)


def test_high_precision_layers_unless_a_rule_names_them():
    policies = layer_policies(SMALL, "wgrad", [("blocks.1.attention.scores", "fp8")])
    bf16 = mxjax.get_policy("bf16")
    assert policies["head"] == policies["blocks.0.attention.scores"] == bf16
    assert policies["blocks.1.attention.scores"] == mxjax.get_policy("fp8")
    assert policies["blocks.2.attention.qkv"] == mxjax.get_policy("wgrad")


ONE_BLOCK = dataclasses.replace(SMALL, n_layers=1)
TO_ZERO = mxjax.Operand(prescale=0.5)
object.__setattr__(TO_ZERO, "prescale", 2.0**-40)  # below what it accepts: every element rounds to zero


@functools.cache
def loss_and_gradients(*quantized):
    """Returns the compiled loss of one block whose layers are pinned to BF16, but `quantized` to zero."""
    pinned = [(f"blocks.0.{name}", "bf16") for name in LINEAR_LAYERS if name not in quantized]
    policies = layer_policies(ONE_BLOCK, mxjax.Policy(*[mxjax.Gemm(TO_ZERO, TO_ZERO)] * 3), pinned)
    return jax.jit(
        jax.value_and_grad(lambda params: decoder.mean_loss(ONE_BLOCK, params, TOKENS, policies=policies))
    )


@parametrize("layer", slow=["mlp.down", "attention.qkv"], exhaustive=["attention.out", "mlp.gate_up"])
def test_layers_pinned_to_bf16_run_in_bf16_beside_a_quantized_one(layer):
    """Bit for bit in all three GEMMs: quantizing a layer to zero does no more than zeros in its weight."""
    module, matrix = layer.split(".")
    params = decoder.init(ONE_BLOCK, jax.random.key(0))
    found, grads = loss_and_gradients(layer)(params)
    params["blocks"][module][matrix] = jnp.zeros_like(params["blocks"][module][matrix])
    expected, wanted = loss_and_gradients()(params)
    assert np.any(wanted["blocks"][module][matrix]) != (layer == "mlp.gate_up")
    wanted["blocks"][module][matrix] = params["blocks"][module][matrix]  # a Wgrad of zero
    assert found == expected
    jax.tree.map(np.testing.assert_array_equal, grads, wanted)


def random_mlp(policy):
    """Random bits in one product of each block: enough to see them, quick to compile."""
    return [("*.mlp.down", policy)]


@pytest.mark.slow
def test_blocks_of_other_policies_take_their_own_weights_and_bits(params):
    """Blocks of different policies run in separate scans; splitting one must change nothing."""
    whole = layer_policies(SMALL, "fp32", random_mlp("full_sr"))
    split = layer_policies(SMALL, "fp32", [*random_mlp("full_sr"), ("blocks.1.mlp.down", renamed_full_sr())])
    other = layer_policies(SMALL, "fp32", [*random_mlp("full_sr"), ("blocks.1.mlp.down", "fp32")])
    one_scan, three_scans, without = (
        logits(SMALL, params, TOKENS, policies, dtype=jnp.float32) for policies in (whole, split, other)
    )
    np.testing.assert_allclose(one_scan, three_scans, atol=1e-6)
    assert np.max(np.abs(one_scan - without)) > 1e-3


def renamed_full_sr():
    """The same Fprop in a policy that differs in its Wgrad."""
    policy = mxjax.get_policy("full_sr")
    return dataclasses.replace(policy, wgrad=mxjax.Gemm())


@pytest.mark.parametrize(("policy", "loops"), [("wgrad", 0), ("uniform4", 1)])
def test_blocks_are_unrolled_on_a_gpu_where_kernels_quantize(params, policy, loops, monkeypatch):
    monkeypatch.setattr(decoder, "on_gpu", lambda: True)
    policies = layer_policies(SMALL, policy)
    with use_target(Target("cuda", "sm_90")):
        jaxpr = jax.make_jaxpr(
            lambda params, key: decoder.losses(SMALL, params, TOKENS, policies=policies, key=key)
        )(params, jax.random.key(0))
    scans = [e for e in _equations(jaxpr.jaxpr) if e.params.get("length") == SMALL.n_layers]
    assert [e.params["unroll"] for e in scans] == [1] * loops


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def test_operands_are_quantized_once(params):
    """SwiGLU alone is computed again in the backward pass, not the forward pass of the product before it."""

    def loss(params):
        return decoder.mean_loss(SMALL, params, TOKENS, policies=layer_policies(SMALL, "fp8"), unroll=1)

    program = jax.jit(jax.grad(loss)).lower(params).as_text()
    assert len(re.findall(r"call @forward\w*\(%", program)) == len(LINEAR_LAYERS) + 1  # and the head


@parametrize("policy", slow=["wgrad_hadamard"], exhaustive=["bf16"])
def test_losses_in_pieces_are_those_of_the_logits(policy, monkeypatch):
    params, policies = decoder.init(ONE_BLOCK, jax.random.key(0)), layer_policies(ONE_BLOCK, policy)
    batch = jax.random.randint(jax.random.key(1), (2, 25), 0, SMALL.vocab_size)

    def loss(p):
        found = decoder.losses(ONE_BLOCK, p, batch, policies=policies)
        return found.mean(), found

    def by_logits(p):
        logits = decoder.apply(ONE_BLOCK, p, batch[:, :-1], policies=policies)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch[:, 1:, None], -1)[..., 0]
        return -chosen.mean(), -chosen

    def mean_loss(p):
        return decoder.mean_loss(ONE_BLOCK, p, batch, policies=policies)

    (_, expected), expected_grads = jax.value_and_grad(by_logits, has_aux=True)(params)
    for tokens in (1000, 20, 16):  # whole, and in pieces with and without a remainder
        monkeypatch.setattr("models.loss.LOSS_TOKENS", tokens)
        (_, found), grads = jax.value_and_grad(loss, has_aux=True)(params)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        mean, mean_grads = jax.value_and_grad(mean_loss)(params)
        np.testing.assert_allclose(mean, expected.mean(), rtol=1e-5)
        np.testing.assert_allclose(mean_loss(params), mean, rtol=1e-6)  # not differentiated
        for made in (grads, mean_grads):
            for got, wanted in zip(jax.tree.leaves(made), jax.tree.leaves(expected_grads), strict=True):
                difference = jnp.linalg.norm(got - wanted)
                assert difference <= 0.01 * jnp.linalg.norm(wanted)  # bfloat16 products of fewer tokens


def test_attention_products_quantize_when_a_rule_says_so(params):
    fused = logits(SMALL, params, TOKENS, layer_policies(SMALL, "bf16"))
    rules = [("*.attention.scores", "fp8"), ("*.attention.values", "fp8")]
    quantized = logits(SMALL, params, TOKENS, layer_policies(SMALL, "bf16", rules))
    assert 1e-4 < np.max(np.abs(fused - quantized)) < 0.1


def test_the_implementation_reaches_every_product(params, monkeypatch):
    seen = []
    for name in ("dot", "dot_general"):
        original = getattr(mxjax, name)

        def spy(*args, implementation, original=original, **options):
            seen.append(implementation)
            return original(*args, implementation=implementation, **options)

        monkeypatch.setattr(mxjax, name, spy)
    policies = layer_policies(SMALL, "bf16", [("*.attention.*", "fp8")])
    logits(SMALL, params, TOKENS, policies, implementation="reference")
    assert seen == ["reference"] * 7


@parametrize("tokens", 10, slow=[2048], ids="pieces of {}".format)
def test_the_gradient_of_a_tied_head_is_added_to_that_of_the_embedding(tokens, monkeypatch):
    monkeypatch.setattr(loss, "LOSS_TOKENS", tokens)
    config = dataclasses.replace(SMALL, tied=True)
    params = decoder.init(config, jax.random.key(0))
    untied = params | {"head": params["embedding"].T}
    policies = layer_policies(SMALL, "bf16")
    batch = jax.random.randint(jax.random.key(1), (4, 17), 0, SMALL.vocab_size)
    found, apart = (
        jax.jit(jax.grad(lambda p, c=c: decoder.mean_loss(c, p, batch, policies=policies)))(p)
        for c, p in ((config, params), (SMALL, untied))
    )
    np.testing.assert_allclose(found["embedding"], apart["embedding"] + apart["head"].T, atol=1e-7)
    np.testing.assert_allclose(found["norm"]["scale"], apart["norm"]["scale"], rtol=1e-6)


def test_initialization_has_the_stds_of_the_recipe():
    config = DecoderConfig(512, 256, 8, 4, 2, 64, 512)
    params = decoder.init(config, jax.random.key(0))
    stds = {name: float(jnp.std(params["blocks"]["mlp"][name])) for name in ("gate_up", "down")}
    np.testing.assert_allclose(stds["gate_up"], 0.02, rtol=0.01)
    np.testing.assert_allclose(stds["down"], 0.02 / 4, rtol=0.01)
    layers = params["blocks"]["attention"]["qkv"]
    assert not np.array_equal(layers[0], layers[1])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3.2-1b", 1_235_814_400),  # the sizes that Meta's checkpoints have
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_configurations_have_the_published_sizes(name, parameters):
    assert get_config(name).n_params == parameters


def test_every_configuration_can_be_built_and_its_parameters_are_counted():
    for config in CONFIGS.values():
        assert layer_policies(config, "wgrad_hadamard")
        shapes = jax.eval_shape(lambda c=config: decoder.init(c, jax.random.key(0)))
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == config.n_params


def test_flops_count_matrices_and_causal_attention():
    config = dataclasses.replace(SMALL, n_layers=1)
    matrices = 32 * config.qkv_size + 64 * 32 + 3 * 32 * 96 + 32 * 64
    norms = 3 * 32
    for frozen, each in ((False, 6), (True, 4)):
        assert config.flops_per_token(24, frozen) == each * (matrices + norms) + 6 * 64 * 24


@parametrize(
    "arguments", slow=[("fsdp=2", "bf16")], exhaustive=[("data=2,fsdp=1,tensor=1", "wgrad_sr", "tied")]
)
def test_unrolled_blocks_on_a_mesh_have_the_gradients_of_the_loop(arguments):
    """The order changes no gradient, and is there: a tie each for `gate_up`, `qkv` above, and the head."""
    # On some processors XLA fuses products by YNNPACK, in a loop otherwise than unrolled.
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
    [found] = on_devices(2, "support.unrolled", *arguments, XLA_FLAGS=flags)
    assert found["loss"] < 1e-6
    assert max(found["gradients"]) < 1e-5
    _, ordered, free = found["barriers"]
    blocks = 3
    assert ordered - free == blocks + (blocks - 1) + 1
    assert found["concatenations"] == 0
