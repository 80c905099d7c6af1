"""The instructions of gfx950 that tinygrad's emulator lacks or computes otherwise than AMD's document.

Each is written from the document, element by element, and shares no code with the emulator in gfx950/.

Source: AMD Instinct CDNA4 Instruction Set Architecture; the sections are named below.
"""

import ctypes
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

U32, LANES = np.uint32, 64
LANE = np.arange(LANES)
VECTOR, M0, NO_SCALAR = 256, 124, 127  # in operand codes: v0, M0, and "off" as the scalar address
INLINE_ZERO = 128


class State(NamedTuple):
    """A wave's registers and LDS, as views of tinygrad's buffers.

    Attributes:
        s: uint32 scalar registers and constants, by operand code.
        v, a: uint32[256, 64] vector and accumulation registers.
        lds: the bytes of the work-group.
    """

    s: np.ndarray
    v: np.ndarray
    a: np.ndarray
    lds: np.ndarray

    def active(self) -> np.ndarray:
        """Returns the lanes of EXEC."""
        bits = self.s[126:128].view(np.uint8)
        return np.unpackbits(bits, bitorder="little").astype(bool)

    def source(self, code: int, count: int) -> np.ndarray:
        """Returns uint32[count, 64] of the operand with this code."""
        if code >= VECTOR:
            return self.v[code - VECTOR : code - VECTOR + count].copy()
        return np.broadcast_to(self.s[code], (count, LANES)).copy()


def memory(address: int, size: int) -> np.ndarray:
    """Returns the bytes at an address of this process."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), np.uint8)


def e2m1(code: np.ndarray) -> np.ndarray:
    """Decodes one sign bit, two exponent bits of bias 1 and one mantissa bit."""
    sign, exponent, mantissa = code >> 3 & 1, code >> 1 & 3, code & 1
    magnitude = np.where(
        exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.astype(float) - 1)
    )
    return np.where(sign == 1, -magnitude, magnitude)


def convert_to_fp4(inst: Any, state: State) -> None:
    """V_CVT_SCALEF32_PK_FP4_F32: divides by the third operand's power of two, rounds to nearest even."""
    values = [state.source(inst.src0.offset, 1)[0], state.source(inst.src1.offset, 1)[0]]
    scale = state.source(inst.src2.offset, 1)[0] >> U32(23) & U32(255)
    byte = np.zeros(LANES, U32)
    for nibble, bits in enumerate(values):
        x = bits.view(np.float32).astype(float) / 2.0 ** (scale.astype(float) - 127)
        distance = np.abs(np.abs(x)[:, None] - e2m1(np.arange(8)))
        near = distance == distance.min(axis=1, keepdims=True)
        even = near & (np.arange(8) % 2 == 0)
        code = np.argmax(np.where(even.any(axis=1, keepdims=True), even, near), axis=1)
        code = np.where(np.isnan(x) | (np.abs(x) >= 6), 7, code).astype(U32) | np.signbit(x).astype(
            U32
        ) << U32(3)
        byte |= code << U32(4 * nibble)
    shift, register = U32(8 * (inst.opsel >> 2 & 3)), state.v[inst.vdst.offset - VECTOR]
    merged = (register & ~(U32(255) << shift)) | (byte << shift)
    np.copyto(register, merged, where=state.active())


def maximum(inst: Any, state: State) -> None:
    """V_MAXIMUM3_F32, the maximum of IEEE 754-2019: NaN if any operand is."""
    values = []
    for bit, operand in enumerate((inst.src0, inst.src1, inst.src2)):
        x = state.source(operand.offset, 1)[0].view(np.float32)
        x = np.abs(x) if inst.abs >> bit & 1 else x
        values.append(-x if inst.neg >> bit & 1 else x)
    largest = np.where(np.isnan(values).any(axis=0), np.float32(np.nan), np.max(values, axis=0))
    np.copyto(state.v[inst.vdst.offset - VECTOR], largest.view(U32), where=state.active())


def swap_lanes(inst: Any, state: State) -> None:
    """V_PERMLANE16_SWAP_B32 and V_PERMLANE32_SWAP_B32, as their pseudocode has them."""
    run = 16 if "16" in inst.op.name else 32
    to, source = state.v[inst.vdst.offset - VECTOR], state.v[inst.src0.offset - VECTOR]
    for low in (lane for lane in range(LANES) if lane % (2 * run) < run):
        source[low], to[low + run] = to[low + run], source[low]


def row_and_k(rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row, and the first k, of the elements that each lane gives to a matrix product (7.1.5)."""
    return LANE % rows, LANE // rows * (k // (LANES // rows))


def result_places(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the row and column of D of [registers, 64]: groups of lanes take four rows in turn (7.1.4)."""
    groups, register = LANES // rows, np.arange(rows * rows // LANES)[:, None]
    row = register // 4 * 4 * groups + 4 * (LANE // rows) + register % 4
    return row, np.broadcast_to(LANE % rows, row.shape)


def accumulate(inst: Any, state: State, products: np.ndarray) -> None:
    """Adds float64[rows, rows] to the third operand, and writes the sum, rounded once."""
    row, column = result_places(len(products))
    count = len(row)
    file = state.a if inst.acc_cd else state.v
    if inst.src2.offset >= VECTOR:
        first = inst.src2.offset - VECTOR
        addend = file[first : first + count].view(np.float32).astype(float)
    else:
        assert inst.src2.offset == INLINE_ZERO, inst
        addend = np.zeros((count, LANES))
    to = inst.vdst.offset - VECTOR
    file[to : to + count] = (products[row, column] + addend).astype(np.float32).view(U32)


def factor(state: State, operand: Any, accumulation: int, count: int) -> np.ndarray:
    """Returns the bytes of [64, 4 * count] of a factor."""
    first = operand.offset - VECTOR
    words = (state.a if accumulation else state.v)[first : first + count]
    return np.ascontiguousarray(words.T).view(np.uint8)


def scaled_matrix(inst: Any, state: State) -> None:
    """V_MFMA_SCALE_F32_16X16X128_F8F6F4 of FP4 (7.2.1): a lane's scale belongs to its own 32 elements.

    OP_SEL has the low bits of both matrices' byte selectors, OP_SEL_HI the high bits.
    """
    assert (inst.cbsz, inst.blgp, inst.abid) == (4, 4, 1), inst
    row, k = row_and_k(16, 128)
    matrices = np.zeros((2, 16, 128))
    for which, (operand, scale) in enumerate(((inst.src0, inst.scale_src0), (inst.src1, inst.scale_src1))):
        packed = factor(state, operand, inst.acc >> which & 1, 4)
        selector = (inst.opsel >> which & 1) + 2 * (inst.opsel_hi >> which & 1)
        byte = state.source(scale, 1)[0] >> U32(8 * selector) & U32(255)
        power = np.where(byte == 255, np.nan, 2.0 ** (byte.astype(float) - 127))
        for i in range(32):
            matrices[which, row, k + i] = e2m1(packed[:, i // 2] >> (4 * (i % 2)) & 15) * power
    accumulate(inst, state, matrices[0] @ matrices[1].T)


def bfloat16_matrix(inst: Any, state: State) -> None:
    """V_MFMA_F32_32X32X16_BF16: tinygrad gives lanes 32 to 63 rows 16 to 31 of the result."""
    row, k = row_and_k(32, 16)
    matrices = np.zeros((2, 32, 16))
    for which, operand in enumerate((inst.src0, inst.src1)):
        values = factor(state, operand, inst.acc >> which & 1, 4).view(ml_dtypes.bfloat16).astype(float)
        for i in range(8):
            matrices[which, row, k + i] = values[:, i]
    accumulate(inst, state, matrices[0] @ matrices[1].T)


def read_transposed(inst: Any, state: State) -> None:
    """DS_READ_B64_TR_B16 (11.4): transposes 4 x 16 elements of 16 bits in each 16 lanes."""
    first = state.v[inst.addr.offset - VECTOR].astype(int) + inst.offset0 + 256 * inst.offset1
    elements = np.stack([state.lds[at : at + 8].view(np.uint16) for at in first])
    result = np.zeros((LANES, 4), np.uint16)
    for lane in range(LANES):
        group, column = lane // 16 * 16, lane % 16
        for row in range(4):
            result[lane, row] = elements[group + 4 * row + column // 4, column % 4]
    to = inst.vdst.offset - VECTOR
    (state.a if inst.acc else state.v)[to : to + 2] = result.view(U32).T


def load_into_lds(inst: Any, state: State) -> None:
    """GLOBAL_LOAD_LDS_DWORDX4 (10.3): lane n's bytes go to M0 + offset + 16 n."""
    low, high = (state.v[inst.addr.offset - VECTOR + word].astype(int) for word in (0, 1))
    if inst.saddr.offset == NO_SCALAR:
        addresses = low | high << 32
    else:
        addresses = low + int(state.s[inst.saddr.offset : inst.saddr.offset + 2].view(np.uint64)[0])
    for lane in np.flatnonzero(state.active()):
        at = (int(state.s[M0]) & 0x3FFFC) + inst.offset + 16 * lane
        state.lds[at : at + 16] = memory(addresses[lane] + inst.offset, 16)


def buffer(inst: Any, state: State) -> None:
    """BUFFER_LOAD and _STORE of 1, 2 and 12 bytes, for which tinygrad takes 4 (9.1.5.1)."""
    assert (inst.offen, inst.idxen, inst.lds, inst.acc) == (1, 0, 0, 0), inst
    size = next(n for name, n in BUFFER_BYTES.items() if inst.op.name.endswith(name))
    descriptor = state.s[inst.srsrc.offset : inst.srsrc.offset + 4]
    base = int(descriptor[:2].view(np.uint64)[0]) & (2**48 - 1)
    offset = state.v[inst.vaddr.offset - VECTOR].astype(int) + inst.offset
    first = inst.vdata.offset - VECTOR
    for lane in np.flatnonzero(state.active()):
        inside, words = offset[lane] < descriptor[2], np.zeros(-(-size // 4), U32)
        place = base + int(state.s[inst.soffset.offset]) + offset[lane]
        if "LOAD" in inst.op.name:
            if inside:
                words.view(np.uint8)[:size] = memory(place, size)
            state.v[first : first + len(words), lane] = words
        elif inside:
            memory(place, size)[:] = state.v[first : first + 1, lane].copy().view(np.uint8)[:size]


def buffer_into_lds(inst: Any, state: State) -> None:
    """BUFFER_LOAD_DWORD and _DWORDX4 with LDS: lane n's bytes go to M0 + offset + their size times n.

    tinygrad loads them from the bare address into a register.
    """
    assert (inst.offen, inst.idxen) == (1, 0), inst
    size = 16 if inst.op.name.endswith("X4") else 4
    descriptor = state.s[inst.srsrc.offset : inst.srsrc.offset + 4]
    base = int(descriptor[:2].view(np.uint64)[0]) & (2**48 - 1)
    offset = state.v[inst.vaddr.offset - VECTOR].astype(int) + inst.offset
    for lane in np.flatnonzero(state.active()):
        at = (int(state.s[M0]) & 0x3FFFC) + inst.offset + size * lane
        place = base + int(state.s[inst.soffset.offset]) + offset[lane]
        state.lds[at : at + size] = memory(place, size) if offset[lane] < descriptor[2] else 0


BUFFER_BYTES = {"UBYTE": 1, "BYTE": 1, "USHORT": 2, "SHORT": 2, "DWORDX3": 12}


def write_lds(inst: Any, state: State) -> None:
    """DS_WRITE_B64 and _B128, whose data tinygrad takes from vector registers even if ACC is set."""
    size = 16 if inst.op.name.endswith("128") else 8
    data = factor(state, inst.data0, inst.acc, size // 4)
    at = state.v[inst.addr.offset - VECTOR].astype(int) + inst.offset0 + 256 * inst.offset1
    for lane in np.flatnonzero(state.active()):
        state.lds[at[lane] : at[lane] + size] = data[lane]


def of_16_bits(inst: Any, state: State) -> None:
    """V_ADD_U16, V_LSHLREV_B16 and V_LSHRREV_B16; tinygrad takes v128 and up for halves of v0 and up."""
    a, b = state.source(inst.src0.offset, 1)[0] & 0xFFFF, state.v[inst.vsrc1.offset - VECTOR] & U32(0xFFFF)
    name = inst.op.name
    result = a + b if "ADD" in name else b << (a & 15) if "LSHL" in name else b >> (a & 15)
    np.copyto(state.v[inst.vdst.offset - VECTOR], result & U32(0xFFFF), where=state.active())


def across_lanes(inst: Any, state: State) -> None:
    """V_MOV_B32, V_ADD_U32, V_XOR_B32, V_MAX_I32 with DPP; tinygrad reads lanes it has written."""
    if inst.dpp < 0x100:  # quad_perm
        lanes = LANE // 4 * 4 + (inst.dpp >> 2 * (LANE % 4) & 3)
    else:
        kind, count = inst.dpp & 0x1F0, inst.dpp & 15
        assert kind == 0x120 or inst.dpp == 0x141, inst  # row_ror and row_half_mirror
        mirrored = LANE // 8 * 8 + 7 - LANE % 8
        lanes = mirrored if inst.dpp == 0x141 else LANE // 16 * 16 + (LANE - count) % 16
    taken = state.v[inst.vsrc0.offset - VECTOR][lanes]
    name = inst.op.name.removesuffix("_E32")
    if name != "V_MOV_B32":
        other = state.v[inst.vsrc1.offset - VECTOR]
        if name == "V_MAX_I32":
            taken = np.maximum(taken.view("i4"), other.view("i4"))
        else:
            taken = taken ^ other if name == "V_XOR_B32" else taken + other
    np.copyto(state.v[inst.vdst.offset - VECTOR], taken.view(U32), where=state.active())


INSTRUCTIONS = {
    "V_CVT_SCALEF32_PK_FP4_F32": convert_to_fp4,
    "V_MAXIMUM3_F32": maximum,
    "V_PERMLANE16_SWAP_B32_E32": swap_lanes,
    "V_PERMLANE32_SWAP_B32_E32": swap_lanes,
    **dict.fromkeys(("V_ADD_U16_E32", "V_LSHLREV_B16_E32", "V_LSHRREV_B16_E32"), of_16_bits),
    "V_MFMA_SCALE_F32_16X16X128_F8F6F4": scaled_matrix,
    "V_MFMA_F32_32X32X16_BF16": bfloat16_matrix,
    "DS_READ_B64_TR_B16": read_transposed,
    "GLOBAL_LOAD_LDS_DWORDX4": load_into_lds,
    **dict.fromkeys(("DS_WRITE_B64", "DS_WRITE_B128"), write_lds),
    **dict.fromkeys(("V_MOV_B32_E32 dpp", "V_ADD_U32_E32 dpp"), across_lanes),
    **dict.fromkeys(("V_XOR_B32_E32 dpp", "V_MAX_I32_E32 dpp"), across_lanes),
    **dict.fromkeys(("BUFFER_LOAD_DWORD lds", "BUFFER_LOAD_DWORDX4 lds"), buffer_into_lds),
    "BUFFER_LOAD_DWORDX3": buffer,
    **dict.fromkeys(("BUFFER_LOAD_UBYTE", "BUFFER_LOAD_USHORT"), buffer),
    **dict.fromkeys(("BUFFER_STORE_BYTE", "BUFFER_STORE_SHORT"), buffer),
}


def function_of(inst: Any):
    """Returns the function of a decoded instruction, or None."""
    into_lds = getattr(inst, "lds", 0) and inst.op.name.startswith("BUFFER")
    return INSTRUCTIONS.get(inst.op.name + (" dpp" if hasattr(inst, "dpp") else " lds" if into_lds else ""))
