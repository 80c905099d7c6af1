"""Runs single instructions of builds for gfx950, with random operands, in tinygrad's emulator and in gfx950/.

    python -m foreign.compare TINYGRAD FOLDER PATTERN …

Both begin with the same registers, LDS and memory, and must end with the same. The instructions that are
left out are those that branch, wait, or that foreign.instructions defines for both.
"""

import ctypes
import fnmatch
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from gfx950 import assembly, scalar, transfers, vector
from gfx950.assembly import EXEC, M0, Instruction
from gfx950.memory import Memory
from gfx950.races import Accesses
from gfx950.wave import Wave

from foreign.emulator import REGISTERS, code_of, supplement
from foreign.instructions import memory

U32 = np.uint32
LDS, DATA = 160 * 1024, 1 << 18  # bytes
TRIALS = 3
SCC = 253  # its operand code
EDGES = [0, 1, 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFF]
WITHIN_AN_ULP = ("v_exp_f32", "v_log_f32", "v_rcp_f32")  # as accurate as the document promises
SKIPPED = ("s_nop", "s_waitcnt", "s_barrier", "s_endpgm", "v_mfma")


def distinct(emu: Any, folder: pathlib.Path, pattern: str, seen: set) -> Iterator[tuple[Instruction, int]]:
    """Yields instructions of builds and their bytes' addresses; one of those that differ in registers."""
    for path in sorted(folder.glob("*.json")):
        if not fnmatch.fnmatch(path.stem, pattern):
            continue
        code = code_of(path.with_suffix(".hsaco").read_bytes(), json.loads(path.read_text())["kernel"])
        kept.append(code)
        program, _ = assembly.read(path.with_suffix(".amdgcn").read_text())
        at = code.ctypes.data
        for i in program:
            inst = emu.decode_inst(memory(at, 16).tobytes(), "cdna")
            while inst.op.name == "S_NOP" != i.opcode.upper():  # before the entry with preloaded arguments
                at += inst.size()
                inst = emu.decode_inst(memory(at, 16).tobytes(), "cdna")
            operands = tuple(
                (o.kind, o.index >= 128, o.words, o.value, o.negative, o.absolute) for o in i.operands
            )
            same = tuple(len({o.index for o in i.operands[:n]}) for n in range(len(i.operands)))
            key = (i.opcode, str(i.modifiers), operands, same)
            if not i.target and not i.opcode.startswith(SKIPPED) and key not in seen:
                seen.add(key)
                yield i, at
            at += inst.size()


kept: list[np.ndarray] = []  # code that tinygrad's emulator may still refer to


class Both:
    """The state of a wave in both emulators."""

    def __init__(self, emu: Any):
        self.emu, self.rng, self.wave = emu, np.random.default_rng(0), emu.WaveState(64, 64)
        self.lds, self.data = np.zeros(LDS, np.uint8), np.zeros(DATA, np.uint8)
        files = {0: self.wave.sgpr_buf, 1: self.wave.vgpr_buf, 5: self.wave.accvgpr_buf}
        self.buffers = {n: file._buf.va_addr for n, file in files.items()}
        self.buffers |= {2: 0, 3: self.lds.ctypes.data}  # memory by its address, and LDS
        self.s = memory(self.buffers[0], 4 * emu.SGPR_COUNT).view(U32)
        self.v, self.a = (
            memory(self.buffers[n], 256 * REGISTERS).view(U32).reshape(REGISTERS, 64) for n in (1, 5)
        )

    def words(self, shape: Any) -> np.ndarray:
        """Draws integers, floats, small integers and edge cases."""
        floats = self.rng.standard_normal(shape) * 2.0 ** self.rng.integers(-20, 20, shape)
        kinds = [
            self.rng.integers(0, 2**32, shape, U32),
            floats.astype(np.float32).view(U32),
            self.rng.integers(0, 256, shape, U32),
            self.rng.choice(np.array(EDGES, U32), shape),
        ]
        return np.choose(self.rng.integers(0, len(kinds), shape), kinds)

    def draw(self, i: Instruction) -> Wave:
        """Fills tinygrad's state and returns the same as a wave of gfx950/."""
        self.lds[:], self.data[:] = (self.rng.integers(0, 256, n, np.uint8) for n in (LDS, DATA))
        self.v[:], self.a[:] = self.words(self.v.shape), self.words(self.a.shape)
        self.s[:M0], self.s[SCC] = self.words(M0), self.rng.integers(0, 2)
        self.s[M0] = 16 * self.rng.integers(0, 64)
        all_lanes = self.rng.random() < 0.5 or "swap" in i.opcode or "_tr_" in i.opcode
        self.s[EXEC : EXEC + 2] = 0xFFFFFFFF if all_lanes else self.rng.integers(0, 2**32, 2, U32)
        self.point(i)
        memories = Memory(self.data.ctypes.data, DATA, True), Memory(0, LDS, True)
        for m, content in zip(memories, (self.data, self.lds), strict=True):
            m.bytes[:] = content
        w = Wave(0, *memories, Accesses(1, LDS), ())
        w.v[:REGISTERS], w.v[REGISTERS:], w.scc = self.v, self.a, bool(self.s[SCC])
        w.s = [int(x) for x in self.s[:128]]
        w.write_scalar(EXEC, int(self.s[EXEC : EXEC + 2].view(np.uint64)[0]), 2)
        return w

    def point(self, i: Instruction) -> None:
        """Lets the registers of an instruction that accesses memory or LDS contain valid addresses."""
        base = np.array([self.data.ctypes.data + DATA // 4], np.uint64)
        offsets = 16 * self.rng.permutation(64).astype(U32)
        if i.opcode == "ds_bpermute_b32":
            self.v[i.operands[1].index] = offsets // U32(4)
        elif i.opcode.startswith("ds_"):
            self.v[i.operands["read" in i.opcode].index] = offsets
        elif i.opcode.startswith("s_load"):
            self.s[i.operands[1].index : i.operands[1].index + 2] = base.view(U32)
        elif i.opcode.startswith("buffer_"):
            *_, offset, descriptor, added = i.operands
            outside = self.rng.random(64) < (0 if "lds" in i.modifiers else 0.3)
            self.v[offset.index] = np.where(outside, U32(0x80000000), offsets)
            self.s[descriptor.index : descriptor.index + 4] = [*base.view(U32), 0x7FFFFFFE, 0x27000]
            if added.kind == "s":
                self.s[added.index] = 1024
        elif i.opcode.startswith("global_"):
            *_, address, scalar_base = i.operands
            if scalar_base.kind == "s":
                self.s[scalar_base.index : scalar_base.index + 2] = base.view(U32)
                self.v[address.index] = offsets
            else:
                both = (base + offsets).view(U32).reshape(64, 2)
                self.v[address.index], self.v[address.index + 1] = both.T

    def run(self, i: Instruction, at: int, w: Wave) -> None:
        """Executes the instruction in both."""
        self.s[self.emu.PC_LO_IDX : self.emu.PC_HI_IDX + 1] = np.array([at], np.uint64).view(U32)
        (program, runtime), _ = self.emu._decode_at(at, "cdna")
        runtime.fxn(*[ctypes.c_uint64(self.buffers[n]) for n in program.arg.globals])
        kind = {"v": vector, "s": scalar}.get(i.opcode.split("_")[0], transfers)
        with np.errstate(all="ignore"):
            kind.run(w, i)
        for load in w.scalar_loads:
            load()

    def differ(self, i: Instruction, w: Wave) -> bool:
        """Whether the states differ; any NaN is equal to any other."""
        ulps = 1 if i.opcode.startswith(WITHIN_AN_ULP) else 0
        for ours, theirs in ((w.v[:REGISTERS], self.v), (w.v[REGISTERS:], self.a)):
            nan = np.isnan(ours.view(np.float32)) & np.isnan(theirs.view(np.float32))
            if np.any((np.abs(ours.astype(np.int64) - theirs) > ulps) & ~nan):
                return True
        same = np.array_equal(w.memory.bytes, self.data) and np.array_equal(w.lds.bytes, self.lds)
        return not same or w.scc != bool(self.s[SCC]) or w.s != [int(x) for x in self.s[:128]]


def main(snapshot: str, folder: str, patterns: list[str]) -> None:
    """Prints the number of instructions that ran, and those that differ, as a line of JSON."""
    sys.path.insert(0, snapshot)
    from test.mockgpu.amd import emu

    supplement(emu, LDS)
    both, seen, ran, differ = Both(emu), set(), set(), {}
    for pattern in patterns:
        for i, at in distinct(emu, pathlib.Path(folder), pattern, seen):
            ran.add(i.opcode)
            for _ in range(TRIALS):
                w = both.draw(i)
                both.run(i, at, w)
                if both.differ(i, w):
                    differ.setdefault(i.opcode, i.text)
    print(json.dumps({"instructions": len(seen), "opcodes": len(ran), "differ": differ}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
