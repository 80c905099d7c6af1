"""Error measures against float64 formulas, and against blocks and distributions whose errors are known."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dots import jitted_products
from support.oracles import types_unchecked

import mxjax
from mxjax import Gemm, Operand, stats


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def expected_error(x, approximation) -> tuple[float, float, float, float]:
    """Signal to noise in dB, relative error, cosine and projection, in float64."""
    x, a = (np.asarray(t, np.float64).ravel() for t in (x, approximation))
    noise = np.sum((x - a) ** 2)
    return (
        10 * np.log10(np.sum(x**2) / noise),
        np.linalg.norm(x - a) / np.linalg.norm(x),
        x @ a / (np.linalg.norm(x) * np.linalg.norm(a)),
        x @ a / (x @ x),
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("noise", [0.01, 1.0, 3.0])
def test_error_is_its_formulas(noise, dtype):
    x = jnp.asarray(normal(30, 40, seed=0), dtype)
    approximation = (x.astype(jnp.float32) + noise * normal(30, 40, seed=1)).astype(dtype)
    actual = stats.error(x, approximation)
    np.testing.assert_allclose(actual, expected_error(x, approximation), rtol=1e-4)


def test_an_exact_approximation_has_infinite_signal_to_noise():
    x = jnp.asarray(normal(8, 8, seed=0))
    error = stats.error(x, x)
    assert error.sqnr_db == jnp.inf
    assert error.relative_error == 0
    np.testing.assert_allclose(error.cosine, 1, rtol=1e-6)


def test_the_cosine_with_zero_is_not_a_number():
    np.testing.assert_array_equal(stats.error(jnp.zeros(4), jnp.ones(4)), (-np.inf, np.inf, np.nan, np.nan))


def test_an_approximation_has_the_shape_of_the_tensor():
    x = jnp.ones((2, 32))
    with types_unchecked(), pytest.raises(ValueError, match=r"in one shape, got \(2, 32\) and \(32,\)"):
        stats.error(x, x[0])
    with types_unchecked(), pytest.raises(ValueError, match=r"in one shape, got \(2, 32\) and \(1, 32\)"):
        stats.quantization(x, mxjax.quantize(x[:1]))


# The largest magnitude is 7.9, so `floor` gives the first block the scale 1, and `rceil` gives it 2.
# Ties go to the even neighbour: 0.25 becomes 0 under `floor`, and so does 0.5 with the scale 2.
BLOCK = np.array([7.9, -6.5, 6.0, -6.0, 5.5, 0.25, -0.2, 0.3, -0.5, *[1.0] * 13, *[0.0] * 10], np.float32)


@pytest.mark.parametrize(
    ("arguments", "clipped", "flushed"),
    [
        ({"scale_rule": "floor"}, 2, 2),
        ({"scale_rule": "even"}, 0, 4),
        ({"scale_rule": "rceil"}, 0, 4),
        ({"scale_rule": "floor", "prescale": 0.75}, 0, 3),
        # Other blocks: the second holds 1 and less, and loses nothing.
        ({"scale_rule": "floor", "block_shape": 5}, 2, 0),
        ({"format": "fp8_e4m3"}, 0, 0),
        ({"format": "bf16"}, 0, 0),
    ],
    ids=str,
)
def test_clipped_and_flushed_elements_are_counted(arguments, clipped, flushed):
    # A block of zeros beside it counts among the elements, and neither clips nor flushes.
    x = jnp.asarray(np.stack([BLOCK, np.zeros(32, np.float32)]))
    error = stats.quantization(x, mxjax.quantize(x, **arguments))
    np.testing.assert_allclose(error.clipped, clipped / 64)
    np.testing.assert_allclose(error.flushed, flushed / 64)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_a_scale_from_the_largest_of_the_tensor_clips_nothing(format):
    # The scale is rounded, so the largest value often comes back a little smaller.
    x = jnp.asarray(normal(256, 8, seed=3))
    assert not np.any(jax.vmap(lambda x: stats.quantization(x, mxjax.quantize(x, format)).clipped)(x))


@pytest.mark.parametrize(
    "arguments",
    [
        {"axis": 0, "scale_rule": "even"},
        {"block_shape": (16, 16), "prescale": 0.75},
        {"format": "nvfp4", "rounding": "stochastic", "key": jax.random.key(0)},
    ],
    ids=["axis and rule", "blocks and prescale", "random bits"],
)
def test_quantization_is_the_error_of_dequantized_values(arguments):
    x = jnp.asarray(normal(48, 40, seed=0))
    error = stats.quantization(x, mxjax.quantize(x, **arguments))
    value = mxjax.dequantize(mxjax.quantize(x, **arguments))
    np.testing.assert_allclose(error[:4], expected_error(x, value), rtol=1e-4)


# (relative squared error, blocks that clip), of blocks of 32 normal numbers.
GAUSSIAN = {
    "floor": (0.01324, 0.296),
    "even": (0.01252, 0.127),
    "uos": (None, 0.065),
    "rceil": (0.01333, 0.0),
    "ceil": (None, 0.0),
}
BLOCKS = 2**15


@functools.cache
def gaussian() -> jax.Array:
    return jnp.asarray(normal(BLOCKS, 32, seed=2))


@functools.cache
def gaussian_quantized(rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the scales and the values of the Gaussian blocks."""
    q = mxjax.quantize(gaussian(), scale_rule=rule)
    return np.asarray(q.scales, np.float32), np.asarray(mxjax.dequantize(q))


@pytest.mark.parametrize("rule", GAUSSIAN)
def test_gaussian_blocks_clip_as_often_as_the_table_says(rule):
    expected = GAUSSIAN[rule][1]
    scales, _ = gaussian_quantized(rule)
    clips = np.max(np.abs(gaussian()), axis=1, keepdims=True) > 6 * scales
    standard_error = np.sqrt(expected * (1 - expected) / BLOCKS)
    # The table is rounded to .001.
    assert abs(np.mean(clips) - expected) <= 4 * standard_error + 0.0005 * (expected > 0)


@pytest.mark.parametrize("rule", ["floor", "even", "rceil"])
def test_the_error_of_gaussian_blocks_is_what_the_table_says(rule):
    x, (_, value) = np.asarray(gaussian(), np.float64), gaussian_quantized(rule)
    error = (
        np.asarray(stats.quantization(gaussian(), mxjax.quantize(gaussian(), scale_rule=rule)).relative_error)
        ** 2
    )
    # Of the ratio of two means over blocks.
    standard_error = np.std(np.mean((x - value) ** 2 - error * x**2, axis=1)) / np.sqrt(BLOCKS)
    # The table is rounded to .00001.
    assert abs(error - GAUSSIAN[rule][0]) <= 4 * standard_error + 5e-6


gemms = jax.jit(stats.gemms, static_argnames="policy")


def test_gemms_are_the_errors_of_dot():
    x, w, dy = operands()
    policy = dataclasses.replace(
        mxjax.get_policy("wgrad"), wgrad=Gemm(Operand(rounding="stochastic"), Operand())
    )
    key = jax.random.key(0)
    actual = gemms(x, w, dy, policy=policy, key=key)
    assert actual._fields == ("fprop", "dgrad", "wgrad")
    exact = [np.asarray(t, np.float64) for t in (x @ w, dy @ w.T, x.T @ dy)]
    for a, e, p in zip(actual, exact, jitted_products(x, w, dy, key, policy=policy), strict=True):
        np.testing.assert_allclose(a.product, expected_error(e, p), rtol=1e-4)


def test_gemms_needs_a_gradient_of_the_product():
    x, w = jnp.ones((2, 4, 64)), jnp.ones((64, 32))
    with (
        types_unchecked(),
        pytest.raises(ValueError, match=r"dy with the shape of x @ w, \(2, 4, 32\), got \(2, 4, 64\)"),
    ):
        stats.gemms(x, w, x, policy="wgrad")
    with types_unchecked(), pytest.raises(TypeError, match="gemms needs a floating-point tensor, got int32"):
        stats.gemms(x.astype(jnp.int32), w, x @ w, policy="wgrad")


def test_gemms_measures_each_shard_by_itself():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P("d"), jax.P(), jax.P("d")
    of_shards = jax.shard_map(
        lambda *tensors: jax.tree.map(jnp.atleast_1d, stats.gemms(*tensors, policy="wgrad")),
        mesh=mesh,
        in_specs=specs,
        out_specs=jax.P("d"),
    )
    assert "psum" not in str(jax.make_jaxpr(of_shards)(*operands()))


def operands(tokens=40):
    return [jnp.asarray(normal(*s, seed=i)) for i, s in enumerate([(tokens, 48), (48, 56), (tokens, 56)])]


def in_bfloat16():
    """Returns x, w and dy, with activations in bfloat16."""
    x, w, dy = operands()
    return x.astype(jnp.bfloat16), w, dy.astype(jnp.bfloat16)


def test_gemms_takes_leading_axes_and_other_dtypes():
    x, w, dy = in_bfloat16()
    flat = gemms(x, w, dy, policy="wgrad")
    leading = gemms(x.reshape(4, 10, 48), w, dy.reshape(4, 10, 56), policy="wgrad")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), leading, flat)


@functools.partial(jax.jit, static_argnames="axis")
def quantization_error(x, axis):
    return stats.quantization(x, mxjax.quantize(x, axis=axis))


def test_gemms_reports_each_operand_as_it_is_quantized():
    x, w, dy = operands(64)
    errors = gemms(x, w, dy, policy="wgrad_hadamard")
    alone = {
        (0, "lhs"): quantization_error(x, axis=-1),
        (0, "rhs"): quantization_error(w, axis=0),
        (1, "lhs"): quantization_error(dy, axis=-1),
        (1, "rhs"): quantization_error(w, axis=-1),
        (2, "lhs"): quantization_error(mxjax.rotate(x, axis=0), axis=0),
        (2, "rhs"): quantization_error(mxjax.rotate(dy, axis=0), axis=0),
    }
    for (gemm, side), expected in alone.items():
        np.testing.assert_allclose(getattr(errors[gemm], side), expected, rtol=1e-6)


def test_the_errors_of_gemms_print_as_a_table():
    errors = gemms(*in_bfloat16(), policy="wgrad")
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in str(errors).splitlines()]
    assert header[1:] == ["SQNR, dB", "relative error", "cosine", "projection", "clipped", "flushed"]
    assert [row[0] for row in rows[:4]] == ["fprop product", "fprop x", "fprop w", "dgrad product"]
    product, lhs = errors.fprop.product, errors.fprop.lhs
    assert rows[0][1:] == [f"{product.sqnr_db:.1f}", *(f"{value:.4f}" for value in product[1:]), "", ""]
    assert rows[1][-2:] == [f"{lhs.clipped:.4f}", f"{lhs.flushed:.4f}"]
    assert [line.split()[1] for line in str(errors.wgrad).splitlines()[2:]] == ["product", "lhs", "rhs"]


def test_errors_that_are_no_scalars_print_as_they_are():
    errors = gemms(*in_bfloat16(), policy="wgrad")
    stacked = jax.tree.map(lambda value: value[None], errors)
    assert str(stacked) == repr(stacked)
    assert repr(errors).startswith("DotErrors(fprop=GemmError(product=Error(sqnr_db=")
    traced = []
    jax.jit(lambda errors: traced.append((str(errors), repr(errors))))(errors)
    assert traced[0][0] == traced[0][1]
