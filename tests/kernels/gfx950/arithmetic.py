"""The simpler vector instructions, one value per lane, on numpy arrays of 64.

Source: AMD Instinct CDNA4 Instruction Set Architecture, chapter 12.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

LANES = 64
F32, U32, I32, U64 = np.float32, np.uint32, np.int32, np.uint64
LANE = np.arange(LANES)


def fma(a, b, c) -> np.ndarray:
    """Returns a * b + c rounded once: rounding to odd in float64 makes the second rounding harmless."""
    with np.errstate(all="ignore"):
        product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
        total = product + c
        shadow = total - product
        error = (product - (total - shadow)) + (c - shadow)
        even = (total.view(U64) & U64(1)) == 0
        odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
        inexact = np.isfinite(total) & (error != 0) & even
        return np.where(inexact, odd, total).astype(F32)


def flushed(function: Callable) -> Callable:
    """Returns the function, with 0 for subnormal operands and results, as v_exp_f32 and v_log_f32 have it."""

    def flush(x):
        return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x).astype(F32)

    return lambda a: flush(function(flush(a).astype(np.float64)).astype(F32))


def larger(a, b):
    """Returns the maximum; 0 is larger than -0. Of NaN and a number it is the number, unless NaN signals."""
    both_zero = (a == 0) & (b == 0)
    result = np.where(both_zero, (a.view(U32) & b.view(U32)).view(F32), np.fmax(a, b))
    for x in (b, a):
        bits = x.view(U32)
        signals = np.isnan(x) & ((bits & U32(0x400000)) == 0)
        result = np.where(signals, (bits | U32(0x400000)).view(F32), result)
    return result


def smaller(a, b):
    """Returns the minimum, by the rules of `larger`."""
    return -larger(-a, -b)


def to_uint(x):
    whole = np.floor(np.nan_to_num(x.astype(np.float64)))
    return np.clip(whole, 0, 2**32 - 1).astype(U32)


def multiply_high(a, b):
    return ((a.astype(U64) * b.astype(U64)) >> U64(32)).astype(U32)


def low24(x):
    return x & U32(0xFFFFFF)


def reverse_bits(x):
    bits = [((x >> U32(i)) & U32(1)) << U32(31 - i) for i in range(32)]
    return np.bitwise_or.reduce(bits)


def bytes_of(a, b, selectors):
    """Selects bytes 0 to 3 of b and 4 to 7 of a by the selectors' bytes.

    8 to 11 give eight signs of byte 1, 3, 5 or 7, 12 gives 0, more gives 255.
    """
    both = (a.astype(U64) << U64(32)) | b.astype(U64)
    result = np.zeros(LANES, U32)
    for byte in range(4):
        which = (selectors >> U32(8 * byte)) & U32(255)
        place = np.where(which < 8, which, U32(2) * which - U32(15)) & U32(7)
        value = (both >> (U64(8) * place.astype(U64))).astype(U32) & U32(255)
        value = np.where(which >= 8, (value >> U32(7)) * U32(255), value)
        value = np.where(which == 12, U32(0), np.where(which > 12, U32(255), value))
        result |= value << U32(8 * byte)
    return result


def field(x, start, width):
    return (x >> (start & U32(31))) & ((U32(1) << (width & U32(31))) - U32(1))


def signed_field(x, start, width):
    spare = U32(32) - (width & U32(31))
    return ((field(x, start, width) << spare).view(I32) >> spare.view(I32)).view(U32)


def align(a, b, bits):
    return (((a.astype(U64) << U64(32)) | b.astype(U64)) >> (bits & U32(31)).astype(U64)).astype(U32)


def saturating_subtract(a, b):
    return np.where(a > b, a - b, U32(0))


def bfloat16_pair(a, b):
    def bits(x):
        return x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(U32)

    return bits(a) | (bits(b) << U32(16))


def half(x):
    return (x & U32(0xFFFF)).astype(np.uint16).view(np.float16).astype(F32)


def shift(bits):
    return bits & U32(31)


def low16(function: Callable) -> Callable:
    return lambda *args: function(*args) & U32(0xFFFF)


def truth_table(table: int) -> Callable:
    """Returns the function of three words whose bit for a, b, c is bit 4 a + 2 b + c of the table."""

    def apply(a, b, c):
        result = np.zeros(LANES, U32)
        for index in range(8):
            if table >> index & 1:
                terms = (x if index >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0)))
                result |= np.bitwise_and.reduce([np.broadcast_to(t, LANES) for t in terms])
        return result

    return apply


# E2M1's values of a positive code, of which 7 is the largest.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BETWEEN = (E2M1[1:] + E2M1[:-1]) / 2


def to_e2m1(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns codes of x / 2**(exponent of scale), rounded to nearest even and saturated; NaN is 7."""
    exponent = (scale.view(U32) >> U32(23)) & U32(255)
    scaled = np.abs(np.ldexp(x.astype(np.float64), 127 - exponent.astype(np.int32)))
    below, above = np.searchsorted(BETWEEN, scaled, "left"), np.searchsorted(BETWEEN, scaled, "right")
    code = np.where(below == above, below, np.where(below % 2 == 0, below, above))
    code = np.where(np.isnan(x), 7, code).astype(U32)
    return code | (np.signbit(x).astype(U32) << U32(3))


# The types of operands: u is uint32, i int32, f float32, w two words as uint64. Results keep their bits.
OPERATIONS: dict[str, tuple[str, Callable]] = {
    "v_mov_b32": ("u", lambda a: a),
    "v_accvgpr_write_b32": ("u", lambda a: a),
    "v_accvgpr_mov_b32": ("u", lambda a: a),
    "v_accvgpr_read_b32": ("u", lambda a: a),
    "v_bfrev_b32": ("u", reverse_bits),
    "v_not_b32": ("u", lambda a: ~a),
    "v_ceil_f32": ("f", np.ceil),
    "v_rcp_f32": ("f", lambda a: F32(1) / a),
    "v_cvt_f32_u32": ("u", lambda a: a.astype(F32)),
    "v_cvt_u32_f32": ("f", to_uint),
    "v_cvt_f32_f16": ("u", half),
    "v_add_u32": ("uu", lambda a, b: a + b),
    "v_sub_u32": ("uu", lambda a, b: a - b),
    "v_subrev_u32": ("uu", lambda a, b: b - a),
    "v_mul_lo_u32": ("uu", lambda a, b: a * b),
    "v_mul_hi_u32": ("uu", multiply_high),
    "v_mul_u32_u24": ("uu", lambda a, b: low24(a) * low24(b)),
    "v_max_u32": ("uu", np.maximum),
    "v_max_i32": ("ii", np.maximum),
    "v_min_i32": ("ii", np.minimum),
    "v_and_b32": ("uu", lambda a, b: a & b),
    "v_or_b32": ("uu", lambda a, b: a | b),
    "v_xor_b32": ("uu", lambda a, b: a ^ b),
    "v_lshlrev_b32": ("uu", lambda a, b: b << shift(a)),
    "v_lshrrev_b32": ("uu", lambda a, b: b >> shift(a)),
    "v_ashrrev_i32": ("ui", lambda a, b: b >> shift(a).view(I32)),
    "v_add_u16": ("uu", low16(lambda a, b: a + b)),
    "v_lshlrev_b16": ("uu", low16(lambda a, b: b << (a & U32(15)))),
    "v_lshrrev_b16": ("uu", lambda a, b: (b & U32(0xFFFF)) >> (a & U32(15))),
    "v_exp_f32": ("f", flushed(np.exp2)),
    "v_log_f32": ("f", flushed(np.log2)),
    "v_min_u32": ("uu", np.minimum),
    "v_max_f32": ("ff", larger),
    "v_max3_f32": ("fff", lambda a, b, c: larger(larger(a, b), c)),
    "v_fma_f32": ("fff", fma),
    "v_mov_b64": ("w", lambda a: a),
    "v_lshlrev_b64": ("uw", lambda a, b: b << (a & U32(63)).astype(U64)),
    "v_lshrrev_b64": ("uw", lambda a, b: b >> (a & U32(63)).astype(U64)),
    "v_add_f32": ("ff", lambda a, b: a + b),
    "v_sub_f32": ("ff", lambda a, b: a - b),
    "v_mul_f32": ("ff", lambda a, b: a * b),
    "v_min_f32": ("ff", smaller),
    "v_cvt_pk_bf16_f32": ("ff", bfloat16_pair),
    "v_maximum3_f32": ("fff", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_max3_i32": ("iii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_u32": ("uuu", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    "v_add3_u32": ("uuu", lambda a, b, c: a + b + c),
    "v_xad_u32": ("uuu", lambda a, b, c: (a ^ b) + c),
    "v_add_lshl_u32": ("uuu", lambda a, b, c: (a + b) << shift(c)),
    "v_lshl_add_u32": ("uuu", lambda a, b, c: (a << shift(b)) + c),
    "v_lshl_or_b32": ("uuu", lambda a, b, c: (a << shift(b)) | c),
    "v_and_or_b32": ("uuu", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("uuu", lambda a, b, c: a | b | c),
    "v_alignbit_b32": ("uuu", align),
    "v_perm_b32": ("uuu", bytes_of),
    "v_bfe_u32": ("uuu", field),
    "v_bfe_i32": ("uuu", signed_field),
    "v_mad_u32_u24": ("uuu", lambda a, b, c: low24(a) * low24(b) + c),
    "v_lshl_add_u64": ("wuw", lambda a, b, c: (a << (b & U32(7)).astype(U64)) + c),
}

COMPARISONS: dict[str, Callable] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "neq": np.not_equal,  # of floats: also true of NaN
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
