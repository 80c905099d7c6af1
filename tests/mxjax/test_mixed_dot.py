"""`mixed_dot` against `dot` and against TetraJet-v2's own layer (tests/golden/make_outlier_channels.py)."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from mxjax import Channels, channels_by_norm, mixed_dot, outlier_count
from mxjax.policy import map_operands

ORDINARY, OUTLIERS = "wgrad_sr", "tetrajet_v2_outliers"
CHANNELS = Channels(*np.split(np.random.default_rng(1).permutation(96), [64]))


def run(function, x, w, dy):
    """Returns the product and both gradients; not jitted, so that tests share the GEMMs' programs."""
    y, vjp = jax.vjp(function, jnp.asarray(x), jnp.asarray(w))
    return y, *vjp(jnp.asarray(dy, y.dtype))


@functools.cache
def small():
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 40, 96), (96, 64), (2, 40, 64))]


def mixed(channels, key=7, **options):
    policies = {"policy": ORDINARY, "outlier_policy": OUTLIERS, "key": jax.random.key(key)}
    return lambda x, w: mixed_dot(x, w, channels, **policies | options)


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("policy", "channels"), [(ORDINARY, (96, 0)), (OUTLIERS, (0, 96))])
def test_one_empty_set_leaves_one_dot(policy, channels):
    sets = np.split(np.arange(96), [channels[0]])
    dot = functools.partial(mxjax.dot, policy=policy, key=jax.random.key(7))
    assert_same(run(mixed(Channels(*sets)), *small()), run(dot, *small()))


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_each_set_of_channels_has_its_own_three_gemms(dtype):
    """Channel by channel, the gradients are those of the set's own dot; the product is the sum of both."""
    x, w, dy = small()
    x, dy = x.astype(dtype), dy.astype(dtype)
    y, dx, dw = run(mixed(CHANNELS, preferred_element_type=dtype), x, w, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, jnp.float32)
    keys = jax.random.key(7), jax.random.fold_in(jax.random.key(7), 3)
    parts = []
    for channels, policy, key in zip(CHANNELS, (ORDINARY, OUTLIERS), keys, strict=True):
        dot = functools.partial(mxjax.dot, policy=policy, key=key, preferred_element_type=dtype)
        part, dx_part, dw_part = run(dot, x[..., channels], w[channels], dy)
        assert_same((dx[..., channels], dw[channels]), (dx_part, dw_part))
        parts.append(part)
    np.testing.assert_array_equal(y, parts[0] + parts[1])


def test_traced_channels_give_the_same_bits_and_vmap_joins_tokens():
    x, w, _ = small()
    expected = mixed(CHANNELS)(x, w)
    np.testing.assert_array_equal(jax.jit(lambda c: mixed(c)(x, w))(CHANNELS), expected)
    np.testing.assert_array_equal(jax.vmap(lambda row: mixed(CHANNELS)(row, w))(x), expected)


def like_golden(name):
    """Returns a policy of TetraJet-v2 with the FP4 of golden/make_outlier_channels.py."""

    def plain(operand):
        if operand.format != "nvfp4_1x128":
            return operand
        return mxjax.Operand("mxfp4", scale_rule="rceil", source=operand.source)

    gemms = map_operands(mxjax.get_policy(name), plain).gemms.values()
    return mxjax.Policy(*(dataclasses.replace(gemm, rotation=None) for gemm in gemms))


@functools.cache
def golden():
    with np.load(pathlib.Path(__file__).parents[1] / "golden" / "outlier_channels.npz") as file:
        return dict(file)


def golden_inputs():
    """Batches, w and dy of golden/make_outlier_channels.py."""
    rng = np.random.RandomState(0)
    draw = lambda *shape: rng.standard_normal(shape) * np.exp(rng.standard_normal(shape) / 2)  # noqa: E731
    x = draw(8, 128, 384) * np.exp(rng.standard_normal(384))
    return [t.astype(np.float32) for t in (x, draw(128, 384), draw(128, 128))]


def test_channels_are_those_that_tetrajet_v2_chooses():
    g, (batches, _, _) = golden(), golden_inputs()
    norms = jnp.sum(jnp.linalg.norm(batches[g["recorded"] - 1], axis=1), axis=0)
    found = channels_by_norm(norms, outlier_count(384, 0.1))
    np.testing.assert_array_equal(found.outliers, g["outliers"])
    np.testing.assert_array_equal(found.ordinary, g["ordinary"])


def test_the_three_gemms_are_those_of_tetrajet_v2():
    g, (batches, w, dy) = golden(), golden_inputs()
    policies = {"policy": like_golden("tetrajet_v2"), "outlier_policy": like_golden("tetrajet_v2_outliers")}
    dot = functools.partial(mixed_dot, channels=Channels(g["ordinary"], g["outliers"]), **policies)
    y, dx, dw = run(dot, batches[-1], w.T, jnp.asarray(dy, jnp.bfloat16).astype(jnp.float32))
    for found, expected in ((y[:16], g["y"]), (dx[:16], g["dx"]), (dw[:16].T, g["dw"])):
        # Its products are rounded to bfloat16, y that of the ordinary channels as well.
        error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
        assert error < 2.5e-3
        assert np.abs(found - expected).max() < 2**-7 * np.abs(expected).max()


def test_counts_of_outliers():
    assert [outlier_count(d, 0.1) for d in (128, 768, 2048, 14336)] == [128, 128, 256, 1536]
    assert outlier_count(1300, 0.1, multiple=1) == 130
    assert outlier_count(300, 0.99) == 256
    assert outlier_count(100, 0.1) == outlier_count(768, 0.0) == 0
    stacked = channels_by_norm(jnp.array([[1.0, 3, 2, 3], [0, 0, 0, 5]]), 2)
    np.testing.assert_array_equal(stacked.outliers, [[1, 3], [3, 0]])
    np.testing.assert_array_equal(stacked.ordinary, [[2, 0], [1, 2]])


@pytest.mark.parametrize(
    ("channels", "error", "message"),
    [
        (Channels(np.arange(64), np.arange(31)), ValueError, "together hold d_in = 96"),
        (Channels(np.arange(64), np.arange(32)), ValueError, "each channel from 0 to 95 once"),
        (Channels(np.arange(96)[None], np.arange(0)), ValueError, "of one axis"),
        (Channels(np.arange(64.0), np.arange(32)), TypeError, "integer arrays"),
    ],
)
def test_bad_channels_are_refused(channels, error, message):
    x, w, _ = small()
    with pytest.raises(error, match=message):
        mixed(channels)(x, w)


def test_other_bad_input_is_refused():
    x, w, _ = small()
    with pytest.raises(ValueError, match=r"needs x \[\.\.\., d_in\] and w"):
        mixed(CHANNELS)(x, w.T)
    with pytest.raises(ValueError, match="unknown policy 'nonsense'"):
        mixed_dot(x, w, Channels(np.arange(96), np.arange(0)), policy="wgrad", outlier_policy="nonsense")
    with pytest.raises(ValueError, match="needs key="):
        mixed_dot(x, w, CHANNELS, policy="wgrad", outlier_policy=OUTLIERS)
    with pytest.raises(ValueError, match="needs 0 to 4 outliers, got 5"):
        channels_by_norm(jnp.ones(4), 5)
