"""Quantization against results of torchao (golden/make_torchao.py says where it departs) and AITER."""

import functools
import pathlib

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
from support import oracles
from support.tensors import elements, info, scale_bytes

import mxjax

FOLDER = pathlib.Path(__file__).parents[2] / "golden"
GOLDEN = np.load(FOLDER / "torchao_mx.npz")
SECTIONS = ("gauss", "range", "threshold", "ties", "special")
GOLDEN_CASES = sorted({tuple(k.split("/")[:4]) for k in GOLDEN.files if k.startswith("mxfp")})
each_golden_case = pytest.mark.parametrize(
    ("name", "dtype", "mode", "section"), GOLDEN_CASES, ids=map("-".join, GOLDEN_CASES)
)

# Blocks of float32 whose amax lies so little past the threshold of rceil that log2 in float32 rounds
# down to it: torchao's scale is one too small there.
LOG2_TOO_SMALL = {
    ("mxfp4", "threshold"): (20, 35, 50, 95, 110),
    ("mxfp4", "special"): tuple(np.flatnonzero(GOLDEN["special_names"] == "amax 1.5 * 2**-125 + ulp")),
    ("mxfp8_e4m3", "threshold"): (56, 71, 86, 101, 116),
    ("mxfp8_e5m2", "threshold"): (56, 71, 86, 116),
}


def golden_input(dtype, section):
    """Returns the blocks of 32 of a section in float32."""
    x = GOLDEN[f"input/{dtype}/{section}"]
    x = x.view(np.float32) if dtype == "f32" else x.view(ml_dtypes.bfloat16).astype(np.float32)
    return x.reshape(-1, 32)


@functools.cache
def all_golden_quantized(name, mode):
    """Returns our scale bytes and elements of every section at once, so that each mode compiles once."""
    keys = [(dtype, section) for dtype in ("f32", "bf16") for section in SECTIONS]
    inputs = [golden_input(*key) for key in keys]
    q = mxjax.quantize(np.concatenate(inputs), name, scale_rule=mode)
    ends = np.cumsum([len(x) for x in inputs])[:-1]
    scales, values = np.split(scale_bytes(q)[:, 0], ends), np.split(elements(q), ends)
    return dict(zip(keys, zip(scales, values, strict=True), strict=True))


def golden_elements(name, codes):
    """Returns the values of torchao's codes, in blocks."""
    if name == "mxfp4":
        codes = np.stack([codes & 0xF, codes >> 4], axis=-1)
    return gfloat.decode_ndarray(info(name), codes.reshape(-1, 32)).astype(np.float32)


def golden_case(name, dtype, mode, section):
    """Returns x, our scales and elements, torchao's, and which blocks have torchao's log2 error."""
    key = f"{name}/{dtype}/{mode}/{section}"
    theirs = GOLDEN[f"{key}/scale"].ravel(), golden_elements(name, GOLDEN[f"{key}/codes"])
    log2 = np.zeros(len(theirs[0]), bool)
    if mode == "rceil" and dtype == "f32":
        log2[list(LOG2_TOO_SMALL.get((name, section), ()))] = True
    return golden_input(dtype, section), all_golden_quantized(name, mode)[dtype, section], theirs, log2


@each_golden_case
def test_scales_and_elements_match_torchao(name, dtype, mode, section):
    x, (scales, values), (their_scales, their_values), log2 = golden_case(name, dtype, mode, section)
    only_infinity = np.isinf(x).any(axis=1) & ~np.isnan(x).any(axis=1)
    same = ~only_infinity & ~log2
    np.testing.assert_array_equal(scales[same], their_scales[same])
    np.testing.assert_array_equal(scales[log2], their_scales[log2] + 1)
    assert np.all(scales[only_infinity] == 255)
    same = (their_scales != 0) & (their_scales != 255) & np.isfinite(x).all(axis=1) & ~log2
    same |= (x == 0).all(axis=1)
    np.testing.assert_array_equal(oracles.bits(values[same]), oracles.bits(their_values[same]))


@pytest.mark.parametrize("rule", ["floor", "even", "rceil", "ceil"])
def test_bytes_are_those_of_aiter(rule):
    """Of its reference of the quantizer for gfx950 (tests/golden/make_aiter.py)."""
    with np.load(FOLDER / "aiter_mx.npz") as golden:
        x = np.concatenate([GOLDEN[f"input/f32/{s}"] for s in golden["sections"]]).view(np.float32)
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
