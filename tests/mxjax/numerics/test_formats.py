"""The tables of formats, against gfloat and ml_dtypes; every E2M1 and every E8M0 code."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support import oracles
from support.tensors import each_element

import mxjax
from mxjax.numerics import formats

E2M1_VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


@each_element
def test_element_has_the_constants_of_its_specification(element):
    info = oracles.ELEMENT_INFO[element.name]
    assert (element.mantissa_bits, element.bits) == (info.precision - 1, info.k)
    assert (element.emax, element.emin) == (info.emax, 1 - info.bias)
    assert element.max == info.max


@each_element
def test_dtype_holds_every_value_of_the_element(element):
    values = oracles.grid(oracles.ELEMENT_INFO[element.name]).astype(np.float32)
    values = np.concatenate([values, -values])
    held = values.astype(jnp.dtype(element.dtype)).astype(np.float32)
    np.testing.assert_array_equal(oracles.bits(held), oracles.bits(values))


# What the format's source says: element, block, kind of block scale, whether the tensor has a scale.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mxfp4", ("e2m1", 32, "e8m0", False)),
        ("mxfp4_e3m0", ("e3m0", 32, "e8m0", False)),
        ("mxfp4_e1m2", ("e1m2", 32, "e8m0", False)),
        ("mxfp6_e2m3", ("e2m3", 32, "e8m0", False)),
        ("mxfp6_e3m2", ("e3m2", 32, "e8m0", False)),
        ("mxfp8_e4m3", ("e4m3", 32, "e8m0", False)),
        ("mxfp8_e5m2", ("e5m2", 32, "e8m0", False)),
        ("nvfp4", ("e2m1", 16, "e4m3", True)),
        ("nvfp4_1x128", ("e2m1", 16, "e4m3", True)),
        ("fp4_ue5m3", ("e2m1", 16, "ue5m3", False)),
        ("fp4_e1m2", ("e1m2", 16, "fp32", False)),
        ("fp8_e4m3", ("e4m3", 0, "none", True)),
        ("fp8_e5m2", ("e5m2", 0, "none", True)),
    ],
)
def test_format_is_as_specified(name, expected):
    f = formats.get_format(name)
    assert f.name == name
    assert (f.element.name, f.block, f.scale, f.tensor_scale) == expected
    assert f.dtype == f.element.dtype


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
