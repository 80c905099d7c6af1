"""MXFP4 against AITER's reference of its quantizer for gfx950 (tests/golden/make_aiter.py)."""

import pathlib

import numpy as np
import pytest

import mxjax

FOLDER = pathlib.Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("rule", ["floor", "even", "rceil", "ceil"])
def test_bytes_are_those_of_aiter(rule):
    with np.load(FOLDER / "aiter_mx.npz") as golden, np.load(FOLDER / "torchao_mx.npz") as inputs:
        x = np.concatenate([inputs[f"input/f32/{s}"] for s in golden["sections"]]).view(np.float32)
        scale, codes = golden[f"{rule}/scale"], golden[f"{rule}/codes"]
    q = mxjax.quantize(x, scale_rule=rule)
    ours, amax = np.asarray(q.scales).view(np.uint8), np.abs(x).reshape(len(x), -1, 32).max(axis=-1)
    # At the ends of float32's range AITER rounds amax up to infinity, and a subnormal scale up to 2**-126.
    same = {
        "floor": amax >= 0,
        "even": amax < 1.75 * 2.0**127,
        "rceil": (amax == 0) | (amax > 3 * 2.0**-126),
        "ceil": (amax == 0) | (amax > 2 * 2.0**-126),
    }[rule]
    assert same.mean() > 0.85
    np.testing.assert_array_equal(ours[same], scale[same])
    assert np.all(ours[~same] <= scale[~same])
    assert np.all(ours[~same] + 1 >= scale[~same])
    packed = np.asarray(mxjax.pack(q)).reshape(*ours.shape, 16)
    np.testing.assert_array_equal(packed[same], codes.reshape(packed.shape)[same])
