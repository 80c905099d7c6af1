"""Products of `dot` against float64 products of quantized operands, their dtypes and shapes."""

import dataclasses
import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import dots
from support.dots import ASSORTED, DETERMINISTIC, IMPLEMENTATIONS, NEAREST, assert_same, inputs, products
from support.marks import parametrize

import mxjax
from mxjax import Gemm, Operand

ROOT = Path(__file__).parents[3]
ALL = [*IMPLEMENTATIONS, "fp8_carriers", "scaled_dot"]
"""Every implementation that runs without a GPU."""


FEW = ("fp8", "rotations", "2-D blocks", "nvfp4", "dequantized")


NAMES = [*FEW, *(name for name in DETERMINISTIC if name not in FEW)]
# Each by one implementation, in turns, and by the other before a release.
BY_ONE, BY_THE_OTHER = (
    [(name, IMPLEMENTATIONS[(i + turn) % 2]) for i, name in enumerate(NAMES)] for turn in range(2)
)


@parametrize(
    ("name", "implementation"), *BY_ONE[: len(FEW)], slow=BY_ONE[len(FEW) :], exhaustive=BY_THE_OTHER
)
def test_products_are_those_of_the_dequantized_operands(name, implementation):
    policy = DETERMINISTIC[name]
    x, w, dy = inputs()
    found = products(x, w, dy, policy=policy, implementation=implementation)
    dots.check_products(found, dots.expected_products(x, w, dy, policy))


# Operands are quantized from what they are, sums are float32, and only the result is rounded to its dtype.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@parametrize(
    ("x_dtype", "w_dtype", "y_dtype"),
    *(("bfloat16", "bfloat16", "bfloat16"), ("float16", "float32", "float32")),
    slow=[("float16",) * 3, ("float32", "bfloat16", "float32"), ("float16", "bfloat16", "float32")],
)
def test_products_of_other_dtypes_are_rounded_once(x_dtype, w_dtype, y_dtype, implementation):
    x, w, dy = inputs()
    x, w, dy = x.astype(x_dtype), w.astype(w_dtype), dy.astype(y_dtype)
    actual = products(x, w, dy, policy=NEAREST, implementation=implementation)
    assert [a.dtype for a in actual] == [y_dtype, x_dtype, w_dtype]
    for a, (value, magnitude) in zip(actual, dots.expected_products(x, w, dy, NEAREST), strict=True):
        rounding = float(jnp.finfo(a.dtype).eps) / 2 * np.abs(value) + 2.0**-20 * magnitude
        assert np.all(np.abs(dots.float64(a) - value) <= rounding)


def test_master_weights_are_quantized_from_float32():
    # 1.25 and its neighbour above are one bfloat16 number, and round to different elements.
    x, w = jnp.ones((1, 1), jnp.bfloat16), jnp.full((1, 1), 1.25 + 2**-12, jnp.float32)
    policy = dataclasses.replace(dots.FP32, fprop=Gemm(Operand("bf16"), Operand(scale_rule="floor")))
    assert mxjax.dot(x, 4 * w, policy=policy) == 6
    assert mxjax.dot(x, 4 * w.astype(jnp.bfloat16), policy=policy) == 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_preferred_element_type_is_the_dtype_of_the_result_alone(implementation):
    x, w, dy = inputs(dtype=jnp.bfloat16)
    options = {"implementation": implementation, "preferred_element_type": jnp.float32}
    found = products(x, w, dy, policy=NEAREST, **options)
    assert [t.dtype for t in found] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    # Float32 all the way, not a bfloat16 result converted.
    dots.check_products(found[:1], dots.expected_products(x, w, dy, NEAREST)[:1])


@parametrize(("x_shape", "d_out"), ((1, 1), 1), ((2, 3, 65), 4), slow=[((33,), 5), ((64, 1), 3)], ids=str)
def test_any_shape(x_shape, d_out):
    policy = mxjax.get_policy("wgrad_hadamard")
    x, w, dy = inputs(x_shape, d_out)
    dots.check_products(products(x, w, dy, policy=policy), dots.expected_products(x, w, dy, policy))


@pytest.mark.parametrize(("tokens", "d_in", "d_out"), [(0, 33, 5), (4, 0, 5), (4, 33, 0)])
@parametrize(
    ("name", "implementation"),
    *((name, "xla") for name in ("fp32", "ms_fp4")),
    *(("wgrad_hadamard", i) for i in ("xla", "fp8_carriers")),
    slow=[("wgrad_hadamard", i) for i in ALL if i not in ("xla", "fp8_carriers")],
)
def test_an_empty_axis_gives_an_empty_or_zero_product(tokens, d_in, d_out, name, implementation):
    x, w, dy = jnp.ones((tokens, d_in)), jnp.ones((d_in, d_out)), jnp.ones((tokens, d_out))
    actual = products(x, w, dy, policy=name, implementation=implementation)
    assert_same(actual, (x @ w, dy @ w.T, x.T @ dy))


def test_leading_axes_are_tokens_flattened():
    x, w, dy = inputs()
    key = jax.random.key(0)
    y, dx, dw = products(x, w, dy, key, policy=ASSORTED)
    leading = products(x.reshape(2, 5, 4, 48), w, dy.reshape(2, 5, 4, 56), key, policy=ASSORTED)
    assert_same(leading, (y.reshape(2, 5, 4, 56), dx.reshape(2, 5, 4, 48), dw))


@pytest.mark.parametrize("name", ["fp8", "wgrad_sr", "nvfp4", "tetrajet_v2"])
def test_a_power_of_two_times_the_loss_changes_no_other_bit(name):
    x, w, dy = inputs()
    key, dot = jax.random.key(0), functools.partial(mxjax.dot, policy=name)
    _, backward = jax.vjp(lambda x, w: dot(x, w, key=key), x, w)
    assert_same(backward(dy), [2.0**20 * gradient for gradient in backward(2.0**-20 * dy)])


def test_without_a_tensor_scale_small_gradients_need_a_scaled_loss():
    x, w, dy = inputs()
    dot = functools.partial(mxjax.dot, policy="ue5m3_no_tensor_scale", key=jax.random.key(0))
    _, backward = jax.vjp(dot, x, w)
    assert not any(jnp.any(gradient) for gradient in backward(2.0**-30 * dy))
    for gradient, exact in zip(backward(dy), (dy @ w.T, x.T @ dy), strict=True):
        assert mxjax.stats.error(exact, gradient).cosine > 0.97


def test_a_power_of_two_scales_the_weight_or_the_result():
    x, w, dy = inputs()
    dot = functools.partial(mxjax.dot, policy="wgrad_hadamard")
    assert_same(
        dots.with_gradients(lambda x, w: dot(x, w / 8), x, w, dy=dy),
        dots.with_gradients(lambda x, w: dot(x, w) / 8, x, w, dy=dy),
    )


@pytest.mark.parametrize("implementation", ALL)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_block_that_is_not_finite_poisons_only_what_it_enters(value, implementation):
    x, w, dy = inputs()
    run = functools.partial(products, policy=NEAREST, implementation=implementation)
    clean = [np.array(product) for product in run(x, w, dy)]
    # Fprop sums over row 3 of x and Wgrad over its column 5; Dgrad does not see x.
    clean[0][3, :] = np.nan
    clean[2][5, :] = np.nan
    assert_same(run(x.at[3, 5].set(value), w, dy), clean)


# In a process of its own, where nothing has been logged yet.
def test_the_choice_of_implementation_is_logged_once():
    code = """
import logging, sys
import jax.numpy as jnp, mxjax
log = logging.getLogger("mxjax")
log.addHandler(logging.StreamHandler(sys.stdout))
log.setLevel(logging.INFO)
x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
mxjax.dot(x, w, policy="fp32", implementation="reference")
mxjax.dot(x, w, policy="fp32")
mxjax.dot(x, w, policy="bf16")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["mxjax.dot runs its GEMMs by implementation='xla'"]


def test_none_runs_the_implementation_it_logs():
    x, w, dy = inputs()
    run = functools.partial(products, x, w, dy, policy=DETERMINISTIC["nvfp4"])
    assert_same(run(), run(implementation="xla"))
    # The other one rounds elsewhere, in formats whose scales are no powers of two.
    assert not np.array_equal(run()[0], run(implementation="reference")[0])


@pytest.mark.parametrize("name", ["wgrad_hadamard", "primus_turbo", "fp8"])
def test_xla_multiplies_in_bfloat16_and_accumulates_in_float32(name):
    text = dots.lowered(name, jnp.bfloat16)
    found = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(found) == 3
    for line in found:
        assert re.search(r"\(tensor<\w+xbf16>, tensor<\w+xbf16>\) -> tensor<\w+xf32>", line), line
    assert "f64" not in text
