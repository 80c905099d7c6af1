"""`dot` and `dot_general` against float64 products of quantized operands, and under transformations."""

import dataclasses
import functools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax
from oracles import types_unchecked

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation

ROOT = Path(__file__).parent.parent
IMPLEMENTATIONS = ["reference", "xla"]
PRODUCTS = ("y", "dx", "dw")

FP32, NEAREST = mxjax.get_policy("fp32"), mxjax.get_policy("wgrad")


def gemm(operand: Operand, rotation: Rotation | None = None) -> Gemm:
    return Gemm(operand, operand, rotation)


def everywhere(operand: Operand, rotation: Rotation | None = None) -> Policy:
    return Policy(*[gemm(operand, rotation)] * 3)


STOCHASTIC = Operand("mxfp4", rounding="stochastic")
AMAZON = Operand("mxfp4", rounding="stochastic", prescale=0.75)
DEQUANTIZED = Operand("fp32", source="dequantized")

# One that has most of what a policy can say, random bits included, for the tests of transformations.
ASSORTED = Policy(
    fprop=Gemm(Operand("nvfp4"), Operand(block_shape=(32, 32), scale_rule="even")),
    dgrad=Gemm(Operand("fp8_e5m2"), Operand("fp8_e4m3")),
    wgrad=Gemm(AMAZON, STOCHASTIC, Rotation(16, "redrawn")),
)
RANDOM_FPROP = dataclasses.replace(FP32, fprop=Gemm(STOCHASTIC, Operand("bf16")))
RANDOM_WGRAD = dataclasses.replace(FP32, fprop=NEAREST.fprop, wgrad=Gemm(STOCHASTIC, Operand()))

# Together they hold each format, block shape, rule and rotation; random bits are below.
DETERMINISTIC = {
    "mxfp4": NEAREST,
    "bf16": mxjax.get_policy("bf16"),
    "fp8": mxjax.get_policy("fp8"),
    "one gemm in fp8": mxjax.get_policy("fprop_dgrad"),
    "rotations": Policy(
        fprop=gemm(Operand(), Rotation(16)),
        dgrad=gemm(Operand(scale_rule="even"), Rotation(32, "fixed", seed=5)),
        wgrad=gemm(Operand(prescale=0.75), Rotation(64)),
    ),
    "rules and prescale": Policy(
        fprop=Gemm(Operand(scale_rule="ceil"), Operand(prescale=0.5)),
        dgrad=Gemm(Operand(prescale=0.75), Operand(prescale=0.75)),
        wgrad=Gemm(Operand(scale_rule="uos"), Operand(scale_rule="rceil")),
    ),
    "2-D blocks": Policy(
        fprop=Gemm(Operand(), Operand(block_shape=(32, 32))),
        dgrad=Gemm(Operand(block_shape=16), Operand(block_shape=(3, 20))),
        wgrad=Gemm(Operand("nvfp4", block_shape=(16, 16)), Operand("mxfp8_e4m3"), Rotation(16)),
    ),
    "nvfp4": everywhere(Operand("nvfp4")),
    "mxfp6, mxfp8 and e3m0": Policy(
        fprop=Gemm(Operand("mxfp6_e2m3"), Operand("mxfp6_e3m2")),
        dgrad=Gemm(Operand("mxfp8_e5m2"), Operand("mxfp8_e4m3")),
        wgrad=Gemm(Operand("mxfp4_e3m0"), Operand("fp32")),
    ),
    "dequantized": Policy(
        fprop=gemm(Operand(scale_rule="rceil")),
        dgrad=Gemm(Operand(), DEQUANTIZED),
        wgrad=Gemm(DEQUANTIZED, Operand()),
    ),
    "dequantized, quantized again": Policy(
        fprop=Gemm(Operand("nvfp4"), Operand(block_shape=(32, 32))),
        dgrad=Gemm(Operand(), Operand(source="dequantized")),
        wgrad=Gemm(Operand(source="dequantized"), Operand(), Rotation(16)),
    ),
}


def draw(*shape: int, seed: int, dtype=jnp.float32) -> jax.Array:
    """Normal numbers whose size varies between neighbours, so that it matters which of them share a scale."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal(shape)), dtype)


def inputs(x_shape=(40, 48), d_out=56, dtype=jnp.float32):
    """x, w and dy; neither a block nor a rotation divides the default tokens, d_in and d_out."""
    x = draw(*x_shape, seed=1, dtype=dtype)
    w = draw(x_shape[-1], d_out, seed=2, dtype=dtype)
    return x, w, draw(*x_shape[:-1], d_out, seed=3, dtype=dtype)


def products(x, w, dy, key=None, *, policy, implementation=None):
    """Returns y, dx and dw; each of the GEMMs is jitted inside, so that policies share what they compile."""

    def product(x, w):
        return mxjax.dot(x, w, policy=policy, key=key, implementation=implementation)

    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


jitted_products = jax.jit(products, static_argnames=("policy", "implementation"))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def operand_values(x, axis: int, operand: Operand, rotation: Rotation | None = None) -> jax.Array:
    """Returns what a GEMM that contracts `axis` multiplies for x."""
    if rotation:
        missing = -x.shape[axis] % rotation.size
        x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
        key = jax.random.key(rotation.seed)
        signs = mxjax.random_signs(key, rotation.size) if rotation.signs == "fixed" else None
        x = mxjax.rotate(x, rotation.size, axis=axis, signs=signs)
    quantized = mxjax.quantize(
        x,
        operand.format,
        axis=axis,
        scale_rule=operand.scale_rule,
        block_shape=operand.block_shape,
        prescale=operand.prescale,
    )
    return mxjax.dequantize(quantized)


def float64(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def expected_products(x, w, dy, policy: Policy):
    """Returns y, dx and dw in float64, each with the sum of the magnitudes that it adds up."""
    x_shape, y_shape = x.shape, dy.shape
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    x_seen, w_seen = x, w
    if policy.wgrad.lhs.source == "dequantized":
        x_seen = operand_values(x, 1, policy.fprop.lhs)
    if policy.dgrad.rhs.source == "dequantized":
        w_seen = operand_values(w, 0, policy.fprop.rhs)

    def multiply(gemm, lhs, lhs_axis, rhs, rhs_axis, shape):
        lhs = float64(operand_values(lhs, lhs_axis, gemm.lhs, gemm.rotation))
        rhs = float64(operand_values(rhs, rhs_axis, gemm.rhs, gemm.rotation))
        axes = ([lhs_axis], [rhs_axis])
        magnitude = np.tensordot(np.abs(lhs), np.abs(rhs), axes)
        return np.tensordot(lhs, rhs, axes).reshape(shape), magnitude.reshape(shape)

    return (
        multiply(policy.fprop, x, 1, w, 0, y_shape),
        multiply(policy.dgrad, dy, 1, w_seen, 1, x_shape),
        multiply(policy.wgrad, x_seen, 0, dy, 0, w.shape),
    )


def check_products(actual, expected):
    """Checks that each product is off by no more than 16 float32 roundings of the magnitude of its sum."""
    for name, a, (value, magnitude) in zip(PRODUCTS, actual, expected, strict=False):
        assert a.shape == value.shape, name
        excess = np.abs(float64(a) - value) - 2.0**-20 * magnitude
        assert np.max(excess) <= 0, name


def assert_same(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_products_are_those_of_the_dequantized_operands(name):
    policy = DETERMINISTIC[name]
    x, w, dy = inputs()
    expected = expected_products(x, w, dy, policy)
    for implementation in IMPLEMENTATIONS:
        check_products(products(x, w, dy, policy=policy, implementation=implementation), expected)


# The bound of the test above is sharp enough to tell any two policies apart.
def test_products_of_different_policies_differ_by_more_than_float32_can():
    x, w, dy = inputs()
    expected = expected_products(x, w, dy, NEAREST)
    for other in ("fprop_dgrad", "wgrad_hadamard"):
        y, dx, dw = products(x, w, dy, policy=other)
        check_products((y, dx, products(x, w, dy, policy=NEAREST)[2]), expected)
        with pytest.raises(AssertionError, match="dw"):
            check_products((y, dx, dw), expected)


@pytest.mark.parametrize("name", ["fprop", "dgrad", "wgrad"])
def test_a_gemm_quantized_alone_changes_only_its_own_product(name):
    quantized = Gemm(Operand(), Operand(rounding="stochastic"), Rotation(16, "redrawn"))
    policy = dataclasses.replace(FP32, **{name: quantized})
    x, w, dy = inputs()
    key = jax.random.key(0)
    actual = products(x, w, dy, key, policy=policy)
    exact = products(x, w, dy, key, policy=FP32)
    changed = [not np.array_equal(a, e) for a, e in zip(actual, exact, strict=True)]
    assert changed == [name == other for other in ("fprop", "dgrad", "wgrad")]


def test_implementations_agree_on_the_same_random_bits():
    x, w, dy = inputs()
    key = jax.random.key(3)
    reference, xla = (products(x, w, dy, key, policy=ASSORTED, implementation=i) for i in IMPLEMENTATIONS)
    for r, a in zip(reference, xla, strict=True):
        np.testing.assert_allclose(a, r, rtol=0, atol=1e-6 * np.max(np.abs(r)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "y_dtype"),
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float16", "float16", "float16"),
        ("bfloat16", "float32", "float32"),
        ("float32", "bfloat16", "float32"),
        ("float16", "bfloat16", "float32"),
    ],
)
def test_gradients_have_the_dtypes_of_the_inputs(x_dtype, w_dtype, y_dtype, implementation):
    x, w, dy = inputs()
    run = functools.partial(products, policy=NEAREST, implementation=implementation)
    shapes = jax.eval_shape(run, x.astype(x_dtype), w.astype(w_dtype), dy.astype(y_dtype))
    assert [s.dtype for s in shapes] == [y_dtype, x_dtype, w_dtype]


# Operands are quantized from what they are, sums are float32, and only the result is rounded to its dtype.
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "y_dtype"),
    [("bfloat16", "bfloat16", "bfloat16"), ("float16", "float32", "float32")],
)
def test_products_of_other_dtypes_are_rounded_once(x_dtype, w_dtype, y_dtype, implementation):
    x, w, dy = inputs()
    x, w, dy = x.astype(x_dtype), w.astype(w_dtype), dy.astype(y_dtype)
    actual = products(x, w, dy, policy=NEAREST, implementation=implementation)
    for a, (value, magnitude) in zip(actual, expected_products(x, w, dy, NEAREST), strict=True):
        rounding = float(jnp.finfo(a.dtype).eps) / 2 * np.abs(value) + 2.0**-20 * magnitude
        assert np.all(np.abs(float64(a) - value) <= rounding)


def test_master_weights_are_quantized_from_float32():
    # 1.25 and its neighbour above are one bfloat16 number, and round to different elements.
    x, w = jnp.ones((1, 1), jnp.bfloat16), jnp.full((1, 1), 1.25 + 2**-12, jnp.float32)
    policy = dataclasses.replace(FP32, fprop=Gemm(Operand("bf16"), Operand(scale_rule="floor")))
    assert mxjax.dot(x, 4 * w, policy=policy) == 6
    assert mxjax.dot(x, 4 * w.astype(jnp.bfloat16), policy=policy) == 4


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_preferred_element_type_is_the_dtype_of_the_result_alone(implementation):
    x, w, dy = inputs(dtype=jnp.bfloat16)

    def product(x, w):
        return mxjax.dot(
            x, w, policy=NEAREST, implementation=implementation, preferred_element_type=jnp.float32
        )

    y, vjp = jax.vjp(product, x, w)
    dx, dw = vjp(dy.astype(jnp.float32))
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    # Float32 all the way, not a bfloat16 result converted.
    check_products((y,), expected_products(x, w, dy, NEAREST)[:1])


@pytest.mark.parametrize(
    ("x_shape", "d_out"),
    [((1, 1), 1), ((33,), 5), ((64, 1), 3), ((2, 3, 65), 4)],
    ids=str,
)
def test_any_shape(x_shape, d_out):
    policy = mxjax.get_policy("wgrad_hadamard")
    x, w, dy = inputs(x_shape, d_out)
    check_products(products(x, w, dy, policy=policy), expected_products(x, w, dy, policy))


@pytest.mark.parametrize(("tokens", "d_in", "d_out"), [(0, 33, 5), (4, 0, 5), (4, 33, 0)])
@pytest.mark.parametrize("name", ["fp32", "wgrad"])
def test_an_empty_axis_gives_an_empty_or_zero_product(tokens, d_in, d_out, name):
    x, w, dy = jnp.ones((tokens, d_in)), jnp.ones((d_in, d_out)), jnp.ones((tokens, d_out))
    assert_same(products(x, w, dy, policy=name), (x @ w, dy @ w.T, x.T @ dy))


def test_leading_axes_are_tokens_flattened():
    x, w, dy = inputs()
    key = jax.random.key(0)
    y, dx, dw = products(x, w, dy, key, policy=ASSORTED)
    leading = products(x.reshape(2, 5, 4, 48), w, dy.reshape(2, 5, 4, 56), key, policy=ASSORTED)
    assert_same(leading, (y.reshape(2, 5, 4, 56), dx.reshape(2, 5, 4, 48), dw))


@pytest.mark.parametrize("policy", [NEAREST, ASSORTED], ids=["nearest", "assorted"])
def test_jit_and_eager_agree_bit_for_bit(policy):
    x, w, dy = inputs()
    key = jax.random.key(0)
    assert_same(jitted_products(x, w, dy, key, policy=policy), products(x, w, dy, key, policy=policy))


def test_numpy_arrays_are_taken_as_they_are():
    x, w, dy = inputs()
    y = mxjax.dot(np.asarray(x), np.asarray(w), policy=NEAREST)
    np.testing.assert_array_equal(y, products(x, w, dy, policy=NEAREST)[0])


# A scale for the whole tensor (FP8) is one for each of the batch, and all draw the same random bits.
def test_vmap_equals_a_loop():
    stacked = [jnp.stack([t, 3 * t[::-1]]) for t in inputs()]
    key = jax.random.key(0)
    run = functools.partial(products, policy=ASSORTED)
    mapped = jax.jit(jax.vmap(run, in_axes=(0, 0, 0, None)))(*stacked, key)
    looped = [run(*(t[i] for t in stacked), key) for i in range(2)]
    for m, *one_by_one in zip(mapped, *looped, strict=True):
        expected = np.stack(one_by_one)
        np.testing.assert_allclose(m, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected)))


def test_vmap_over_x_alone_equals_a_loop():
    x, w, dy = inputs()
    xs, dys = jnp.stack([x, 2 * x[::-1]]), jnp.stack([dy, dy[::-1]])
    run = functools.partial(products, policy=NEAREST)
    mapped = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(xs, w, dys)
    for m, *one_by_one in zip(mapped, *(run(xs[i], w, dys[i]) for i in range(2)), strict=True):
        expected = np.stack(one_by_one)
        np.testing.assert_allclose(m, expected, rtol=0, atol=1e-6 * np.max(np.abs(expected)))


def test_scan_over_stacked_weights_equals_a_loop():
    x, ws = draw(33, 40, seed=4), draw(2, 40, 40, seed=5) / 8

    def layer(x, w, i, key):
        return jnp.tanh(mxjax.dot(x, w, policy=RANDOM_WGRAD, key=jax.random.fold_in(key, i)))

    def scanned(ws, key):
        def body(x, layer_inputs):
            return layer(x, *layer_inputs, key), None

        return jnp.sum(lax.scan(body, x, (ws, jnp.arange(2)))[0] ** 2)

    def looped(ws, key):
        y = x
        for i, w in enumerate(ws):
            y = layer(y, w, i, key)
        return jnp.sum(y**2)

    value, gradient = jax.jit(jax.value_and_grad(scanned))(ws, jax.random.key(0))
    expected_value, expected = jax.jit(jax.value_and_grad(looped))(ws, jax.random.key(0))
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-5 * np.max(np.abs(expected)))


@pytest.mark.parametrize(
    "policy",
    [mxjax.get_policy("wgrad_sr"), mxjax.get_policy("wgrad_rht"), RANDOM_FPROP],
    ids=["wgrad_sr", "wgrad_rht", "random fprop"],
)
def test_remat_replays_the_random_bits(policy):
    x, w, _ = inputs()

    # The slope of the last tanh needs y, which remat computes again.
    def block(x, w, key):
        return jnp.tanh(mxjax.dot(jnp.tanh(x), w, policy=policy, key=key))

    def gradients(block):
        return jax.grad(lambda x, w, key: jnp.sum(block(x, w, key) ** 2), argnums=(0, 1))

    remat, plain = gradients(jax.checkpoint(block)), gradients(block)
    key = jax.random.key(0)
    tanhs = [jax.jit(f).lower(x, w, key).as_text().count("stablehlo.tanh") for f in (remat, plain)]
    assert tanhs == [4, 2]
    for actual, expected in zip(jax.jit(remat)(x, w, key), jax.jit(plain)(x, w, key), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_rotation_without_quantization_cancels():
    x, w, dy = inputs()
    rotations = (Rotation(16), Rotation(32, "fixed"), Rotation(64, "redrawn"))
    policy = Policy(*(gemm(Operand("fp32"), rotation) for rotation in rotations))
    actual = products(x, w, dy, jax.random.key(0), policy=policy)
    # A rotation mixes the terms of each sum, so the bound is by the norms of its operands.
    norms = [np.linalg.norm(t) for t in (x, w, dy)]
    bounds = (norms[0] * norms[1], norms[2] * norms[1], norms[0] * norms[2])
    for a, e, bound in zip(actual, products(x, w, dy, policy=FP32), bounds, strict=True):
        assert np.max(np.abs(a - e)) < 2e-7 * bound
        assert not np.array_equal(a, e)


@pytest.mark.parametrize("signs", ["none", "fixed", "redrawn"])
def test_only_redrawn_signs_depend_on_the_key(signs):
    x, w, _ = inputs()
    policy = dataclasses.replace(FP32, fprop=gemm(Operand(), Rotation(16, signs)))
    first, second = (mxjax.dot(x, w, policy=policy, key=jax.random.key(i)) for i in range(2))
    assert np.array_equal(first, second) == (signs != "redrawn")


def test_fixed_signs_depend_on_their_seed():
    x, w, _ = inputs()
    first, second = (
        mxjax.dot(x, w, policy=everywhere(Operand(), Rotation(16, "fixed", seed))) for seed in (0, 1)
    )
    assert not np.array_equal(first, second)


@pytest.mark.parametrize("operand", range(2), ids=["lhs", "rhs"])
def test_the_same_key_gives_the_same_bits_and_another_key_others(operand):
    x, w, _ = inputs()
    operands = [Operand("bf16"), Operand("bf16")]
    operands[operand] = STOCHASTIC
    policy = dataclasses.replace(FP32, fprop=Gemm(*operands))
    first, again, other = (mxjax.dot(x, w, policy=policy, key=jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_raw_keys_work_too():
    x, w, dy = inputs()
    key = jax.random.key(0)
    raw = jax.random.key_data(key)
    assert_same(products(x, w, dy, raw, policy=RANDOM_FPROP), products(x, w, dy, key, policy=RANDOM_FPROP))


def z_scores(policy: Policy, draws: int = 512) -> np.ndarray:
    """Returns how many standard errors the mean over keys of y, dx and dw lies from the exact products.

    x, w and dy are one symmetric matrix, so that its elements meet themselves on the products' diagonals:
    if the operands of a GEMM drew the same random bits, their errors would be correlated there, and biased.
    """
    s = draw(32, 32, seed=6)
    s = (s + s.T) / 2

    @jax.jit
    def moments(s, key):
        keys = jax.random.split(key, draws)
        values = jax.vmap(lambda k: jnp.stack(products(s, s, s, k, policy=policy)))(keys)
        return jnp.mean(values, 0), jnp.std(values, 0, ddof=1)

    mean, std = (float64(m) for m in moments(s, jax.random.key(1)))
    return (mean - float64(s) @ float64(s)) / (std / np.sqrt(draws) + 1e-6)


def test_stochastic_rounding_without_clipping_has_unbiased_products():
    rceil = Operand("mxfp4", scale_rule="rceil", rounding="stochastic")
    z = z_scores(Policy(gemm(AMAZON), gemm(AMAZON, Rotation(64, "redrawn")), gemm(rceil)))
    # A normal number exceeds 5 once in 1.7 million; there are 3072 products.
    assert np.max(np.abs(z)) < 5
    np.testing.assert_allclose(np.std(z, axis=(1, 2)), 1, atol=0.12)


def test_stochastic_rounding_after_clipping_is_biased():
    y, _, _ = z_scores(dataclasses.replace(FP32, fprop=gemm(STOCHASTIC)))
    assert np.std(y) > 2


@pytest.mark.parametrize(
    ("policy", "drawing"),
    [
        ("wgrad_sr", "wgrad"),
        ("wgrad_rht", "wgrad"),
        ("amazon", "dgrad, wgrad"),
        ("full_sr", "fprop, dgrad, wgrad"),
    ],
)
def test_a_missing_key_raises_and_names_the_gemms(policy, drawing):
    x, w, _ = inputs()
    with pytest.raises(ValueError, match=f"draws random bits in {drawing} and needs key="):
        mxjax.dot(x, w, policy=policy)


@pytest.fixture
def unchecked(monkeypatch):
    """Turns off the tests' annotation checks, which would reject a wrong Literal before the library does."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_an_implementation_that_does_not_run_here_raises():
    x, w, _ = inputs()
    with pytest.raises(NotImplementedError, match=r"'triton' needs a GPU and jax-triton.*use 'xla'"):
        mxjax.dot(x, w, policy="wgrad", implementation="triton")


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_implementation_raises():
    x, w, _ = inputs()
    with pytest.raises(ValueError, match=r"unknown implementation 'cuda'.*reference, xla, fp8"):
        mxjax.dot(x, w, policy="wgrad", implementation="cuda")


def test_an_unknown_policy_raises():
    x, w, _ = inputs()
    with pytest.raises(ValueError, match="unknown policy 'wgrad_hadamar'; did you mean"):
        mxjax.dot(x, w, policy="wgrad_hadamar")


@pytest.mark.parametrize(
    ("x_shape", "w_shape"), [((4, 5), (4, 5)), ((4, 5), (5,)), ((4, 5), (2, 5, 3)), ((), (5, 3))], ids=str
)
@pytest.mark.usefixtures("unchecked")
def test_shapes_that_do_not_match_raise(x_shape, w_shape):
    with pytest.raises(ValueError, match=re.escape(f"got {x_shape} and {w_shape}")):
        mxjax.dot(jnp.ones(x_shape), jnp.ones(w_shape), policy="wgrad")


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "name"), [("int32", "float32", "x"), ("float32", "int8", "w")]
)
def test_integers_raise(x_dtype, w_dtype, name):
    with pytest.raises(TypeError, match=rf"floating-point operands, but .hs \({name}\) is int"):
        mxjax.dot(jnp.ones((4, 5), x_dtype), jnp.ones((5, 3), w_dtype), policy="wgrad")


@pytest.mark.parametrize("block_shape", [0, -32, (0, 32), (32, -1)], ids=str)
def test_a_block_shape_that_is_not_positive_raises(block_shape):
    x, w, _ = inputs()
    with pytest.raises(ValueError, match="block_shape"):
        mxjax.dot(x, w, policy=everywhere(Operand(block_shape=block_shape)))


@pytest.mark.parametrize("name", ["fp32", "wgrad"])
def test_a_second_derivative_raises(name):
    x, w, _ = inputs()

    def loss(x):
        return jnp.sum(mxjax.dot(x, w, policy=name) ** 2)

    with pytest.raises(NotImplementedError, match=r"mxjax\.dot has no second derivative"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x)


def test_a_hessian_raises():
    with pytest.raises((TypeError, NotImplementedError), match=r"forward-mode|second derivative"):
        jax.hessian(lambda x: jnp.sum(mxjax.dot(x, jnp.ones((3, 2)), policy="wgrad") ** 2))(jnp.ones((2, 3)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_poisons_only_what_it_enters(value, implementation):
    x, w, dy = inputs()
    run = functools.partial(products, policy=NEAREST, implementation=implementation)
    clean = [np.array(product) for product in run(x, w, dy)]
    # Fprop sums over row 3 of x and Wgrad over its column 5; Dgrad does not see x.
    clean[0][3, :] = np.nan
    clean[2][5, :] = np.nan
    assert_same(run(x.at[3, 5].set(value), w, dy), clean)


# (lhs shape, rhs shape, dimension numbers) as jax.lax.dot_general takes them.
DIMENSION_NUMBERS = {
    "matrices": ((4, 5), (5, 6), (((1,), (0,)), ((), ()))),
    "transposed": ((5, 4), (6, 5), (((0,), (1,)), ((), ()))),
    "batch first": ((2, 4, 5), (2, 5, 6), (((2,), (1,)), ((0,), (0,)))),
    "batch in odd places": ((4, 2, 5, 3), (3, 6, 5, 2), (((2,), (2,)), ((1, 3), (3, 0)))),
    "batch in another order": ((4, 2, 5, 3), (3, 6, 5, 2), (((2,), (2,)), ((3, 1), (0, 3)))),
    "several contracting": ((4, 3, 5), (5, 6, 3), (((1, 2), (2, 0)), ((), ()))),
    "several contracting, in another order": ((4, 3, 5), (5, 6, 3), (((2, 1), (0, 2)), ((), ()))),
    "several free": ((4, 5, 2), (3, 5, 6), (((1,), (1,)), ((), ()))),
    "no free axes": ((5,), (5,), (((0,), (0,)), ((), ()))),
    "no free axes, batched": ((5, 2), (2, 5), (((0,), (1,)), ((1,), (0,)))),
    "no free axis on the left": ((5,), (5, 6), (((0,), (0,)), ((), ()))),
    "outer product": ((4,), (6,), (((), ()), ((), ()))),
    "scalars": ((), (), (((), ()), ((), ()))),
}


@pytest.mark.parametrize("name", DIMENSION_NUMBERS)
def test_dot_general_is_that_of_lax(name):
    lhs_shape, rhs_shape, dims = DIMENSION_NUMBERS[name]
    lhs, rhs = draw(*lhs_shape, seed=7), draw(*rhs_shape, seed=8)

    @functools.partial(jax.jit, static_argnums=0)
    def run(dot_general, lhs, rhs):
        y, vjp = jax.vjp(lambda lhs, rhs: dot_general(lhs, rhs, dims), lhs, rhs)
        return y, *vjp(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

    actual = run(functools.partial(mxjax.dot_general, policy="fp32"), lhs, rhs)
    expected = run(functools.partial(lax.dot_general, precision=lax.Precision.HIGHEST), lhs, rhs)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6 * np.max(np.abs(e)), strict=True)


def test_dot_general_contracts_several_axes_as_one():
    lhs, rhs = draw(4, 3, 20, seed=7), draw(20, 6, 3, seed=8)
    actual = mxjax.dot_general(lhs, rhs, (((1, 2), (2, 0)), ((), ())), policy=NEAREST)
    flat = mxjax.dot(lhs.reshape(4, 60), rhs.transpose(2, 0, 1).reshape(60, 6), policy=NEAREST)
    np.testing.assert_array_equal(actual, flat)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dot_general_quantizes_each_matrix_of_a_batch(implementation):
    # Attention scores: q [batch, query, head, channel] and k [batch, key, head, channel].
    q, k, dy = draw(2, 37, 3, 40, seed=7), draw(2, 34, 3, 40, seed=8), draw(2, 3, 37, 34, seed=9)
    dims = (((3,), (3,)), ((0, 2), (0, 2)))
    policy = mxjax.get_policy("wgrad")

    @jax.jit
    def run(q, k, dy):
        y, vjp = jax.vjp(
            lambda q, k: mxjax.dot_general(q, k, dims, policy=policy, implementation=implementation), q, k
        )
        return y, *vjp(dy)

    def values(t, axis):
        return float64(operand_values(t, axis, Operand()))

    def product(equation, lhs, rhs):
        return np.einsum(equation, lhs, rhs), np.einsum(equation, np.abs(lhs), np.abs(rhs))

    expected = (
        product("bqhc,bkhc->bhqk", values(q, 3), values(k, 3)),
        product("bhqk,bkhc->bqhc", values(dy, 3), values(k, 1)),
        product("bqhc,bhqk->bkhc", values(q, 1), values(dy, 2)),
    )
    check_products(run(q, k, dy), expected)


@pytest.mark.parametrize(
    ("lhs_shape", "rhs_shape", "dims"),
    [
        ((4, 5), (4, 5), (((1,), (0,)), ((), ()))),
        ((2, 4, 5), (3, 5, 6), (((2,), (1,)), ((0,), (0,)))),
        ((2, 4, 5), (2, 5, 6), (((2,), (1, 2)), ((0,), (0,)))),
        # Equal products of unequal sizes.
        ((2, 3, 4), (3, 2, 4), (((2,), (2,)), ((0, 1), (0, 1)))),
        ((7, 2, 3), (3, 2, 4), (((1, 2), (0, 1)), ((), ()))),
    ],
    ids=["contracting", "batch", "numbers of axes", "batch axes swapped", "contracting axes swapped"],
)
def test_dot_general_of_shapes_that_do_not_match_raises(lhs_shape, rhs_shape, dims):
    with pytest.raises(ValueError, match="do not match along"):
        mxjax.dot_general(jnp.ones(lhs_shape), jnp.ones(rhs_shape), dims, policy="fp32")


def test_dot_general_passes_precision_to_the_products():
    dims = (((1,), (0,)), ((), ()))

    def run(x, precision):
        return mxjax.dot_general(x, x, dims, precision, policy="fp32")

    def dots(precision):
        text = jax.jit(run, static_argnums=1).lower(jnp.ones((4, 4)), precision).as_text()
        return [line for line in text.splitlines() if "stablehlo.dot_general" in line]

    assert all("precision = [DEFAULT, DEFAULT]" in line for line in dots(lax.Precision.DEFAULT))
    # float32 operands are there to be exact, unless told otherwise.
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots(None))


def nnx_products(layer: nnx.Module, kernel: nnx.Param, x, w, dy):
    """Returns y, dx and dw of an NNX layer with the given weight."""
    kernel.set_value(w)
    gradient, dx = nnx.grad(lambda layer, x: jnp.vdot(layer(x), dy), argnums=(0, 1))(layer, x)
    (dw,) = jax.tree.leaves(gradient)
    return layer(x), dx, dw


def test_make_dot_general_in_an_nnx_linear():
    x, w, dy = inputs()
    key = jax.random.key(2)
    dot_general = mxjax.make_dot_general(ASSORTED, key=key)
    layer = nnx.Linear(48, 56, use_bias=False, dot_general=dot_general, rngs=nnx.Rngs(0))
    assert_same(nnx_products(layer, layer.kernel, x, w, dy), products(x, w, dy, key, policy=ASSORTED))


class KeyedLinear(nnx.Module):
    """An NNX layer that draws its keys from its own "mxjax" stream, as transformations need."""

    def __init__(self, policy: Policy, rngs: nnx.Rngs):
        self.policy = policy
        self.linear = nnx.Linear(48, 56, use_bias=False, rngs=rngs)
        self.rngs = rngs

    def __call__(self, x):
        self.linear.dot_general = mxjax.make_dot_general(self.policy, key=lambda: self.rngs.mxjax())
        return self.linear(x)


def test_make_dot_general_draws_keys_in_an_nnx_module():
    x, w, dy = inputs()
    layer = KeyedLinear(ASSORTED, nnx.Rngs(params=0, mxjax=1))
    _, dx, dw = nnx_products(layer, layer.linear.kernel, x, w, dy)
    first_key = nnx.Rngs(mxjax=1).mxjax()
    _, *expected = products(x, w, dy, first_key, policy=ASSORTED)
    assert_same((dx, dw), expected)


class KeyedDense(linen.Module):
    """A Linen layer that draws its keys from the "mxjax" stream, and tells which."""

    policy: Policy
    tell: Callable[[jax.Array], None]

    @linen.compact
    def __call__(self, x):
        def draw_key():
            key = self.make_rng("mxjax")
            self.tell(key)
            return key

        dot_general = mxjax.make_dot_general(self.policy, key=draw_key)
        return linen.Dense(56, use_bias=False, dot_general=dot_general)(x)


def test_make_dot_general_in_a_linen_dense():
    x, w, dy = inputs()
    keys = []

    def forward(x, w):
        variables = {"params": {"Dense_0": {"kernel": w}}}
        return KeyedDense(ASSORTED, keys.append).apply(variables, x, rngs={"mxjax": jax.random.key(2)})

    y, vjp = jax.vjp(forward, x, w)
    assert len(keys) == 1
    assert_same((y, *vjp(dy)), products(x, w, dy, keys[0], policy=ASSORTED))


def test_make_dot_general_asks_a_callable_for_a_key_at_every_call():
    x, w, _ = inputs()
    keys = jax.random.split(jax.random.key(0), 2)
    dot_general = mxjax.make_dot_general(RANDOM_FPROP, key=iter(keys).__next__)
    for key in keys:
        y = dot_general(x, w, (((1,), (0,)), ((), ())))
        np.testing.assert_array_equal(y, mxjax.dot(x, w, policy=RANDOM_FPROP, key=key))


def test_make_dot_general_uses_a_given_key_at_every_call():
    x, w, _ = inputs()
    key = jax.random.key(3)
    dot_general = mxjax.make_dot_general(RANDOM_FPROP, key=key, implementation="reference")
    for _ in range(2):
        y = dot_general(x, w, (((1,), (0,)), ((), ())))
        expected = mxjax.dot(x, w, policy=RANDOM_FPROP, key=key, implementation="reference")
        np.testing.assert_array_equal(y, expected)


def test_make_dot_general_passes_the_implementation_on():
    x, w, _ = inputs()
    dot_general = mxjax.make_dot_general("wgrad", implementation="triton")
    with pytest.raises(NotImplementedError, match="'triton' needs a GPU"):
        dot_general(x, w, (((1,), (0,)), ((), ())))


def test_make_dot_general_refuses_an_out_sharding():
    x, w, _ = inputs()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with pytest.raises(NotImplementedError, match="out_sharding"):
        mxjax.make_dot_general("wgrad")(x, w, (((1,), (0,)), ((), ())), out_sharding=sharding)


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


# An identity matrix in the other operand shows what was multiplied.
def test_dequantized_operands_are_those_of_the_same_forward_pass():
    bf16 = Operand("bf16")  # holds values of MXFP4 exactly
    policy = Policy(gemm(STOCHASTIC), Gemm(bf16, DEQUANTIZED), Gemm(DEQUANTIZED, bf16))
    t, eye = draw(32, 32, seed=4), jnp.eye(32)
    key = jax.random.key(0)
    w_multiplied, w_seen, _ = products(eye, t, eye, key, policy=policy)
    np.testing.assert_array_equal(w_seen.T, w_multiplied)
    x_multiplied, _, x_seen = products(t, eye, eye, key, policy=policy)
    np.testing.assert_array_equal(x_seen.T, x_multiplied)


def lowered(policy: str, dtype, key=None) -> str:
    x, w, dy = inputs(dtype=dtype)
    return jitted_products.lower(x, w, dy, key, policy=policy, implementation="xla").as_text()


@pytest.mark.parametrize("name", ["wgrad_hadamard", "primus_turbo", "fp8"])
def test_xla_multiplies_in_bfloat16_and_accumulates_in_float32(name):
    text = lowered(name, jnp.bfloat16)
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) == 3
    for line in dots:
        assert re.search(r"\(tensor<\w+xbf16>, tensor<\w+xbf16>\) -> tensor<\w+xf32>", line), line
    assert "f64" not in text


@pytest.mark.parametrize("name", ["wgrad_hadamard", "primus_turbo", "fp8"])
def test_no_random_bits_are_generated_without_need(name):
    assert not re.search("threefry|rng|random|philox|mulhi", lowered(name, jnp.bfloat16))


def test_random_bits_show_in_the_lowered_text():
    # The search of the test above finds what it looks for.
    assert re.search("threefry|rng|random|philox|mulhi", lowered("wgrad_sr", jnp.float32, jax.random.key(0)))


@pytest.mark.parametrize("policy", [None, 3])
def test_what_is_no_policy_is_refused(policy):
    with types_unchecked(), pytest.raises(TypeError, match=r"policy must be a mxjax\.Policy"):
        mxjax.dot(jnp.ones((2, 3)), jnp.ones((3, 2)), policy=policy)


@pytest.mark.parametrize(("policy", "message"), [("foo", "unknown policy"), ("full_sr", "needs key=")])
def test_make_dot_general_checks_its_policy_at_once(policy, message):
    with pytest.raises(ValueError, match=message):
        mxjax.make_dot_general(policy)
