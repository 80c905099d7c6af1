"""Weights that oscillate are snapped as by the sources' code (tests/golden/make_deoscillation.py)."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.llamas import SMALL, layer_policies

import mxjax
from models import decoder
from mxjax.policy.layers import LayerPolicies
from training.config import Config, PrecisionConfig
from training.log.report import late_flags
from training.optimizer import deoscillation
from training.optimizer.deoscillation import Deoscillation, check_policies, parse_deoscillation
from training.phases import expand


@functools.cache
def golden():
    with np.load(pathlib.Path(__file__).parents[2] / "golden" / "deoscillation.npz") as file:
        return dict(file)


@pytest.fixture
def rounded(monkeypatch):
    """Makes integers of what is a grid of 4 bits."""
    round_all = functools.partial(jax.tree.map, jnp.round)
    monkeypatch.setattr(deoscillation, "quantized_weights", lambda params, *_: round_all(params))


def snapping(optimizer, setting):
    return optax.chain(optimizer, deoscillation.snap_oscillating(setting, LayerPolicies((), ())))


def walk(optimizer, first, updates):
    """Returns the weights after each step."""

    def step(carry, update):
        params, state = carry
        change, state = optimizer.update({"w": -update}, state, params)
        params = optax.apply_updates(params, change)
        return (params, state), params["w"]

    params = {"w": jnp.asarray(first)}
    return jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), jnp.asarray(updates)))()[1]


@pytest.mark.parametrize("source", ["primus", "tetrajet"])
def test_oscillating_weights_are_snapped_as_the_source_does(source, rounded):
    g = golden()
    ratio, *steps = g[f"{source}_setting"]
    optimizer = snapping(optax.sgd(1.0), Deoscillation(ratio, *map(int, steps)))
    found, expected = np.asarray(walk(optimizer, g["first"], g["updates"])), g[source]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    plain = np.cumsum(np.concatenate([g["first"][None], g["updates"]]), axis=0)[1:]
    assert 0.1 < np.mean(np.abs(plain[-1] - found[-1]) > 1e-4) < 0.9
    # When weights are snapped, they are the values of the grid themselves.
    snapped = 8 if source == "primus" else 12
    assert np.mean(found[snapped] == np.round(found[snapped])) > 0.02


@pytest.mark.parametrize("bf16", [False, True])
def test_distances_begin_at_weights_in_bfloat16_if_the_setting_says_so(bf16, rounded):
    """Between 100.49 and 100.51, which are 100.5 in bfloat16: the ratio is 50, or 100."""
    updates = np.tile(np.float32([[0.02], [-0.02]]), (3, 1))
    setting = parse_deoscillation("75:4:1" + ":bf16" * bf16)
    found = walk(snapping(optax.sgd(1.0), setting), np.float32([100.49]), updates)
    assert bool(found[4, 0] == np.round(found[4, 0])) == bf16


def test_snapping_needs_the_weights():
    optimizer = deoscillation.snap_oscillating(Deoscillation(3.0, 2, 0), LayerPolicies((), ()))
    params = {"w": jnp.zeros(1)}
    with pytest.raises(ValueError, match="pass params to its update"):
        optimizer.update(params, optimizer.init(params))


@pytest.mark.slow
def test_quantized_weights_are_those_that_each_layer_multiplies():
    layers = layer_policies(SMALL, "primus_turbo", [("blocks[0].*", "bf16"), ("blocks[1].mlp.down", "wgrad")])
    params = decoder.init(SMALL, jax.random.key(0))
    found = jax.jit(lambda p: deoscillation.quantized_weights(p, layers))(params)
    for module, matrix in (("attention", "qkv"), ("mlp", "gate_up"), ("mlp", "down")):
        first, second = params["blocks"][module][matrix]
        np.testing.assert_array_equal(found["blocks"][module][matrix][0], first)
        operand = layers[f"blocks.1.{module}.{matrix}"].fprop.rhs
        q = mxjax.quantize(second, axis=0, block_shape=operand.block_shape, scale_rule=operand.scale_rule)
        np.testing.assert_array_equal(found["blocks"][module][matrix][1], mxjax.dequantize(q))
    for name in ("embedding", "head"):
        np.testing.assert_array_equal(found[name], params[name])


def test_a_tensor_scale_belongs_to_one_layer():
    params = {"blocks": {"mlp": {"down": jax.random.normal(jax.random.key(0), (2, 32, 16))}}}
    params["blocks"]["mlp"]["down"] *= jnp.array([1.0, 0.01])[:, None, None]
    policies = layer_policies(SMALL, "nvfp4_unclipped")
    found = jax.jit(lambda p: deoscillation.quantized_weights(p, policies))(params)
    for got, w in zip(found["blocks"]["mlp"]["down"], params["blocks"]["mlp"]["down"], strict=True):
        q = mxjax.quantize(w, mxjax.get_policy("nvfp4_unclipped").fprop.rhs, axis=0)
        np.testing.assert_array_equal(got, mxjax.dequantize(q))


def test_a_recipe_stands_for_its_flags():
    config = Config(precision=PrecisionConfig("primus_deosc", layers=("head=fp8",)))
    precision = expand(config).precision
    assert (precision.policy, precision.deoscillate) == ("primus_turbo", "3:200:1500")
    assert precision.layers == ("blocks[:2].*=bf16", "blocks[-2:].*=bf16", "head=fp8")
    assert parse_deoscillation(precision.deoscillate) == Deoscillation(3.0, 200, 1500)
    assert expand(expand(config)) == expand(config)
    assert expand(Config(policy=" heal ")).precision.policy == "full_hadamard; fp8 from 0.82"
    assert expand(Config()) == Config()


@pytest.mark.parametrize(
    ("setting", "first"), [("3:200:1500", 1700), ("8:200:15001:50", 15052), ("8:50:100:50", 150)]
)
def test_snaps_that_begin_after_the_last_step_are_named(setting, first):
    precision = PrecisionConfig(deoscillate=setting)
    [said] = late_flags(Config(steps=first - 1, precision=precision))
    flag, start = f"--deoscillate {setting}", setting.split(":")[2]
    assert said.startswith(f"warning: {flag} has no effect with --steps {first - 1}: its START is {start}, ")
    assert said.endswith(f" step {first}")
    assert late_flags(Config(steps=first, precision=precision)) == []


@pytest.mark.parametrize("window", [0, 1, 3, 4])
def test_weights_are_first_snapped_after_the_step_that_is_named(window, rounded):
    setting = Deoscillation(0.01, 4, 2, window)
    optimizer = snapping(optax.sgd(1.0), setting)
    updates = np.float32([[0.6], [-0.6]] * 5)  # of a weight that oscillates between 0 and 1
    weights = np.asarray(walk(optimizer, np.float32([0.2]), updates))[:, 0]
    assert 1 + int(np.argmax(weights == np.round(weights))) == setting.first_snap


PAST_THEIR_TYPES = ["3:99999999999999:1", "3:1:2147483647", f"{10**39}:1:1", f"3:1:{'9' * 5000}"]


@pytest.mark.parametrize(
    "text", ["3:200", "0:200:1500", "3:0:0", "3:200:-1", "x:1:1", "3:200:0:201", "3:2:1:", *PAST_THEIR_TYPES]
)
def test_a_malformed_setting_is_refused(text):
    with pytest.raises(ValueError, match="--deoscillate takes RATIO:PERIOD:START"):
        parse_deoscillation(text)


@pytest.mark.parametrize(
    ("policy", "message"),
    [("fp8", "no weight of the blocks is in 4 bits"), ("full_hadamard", "without rotation")],
)
def test_policies_without_weights_to_snap_are_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        check_policies([layer_policies(SMALL, policy)])
    with pytest.raises(ValueError, match=f"in phase 2 of 2.*{message}|{message} in phase 2 of 2"):
        check_policies([layer_policies(SMALL, name) for name in ("wgrad", policy)])
