"""Plain numpy definitions that the tests compare with: slow, obvious, and written apart from mxjax."""

import contextlib

import gfloat
import gfloat.formats
import jaxtyping
import numpy as np


def format_info(
    name: str, k: int, precision: int, bias: int, is_signed: bool = True, num_high_nans: int = 0
) -> gfloat.FormatInfo:
    """Returns gfloat's description of a finite format with subnormals that gfloat does not name."""
    return gfloat.FormatInfo(
        name=name,
        k=k,
        precision=precision,
        bias=bias,
        is_signed=is_signed,
        domain=gfloat.Domain.Finite,
        has_nz=is_signed,
        num_high_nans=num_high_nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


ELEMENT_INFO = {
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e3m0": format_info("e3m0", k=4, precision=1, bias=3),  # zero and the powers of two from 2**-2 to 2**4
    "e1m2": format_info("e1m2", k=4, precision=3, bias=0),  # the multiples of 1/2 up to 3.5
}


def bits(x):
    """Returns the bits of float32 values, which tell -0.0 from 0.0 and subnormals from zero."""
    return np.asarray(x, np.float32).view(np.uint32)


def floats(patterns):
    """Returns the float32 values with these bits."""
    return np.asarray(patterns, np.uint32).view(np.float32)


def grid(info):
    """Returns every finite value of the format, from 0 up."""
    values = gfloat.decode_ndarray(info, np.arange(2 ** (info.k - 1)))
    return values[np.isfinite(values)]


def round_nearest(x, info):
    """Returns the float32 value of the format nearest to each x, ties to the even code, saturating."""
    rounded = gfloat.round_ndarray(info, np.asarray(x, np.float64), gfloat.RoundMode.TiesToEven, sat=True)
    return rounded.astype(np.float32)


def scale_byte(amax, rule, info):
    """Returns the E8M0 byte of each amax: one up for every scale at which amax lies past the threshold."""
    threshold, side = {
        "floor": (2, "right"),
        "even": (2 - 2.0**-info.precision, "right"),
        "uos": (1.625, "right"),
        "rceil": (info.max / 2**info.emax, "left"),
        "ceil": (1, "left"),
    }[rule]
    amax = np.asarray(amax, np.float64)
    # "right" counts an amax that equals the threshold as past it. Exact: float64 holds every product.
    byte = np.searchsorted(threshold * 2.0 ** (info.emax + np.arange(254) - 127), amax, side)
    return np.where(np.isfinite(amax), byte, 255).astype(np.uint8)


def quantize(x, info, rule="floor", block=(1, 32), prescale=1.0):
    """Returns the scale bytes and the elements of a matrix, one block of `block` after the other."""
    x = np.asarray(x, np.float32)
    rows, length = block
    scales = np.zeros([-(-n // size) for n, size in zip(x.shape, block, strict=True)], np.uint8)
    elements = np.zeros(x.shape, np.float32)
    for i, j in np.ndindex(scales.shape):
        here = np.s_[i * rows : (i + 1) * rows, j * length : (j + 1) * length]
        scales[i, j] = byte = scale_byte(np.max(np.abs(x[here])), rule, info)
        if byte != 255:
            scaled = np.float32(x[here].astype(np.float64) / 2.0 ** (int(byte) - 127))
            elements[here] = round_nearest(scaled * np.float32(prescale), info)
    return scales, elements


@contextlib.contextmanager
def types_unchecked():
    """Lets a wrong argument through to the function's own check, which is what a user meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
