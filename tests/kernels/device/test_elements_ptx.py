"""The inline assembly for Hopper, run by `ptx`, against the definitions."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import ptx

from mxjax.kernels.device import elements_ptx, stochastic_ptx
from mxjax.kernels.matmul import carry
from mxjax.numerics.array import float4_codes
from mxjax.numerics.formats import E2M1
from mxjax.numerics.philox import philox_4x32
from mxjax.numerics.rounding import round_nearest, stochastic_round
from mxjax.numerics.scales import divide_by_scale

N = 2**14


def draw_elements(rng, byte, bits):
    """Returns [8, N] floats of `bits` bits below 8 times the scale: E2M1's values, their middles, others."""
    steps = np.where(rng.random((8, N)) < 0.5, rng.integers(0, 32, (8, N)) / 4, 8 * rng.random((8, N)))
    steps *= np.exp2(rng.choice([0, 0, 0, -3, -30], (8, N)))
    x = np.ldexp(rng.choice([-1, 1], (8, N)) * steps, np.minimum(byte, 252).astype(int) - 127)
    x = np.clip(x, -3e38, 3e38).astype(np.float32)
    return x if bits == 32 else x.astype(ml_dtypes.bfloat16).astype(np.float32)


def define(x, byte):
    """Returns the words of groups [8, N] of elements by their scale bytes [N]; any where those are 255."""
    scaled = divide_by_scale(jnp.asarray(x), jnp.asarray(byte, jnp.int32)[None])
    codes = np.asarray(float4_codes(round_nearest(scaled, E2M1))).astype(np.uint32)
    return np.bitwise_or.reduce([code << np.uint32(4 * i) for i, code in enumerate(codes)])


def draw_bytes(rng):
    """Scale bytes up to the largest that there is, 253, and NaN."""
    return rng.choice([0, 1, 2, 3, 100, 127, 252, 253, 255], N).astype(np.uint32)


def float_bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("seed", range(4))
def test_encode_pairs(seed):
    """Each group has its own scale, whatever that of the other."""
    rng = np.random.default_rng(seed)
    scales = [draw_bytes(rng) for _ in range(2)]
    groups = [draw_elements(rng, byte, 16) for byte in scales]
    low, high = (float_bits(x) >> 16 for x in groups)
    inputs = {f"r{i + 2}": low[i] | high[i] << 16 for i in range(8)} | {"r10": scales[0], "r11": scales[1]}
    got = ptx.run(elements_ptx._ENCODE_PAIRS.value, **inputs)
    for i in range(2):
        finite = scales[i] != 255
        np.testing.assert_array_equal(got[f"${i}"][finite], define(groups[i], scales[i])[finite])


@pytest.mark.parametrize("seed", range(4))
def test_encode_floats(seed):
    rng = np.random.default_rng(seed)
    byte = draw_bytes(rng)
    x = draw_elements(rng, byte, 32)
    inverse = np.ldexp(1.0, 127 - 14 - np.minimum(byte, 253).astype(int))
    inputs = {f"r{i + 1}": bits for i, bits in enumerate(float_bits(x))}
    got = ptx.run(elements_ptx._ENCODE_FLOATS.value, **inputs, r9=byte, r10=float_bits(inverse))["$0"]
    np.testing.assert_array_equal(got[byte != 255], define(x, byte)[byte != 255])


def neighbouring_fractions(rng, words):
    """Returns [8, N] floats whose fraction of a step is a random 16-bit number plus a half, or almost."""
    halves = np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)]).astype(np.float64)
    near = rng.choice([-(2.0**-6), 0, 2.0**-6, 1, -1], halves.shape)
    step, least, most = rng.choice([(0.5, 0, 4), (1.0, 2, 4), (2.0, 2, 3)], halves.shape).transpose(2, 0, 1)
    below = np.floor(least + (most - least) * rng.random(halves.shape))
    x = step * (below + (halves + 0.5 + near) / 2**16)
    x = np.where(rng.random(halves.shape) < 0.1, rng.choice([0, 1e-45, 2.0**-18, 6, 5.9999995, 12]), x)
    return (x * rng.choice([-1, 1], halves.shape)).astype(np.float32)


@pytest.mark.parametrize(("factor", "text"), [
    *((factor, stochastic_ptx._ENCODE_CLIPPED) for factor in (1.0, 2.0**-20, 0.75)),
    (0.75, stochastic_ptx._ENCODE),
])  # fmt: skip
def test_encode_stochastic(factor, text):
    rng = np.random.default_rng(7)
    counter, row, *key = jnp.asarray(rng.integers(0, 2**32, (4, N), np.uint32))
    drawn = philox_4x32((counter, row, 0 * row, 0 * row), (key[0], key[1]))
    words = [np.asarray(word) for word in drawn]
    x = (neighbouring_fractions(rng, words) / np.float32(factor)).astype(np.float32)
    if text is stochastic_ptx._ENCODE:
        x = np.clip(x, -8, 8)
    registers = {f"r{i + 1}": bits for i, bits in enumerate(float_bits(x))}
    registers |= {"r9": float_bits(factor), "r10": counter, "r11": row, "r12": key[0], "r13": key[1]}
    got = ptx.run(text.value, **registers)["$0"]
    random = np.stack([half for word in words for half in (word & 0xFFFF, word >> 16)]).astype(np.uint16)
    rounded = stochastic_round(jnp.asarray(x * np.float32(factor)), E2M1, jnp.asarray(random))
    codes = np.asarray(float4_codes(rounded)).astype(np.uint32)
    wanted = np.bitwise_or.reduce([code << np.uint32(4 * i) for i, code in enumerate(codes)])
    np.testing.assert_array_equal(got, wanted)


def any_bits(rng, shape, dtype):
    """Returns floats of random bits, many of them subnormal, infinite or NaN."""
    x = rng.integers(0, 2**32, shape, np.uint32)
    x = np.where(rng.random(shape) < 0.1, x & 0x807FFFFF, x)
    x = np.where(rng.random(shape) < 0.02, x | 0x7F800000, x)
    return x & 0xFFFF0000 if dtype == "bfloat16" else x


def largest(x):
    """Returns the bits of the largest magnitudes along the first axis; NaN is above infinity."""
    return np.max(x & 0x7FFFFFFF, axis=0)


@pytest.mark.parametrize("elements", [8, 32])
def test_largest_pairs(elements):
    groups = any_bits(np.random.default_rng(5), (2, elements, N), "bfloat16")
    inputs = {f"r{i + 2}": groups[0, i] >> 16 | groups[1, i] for i in range(elements)}
    for exponent_only in (False, True):
        got = ptx.run(elements_ptx._largest_pairs(elements, exponent_only), **inputs)
        for i in range(2):
            expected = largest(groups[i])
            if exponent_only:
                expected &= 0x7F800000
            nan = expected > 0x7F800000
            np.testing.assert_array_equal(got[f"${i}"][~nan], expected[~nan])
            assert np.all(got[f"${i}"][nan] > 0x7F800000)


@pytest.mark.parametrize("elements", [8, 32])
def test_largest_exponent(elements):
    x = any_bits(np.random.default_rng(6), (elements, N), "float32")
    inputs = {f"r{i + 1}": x[i] for i in range(elements)}
    got = ptx.run(elements_ptx._largest_exponent(elements), **inputs)["$0"]
    np.testing.assert_array_equal(got & 0x7F800000, largest(x) & 0x7F800000)


@pytest.mark.parametrize("carrier", ["e4m3", "e5m2"])
def test_decode_by_bytes(carrier):
    """The bytes of codes 0 to 7 are chosen by the nibbles of a word, and their signs set."""
    words = np.random.default_rng(7).integers(0, 2**32, N, np.uint32)
    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[carrier]
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * 4
    low, high = values.astype(dtype).view("<u4")
    got = ptx.run(carry._DECODE.value, r2=words, r3=low, r4=high)
    carried = np.stack([got["$0"], got["$1"]], -1).view(np.uint8)
    code = words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15
    expected = np.where(code & 8, -values[code & 7], values[code & 7]).astype(dtype)
    np.testing.assert_array_equal(carried, expected.view(np.uint8))
