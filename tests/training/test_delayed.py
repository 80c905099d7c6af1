"""Runs with delayed scales: what the histories hold, on meshes and in parts, and resumed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.llamas import SMALL, layer_policies
from support.runs import LAYERS as LAYERS_OF_RUNS
from support.runs import lines, resume, run, untimed, weights

from eval import EvalConfig, evaluate
from models import decoder
from models.gemms import LINEAR_LAYERS, linear_layers
from mxjax.numerics.delayed import Scales
from mxjax.stats.layers import Amax
from training.optimizer.delayed import check_delayed, scales_of, with_histories, without_histories
from training.step import init_state, make_train_step

LAYERS = layer_policies(SMALL, "fp8_delayed")
BATCH = jax.random.randint(jax.random.key(1), (4, 65), 0, SMALL.vocab_size, jnp.int32)
KEY = jax.random.key(2)


@functools.cache
def first_params():
    return decoder.init(SMALL, jax.random.key(0))


def loss(params, batch, key, scales=None, layers=LAYERS):
    return decoder.mean_loss(SMALL, params, batch, policies=layers, key=key, slots=scales)


def optimizer_of(layers=LAYERS):
    return with_histories(optax.with_extra_args_support(optax.sgd(0.5)), SMALL, [LAYERS], layers)


def step_of(optimizer, **options):
    scales = functools.partial(scales_of, model=SMALL)
    return make_train_step(loss, optimizer, scales_of=scales, **options)


def take(optimizer, batch=BATCH, params=None, **options):
    """Returns the state after a step from the first parameters."""
    state = init_state(jax.tree.map(jnp.copy, params or first_params()), optimizer)
    return step_of(optimizer, **options)(state, batch, KEY, jnp.float32(1))


@pytest.mark.slow
def test_a_step_writes_the_largest_magnitudes_and_their_scales():
    """Beside those that probes find in a step with scales of one."""
    optimizer = optimizer_of()
    state, metrics = take(optimizer)
    assert metrics.finite
    names, ones = linear_layers(SMALL), jnp.ones(SMALL.n_layers)
    unit = dict.fromkeys(names, Scales(ones, ones, ones))
    amax = jax.jit(jax.grad(loss, 3))(first_params(), BATCH, KEY, unit)
    [_, (histories,)] = state.opt_state
    for i, name in enumerate(names):
        np.testing.assert_allclose(histories.amax[i, ..., -1], jnp.stack(amax[name]), rtol=1e-6)
    np.testing.assert_array_equal(histories.amax[..., :-1], 0)
    largest = np.array([448, 448, 57344])[:, None]
    np.testing.assert_allclose(histories.scale, largest / np.asarray(histories.amax[..., -1]), rtol=1e-6)
    # Weights and the first layer's input depend on no scale.
    probes = dict.fromkeys(names, Amax(0 * ones, 0 * ones, 0 * ones))
    current = without_histories(LAYERS)
    probed = jax.jit(jax.grad(functools.partial(loss, layers=current), 3))(first_params(), BATCH, KEY, probes)
    for name in names:
        np.testing.assert_array_equal(amax[name].w, probed[name].w)
    np.testing.assert_array_equal(amax["attention.qkv"].x[0], probed["attention.qkv"].x[0])


@pytest.mark.slow
def test_parts_of_a_batch_give_the_magnitudes_of_the_whole():
    """The gradients of a part's mean are four times as large, in the last layer, which no cast precedes."""
    whole, parts = (take(optimizer_of(), accumulate=n)[0].opt_state[1].histories for n in (1, 4))
    np.testing.assert_allclose(parts.amax[:, :2], whole.amax[:, :2], rtol=1e-6)
    last = linear_layers(SMALL).index("mlp.down"), 2, -1, -1
    np.testing.assert_allclose(parts.amax[last], 4 * whole.amax[last], rtol=1e-2)


def test_a_step_that_is_not_finite_leaves_the_histories():
    params = first_params() | {"head": first_params()["head"].at[0, 0].set(jnp.nan)}
    optimizer = optimizer_of()
    state, metrics = take(optimizer, params=params, skip_nonfinite=True)
    assert not metrics.finite
    first = init_state(params, optimizer).opt_state
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, first)


def test_a_magnitude_that_is_not_finite_stops_though_casts_saturate():
    down = first_params()["blocks"]["mlp"]["down"].at[0, 0, 0].set(jnp.inf)
    blocks = first_params()["blocks"]
    params = first_params() | {"blocks": blocks | {"mlp": blocks["mlp"] | {"down": down}}}
    ones = jnp.ones(SMALL.n_layers)
    scales = dict.fromkeys(LINEAR_LAYERS, Scales(ones, ones, ones))
    assert jnp.isfinite(jax.jit(loss)(params, BATCH, KEY, scales))
    _, metrics = take(optimizer_of(), params=params, keeps_finite=lambda rate: jnp.array(True))
    assert not metrics.finite


def test_a_phase_without_delayed_scales_keeps_the_histories():
    optimizer = optimizer_of(without_histories(LAYERS))
    state = init_state(jax.tree.map(jnp.copy, first_params()), optimizer)  # which the step takes
    step = make_train_step(functools.partial(loss, layers=without_histories(LAYERS)), optimizer)
    before = jax.tree.map(np.asarray, state.opt_state)
    after, _ = step(state, BATCH, KEY)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before)
    plain = optax.with_extra_args_support(optax.sgd(0.5))
    assert with_histories(plain, SMALL, [without_histories(LAYERS)], LAYERS) is plain


@pytest.mark.parametrize(
    ("model", "rules", "message"),
    [
        (SMALL, [("head", "fp8_delayed")], "head has scaling='delayed', and only attention.qkv, "),
        (SMALL, [("blocks.*.attention.values", "fp8_delayed")], r"'blocks\.\*\.attention\.values=fp8'$"),
    ],
)
def test_layers_without_histories_are_refused(model, rules, message):
    check_delayed(model, layer_policies(model, "fp8_delayed"))
    with pytest.raises(ValueError, match=message):
        check_delayed(model, layer_policies(model, "bf16", rules))


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_bits(text, tmp_path):
    """On its way from bfloat16 to delayed scales and to current ones, in parts; and it is evaluated."""
    flags = ("--policy", "bf16; fp8_delayed from 2; fp8 from 6", "--layers", *LAYERS_OF_RUNS)
    flags += ("--accumulate", "2", "--eval-every", "2")
    run(text, tmp_path / "whole", *flags)
    run(text, tmp_path / "resumed", *flags, "--stop-after", "4")
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:  # a step that was not saved when it died
        file.write('{"step": 5, "lo')
    resume(tmp_path / "resumed")
    jax.tree.map(np.testing.assert_array_equal, weights(tmp_path / "resumed"), weights(tmp_path / "whole"))
    assert untimed(tmp_path / "resumed") == untimed(tmp_path / "whole")
    delayed = EvalConfig(tmp_path / "whole", policy="fp8_delayed", layers=LAYERS_OF_RUNS)
    found = evaluate(EvalConfig(tmp_path / "whole"))
    assert found["eval_loss"] == lines(tmp_path / "whole")[-1]["eval_loss"]
    assert evaluate(delayed)["eval_loss"] == found["eval_loss"]
