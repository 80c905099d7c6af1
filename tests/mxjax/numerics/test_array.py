"""Quantized arrays packed to bytes, as pytrees under transformations, and in print."""

import jax
import numpy as np
import pytest
from support import oracles
from support.tensors import assert_parts, elements, gaussian, scale_bytes, wide_range

import mxjax

# --- packing


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_unpack_undoes_pack_along_any_axis(axis):
    q = mxjax.quantize(gaussian(6, 4, 8))
    packed = mxjax.pack(q.elements, axis=axis)
    assert packed.shape[axis] == q.elements.shape[axis] // 2
    unpacked = np.asarray(mxjax.unpack(packed, axis=axis), np.float32)
    np.testing.assert_array_equal(oracles.bits(unpacked), oracles.bits(elements(q)))


def test_pack_fills_an_odd_axis_up_with_a_zero():
    q = mxjax.quantize(gaussian(3, 33))
    unpacked = np.asarray(mxjax.unpack(mxjax.pack(q)), np.float32)
    np.testing.assert_array_equal(unpacked, np.pad(elements(q), [(0, 0), (0, 1)]))
    cut = np.asarray(mxjax.unpack(mxjax.pack(q), size=33), np.float32)
    np.testing.assert_array_equal(cut, elements(q))


def test_pack_takes_the_axis_of_a_quantized_tensor():
    q = mxjax.quantize(gaussian(64, 6), axis=0)
    np.testing.assert_array_equal(mxjax.pack(q), mxjax.pack(q.elements, axis=0))


# --- MXArray is a pytree


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_vmap_quantizes_each_and_dequantizes_the_stack(axis):
    x = wide_range(3, 64, 40)
    q = jax.vmap(lambda v: mxjax.quantize(v, axis=axis))(x)
    each = [mxjax.quantize(v, axis=axis) for v in x]
    assert q.axis == each[0].axis
    assert_parts(q, *(np.stack([f(e) for e in each]) for f in (scale_bytes, elements)))
    np.testing.assert_array_equal(mxjax.dequantize(q), [mxjax.dequantize(e) for e in each])


def test_axis_counts_from_the_end():
    assert [mxjax.quantize(gaussian(3, 64), axis=axis).axis for axis in (0, 1, -1, -2)] == [-2, -1, -1, -2]


def test_a_quantized_array_prints_in_one_line():
    q = mxjax.quantize(np.ones((4, 40), np.float32))
    assert q.shape == (4, 40)
    assert repr(q) == "MXArray(mxfp4, shape (4, 40), blocks of 1x32 along axis -1)"
