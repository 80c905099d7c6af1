"""The tables of formats, against gfloat and ml_dtypes; every E2M1 and every E8M0 code."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from support import oracles
from support.tensors import each_element

import mxjax

E2M1_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@each_element
def test_dtype_holds_every_value_of_the_element(element):
    values = oracles.grid(oracles.ELEMENT_INFO[element.name]).astype(np.float32)
    values = np.concatenate([values, -values])
    held = values.astype(jnp.dtype(element.dtype)).astype(np.float32)
    np.testing.assert_array_equal(oracles.bits(held), oracles.bits(values))


def test_each_e2m1_code_has_its_value():
    codes = np.arange(16, dtype=np.uint8)
    ours = mxjax.unpack(jnp.asarray(codes[::2] | codes[1::2] << 4)).astype(jnp.float32)
    theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(oracles.bits(theirs), oracles.bits(E2M1_VALUES))
    np.testing.assert_array_equal(oracles.bits(ours), oracles.bits(E2M1_VALUES))


def test_each_e8m0_byte_multiplies_by_its_power_of_two():
    byte = np.arange(256, dtype=np.uint8)[:, None]
    ones = jnp.ones((256, 1), jnp.float4_e2m1fn)
    scales = lax.bitcast_convert_type(jnp.asarray(byte), jnp.float8_e8m0fnu)
    values = np.asarray(mxjax.dequantize(mxjax.MXArray(ones, scales, None, "mxfp4", -1, (1, 32))))
    powers = np.ldexp(1.0, byte[:255].astype(int) - 127).astype(np.float32)
    # By bits: 2**-127 is a float32 subnormal.
    np.testing.assert_array_equal(oracles.bits(values[:255]), oracles.bits(powers))
    assert np.isnan(values[255])
