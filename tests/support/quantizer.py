"""The quantizer kernel beside the definitions in `mxjax`, for tests/kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mxjax
from mxjax.kernels.quantize.quantizer import quantize_operands
from mxjax.operands.use import OperandUse

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
GRID = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 6.99, 7], np.float32)


def draw_tensor(rng, shape, kind, dtype):
    """Returns random numbers: normal, of all magnitudes, with special values, or E2M1's values and ties."""
    x = rng.standard_normal(shape).astype(np.float32)
    if kind == "wide":
        x *= np.exp2(rng.integers(-12, 8, shape)).astype(np.float32)
        x[..., :32] *= np.float32(2.0 ** rng.integers(-30, 30)) if dtype != "float16" else 1
    elif kind == "special":
        chosen = rng.random(shape)
        for value, below in ((np.nan, 0.01), (-np.inf, 0.02), (0, 0.2), (-0.0, 0.3)):
            x = np.where((chosen < below) & (chosen >= below / 2), np.float32(value), x)
    elif kind == "grid":
        x = rng.choice(np.concatenate([GRID, -GRID]), shape)
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(DTYPES[dtype]))


def with_operand(policy, gemm, side, **changes):
    """Returns the policy with an operand of a GEMM changed."""
    whole = getattr(policy, gemm)
    changed = dataclasses.replace(whole, **{side: dataclasses.replace(getattr(whole, side), **changes)})
    return dataclasses.replace(policy, **{gemm: changed})


def draw(key, use: OperandUse) -> OperandUse:
    """Returns the use with a key, and with signs if its rotation has any."""
    signs = None
    if use.has_signs:
        signs = mxjax.random_signs(jax.random.fold_in(key, 1), use.rotation_size)
    return use._replace(key=key, signs=signs)


@functools.partial(jax.jit, static_argnames=("axis", "size", "operand"))
def quantize_by_definition(x, signs, key, *, axis, size, operand):
    """Returns x rotated, if it has a size, and quantized: in one program, which many cases share."""
    if size is not None:
        x = mxjax.rotate(x, size, axis=axis, signs=signs)
    return mxjax.quantize(
        x,
        axis=axis,
        scale_rule=operand.scale_rule,
        rounding=operand.rounding,
        block_shape=operand.block_shape,
        prescale=operand.prescale,
        key=key if operand.rounding == "stochastic" else None,
    )


def define(x, use: OperandUse):
    """Returns what the definitions make of x: elements [*b, other, length], bytes [*b, other, blocks]."""
    widths = [(0, 0)] * x.ndim
    widths[use.axis] = (0, use.padded(x.shape[use.axis]) - x.shape[use.axis])
    x = jnp.asarray(np.pad(x, widths))  # XLA flushes subnormals of bfloat16 where it pads
    o, size = use.operand, use.rotation.size if use.rotation else None
    q = quantize_by_definition(x, use.signs, use.key, axis=use.axis, size=size, operand=o)
    elements, scales = np.asarray(q.elements), np.asarray(q.scales).view(np.uint8)
    if use.axis == -2:
        elements, scales = elements.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    if o.block_shape == (32, 32):
        scales = np.repeat(scales, 32, axis=-2)[..., : elements.shape[-2], :]
    return elements, scales


def check(got, elements, scales):
    """Checks what the kernel wrote for one use, in either form, against elements and scale bytes."""
    codes = elements.view(np.uint8)
    written = np.asarray(got.elements)
    if got.scales is not None:
        np.testing.assert_array_equal(got.scales, scales)
        np.testing.assert_array_equal(written, codes[..., ::2] | codes[..., 1::2] << 4)
        return
    spread = np.repeat(scales, 32, axis=-1)
    shift = spread.astype(np.int64) - 127
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(spread == 255, np.nan, np.ldexp(elements.astype(np.float64), shift))
        expected = expected.astype(ml_dtypes.bfloat16).astype(np.float32)
    actual = written.astype(np.float32)
    np.testing.assert_array_equal(actual, expected)
    signed = spread != 255
    np.testing.assert_array_equal(np.signbit(actual[signed]), np.signbit(expected[signed]))


def assert_as_defined(x, *uses, form="packed", seed=0):
    """Quantizes x for the uses and checks each."""
    drawn = [draw(jax.random.key(seed + i), use) for i, use in enumerate(uses)]
    for use, got in zip(drawn, quantize_operands(x, drawn, form), strict=True):
        check(got, *define(x, use))
