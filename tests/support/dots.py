"""Policies, inputs and expected products that the tests of `dot` share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax import Gemm, Operand, Policy, Rotation

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

# Together they hold each format, block shape, rule and rotation; random bits are in test_dot_random.py.
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


def with_gradients(function, *operands, dy=None):
    """Returns function(*operands) and the operands' gradients for the cotangent dy, by default cosines."""
    y, vjp = jax.vjp(function, *operands)
    dy = jnp.cos(jnp.arange(y.size)).reshape(y.shape) if dy is None else dy
    return y, *vjp(jnp.asarray(dy, y.dtype))


def products(x, w, dy, key=None, *, product=mxjax.dot, **options):
    """Returns y, dx and dw; each of the GEMMs is jitted inside, so that policies share what they compile."""
    return with_gradients(functools.partial(product, key=key, **options), x, w, dy=dy)


jitted_products = jax.jit(
    products, static_argnames=("policy", "implementation", "product", "preferred_element_type")
)


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


def assert_near(actual, expected, atol, rtol=0.0):
    """Checks arrays within rtol, or within atol times the largest magnitude of what is expected."""
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol * np.max(np.abs(e)))


def assert_close(actual, expected, bound):
    """Checks that arrays differ, in their norms, by no more than `bound` times what is expected."""
    for a, e in zip(actual, expected, strict=True):
        assert np.linalg.norm(float64(a) - float64(e)) <= bound * np.linalg.norm(float64(e))


def lowered(policy: str, dtype, key=None) -> str:
    """Returns the program of y, dx and dw by `xla`, as it is before XLA compiles it."""
    x, w, dy = inputs(dtype=dtype)
    return jitted_products.lower(x, w, dy, key, policy=policy, implementation="xla").as_text()
