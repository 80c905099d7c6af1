"""The vector instructions: those of arithmetic.py, and those that compute more than a word a lane.

Source: AMD Instinct CDNA4 Instruction Set Architecture, chapters 6, 7 and 12.
"""

import dataclasses

import ml_dtypes
import numpy as np

from gfx950 import arithmetic
from gfx950.assembly import Instruction
from gfx950.wave import LANES, U32, U64, Wave, as_mask

LANE = np.arange(LANES)


def lanes_of(modifiers: dict) -> np.ndarray:
    """Returns the lane that each lane reads under a DPP modifier."""
    assert modifiers["row_mask"] == modifiers["bank_mask"] == "0xf"
    if quad := modifiers.get("quad_perm"):
        return (LANE & ~3) + np.array(quad)[LANE & 3]
    if "row_half_mirror" in modifiers:
        return (LANE & ~7) + 7 - (LANE & 7)
    assert modifiers["row_ror"] == "8", modifiers
    return (LANE & ~15) + (LANE + 8) % 16


def part_of(values: np.ndarray, name: str) -> np.ndarray:
    """Returns the part of each word that an SDWA modifier names."""
    first, mask = _bits_of(name)
    return (values >> first) & mask


def placed_at(values: np.ndarray, name: str) -> np.ndarray:
    """Returns words with the low bits of the values in the part that an SDWA modifier names, else zeros."""
    first, mask = _bits_of(name)
    return (values & mask) << first


def _bits_of(name: str) -> tuple[np.uint32, np.uint32]:
    """Returns the first bit and the mask, at bit 0, of DWORD, WORD_1 and so on."""
    kind, number = name.split("_") if "_" in name else (name, "0")
    width = {"DWORD": 32, "WORD": 16, "BYTE": 8}[kind]
    return U32(width * int(number)), U32(2**width - 1)


def run(w: Wave, i: Instruction) -> None:
    name = i.opcode.removesuffix("_e32").removesuffix("_e64").removesuffix("_dpp").removesuffix("_sdwa")
    assert i.modifiers.keys() <= KNOWN.get(name, KNOWN[""]), i.text
    if name in SPECIAL:
        SPECIAL[name](w, i)
        return
    to, *sources = i.operands
    if name.startswith("v_cmp_"):
        _, _, relation, kind = name.split("_")
        a, b = (w.read(o, {"u32": "u", "i32": "i", "f32": "f", "i64": "w"}[kind]) for o in sources)
        if kind == "i64":
            a, b = a.view(np.int64), b.view(np.int64)
        w.write_mask(to, arithmetic.COMPARISONS[relation](a, b))
        return
    if name.startswith("v_bitop3"):
        kinds, function = "uuu", arithmetic.truth_table(i.integer("bitop3"))
        function = arithmetic.low16(function) if name.endswith("b16") else function
    else:
        kinds, function = arithmetic.OPERATIONS[name]
    taken = [w.read(o, kind) for o, kind in zip(sources, kinds, strict=True)]
    if i.opcode.endswith("_dpp"):
        taken[0] = taken[0][lanes_of(i.modifiers)]
    if i.opcode.endswith("_sdwa"):
        assert i.modifiers["dst_sel"] == "DWORD" or i.modifiers.get("dst_unused") == "UNUSED_PAD", i.text
        for n, values in enumerate(taken):
            taken[n] = part_of(values, str(i.modifiers[f"src{n}_sel"]))
    if i.modifiers.get("clamp"):
        function = arithmetic.saturating_subtract
    result = function(*taken)
    if i.modifiers.get("dst_sel", "DWORD") != "DWORD":
        result = placed_at(result, str(i.modifiers["dst_sel"]))
    w.write(to.index, result)


PACKED = {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"}
# The modifiers that instructions may have; "" is all others.
KNOWN = {
    "": {
        *("dst_sel", "dst_unused", "src0_sel", "src1_sel"),
        *("quad_perm", "row_half_mirror", "row_ror", "row_mask", "bank_mask", "bound_ctrl"),
    },
    "v_sub_u32": {"clamp"},
    "v_bitop3_b32": {"bitop3"},
    "v_bitop3_b16": {"bitop3"},
    "v_pk_mov_b32": {"op_sel"},
    "v_pk_sub_u16": {"clamp"},
    "v_pk_lshrrev_b16": {"op_sel", "op_sel_hi"},
    "v_pk_add_f32": PACKED,
    "v_pk_mul_f32": PACKED,
    "v_pk_fma_f32": PACKED,
    "v_cvt_scalef32_pk_fp4_f32": {"op_sel"},
    "v_mfma_scale_f32_16x16x128_f8f6f4": {"op_sel", "op_sel_hi", "cbsz", "blgp"},
}


def select(w: Wave, i: Instruction) -> None:
    to, no, yes, mask = i.operands
    w.write(to.index, np.where(as_mask(w.read_scalar(mask, 2)), w.read(yes, "u"), w.read(no, "u")))


def add_with_carry(w: Wave, i: Instruction) -> None:
    to, carry, *sources = i.operands
    total = w.read(sources[0], "u").astype(U64) + w.read(sources[1], "u")
    if len(sources) == 3:
        total = total + as_mask(w.read_scalar(sources[2], 2)).astype(U64)
    w.write(to.index, total.astype(U32))
    w.write_mask(carry, total >> U64(32) != 0)


def multiply_add_long(w: Wave, i: Instruction) -> None:
    to, carry, a, b, c = i.operands
    product, c = w.read(a, "u").astype(U64) * w.read(b, "u").astype(U64), w.read(c, "w")
    w.write(to.index, product + c)
    w.write_mask(carry, product + c < c)


def read_first_lane(w: Wave, i: Instruction) -> None:
    to, source = i.operands
    lane = int(np.argmax(w.lanes)) if w.lanes.any() else 0
    w.write_scalar(to.index, int(w.v[source.index, lane]), 1)


def read_lane(w: Wave, i: Instruction) -> None:
    to, source, lane = i.operands
    w.write_scalar(to.index, int(w.v[source.index, w.read_scalar(lane, 1) & (LANES - 1)]), 1)


def write_lane(w: Wave, i: Instruction) -> None:
    to, source, lane = i.operands
    w.v[to.index, w.read_scalar(lane, 1) & (LANES - 1)] = w.read_scalar(source, 1)


def multiply_accumulate(w: Wave, i: Instruction) -> None:
    to, a, b = i.operands
    w.write(to.index, arithmetic.fma(w.read(a, "f"), w.read(b, "f"), w.read(to, "f")))


def swap_lanes(w: Wave, i: Instruction) -> None:
    """Swaps the odd runs of lanes of the first register with the even ones of the second."""
    assert w.lanes.all(), i.text
    run = 16 if "16" in i.opcode else 32
    a, b = (w.v[o.index].reshape(-1, 2, run) for o in i.operands)
    a[:, 1], b[:, 0] = b[:, 0].copy(), a[:, 1].copy()


def pair_of_differences(w: Wave, i: Instruction) -> None:
    """Subtracts the halves of words, and gives 0 for negative differences; a constant's high half is 0."""
    assert i.modifiers.get("clamp"), i.text
    to, *sources = i.operands
    a, b = (w.read(o, "u") for o in sources)
    low, high = (arithmetic.saturating_subtract(part_of(a, n), part_of(b, n)) for n in ("WORD_0", "WORD_1"))
    w.write(to.index, high << U32(16) | low)


def pair_of_shifts(w: Wave, i: Instruction) -> None:
    """Shifts the halves of words right: op_sel chooses the low result's operands, op_sel_hi the high's."""
    to, *sources = i.operands
    values = [w.read(o, "u") for o in sources]
    halves = []
    for choice in (i.bits("op_sel", 0, 2), i.bits("op_sel_hi", 1, 2)):
        amount, value = (part_of(v, f"WORD_{half}") for v, half in zip(values, choice, strict=True))
        halves.append(value >> (amount & U32(15)))
    w.write(to.index, halves[1] << U32(16) | halves[0])


def pair_of_floats(w: Wave, i: Instruction) -> None:
    """Computes two words: op_sel chooses the low result's operands, op_sel_hi the high result's.

    The low word of a constant is its value; LLVM never takes the other.
    """
    to, *sources = i.operands
    count = len(sources)
    choices = i.bits("op_sel", 0, count), i.bits("op_sel_hi", 1, count)
    signs = i.bits("neg_lo", 0, count), i.bits("neg_hi", 0, count)
    results = []
    for choice, sign in zip(choices, signs, strict=True):
        taken = []
        for o, word, negative in zip(sources, choice, sign, strict=True):
            is_constant = o.kind == "constant"
            assert not (is_constant and word), i.text
            value = w.read(o if is_constant else dataclasses.replace(o, index=o.index + word, words=1), "f")
            taken.append(-value if negative else value)
        results.append(PAIRS[i.opcode](*taken))
    for word, result in enumerate(results):
        w.write(to.index + word, result)


PAIRS = {
    "v_pk_add_f32": lambda a, b: a + b,
    "v_pk_mul_f32": lambda a, b: a * b,
    "v_pk_fma_f32": arithmetic.fma,
}


def pair_of_moves(w: Wave, i: Instruction) -> None:
    to, *sources = i.operands
    chosen = zip(sources, i.bits("op_sel", 0, 2), strict=True)
    values = [w.read(dataclasses.replace(o, index=o.index + word), "u").copy() for o, word in chosen]
    for word, value in enumerate(values):
        w.write(to.index + word, value)


def convert_to_e2m1(w: Wave, i: Instruction) -> None:
    to, a, b, scale = i.operands
    low, high = (arithmetic.to_e2m1(w.read(o, "f"), w.read(scale, "f")) for o in (a, b))
    *_, one, two = i.bits("op_sel", 0, 4)
    shift = U32(8 * (one + 2 * two))
    w.write(to.index, (w.v[to.index] & ~(U32(255) << shift)) | ((low | (high << U32(4))) << shift))


def matrix(w: Wave, i: Instruction) -> None:
    """D[16, 16] = A[16, 128] B[128, 16] + C of E2M1 with a scale for each 32 along the sum.

    A lane holds 32 elements of row or column lane % 16, from 32 (lane // 16) on, and four rows of a column
    of D. The sum is rounded once here; the hardware's order is its own.
    """
    assert i.modifiers["cbsz"] == i.modifiers["blgp"] == "4", i.text
    assert w.lanes.all(), i.text
    to, *factors, addend, a_scale, b_scale = i.operands
    low, high = i.bits("op_sel", 0, 3), i.bits("op_sel_hi", 1, 3)
    values = []
    for which, (o, scale) in enumerate(zip(factors, (a_scale, b_scale), strict=True)):
        assert o.words == 4
        codes = np.ascontiguousarray(w.v[o.index : o.index + 4].T).view(np.uint8)
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(LANES, 32)
        byte = w.read(scale, "u") >> U32(8 * (low[which] + 2 * high[which])) & U32(255)
        factor = np.where(byte == 255, np.nan, np.exp2(byte.astype(np.float64) - 127))
        elements = arithmetic.E2M1[codes & 7] * np.where(codes & 8, -1, 1) * factor[:, None]
        values.append(elements.reshape(4, 16, 32).transpose(1, 0, 2).reshape(16, 128))
    a, b = values
    result = a @ b.T
    if addend.kind == "v":
        before = w.v[addend.index : addend.index + 4].view(np.float32)
        result = result + before.reshape(4, 4, 16).transpose(1, 0, 2).reshape(16, 16)
    else:
        assert addend.value == 0
    rows = result.astype(np.float32).reshape(4, 4, 16).transpose(1, 0, 2).reshape(4, LANES)
    w.v[to.index : to.index + 4] = rows.view(U32)


def matrix_of_bfloat16(w: Wave, i: Instruction) -> None:
    """D[32, 32] = A[32, 16] B[16, 32] + C.

    A lane holds 8 elements of row or column lane % 32, from 8 (lane // 32) on. Of column lane % 32 of D it
    holds four rows from 8 n + 4 (lane // 32) on, for n from 0 to 3. The sum is rounded once, as in `matrix`.
    """
    assert w.lanes.all(), i.text
    to, *factors, addend = i.operands
    values = []
    for o in factors:
        words = np.ascontiguousarray(w.v[o.index : o.index + 4].T)
        elements = words.view(ml_dtypes.bfloat16).astype(np.float64)
        values.append(elements.reshape(2, 32, 8).transpose(1, 0, 2).reshape(32, 16))
    a, b = values
    result = a @ b.T
    if addend.kind == "v":
        before = w.v[addend.index : addend.index + 16].view(np.float32).reshape(4, 4, 2, 32)
        result = result + before.transpose(0, 2, 1, 3).reshape(32, 32)
    else:
        assert addend.value == 0
    rows = result.astype(np.float32).reshape(4, 2, 4, 32).transpose(0, 2, 1, 3).reshape(16, LANES)
    w.v[to.index : to.index + 16] = np.ascontiguousarray(rows).view(U32)


SPECIAL = {
    "v_mfma_f32_32x32x16_bf16": matrix_of_bfloat16,
    "v_cndmask_b32": select,
    "v_add_co_u32": add_with_carry,
    "v_addc_co_u32": add_with_carry,
    "v_mad_u64_u32": multiply_add_long,
    "v_readfirstlane_b32": read_first_lane,
    "v_readlane_b32": read_lane,
    "v_writelane_b32": write_lane,
    "v_fmac_f32": multiply_accumulate,
    "v_permlane16_swap_b32": swap_lanes,
    "v_permlane32_swap_b32": swap_lanes,
    "v_pk_mov_b32": pair_of_moves,
    "v_pk_sub_u16": pair_of_differences,
    "v_pk_lshrrev_b16": pair_of_shifts,
    **dict.fromkeys(PAIRS, pair_of_floats),
    "v_cvt_scalef32_pk_fp4_f32": convert_to_e2m1,
    "v_mfma_scale_f32_16x16x128_f8f6f4": matrix,
}
