"""Outlier channels in training: when norms are added up, which channels are chosen, and what multiplies them.

Choices are compared with TetraJet-v2's code (tests/golden/make_outlier_channels.py).
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.llamas import SMALL, layer_policies

import mxjax
from models import llama
from models.configs import LlamaConfig
from mxjax import Channels
from mxjax.layer_stats import ChannelNorms
from training import deoscillation
from training.config import Config, PrecisionConfig
from training.extension import extend_phases
from training.outliers import (
    OutlierError,
    OutlierSetting,
    add_outliers,
    check_norms,
    check_outliers,
    choose_channels,
    drop_unmixed,
    empty_norms,
    has_outliers,
    input_shapes,
    parse_outliers,
    remove_outliers,
    with_outlier_channels,
)
from training.policy_schedule import phases_of, with_exceptions, without_outliers
from training.recipes import expand
from training.weight_hooks import Hook, with_hook

ONE_DEVICE = {"data": 1, "fsdp": 1, "tensor": 1}
OUTLIER_POLICY = mxjax.get_policy("tetrajet_v2_outliers")


def test_channels_are_chosen_as_tetrajet_v2_does_in_the_same_steps():
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "outlier_channels.npz") as file:
        g = dict(file)
    rng = np.random.RandomState(0)
    draw = lambda *shape: rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) / 2)  # noqa: E731
    batches = (draw(8, 128, 384) * np.exp(rng.standard_normal(384))).astype(np.float32)
    model = LlamaConfig(32, 384, 1, 1, 1, 32, 384)
    setting = OutlierSetting(0.1, int(g["start"]), int(g["steps"]))
    assert list(g["recorded"]) == list(range(setting.start + 1, setting.first_step))
    optimizer = with_outlier_channels(optax.sgd(1.0), setting, model)

    @jax.jit
    def update(state, x, step):
        norms = jnp.linalg.norm(x, axis=0)[None]
        observed = {name: ChannelNorms(jnp.ones(shape)) for name, shape in input_shapes(model).items()}
        observed["mlp.down"] = ChannelNorms(norms)
        return optimizer.update({}, state, {}, step=step, observed=observed)[1]

    state, seen = optimizer.init({}), []
    for step, x in enumerate(batches, 1):
        state = update(state, x, step)
        seen.append(np.asarray(state.norms["mlp.down"]).sum())
    assert [step for step in range(2, 9) if seen[step - 1] != seen[step - 2]] == list(g["recorded"])
    found = choose_channels(state.norms, setting)["mlp.down"]
    np.testing.assert_array_equal(found.outliers[0], g["outliers"])
    np.testing.assert_array_equal(found.ordinary[0], g["ordinary"])
    later = optimizer.update({}, state, {}, channels=None)[1]  # a step of the mixed phase
    jax.tree.map(np.testing.assert_array_equal, later, state)


def test_the_model_gives_the_norms_of_each_layers_input():
    """Against the inputs themselves, with the parameters' gradients as they are."""
    policies = layer_policies(SMALL, "bf16")
    params = llama.init(SMALL, jax.random.key(0))
    batch = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 33), np.int32)
    shapes = input_shapes(SMALL)
    assert shapes["mlp.down"] == (2, 96)

    @jax.jit
    def gradients(params, slots):
        def loss(params, slots):
            return llama.mean_loss(SMALL, params, batch, policies=policies, slots=slots)

        return jax.grad(loss, argnums=(0, 1))(params, slots)

    norms = {name: ChannelNorms(jnp.zeros(shape)) for name, shape in shapes.items()}
    grads, found = gradients(params, norms)
    jax.tree.map(np.testing.assert_array_equal, grads, gradients(params, None)[0])
    # The first block's qkv reads the normalized embedding, whose scale is one.
    x = params["embedding"][batch[:, :-1]].astype(jnp.bfloat16).astype(jnp.float32).reshape(-1, 64)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + SMALL.norm_eps)
    expected = np.linalg.norm(x.astype(jnp.bfloat16).astype(np.float32), axis=0)
    np.testing.assert_allclose(found["attention.qkv"].x[0], expected, rtol=1e-4)
    assert all(np.all(np.asarray(slot.x) > 0) for slot in found.values())


def layer_policies_of(model):
    return lambda default, rules=(): llama.layer_policies(model, default, rules)


def test_outliers_begin_a_phase_and_an_extension_keeps_them():
    precision = PrecisionConfig("tetrajet_v2; fp8 from 9", outlier_channels="0.1:2:3:32")
    phases = phases_of(precision, 10, layer_policies_of(SMALL))
    assert [(p.first_step, has_outliers(p.layers)) for p in phases] == [(1, False), (6, True), (9, False)]
    mixed = phases[1].layers
    assert phases[1].policy == "tetrajet_v2 with outlier channels"
    assert mixed["blocks.1.mlp.down.outliers"] == OUTLIER_POLICY
    assert remove_outliers(mixed) == phases[0].layers
    plain = phases_of(dataclasses.replace(precision, outlier_channels=None), 10, layer_policies_of(SMALL))
    assert without_outliers(phases, 6) == plain
    other = dataclasses.replace(precision, policy="fp8; tetrajet_v2 from 9")  # the sixth step changes nothing
    found = phases_of(other, 10, layer_policies_of(SMALL))
    assert [(p.first_step, has_outliers(p.layers)) for p in found] == [(1, False), (9, True)]
    # Outliers that begin in the extension, and those that have begun.
    shares = dataclasses.replace(precision, policy="tetrajet_v2; fp8 from 0.5")
    for steps in (4, 8):
        begun = phases_of(shares, steps, layer_policies_of(SMALL))
        extended = extend_phases(begun, Config(precision=shares, steps=20), taken=2)
        assert extended == phases_of(shares, 20, layer_policies_of(SMALL))
    assert len(phases_of(dataclasses.replace(precision, policy="wgrad"), 5, layer_policies_of(SMALL))) == 1


def test_a_hook_on_weights_gets_the_channels():
    seen = []

    def apply(step, before, after, state, channels):
        seen.append(channels)
        return after, state

    hooked = with_hook(optax.sgd(1.0), Hook(lambda _: (), apply))
    optimizer = with_outlier_channels(hooked, OutlierSetting(0.5, 1, 1, 32), SMALL)
    params = {"w": jnp.ones(3)}
    state = optimizer.init(params)
    _, state = optimizer.update(params, state, params, step=2, observed=empty_norms(SMALL))
    optimizer.update(params, state, params, channels="channels")
    assert seen == [None, "channels"]


def test_layers_that_do_not_read_4_bits_have_no_outliers():
    rules = [("blocks[0].*", "bf16"), ("blocks[1].mlp.down", "weight_only"), ("head", "tetrajet_v2")]
    layers = add_outliers(layer_policies(SMALL, "wgrad", rules), OUTLIER_POLICY)
    found = [name for name in layers.names if name.endswith(".outliers")]
    assert found == [
        f"blocks.1.{name}.outliers" for name in ("attention.qkv", "attention.out", "mlp.gate_up")
    ]


def test_weights_of_outlier_channels_are_not_quantized_against_oscillation():
    w = jax.random.normal(jax.random.key(0), (2, 96, 16))
    params = {"blocks": {"mlp": {"down": w}}}
    order = np.stack([np.random.default_rng(i).permutation(96) for i in range(2)])
    channels = {"mlp.down": Channels(jnp.asarray(order[:, 32:]), jnp.asarray(order[:, :32]))}
    layers = add_outliers(layer_policies(SMALL, "wgrad", [("blocks[0].*", "fp8")]), OUTLIER_POLICY)
    quantized_weights = jax.jit(lambda p, c: deoscillation.quantized_weights(p, layers, c))
    found = quantized_weights(params, channels)["blocks"]["mlp"]["down"]
    np.testing.assert_array_equal(found[0], w[0])
    outliers, ordinary = order[1, :32], order[1, 32:]
    np.testing.assert_array_equal(found[1, outliers], w[1, outliers])
    operand = mxjax.get_policy("wgrad").fprop.rhs
    expected = mxjax.dequantize(mxjax.quantize(w[1, ordinary], operand, axis=0))
    np.testing.assert_array_equal(found[1, ordinary], expected)


def test_the_recipe_stands_for_its_flags():
    precision = expand(Config(policy="tetrajet_v2_full")).precision
    assert (precision.policy, precision.deoscillate) == ("tetrajet_v2", "8:200:15001:50")
    assert precision.outlier_policy == "tetrajet_v2_outliers"
    assert parse_outliers(str(precision.outlier_channels)) == OutlierSetting(0.1, 502, 50)
    assert OutlierSetting(0.1, 502, 50).first_step == 553


def test_channels_without_norms_are_not_chosen():
    norms = {"attention.qkv": np.ones((2, 4)), "mlp.down": np.array([[0.0, 1.0], [0.0, 0.0]])}
    with pytest.raises(OutlierError, match=r"the input channels of mlp\.down have no norms"):
        check_norms(norms)
    check_norms({"attention.qkv": norms["attention.qkv"]})


def test_exceptions_take_the_outliers_policy_with_them():
    phases = phases_of(
        PrecisionConfig("tetrajet_v2", outlier_channels="0.5:1:1:32"), 9, layer_policies_of(SMALL)
    )
    exact = with_exceptions(phases[1], [("blocks.0.mlp.down", mxjax.get_policy("bf16"))])
    names = drop_unmixed(exact.layers).names
    assert "blocks.0.mlp.down.outliers" not in names
    assert "blocks.1.mlp.down.outliers" in names


def test_a_scale_rule_is_of_the_outliers_too():
    precision = PrecisionConfig(
        "wgrad", "even", outlier_channels="0.5:1:1:32", outlier_policy="wgrad_hadamard"
    )
    layers = dict(phases_of(precision, 9, layer_policies_of(SMALL))[1].layers.items())
    assert layers["blocks.0.mlp.down.outliers"].wgrad.lhs.scale_rule == "even"


@pytest.mark.parametrize(
    "text",
    [
        "0.1:502",
        "0:1:1",
        "1.5:1:1",
        "0.1:1:0",
        "0.1:-1:3",
        "x:1:1",
        "0.1:1:1:",
        "0.1:1:1:0",
        "0.1:2147483000:900",
    ],
)
def test_a_malformed_setting_is_refused(text):
    with pytest.raises(ValueError, match="--outlier-channels takes FRACTION:START:STEPS"):
        parse_outliers(text)


@pytest.mark.parametrize(
    ("policy", "setting", "mesh", "message"),
    [
        ("fp8", OutlierSetting(0.1, 1, 1), {}, "no linear layer of the blocks reads x in 4 bits"),
        (
            "wgrad",
            OutlierSetting(0.1, 1, 1),
            {},
            "makes 0 of the 64 input channels of attention.qkv",
        ),
        ("wgrad", OutlierSetting(0.9, 1, 1, 64), {}, "makes 64 of the 64 input channels"),
        ("wgrad", OutlierSetting(0.1, 1, 1, 7), {"fsdp": 2}, "--mesh fsdp=2 cannot split the 7 outliers"),
    ],
)
def test_channels_that_a_run_cannot_have_are_refused(policy, setting, mesh, message):
    with pytest.raises(ValueError, match=message):
        check_outliers(setting, SMALL, [layer_policies(SMALL, policy)], ONE_DEVICE | mesh)


def test_a_model_needs_channels_for_its_outlier_policies():
    layers = add_outliers(layer_policies(SMALL, "wgrad"), OUTLIER_POLICY)
    with pytest.raises(ValueError, match="needs channels="):
        jax.eval_shape(
            lambda params: llama.apply(
                SMALL, params, jnp.zeros((1, 32), jnp.int32), policies=layers, key=jax.random.key(0)
            ),
            llama.abstract_params(SMALL),
        )
