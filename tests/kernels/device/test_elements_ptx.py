"""The inline assembly for Hopper, run by `ptx`, against the definitions."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import ptx

from mxjax.kernels.device import stochastic_ptx
from mxjax.numerics.array import float4_codes
from mxjax.numerics.formats import E2M1
from mxjax.numerics.philox import philox_4x32
from mxjax.numerics.rounding import stochastic_round

N = 2**14


def float_bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


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
