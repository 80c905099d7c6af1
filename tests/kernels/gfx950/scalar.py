"""The scalar instructions: functions of Python's integers that return a value and, where one is set, SCC.

Source: AMD Instinct CDNA4 Instruction Set Architecture, chapter 12.
"""

from collections.abc import Callable

import numpy as np

from gfx950.assembly import EXEC, Instruction, Operand
from gfx950.wave import Wave

WORD, LONG = 2**32 - 1, 2**64 - 1


def signed(x: int) -> int:
    return x - 2**32 if x & 2**31 else x


def short(x: int) -> int:
    return ((x & 0xFFFF) ^ 0x8000) - 0x8000


def signed_byte(x: int) -> int:
    return ((x & 0xFF) ^ 0x80) - 0x80


def overflowing(value: int) -> tuple[int, bool]:
    return value & WORD, not -(2**31) <= value < 2**31


def carrying(value: int) -> tuple[int, bool]:
    return value & WORD, not 0 <= value <= WORD


def nonzero(value: int, mask: int = WORD) -> tuple[int, bool]:
    return value & mask, value & mask != 0


def field(x: int, control: int) -> tuple[int, int]:
    width = control >> 16 & 127
    return x >> (control & 31) & (2**width - 1), width


def signed_field(x: int, control: int) -> int:
    value, width = field(x, control)
    return value - 2**width if width and value >> (width - 1) else value


def smaller(a: int, b: int) -> tuple[int, bool]:
    return min(signed(a), signed(b)) & WORD, signed(a) < signed(b)


# Of words; the first argument is SCC where the instruction reads it.
OPERATIONS: dict[str, Callable[..., int | tuple[int, bool]]] = {
    "s_mov_b32": lambda a: a & WORD,
    "s_movk_i32": lambda a: short(a) & WORD,
    "s_brev_b32": lambda a: int(f"{a & WORD:032b}"[::-1], 2),
    "s_not_b32": lambda a: nonzero(~a),
    "s_abs_i32": lambda a: nonzero(abs(signed(a))),
    "s_add_i32": lambda a, b: overflowing(signed(a) + signed(b)),
    "s_sub_i32": lambda a, b: overflowing(signed(a) - signed(b)),
    "s_add_u32": lambda a, b: carrying(a + b),
    "s_mul_i32": lambda a, b: a * b & WORD,
    "s_mul_hi_u32": lambda a, b: a * b >> 32,
    "s_mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32) & WORD,
    "s_and_b32": lambda a, b: nonzero(a & b),
    "s_andn2_b32": lambda a, b: nonzero(a & ~b),
    "s_or_b32": lambda a, b: nonzero(a | b),
    "s_xor_b32": lambda a, b: nonzero(a ^ b),
    "s_lshl_b32": lambda a, b: nonzero(a << (b & 31)),
    "s_lshr_b32": lambda a, b: nonzero(a >> (b & 31)),
    "s_ashr_i32": lambda a, b: nonzero(signed(a) >> (b & 31)),
    "s_bfe_u32": lambda a, b: nonzero(field(a, b)[0]),
    "s_bfe_i32": lambda a, b: nonzero(signed_field(a, b)),
    "s_min_i32": smaller,
    "s_max_i32": lambda a, b: (max(signed(a), signed(b)) & WORD, signed(a) > signed(b)),
    "s_max_u32": lambda a, b: (max(a, b), a > b),
    "s_sext_i32_i16": lambda a: short(a) & WORD,
    "s_sext_i32_i8": lambda a: signed_byte(a) & WORD,
    "s_lshl1_add_u32": lambda a, b: carrying((a << 1) + b),
    "s_lshl2_add_u32": lambda a, b: carrying((a << 2) + b),
    "s_lshl3_add_u32": lambda a, b: carrying((a << 3) + b),
    "s_lshl4_add_u32": lambda a, b: carrying((a << 4) + b),
}
WITH_SCC: dict[str, Callable[..., int | tuple[int, bool]]] = {
    "s_addc_u32": lambda scc, a, b: carrying(a + b + scc),
    "s_cselect_b32": lambda scc, a, b: a if scc else b,
}
# Of two words.
LONG_OPERATIONS: dict[str, Callable[..., int | tuple[int, bool]]] = {
    "s_mov_b64": lambda a: a,
    "s_and_b64": lambda a, b: nonzero(a & b, LONG),
    "s_or_b64": lambda a, b: nonzero(a | b, LONG),
    "s_lshl_b64": lambda a, b: nonzero(a << (b & 63), LONG),
    "s_lshr_b64": lambda a, b: nonzero(a >> (b & 63), LONG),
}
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "s_cmp_eq_u32": lambda a, b: a == b,
    "s_cmp_lg_u32": lambda a, b: a != b,
    "s_cmp_ge_u32": lambda a, b: a >= b,
    "s_cmp_gt_u32": lambda a, b: a > b,
    "s_cmp_lt_u32": lambda a, b: a < b,
    "s_bitcmp0_b32": lambda a, b: not a >> (b & 31) & 1,
    "s_bitcmp1_b32": lambda a, b: bool(a >> (b & 31) & 1),
    "s_cmp_lt_i32": lambda a, b: signed(a) < signed(b),
    "s_cmp_gt_i32": lambda a, b: signed(a) > signed(b),
    "s_cmp_ge_i32": lambda a, b: signed(a) >= signed(b),
    "s_cmp_le_i32": lambda a, b: signed(a) <= signed(b),
}
# Of a word and the 16 bits in the instruction.
SHORT_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "s_cmpk_eq_i32": lambda a, k: signed(a) == short(k),
    "s_cmpk_lg_i32": lambda a, k: signed(a) != short(k),
    "s_cmpk_lt_u32": lambda a, k: a < k & 0xFFFF,
}


def run(w: Wave, i: Instruction) -> None:
    name = i.opcode
    assert name == "s_waitcnt" or not i.modifiers, i.text
    if name in COMPARISONS:
        w.scc = COMPARISONS[name](*(w.read_scalar(o, 1) for o in i.operands))
        return
    if name == "s_waitcnt":
        for counter, most in i.modifiers.items():
            w.wait(counter, int(str(most)))
        return
    to, *sources = i.operands
    if name.startswith("s_load_dword"):
        words = int(name.removeprefix("s_load_dwordx")) if "x" in name else 1
        assert sources[1].kind == "constant", i.text
        data = w.memory.load(np.array([w.read_scalar(sources[0], 2) + sources[1].value]), 4 * words)
        loaded = int.from_bytes(data.tobytes(), "little")
        w.later_scalar(lambda: w.write_scalar(to.index, loaded, words))
    elif name == "s_mulk_i32":
        w.write_scalar(to.index, w.s[to.index] * short(sources[0].value) & WORD, 1)
    elif name in SHORT_COMPARISONS:
        w.scc = SHORT_COMPARISONS[name](w.s[to.index], sources[0].value)
    elif name == "s_bitset1_b32":
        w.write_scalar(to.index, w.s[to.index] | 1 << (w.read_scalar(sources[0], 1) & 31), 1)
    elif name == "s_addk_i32":
        total, w.scc = overflowing(signed(w.s[to.index]) + short(sources[0].value))
        w.write_scalar(to.index, total, 1)
    elif name == "s_and_saveexec_b64":
        before, mask = w.read_scalar(Operand("s", EXEC), 2), w.read_scalar(sources[0], 2)
        w.write_scalar(to.index, before, 2)
        w.write_scalar(EXEC, before & mask, 2)
        w.scc = before & mask != 0
    elif name == "s_cselect_b64":
        w.write_scalar(to.index, w.read_scalar(sources[0 if w.scc else 1], 2), 2)
    else:
        words = 2 if name in LONG_OPERATIONS else 1
        # The second operand of a shift of two words is one.
        taken = [w.read_scalar(o, 1 if n and "lshl" in name else words) for n, o in enumerate(sources)]
        if name in WITH_SCC:
            result = WITH_SCC[name](w.scc, *taken)
        else:
            result = (OPERATIONS | LONG_OPERATIONS)[name](*taken)
        if isinstance(result, tuple):
            result, w.scc = result
        w.write_scalar(to.index, result, words)
