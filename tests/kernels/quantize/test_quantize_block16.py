"""The quantizer of NVFP4 and its relatives against the definitions in `mxjax`, bit for bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gpu import HAS_GPU
from support.marks import parametrize
from support.quantizer import draw_tensor

import mxjax
from mxjax.kernels.cases import block16 as block16_builds
from mxjax.kernels.cases.expected_block16 import uses_of_tensor
from mxjax.kernels.quantize import block16
from mxjax.kernels.quantize.block16 import quantize_block16
from mxjax.kernels.quantize.quantizer import elements_of
from mxjax.numerics.operand import Operand
from mxjax.operands.kernel_operand import KernelOperand, bfloat16_by_definition
from mxjax.operands.use import dequantize_use
from mxjax.policy import Gemm, Rotation
from mxjax.products import prepare
from mxjax.products.draws import uses_of
from mxjax.runtime.devices import Target, current_target, use_target

NV, SQUARE = Operand("nvfp4"), Operand("nvfp4", block_shape=(16, 16))
SR = dataclasses.replace(NV, rounding="stochastic")
SIX = Operand("nvfp4", scale_max=256, four_over_six="mse")
SIX_SR = dataclasses.replace(SIX, rounding="stochastic", four_over_six="mae", scale_target=5.5)
SIX_TO_8 = dataclasses.replace(SIX_SR, scale_target=6.4)  # of which random rounding makes 8, if not clipped
SMALL = Operand("nvfp4", scale_target=0.5, scale_max=2.0**-9)
EDEN = mxjax.get_policy("quartet2").dgrad.lhs
RUNS = Operand("nvfp4_1x128")
UE5M3 = Operand("fp4_ue5m3", rounding="stochastic")
H16, H128 = Rotation(16, "fixed"), Rotation(128, "redrawn")
CASES = {
    "to nearest, both": (NV, NV, None),
    "weights": (SQUARE, SQUARE, None),
    "stochastic, H16": (NV, SR, H16),
    "four over six": (SIX, SIX, None),
    "four over six, weights": (dataclasses.replace(SIX, block_shape=(16, 16)), NV, None),
    "four over six, stochastic": (SIX_SR, SIX_SR, H16),
    "four over six, to 6.4": (SIX_TO_8, SIX_TO_8, H16),
    "to small elements": (SMALL, SMALL, None),
    "eden, H128": (EDEN, EDEN, H128),
    "eden of single blocks": (dataclasses.replace(EDEN, eden=16), dataclasses.replace(EDEN, eden=64), None),
    "scales of runs": (RUNS, RUNS, H16),
    "scales of runs, stochastic": (dataclasses.replace(RUNS, rounding="stochastic"), RUNS, None),
    "ue5m3": (dataclasses.replace(UE5M3, scale_max=448), UE5M3, None),
}


def on_cpu(function):
    """Returns a function that runs on the CPU: XLA's divisions on GPUs are not rounded correctly."""

    @functools.wraps(function)
    def run(*arguments):
        with jax.default_device(jax.devices("cpu")[0]), use_target(Target("none", "none")):
            return function(*jax.device_get(arguments))

    return run


def assert_equal(got: KernelOperand, wanted: KernelOperand, length: int):
    assert got.elements.shape == wanted.elements.shape
    # Zeros of the padding have any sign, and are NaN where all of the tensor or block is.
    a, b = (np.asarray(q.elements, np.float32)[..., :length] for q in (got, wanted))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)]))
    assert (got.tensor_scale is None) == (wanted.tensor_scale is None)
    if wanted.tensor_scale is not None:
        np.testing.assert_array_equal(got.tensor_scale, wanted.tensor_scale)
    assert (got.run_scales is None) == (wanted.run_scales is None)
    if wanted.run_scales is not None:
        np.testing.assert_array_equal(got.run_scales, wanted.run_scales)


def check(case, x, axes):
    """Quantizes x as one use or two, and compares with the definition."""
    gemm, key = Gemm(*CASES[case]), jax.random.key(5)

    def uses():
        return [use for use in uses_of(gemm, -1, -2, key) if use.axis in axes]

    got = jax.jit(lambda x: quantize_block16(x, uses()))(x)
    wanted = on_cpu(lambda x: jax.jit(lambda x: [bfloat16_by_definition(x, use) for use in uses()])(x))(x)
    for q, defined, axis in zip(got, wanted, axes, strict=True):
        assert_equal(q, defined, x.shape[axis])


SHAPES = [(2, 144, 272), (512, 2048)] if HAS_GPU else [(2, 48, 80)]


# Cases of which each code path is in another, too.
ALIKE = {"to nearest, both", "weights", "four over six", "four over six, weights", "eden of single blocks"}
ALIKE |= {"scales of runs", "four over six, to 6.4", "to small elements"}


@parametrize("case", *(case for case in CASES if case not in ALIKE), exhaustive=sorted(ALIKE))
@pytest.mark.parametrize("shape", SHAPES)
def test_both_orientations_have_the_definitions_bits(case, shape):
    x = draw_tensor(np.random.default_rng(0), shape, "wide", "bfloat16")
    check(case, x, (-1, -2))


@pytest.mark.usefixtures("on_hopper")
@parametrize("case", "four over six, stochastic", slow=["ue5m3", "four over six, to 6.4"])
def test_hoppers_random_bits_in_the_interpreter(case):
    check(case, draw_tensor(np.random.default_rng(4), (33, 70), "special", "float32"), (-1, -2))


@pytest.mark.usefixtures("on_hopper")
@parametrize("value", 2.0**-95, np.inf, slow=[0.0, 2.0**-60, 3e38, np.nan])
def test_hopper_divides_as_defined(value):
    x = 2.0**-100 * draw_tensor(np.random.default_rng(7), (16, 64), "wide", "float32")
    check("four over six", x.at[3, 5].set(value), (-1,))


@pytest.mark.usefixtures("on_hopper")
def test_hopper_divides_an_infinite_quotient_by_an_infinite_scale():
    x = draw_tensor(np.random.default_rng(7), (16, 64), "wide", "float32")
    check("to small elements", 3e38 * x / jnp.max(jnp.abs(x)), (-1,))


@pytest.mark.parametrize(
    ("case", "axis"), [("weights", -2), ("eden, H128", -1), ("ue5m3", -2), ("scales of runs", -1)]
)
def test_special_values_and_any_shape(case, axis):
    check(case, draw_tensor(np.random.default_rng(1), (33, 70), "special", "float32"), (axis,))


@pytest.mark.parametrize("value", [0.0, 2.0**-120, np.nan, np.inf])
def test_tensors_that_have_no_scale_of_their_own(value):
    check("to nearest, both", jnp.zeros((16, 32)).at[3, 5].set(value), (-1, -2))


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", ["quartet2", "tetrajet_v2"])
def test_what_the_forward_pass_left_is_quantized_again_as_defined(name, axis):
    """By the kernel's operand, K-major and without its tensor scale, in place of the values."""
    shape = (64, 128) if name == "quartet2" else (288, 160)
    x = draw_tensor(np.random.default_rng(2), shape, "wide", "bfloat16")

    def use():
        policy = mxjax.get_policy(name)
        fprop, _ = uses_of(policy.fprop, axis, axis, jax.random.key(0))
        rotated, _ = uses_of(policy.dgrad, -3 - axis, axis, jax.random.key(5))
        return rotated._replace(form="bf16", reads=fprop._replace(form="bf16"))

    assert prepare.takes_seen(x, use())
    [got] = jax.jit(lambda x: prepare.prepare(x, [use()]))(x)
    define = jax.jit(lambda x: bfloat16_by_definition(dequantize_use(x, use().reads), use()))
    assert_equal(got, on_cpu(define)(x), x.shape[-3 - axis])


@pytest.mark.slow
def test_vmap_gives_each_tensor_its_scale_and_each_key_its_bits():
    x = np.asarray(draw_tensor(np.random.default_rng(3), (2, 32, 128), "wide", "float32"))
    keys = jax.random.split(jax.random.key(9), 2)

    def quantize(x, key):
        _, use = uses_of(Gemm(*CASES["eden, H128"]), -1, -1, key)
        [q] = quantize_block16(x, [use])
        return q.elements, q.tensor_scale

    got = jax.vmap(quantize)(x, keys)
    for i in range(2):
        for a, b in zip(got, quantize(x[i], keys[i]), strict=True):
            np.testing.assert_array_equal(a[i], b)
    assert got[1][0] != got[1][1]


@parametrize(("case", "n"), ("four over six, stochastic", 32), exhaustive=[("eden, H128", 128)])
def test_a_part_draws_the_bits_of_its_place_in_the_whole(case, n):
    whole = jax.random.normal(jax.random.key(0), (2, 2 * n, 2 * n))
    b, r, c = slice(1, 2), slice(n, 2 * n), slice(n, 2 * n)
    pair = uses_of(Gemm(*CASES[case]), -1, -2, jax.random.key(5))
    scalars = jnp.concatenate([*(block16._words(use) for use in pair), jnp.zeros(1, jnp.uint32)])[None]
    places = [jnp.arange(s.start, s.stop, dtype=jnp.uint32) for s in (b, r, c)]
    start = block16._Start("", current_target())
    maxima = block16._maxima(pair, start, whole[None], scalars, [p * 0 for p in places])
    part = whole[b, r, c][None]
    got = block16._call(pair, start, (2 * n, 2 * n), part, maxima, scalars, *places)[::2]
    for use, words, defined in zip(pair, got, quantize_block16(whole, pair), strict=True):
        other, blocked = (r, c) if use.axis == -1 else (c, r)
        np.testing.assert_array_equal(elements_of(words, "bf16")[0], defined.elements[b, other, blocked])


def test_the_kernel_subtracts_the_mean():
    x = draw_tensor(np.random.default_rng(6), (2, 33, 70), "wide", "bfloat16")
    operand = mxjax.get_policy("averis").fprop.lhs

    def uses():
        return [use._replace(form="bf16") for use in uses_of(Gemm(operand, operand), -1, -2, None)]

    got = jax.jit(lambda x: prepare.prepare(x, uses()))(x)
    wanted = on_cpu(jax.jit(lambda x: [bfloat16_by_definition(x, use) for use in uses()]))(x)
    for q, defined, axis in zip(got, wanted, (-1, -2), strict=True):
        assert_equal(q, defined, x.shape[axis])


def test_a_recorded_launch_leaves_no_trace_without_kernels():
    x = draw_tensor(np.random.default_rng(3), (32, 32), "normal", "bfloat16")
    uses = uses_of_tensor("nvfp4", "weight")
    for _ in range(2):
        assert [*block16_builds._builds("nvfp4", "weight", (32, 32), current_target())]
        assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(quantize_block16(x, uses)))
