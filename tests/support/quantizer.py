"""The quantizer kernel beside the definitions in `mxjax`, for tests/kernels."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mxjax
from mxjax.kernels.quantize.quantizer import Random, quantize_operands

FP8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
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


def draw_side_random(key, side):
    """Returns the JAX key of a side, and what it draws from it: key words, and signs if it has any."""
    signs = None
    if side.rotation and side.rotation.signs != "none":
        signs = mxjax.random_signs(jax.random.fold_in(key, 1), side.rotation.size)
    return key, Random(jax.random.bits(key, (2,), jnp.uint32), signs)


def define(x, side, axis, key, signs):
    """Returns what the definitions make of x: elements [*b, other, length], bytes [*b, other, blocks]."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, side.length(x.shape[axis]) - x.shape[axis])
    x = jnp.asarray(np.pad(x, widths))  # XLA flushes subnormals of bfloat16 where it fills up
    if side.rotation:
        x = mxjax.rotate(x, side.rotation.size, axis=axis, signs=signs)
    o = side.operand
    q = mxjax.quantize(
        x,
        axis=axis,
        scale_rule=o.scale_rule,
        rounding=o.rounding,
        block_shape=o.block_shape,
        prescale=o.prescale,
        key=key if o.rounding == "stochastic" else None,
    )
    elements, scales = np.asarray(q.elements), np.asarray(q.scales).view(np.uint8)
    if axis == -2:
        elements, scales = elements.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    if o.block_shape == (32, 32):
        scales = np.repeat(scales, 32, axis=-2)[..., : elements.shape[-2], :]
    return elements, scales


def check(got, side, elements, scales, reference=0):
    """Checks what the kernel wrote of one side, in any form, against elements and scale bytes."""
    codes = elements.view(np.uint8)
    written = np.asarray(got.elements)
    if side.form == "packed":
        np.testing.assert_array_equal(got.scales, scales)
        np.testing.assert_array_equal(written, codes[..., ::2] | codes[..., 1::2] << 4)
        return
    spread = np.repeat(scales, 32, axis=-1)
    values = elements.astype(np.float64)
    shift = spread.astype(np.int64) - (127 if side.form == "bf16" else reference)
    if side.form == "bf16":
        np.testing.assert_array_equal(got.scales, scales)
        kept = np.ones_like(spread, bool)
        dtype = ml_dtypes.bfloat16
    else:
        dtype = FP8[side.form]
        lost = np.asarray(got.scales)
        np.testing.assert_array_equal(lost[scales == 255], 0)
        some = np.any((codes & 7).reshape(*scales.shape, 32) != 0, axis=-1) & (scales != 255)
        np.testing.assert_array_equal(lost[some], ~exact_in(dtype, shift[..., ::32][some]))
        kept = np.repeat(lost == 0, 32, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(spread == 255, np.nan, np.ldexp(values, shift)).astype(dtype).astype(np.float32)
    actual = written.astype(np.float32)
    np.testing.assert_array_equal(actual[kept], expected[kept])
    signed = kept & (spread != 255)
    np.testing.assert_array_equal(np.signbit(actual[signed]), np.signbit(expected[signed]))


def exact_in(dtype, shifts):
    """Returns whether every E2M1 value times 2**shift is one of dtype."""
    values = np.ldexp(np.array([0.5, 1, 1.5, 2, 3, 4, 6]), np.asarray(shifts)[..., None])
    with np.errstate(over="ignore"):
        return np.all(values.astype(dtype).astype(np.float64) == values, axis=-1)


def assert_as_defined(x, rows=None, columns=None, seed=0):
    """Quantizes x both ways and checks each side that is wanted."""
    sides, keys, randoms, expected = (rows, columns), [], [], []
    for i, side in enumerate(sides):
        key, random = draw_side_random(jax.random.key(seed + i), side) if side else (None, Random())
        made = define(x, side, i - 1 if i == 0 else -2, key, random.signs) if side else None
        reference = 0
        if side and side.form in FP8:
            reference = int(np.median(made[1]))
            random = random._replace(reference=jnp.int32(reference))
        keys.append(reference)
        randoms.append(random)
        expected.append(made)
    results = quantize_operands(x, *sides, row_random=randoms[0], column_random=randoms[1])
    for side, reference, made, got in zip(sides, keys, expected, results, strict=True):
        assert (got is None) == (side is None)
        if side:
            check(got, side, *made, reference)
