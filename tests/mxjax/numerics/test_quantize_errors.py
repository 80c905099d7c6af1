"""Arguments that `quantize` and its relatives refuse; what `Operand` refuses is in policy/test_policy.py."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import oracles

import mxjax


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": None}, "unknown format None; the formats are"),
        ({"format": "fp8"}, "did you mean 'fp8_e4m3' or 'fp8_e5m2'"),
        ({"rounding": "stochastic"}, r"needs key=; pass jax.random.key\(0\)"),
        ({"axis": 0, "block_shape": (32, 32)}, "axis to be one of the last two, got -3 of 3"),
        ({"axis": 3}, "axis"),
        ({"axis": -4}, "axis"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with oracles.types_unchecked(), pytest.raises(ValueError, match=message):
        mxjax.quantize(np.ones((3, 64, 32), np.float32), **arguments)


X = np.ones((3, 64), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mxjax.quantize([1.0]), TypeError, r"x to be an array, not list; pass jnp\.asarray\(x\)"),
        (lambda: mxjax.quantize(mxjax.quantize(X)), TypeError, r"pass mxjax\.dequantize\(x\)"),
        (lambda: mxjax.quantize(jnp.float32(1)), ValueError, "quantize needs an array with an axis, got"),
        *(
            (
                lambda dtype=dtype: mxjax.quantize(X.astype(dtype)),
                TypeError,
                r"needs a floating-point tensor, got \w+; cast it",
            )
            for dtype in (np.int32, np.uint8, np.bool_)
        ),
        (lambda: mxjax.quantize(X[0], block_shape=(32, 32)), ValueError, "one of the last two, got -1 of 1"),
        (lambda: mxjax.quantize(X, axis=1.0), TypeError, "quantize needs axis to be an integer"),
        (lambda: mxjax.rotate(X, axis=None), TypeError, "rotate needs axis to be an integer"),
        (lambda: mxjax.quantize(X, key=3), TypeError, "must be a JAX key, got 3"),
        (lambda: mxjax.dequantize(mxjax.quantize(X), jnp.int8), TypeError, "floating-point dtype, got int8"),
        (lambda: mxjax.dequantize(X), TypeError, "needs the MXArray that quantize returns"),
        (
            lambda: mxjax.dequantize(mxjax.pack(mxjax.quantize(X))),
            TypeError,
            "needs the MXArray that quantize returns",
        ),
        (lambda: mxjax.pack([1.0]), ValueError, "pack needs float4_e2m1fn elements, got list"),
        (lambda: mxjax.pack(X), ValueError, "elements, got float32; quantize to mxfp4"),
        (lambda: mxjax.pack(mxjax.quantize(X, "mxfp8_e4m3")), ValueError, "elements, got float8_e4m3fn"),
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
