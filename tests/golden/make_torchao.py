"""Quantise adversarial inputs with torchao and store what it gives.

Run with Python 3.11, torch 2.13.0+cpu, torchao 0.18.0, numpy 2.4.6:

    python tests/golden/make_torchao.py

Writes torchao_mx.npz next to this file. DT is f32 or bf16, SECTION one of the
names below, MODE one of floor, rceil, ceil, even.

    input/DT/SECTION              [rows, 64] bit patterns, uint32 (f32) or uint16 (bf16)
    mxfp4/DT/MODE/SECTION/codes   [rows, 32] uint8, first element in the low nibble
    mxfp4/DT/MODE/SECTION/scale   [rows, 2]  uint8, E8M0
    FMT/DT/MODE/SECTION/codes     [rows, 64] uint8, one code a byte; FMT is mxfp8_e4m3,
    FMT/DT/MODE/SECTION/scale     [rows, 2]    mxfp8_e5m2, mxfp6_e2m3, mxfp6_e3m2; MODE floor,
                                  rceil; SECTION gauss, special, for mxfp8 threshold too
    special_names                 [blocks]   what each block of the section special holds
    versions                      [n]        versions this file was made with

Sections, in blocks of 32, two to a row:

    gauss      standard normal; the second half of the rows times 2**uniform(-16, 16)
    range      block i < 256: largest exponent field about min(i, 254), elements within
               2**5 below; then 32 blocks with independent exponents below a random cap
    threshold  per exponent in EXPONENTS, per mantissa in 1, 1.5, 1.625, 1.75, 2 - 2 ulp,
               per offset in -1, 0, +1 ulp: a block with that amax, the rest uniform below
    ties       per s in TIE_SCALES and per amax in TIE_AMAX (times 2**s) one row: the ties
               0.25, .75, 1.25, 1.75, 2.5, 3.5, 5 and one ulp to each side, some exact
               codes, and values past 6, all times 2**s; positive in the first block,
               negative in the second; what would exceed amax is zero instead
    special    zeros, NaN, Inf, subnormals, largest values; see special_names

Where torchao departs from "an all-zero block has scale byte 0, a block with NaN or
Inf has 255, otherwise clamp(exponent - emax + 127, 0, 254), and elements are x / scale
rounded to nearest even and saturated" (emax is 2 for FP4, and exponent is of amax as
the mode rounds it):

    Inf         A block with Inf and no NaN has scale byte 255 - emax (253 for FP4), or
                254 in rceil. Inf saturates; the finite elements are quantised as usual.
    NaN         The scale byte is 255, but the codes mean nothing and the sign of NaN may
                vary with the processor. In rceil every element of the block becomes
                NaN; in the other modes finite elements become zeros with their sign.
                FP4 and FP6 have no NaN: the code is whatever the bit arithmetic leaves.
    byte 0      The scale byte is right but elements are not divided by 2**-127: floor,
                ceil and even divide by 2**-126 (so values read back half as large), and
                rceil divides by 1 (so all become zeros with their sign).
    rceil, f32  ceil(log2(amax / max)) takes log2 in float32, which rounds to the integer
                when amax / max lies just above a power of two 2**k. For FP4 the window is
                empty for k in -2..3, 2 or 3 ulp of amax at |k| = 8, 33 at |k| = 125. The
                scale byte is then one too small, and the largest elements saturate. It
                is seen at mantissa "1.5 + ulp" (1.75 + ulp for FP8) in threshold and
                special. bf16 inputs are too coarse for it.

Everything else follows that rule, -0.0 keeps its sign, and a block of zeros has byte 0.
"""

import importlib.metadata
import pathlib
import platform

import numpy as np
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

EXPONENTS = (-126, -125, -124, -60, 0, 1, 17, 127)
TIE_SCALES = (-127, -126, -125, -124, -100, -20, -3, -1, 0, 1, 7, 60, 124, 125)
TIE_AMAX = (4, 6, 6.875, 7, 7.9375)
MODES = ("floor", "rceil", "ceil", "even")
SECTIONS = ("gauss", "special", "threshold", "range", "ties")
FORMATS = {  # name: (element type, modes, sections)
    "mxfp4": (torch.float4_e2m1fn_x2, MODES, SECTIONS),
    "mxfp8_e4m3": (torch.float8_e4m3fn, MODES[:2], SECTIONS[:3]),
    "mxfp8_e5m2": (torch.float8_e5m2, MODES[:2], SECTIONS[:3]),
    "mxfp6_e2m3": ("fp6_e2m3", MODES[:2], SECTIONS[:2]),
    "mxfp6_e3m2": ("fp6_e3m2", MODES[:2], SECTIONS[:2]),
}


def make_sections(step):
    """The inputs as uint32 bit patterns; step is one ulp (1 for f32, 0x10000 for bf16)."""
    rng = np.random.default_rng(0)
    mask = np.uint32(0x100000000 - step)

    def bits(x):
        """Bits of x, cut towards zero to the input type."""
        return np.asarray(x, np.float32).view(np.uint32) & mask

    out = {}

    x = rng.standard_normal((32, 64))
    x[16:] *= 2 ** rng.uniform(-16, 16, (16, 1))
    out["gauss"] = bits(x)

    top = np.minimum(np.arange(256), 254)[:, None]
    narrow = np.maximum(top - rng.integers(0, 6, (256, 32)), 0)
    wide = rng.integers(0, rng.integers(1, 256, (32, 1)), (32, 32))
    exponent = np.concatenate([narrow, wide])
    shape = exponent.shape
    x = rng.integers(0, 2, shape) << 31 | exponent << 23 | rng.integers(0, 1 << 23, shape)
    x[254, 0] = 0x7F7FFFFF
    x[255, 0] = 0xFF7FFFFF
    out["range"] = x.astype(np.uint32) & mask

    blocks = []
    for e in EXPONENTS:
        for mantissa in (1, 1.5, 1.625, 1.75, None):
            for offset in (-1, 0, 1):
                if mantissa is None:  # 2 - 3 ulp .. 2 - ulp
                    amax = ((e + 128) << 23) + (offset - 2) * step
                else:
                    amax = int(bits(mantissa * 2.0**e)) + offset * step
                value = np.uint32(amax).view(np.float32).astype(np.float64)
                block = bits(value * rng.uniform(-1, 1, 32))
                block[rng.integers(32)] = amax | int(rng.integers(2)) << 31
                blocks.append(block)
    out["threshold"] = np.stack(blocks)

    blocks = []
    for s in TIE_SCALES:
        for amax in TIE_AMAX:
            ties = bits(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]) * 2.0**s)
            ties = np.concatenate([ties - np.uint32(step), ties, ties + np.uint32(step)])
            more = bits(np.array([amax, 0, 0.5, 1, 1.5, 2, 3, 4, 6, 6.5, 7]) * 2.0**s)
            block = np.concatenate([more, ties])
            block[block > more[0]] = 0
            blocks += [block, block | np.uint32(1 << 31)]
    out["ties"] = np.stack(blocks)

    ordinary = bits(rng.uniform(-3, 3, 32))
    big = bits(rng.uniform(-(2.0**127), 2.0**127, 32))
    tiny = np.resize(np.array([0, step, 0x80000000 + step], np.uint32), 32)

    def put(block, *values):
        block = block.copy()
        block[3 : 3 + len(values)] = values
        return block

    def subnormal(amax):
        return put(bits(np.uint32(amax).view(np.float32) * rng.uniform(-1, 1, 32)), amax)

    nan, inf, minus = 0x7FC00000, 0x7F800000, 1 << 31
    named = {
        "zero": np.zeros(32, np.uint32),
        "minus zero": np.full(32, minus, np.uint32),
        "both zeros": np.resize(np.array([0, minus], np.uint32), 32),
        "one nonzero": put(np.zeros(32, np.uint32), 0x3F800000),
        "NaN": put(ordinary, nan),
        "-NaN": put(ordinary, nan | minus),
        "NaN with payload": put(ordinary, 0x7FFF0000, 0x7F810000),
        "all NaN": np.full(32, nan, np.uint32),
        "NaN among zeros": put(np.zeros(32, np.uint32), nan),
        "+Inf": put(ordinary, inf),
        "-Inf": put(ordinary, inf | minus),
        "both Inf": put(ordinary, inf, inf | minus),
        "all +Inf": np.full(32, inf, np.uint32),
        "Inf and NaN": put(ordinary, inf, nan),
        "Inf among large": put(big, inf),
        "NaN among large": put(big, nan),
        "largest finite": np.resize(np.array([0x7F7FFFFF, 0xFF7FFFFF], np.uint32) & mask, 32),
        "smallest subnormal": tiny,
        "amax 3 ulp": subnormal(3 * step),
        "amax 2**-129": subnormal(0x00100000),
        "amax 2**-128": subnormal(0x00200000),
        "amax 1.5 * 2**-128": subnormal(0x00300000),
        "amax 2**-127": subnormal(0x00400000),
        "amax 2**-127 + ulp": subnormal(0x00400000 + step),
        "amax 1.5 * 2**-127": subnormal(0x00600000),
        "amax largest subnormal": subnormal(0x00800000 - step),
        "amax 2**-126": subnormal(0x00800000),
        "amax 2**-125": subnormal(0x01000000),
        "amax 1.5 * 2**-125": subnormal(0x01400000),
        "amax 1.5 * 2**-125 + ulp": subnormal(0x01400000 + step),
        "amax 1.75 * 2**-125": subnormal(0x01600000),
        "amax 2**-124": subnormal(0x01800000),
    }
    out["special"] = np.stack(list(named.values()))
    return {name: x.reshape(-1, 64) for name, x in out.items()}, list(named)


def main():
    out = {}
    for dt, step in (("f32", 1), ("bf16", 0x10000)):
        sections, names = make_sections(step)
        for section, x in sections.items():
            if dt == "bf16":
                x = (x >> 16).astype(np.uint16)
            out[f"input/{dt}/{section}"] = x
            x = torch.from_numpy(x).view(torch.float32 if dt == "f32" else torch.bfloat16)
            for fmt, (elem, modes, wanted) in FORMATS.items():
                for mode in modes if section in wanted else ():
                    scale, codes = to_mx(x, elem, 32, ScaleCalculationMode(mode))
                    key = f"{fmt}/{dt}/{mode}/{section}"
                    out[f"{key}/scale"] = scale.view(torch.uint8).numpy()
                    out[f"{key}/codes"] = codes.view(torch.uint8).numpy()
    out["special_names"] = np.array(names)
    versions = [f"{p} {importlib.metadata.version(p)}" for p in ("torch", "torchao", "numpy")]
    out["versions"] = np.array([f"python {platform.python_version()}", *versions])
    path = pathlib.Path(__file__).with_name("torchao_mx.npz")
    np.savez_compressed(path, **out)
    print(path.name, len(out), "arrays", path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
