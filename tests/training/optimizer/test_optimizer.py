"""The optimizer: MLPerf's schedule, and AdamW against a plain numpy version."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import decoder
from models.configs import DecoderConfig
from training.command_line import parse
from training.config import Config, OptimizerConfig
from training.log.report import low_learning_rate
from training.optimizer.optimizers import keeps_finite, make_optimizer
from training.optimizer.schedule import learning_rate


def test_warm_up_and_cosine():
    """Values by hand from the formulas of MLPerf's llama31_8b: peak 8e-4, W 128, 1,200,000 steps."""
    config = OptimizerConfig(lr=8e-4, warmup_steps=128)
    schedule = learning_rate(config, 1_200_000)
    np.testing.assert_allclose(schedule(0), 8e-4 / 129, rtol=1e-6)
    np.testing.assert_allclose(schedule(63), 8e-4 * 64 / 129, rtol=1e-6)
    np.testing.assert_allclose(schedule(128), 8e-4, rtol=1e-6)
    np.testing.assert_allclose(schedule(128 + (1_200_000 - 128) // 2), 4.4e-4, rtol=1e-5)
    np.testing.assert_allclose(schedule(1_200_000), 8e-5, rtol=1e-5)
    np.testing.assert_allclose(schedule(2_000_000), 8e-5, rtol=1e-5)
    on_host = learning_rate(config, 1_200_000, np)
    for step in (0, 63, 128, 5000, 1_200_000):
        np.testing.assert_allclose(on_host(step), schedule(step), rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "rates"),
    [
        ("--schedule constant", {0: 1, 4: 5, 5: 5, 99: 5, 500: 5}),
        ("--min-lr-ratio 0.2 --decay 40", {4: 5, 24: 3, 44: 1, 99: 1}),
        ("--min-lr-ratio 0.2 --decay 192", {4: 5, 52: 3 + 2 * 0.5**0.5, 100: 3}),
        ("--min-lr-ratio 0.2 --schedule wsd --decay 40", {4: 5, 60: 5, 80: 3, 99: 1 + 4 / 40, 100: 1}),
        ("--min-lr-ratio 0.2 --schedule wsd --decay 40 --decay-shape 1-sqrt", {60: 5, 70: 3, 100: 1}),
        ("--min-lr-ratio 0.2 --schedule wsd", {80: 5, 90: 3, 100: 1}),
    ],
)
def test_other_schedules_by_hand(flags, rates):
    """Of 100 steps, a peak of 5, a final fifth of it and 4 steps of warm-up."""
    flags = f"--lr 5 --steps 100 --warmup-steps 4 {flags}"
    config = parse(flags.split())
    for numpy in (np, jnp):
        schedule = learning_rate(config.optimizer, config.steps, numpy)
        found = {step: float(schedule(step)) for step in rates}
        assert found == pytest.approx(rates, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--adam-lr 1e-3", "--adam-lr 0.001 is for --optimizer muon, and not for adamw; leave it out"),
        ("--momentum 0.9", " 0.9 is for --optimizer muon or sgd, and not for adamw; leave it at 0.95"),
        ("--consistent-rms None", "--consistent-rms None is for --optimizer muon, and not for adamw"),
        ("--optimizer sgd --b2 0.9", "--b2 0.9 is for --optimizer adamw or muon, and not for sgd"),
        ("--optimizer sgd --eps 1e-8", "--eps 1e-08 is for --optimizer adamw or muon, and not for sgd"),
        (
            "--schedule constant --decay 10",
            "--decay 10 is for --schedule cosine or wsd, and not for constant; leave it out",
        ),
        ("--min-lr-ratio 0 --decay 69", "the cosine ends at step 99, and the rate of the others up to"),
        ("--decay-shape 1-sqrt", "--decay-shape 1-sqrt is for --schedule wsd, and not for cosine"),
        ("--schedule constant --min-lr-ratio 0", "is for --schedule cosine or wsd, and not for constant"),
        ("--no-decay head --weight-decay 0", "leaves parameters out of --weight-decay, which is 0"),
        ("--schedule wsd --decay 280", "--warmup-steps 30 take 310 steps, more than --steps 300; lower one"),
        (
            "--schedule wsd --steps 36",
            "--schedule wsd: a decay of 7 steps, a fifth of the run, and --warmup-steps 30 take 37 steps, "
            "more than --steps 36; lower --warmup-steps",
        ),
        (
            "--preset mlperf-llama3.1-8b --ema 0.9 --no-decay head",
            "--mllog: MLPerf's log has no name for --no-decay, --ema; leave that out, or add --no-mllog",
        ),
    ],
)
def test_flags_without_effect_room_or_record_are_refused(flags, said, capsys):
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "flags",
    [
        "--optimizer sgd --momentum 0.9 --schedule constant",
        "--optimizer muon --b1 0.8 --momentum 0.9 --adam-lr 1e-3 --consistent-rms None",
        "--b1 0.8 --b2 0.9 --eps 1e-8 --schedule wsd --decay-shape 1-sqrt --min-lr-ratio 0",
    ],
)
def test_a_flag_that_the_optimizer_and_the_schedule_read_is_taken(flags):
    assert isinstance(parse(flags.split()), Config)


def test_a_warm_up_that_outlasts_the_run_is_named_with_the_highest_learning_rate():
    [said] = low_learning_rate(parse(["--steps", "3", "--warmup-steps", "500", "--lr", "1"]))
    assert said.startswith("warning: --warmup-steps 500 does not end within --steps 3: ")
    assert said.endswith(f"the highest learning rate is {3 / 501:.4g}, not --lr 1")
    assert len(low_learning_rate(Config(steps=30))) == 1
    assert low_learning_rate(Config(steps=31)) == []
    assert low_learning_rate(Config(steps=300, stop_after=3)) == []


def test_two_steps_equal_optax_s_clipped_adamw():
    config = OptimizerConfig(lr=1e-2, warmup_steps=1, clip=0.5)
    params = {"w": jax.random.normal(jax.random.key(0), (3, 4)), "norm": {"scale": jnp.ones(4)}}
    names = {"b1": config.b1, "b2": config.b2, "eps": config.eps, "weight_decay": config.weight_decay}
    mask = {"w": True, "norm": {"scale": False}}
    adamw = optax.adamw(lambda i: 1e-2 * (i + 1) / 2, mask=mask, **names)  # both steps are warm-up
    optimizer, theirs = make_optimizer(config), optax.chain(optax.clip_by_global_norm(0.5), adamw)
    schedule, ours, expected = learning_rate(config, 10), params, params
    state, their_state = optimizer.init(params), theirs.init(params)
    for i in range(2):
        g = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1 + i), p.shape), params)  # noqa: B023
        updates, state = optimizer.update(g, state, ours, learning_rate=schedule(i))
        ours = optax.apply_updates(ours, updates)
        updates, their_state = theirs.update(g, their_state, expected)
        expected = optax.apply_updates(expected, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, expected)


LIMITS = {"clip": 1e15, "momentum": 0.999999}


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(),
        OptimizerConfig(clip=1e15, eps=1e-8, b1=0.9999, b2=0.999, weight_decay=0.5),
        OptimizerConfig(optimizer="muon", **LIMITS),
        OptimizerConfig(optimizer="sgd", **LIMITS),
    ],
)
def test_a_finite_state_stays_finite_where_that_is_said(config):
    """Gradients from 1e-38 to as much as a finite norm allows, parameters up to float32's largest value."""
    certain, model = keeps_finite(config), DecoderConfig(8, 8, 2, 2, 1, 4, 8)
    assert certain is not None
    assert bool(certain(jnp.float32(1)))
    values, rng = np.float32([np.finfo(np.float32).max, 1e30, 1, 1e-38, 0]), np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: jnp.asarray(rng.choice([-1, 1], a.shape) * rng.choice(values, a.shape), jnp.float32),
        decoder.abstract_params(model),
    )
    optimizer = make_optimizer(config, model)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(100):
        largest = rng.choice([-37, 0, 17.5])
        sizes = jax.tree.map(lambda p: 10.0 ** rng.uniform(-38, largest, p.shape), params)  # noqa: B023
        grads = jax.tree.map(lambda s: jnp.float32(s * rng.choice([-1, 0, 1], s.shape)), sizes)
        assert np.isfinite(optax.tree.norm(grads))
        updates, state = update(grads, state, params, learning_rate=jnp.float32(1))
        params = optax.apply_updates(params, updates)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


@pytest.mark.parametrize(
    "changes",
    [
        *({"clip": np.inf}, {"clip": 2e15}, {"clip": 1e-40}, {"clip": 0.0}),
        *({"eps": 0.0}, {"eps": 1e-40, "clip": 1e-12}, {"eps": 1e-32}),
        *({"b1": 1.0}, {"b1": 1 - 1e-7}, {"b2": 1.0}, {"b2": 1 - 1e-7}, {"weight_decay": 0.6}),
        *({"optimizer": name, "momentum": 1 - 1e-7} for name in ("muon", "sgd")),
    ],
)
def test_settings_without_a_bound_have_their_updates_checked(changes):
    assert keeps_finite(dataclasses.replace(OptimizerConfig(), **changes)) is None


def test_learning_rates_without_a_bound_have_their_updates_checked():
    certain = keeps_finite(OptimizerConfig())
    found = [bool(certain(jnp.float32(rate))) for rate in (0, 4e-3, 1, 1.001, -1e-3, np.inf, np.nan)]
    assert found == [True, True, True, False, False, False, False]
    assert not keeps_finite(OptimizerConfig(optimizer="muon", adam_lr=1.0))(jnp.float32(1))
