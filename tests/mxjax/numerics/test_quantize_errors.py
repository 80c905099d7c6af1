"""Arguments that `quantize` refuses, and the texts of its errors."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles

import mxjax


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_integers_are_refused(dtype):
    with pytest.raises(TypeError, match=r"needs a floating-point tensor, got \w+; cast it"):
        mxjax.quantize(np.ones((3, 64), dtype))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "mxfp5"}, "unknown format 'mxfp5'; did you mean 'mxfp4'"),
        ({"format": None}, "unknown format None; the formats are"),
        ({"format": "fp8"}, "did you mean 'fp8_e4m3' or 'fp8_e5m2'"),
        ({"scale_rule": "round"}, "unknown scale_rule 'round'; the rules are floor"),
        ({"rounding": "up"}, "unknown rounding 'up'; use one of nearest, stochastic"),
        ({"format": "mxfp8_e4m3", "scale_rule": "uos"}, "'uos' is defined for E2M1"),
        ({"rounding": "stochastic"}, r"needs key=; pass jax.random.key\(0\)"),
        ({"block_shape": 0}, "a positive size or a tuple of two, got 0"),
        ({"block_shape": -32}, "a positive size or a tuple of two, got -32"),
        ({"block_shape": (0, 32)}, r"a positive size or a tuple of two, got \(0, 32\)"),
        ({"block_shape": (32, 0)}, r"a positive size or a tuple of two, got \(32, 0\)"),
        ({"axis": 0, "block_shape": (32, 32)}, "axis to be one of the last two, got -3 of 3"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with oracles.types_unchecked(), pytest.raises(ValueError, match=message):
        mxjax.quantize(np.ones((3, 64, 32), np.float32), **arguments)


@pytest.mark.parametrize(("function", "axis"), [("quantize", 1.0), ("rotate", None)])
def test_an_axis_is_an_integer(function, axis):
    with oracles.types_unchecked(), pytest.raises(TypeError, match=f"{function} needs axis to be an integer"):
        getattr(mxjax, function)(np.ones((3, 64), np.float32), axis=axis)


@pytest.mark.parametrize("made", [np.asarray, lambda x: mxjax.pack(mxjax.quantize(x))])
def test_dequantize_takes_what_quantize_returns(made):
    with oracles.types_unchecked(), pytest.raises(TypeError, match="needs the MXArray that quantize returns"):
        mxjax.dequantize(made(np.ones(64, np.float32)))


X = np.ones((3, 64), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: mxjax.quantize([1.0, 2.0]),
            TypeError,
            r"x to be an array, not list; pass jnp\.asarray\(x\)",
        ),
        (lambda: mxjax.quantize(mxjax.quantize(X)), TypeError, r"pass mxjax\.dequantize\(x\)"),
        (
            lambda: mxjax.quantize(jnp.float32(1)),
            ValueError,
            "quantize needs an array with an axis, got a scalar",
        ),
        (lambda: mxjax.quantize(X, key=3), TypeError, "must be a JAX key, got 3"),
        (lambda: mxjax.dequantize(mxjax.quantize(X), jnp.int8), TypeError, "floating-point dtype, got int8"),
        (lambda: mxjax.pack([1.0]), ValueError, "pack needs float4_e2m1fn elements, got list"),
        (lambda: mxjax.pack(X), ValueError, "elements, got float32; quantize to mxfp4"),
        (lambda: mxjax.pack(jnp.ones((), "float4_e2m1fn")), ValueError, "pack needs an array with an axis"),
        (lambda: mxjax.unpack(X), TypeError, "the uint8 array that pack returns, got float32"),
        (lambda: mxjax.unpack(mxjax.quantize(X)), TypeError, r"got MXArray; pass mxjax\.pack\(q\)"),
        (
            lambda: mxjax.unpack(jnp.ones(3, jnp.uint8), size=4),
            ValueError,
            "3 bytes along axis 0 for 4 elements",
        ),
        (lambda: mxjax.unpack(jnp.uint8(1)), ValueError, "unpack needs an array with an axis"),
    ],
)
def test_what_is_no_such_array_is_refused(call, error, message):
    with oracles.types_unchecked(), pytest.raises(error, match=message):
        call()


def test_square_blocks_need_two_axes():
    with pytest.raises(ValueError, match="axis to be one of the last two, got -1 of 1"):
        mxjax.quantize(np.ones(64, np.float32), block_shape=(32, 32))


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_is_not_there_is_refused(axis):
    with pytest.raises(ValueError, match="axis"):
        mxjax.quantize(np.ones((3, 64), np.float32), axis=axis)
