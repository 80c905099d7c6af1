"""Reads the assembly of a compiled kernel: registers, spills, occupancy, instructions of its main loop.

It takes AMDGCN (`.amdgcn`), and NVIDIA's SASS as Triton's disassembler prints it.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Instruction(NamedTuple):
    """An instruction: its opcode, and the label that it branches to, or None."""

    opcode: str
    target: str | None


_AMD = (
    ("matrix", r"v_(mfma|smfmac)"),
    ("wait", r"s_(waitcnt|nop|sleep)"),
    ("barrier", r"s_barrier"),
    ("branch", r"s_(c?branch|setpc|endpgm)"),
    ("scratch", r"scratch_"),
    ("global_to_lds", r"(global|buffer)_load_(lds_)?\w+ .*\blds\b|global_load_lds"),
    ("global_load", r"(global|buffer|flat)_load"),
    ("global_store", r"(global|buffer|flat)_(store|atomic)"),
    ("lds_read", r"ds_(read|load)"),
    ("lds_write", r"ds_(write|store)"),
    ("lds_permute", r"ds_(bpermute|permute|swizzle)"),
    ("accumulator_move", r"v_accvgpr"),
    ("convert", r"v_cvt_scalef32"),
    ("scalar", r"s_"),
    ("vector", r"v_"),
)
_NVIDIA = (
    ("matrix", r"UTC\w*MMA|\w*(HGMMA|QGMMA|HMMA|QMMA|OMMA)"),
    ("barrier", r"BAR|SYNCS|DEPBAR|LDGDEPBAR|WARPGROUP|WARPSYNC|FENCE|MEMBAR"),
    ("branch", r"BRA|EXIT|BSYNC|BSSY"),
    ("scratch", r"STL|LDL"),
    ("global_to_lds", r"LDGSTS|UTMALDG"),
    ("global_load", r"LDG"),
    ("global_store", r"STG|RED"),
    ("lds_read", r"LDS|LDSM"),
    ("lds_write", r"STS|STSM"),
    ("scalar", r"U[A-Z]|R2UR"),
    ("vector", r""),
)


def amd_resources(assembly: str) -> dict[str, int]:
    """Returns registers, spills and memory of a kernel from its AMDGCN metadata; vgprs include agprs."""
    fields = {
        "vgprs": "vgpr_count",
        "agprs": "agpr_count",
        "sgprs": "sgpr_count",
        "vgpr_spills": "vgpr_spill_count",
        "sgpr_spills": "sgpr_spill_count",
        "scratch_bytes": "private_segment_fixed_size",
        "static_lds_bytes": "group_segment_fixed_size",
        "kernarg_bytes": "kernarg_segment_size",
    }
    return {name: _number(rf"^\s+(?:- )?\.{field}:\s+(\d+)", assembly) for name, field in fields.items()}


def amd_arguments(assembly: str) -> list[dict[str, int | str | None]]:
    """Returns offset, size, kind and address space of each kernel argument, the hidden ones last."""
    [metadata] = re.findall(r"\.args:\n(.*?)^\s+\.group_segment", assembly, re.M | re.S)
    arguments = []
    for entry in re.split(r"^\s+- ", metadata, flags=re.M)[1:]:
        fields = dict(re.findall(r"\.(\w+):\s+(\S+)", entry))
        arguments.append(_argument(fields["offset"], fields["size"], fields["value_kind"], fields))
    return arguments


def amd_descriptor(assembly: str) -> dict[str, int]:
    """Returns the kernel descriptor's fields: registers at the start, modes of rounding and subnormals."""
    return {name: int(value) for name, value in re.findall(r"^\s+\.amdhsa_(\w+) (\d+)$", assembly, re.M)}


def cuda_arguments(ptx: str) -> list[dict[str, int | str | None]]:
    """Returns the same for a PTX entry, whose parameters must be pointers to global memory or of 32 bits."""
    [parameters] = re.findall(r"\.entry \w+\((.*?)\)", ptx, re.S)
    found, end = [], 0
    for words in (p.split() for p in parameters.split(",")):
        if words[:4] == [".param", ".u64", ".ptr", ".global"]:
            size, kind, fields = 8, "global_buffer", {"address_space": "global"}
        elif words[:2] == [".param", ".u32"]:
            size, kind, fields = 4, "by_value", {}
        else:
            raise ValueError(f"cuda_arguments takes pointers to global memory and .u32, got {parameters}")
        offset = -(-end // size) * size
        found.append(_argument(offset, size, kind, fields))
        end = offset + size
    return found


def _argument(offset, size, kind: str, fields) -> dict[str, int | str | None]:
    space = fields.get("address_space")
    return {"offset": int(offset), "size": int(size), "kind": kind, "address_space": space}


def amd_occupancy(vgprs: int, lds_bytes: int, warps: int) -> int:
    """Returns the waves a SIMD of gfx950: at most 8, with 512 registers a lane and 160 KiB of LDS for four.

    Source: AMD Instinct CDNA4 ISA; registers are allocated in eights, LDS in units of 1280 bytes.
    """
    by_registers = 512 // (-(-vgprs // 8) * 8) if vgprs else 8
    programs = 160 * 1024 // (-(-lds_bytes // 1280) * 1280) if lds_bytes else 8 * 4 // warps
    return min(8, by_registers, max(1, programs * warps // 4))


def cuda_resources(usage: str) -> dict[str, int]:
    """Returns registers and memory from the output of `cuobjdump -res-usage`."""
    fields = {
        "registers": "REG",
        "stack_bytes": "STACK",
        "scratch_bytes": "LOCAL",
        "static_lds_bytes": "SHARED",
    }
    return {name: _number(rf"\b{field}:(\d+)", usage) for name, field in fields.items()}


def cuda_spills(instructions: Sequence[Instruction | str]) -> int:
    """Counts the instructions that store registers to local memory."""
    return sum(isinstance(x, Instruction) and x.opcode.startswith("STL") for x in instructions)


def cuda_occupancy(registers: int, shared_bytes: int, warps: int) -> int:
    """Returns the warps on a multiprocessor of sm_90 or sm_100: at most 64, in at most 32 programs.

    It has 65,536 registers, allocated to warps in units of 256, and 228 KiB of shared memory, allocated in
    units of 128 bytes; a program takes 1 KiB more than it asks for.
    Source: CUDA C++ Programming Guide, compute capabilities 9.0 and 10.0.
    """
    warp_registers = -(-registers * 32 // 256) * 256
    by_registers = 65536 // warp_registers // warps if registers else 64
    by_shared = 228 * 1024 // (-(-shared_bytes // 128) * 128 + 1024)
    return warps * min(64 // warps, 32, by_registers, by_shared)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text, re.M)
    if match is None:
        raise ValueError(f"the assembly has no match for {pattern!r}")
    return int(match[1])


def amd_instructions(assembly: str) -> list[Instruction | str]:
    """Returns the instructions and labels of AMDGCN text in order; labels are strings."""
    found: list[Instruction | str] = []
    for line in assembly.splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            found.append(label[1])
        elif instruction := re.match(r"\s*((?:v|s|ds|global|buffer|flat|scratch)_\w+)\s*([^;]*)", line):
            opcode, operands = instruction[1], instruction[2].strip()
            branch = opcode.startswith(("s_branch", "s_cbranch"))
            to_lds = " lds" if re.search(r"\blds\b", operands) else ""
            found.append(Instruction(opcode + to_lds, operands if branch else None))
        elif re.match(r"\.Lfunc_end", line):
            break
    return found


def cuda_instructions(sass: str) -> list[Instruction | str]:
    """Returns the instructions of SASS in order, with labels and branched-to addresses as strings."""
    lines = []
    for line in sass.splitlines():
        if label := re.match(r"(LBB\d+):", line):
            lines.append(label[1])
        elif instruction := re.match(r"\S+\t(?:@!?\w+ )?([A-Z][\w.]*)([^;]*);", line):
            target = re.search(r"\b(?:LBB\d+|0x[0-9a-f]+)\s*$", instruction[2])
            branch = instruction[1].startswith("BRA")
            lines.append(Instruction(instruction[1], target[0].strip() if branch and target else None))
    targets = {x.target for x in lines if isinstance(x, Instruction) and x.target}
    found, address = [], 0
    for line in lines:
        if isinstance(line, Instruction):
            if hex(address) in targets:
                found.append(hex(address))
            address += 16
        found.append(line)
    return found


def main_loop(instructions: Sequence[Instruction | str]) -> tuple[list[Instruction], bool]:
    """Returns the innermost loop with most matrix instructions, and True.

    Without matrix instructions it is the longest loop; without a loop, the whole kernel and False.
    """
    everything = [x for x in instructions if isinstance(x, Instruction)]
    labels = {x: i for i, x in enumerate(instructions) if isinstance(x, str)}
    ends: dict[int, int] = {}
    for i, x in enumerate(instructions):
        if isinstance(x, Instruction) and x.target and labels.get(x.target, i) < i:
            ends[labels[x.target]] = i
    loops = {
        span: [x for x in instructions[span[0] : span[1] + 1] if isinstance(x, Instruction)]
        for span in ends.items()
    }
    loops = {span: body for span, body in loops.items() if len(body) > 1}  # SASS ends in a branch to itself
    if _matrices(everything):  # drop loops that only wait or store
        loops = {span: body for span, body in loops.items() if _matrices(body)}
    inner = [body for span, body in loops.items() if not any(span[0] < other[0] < span[1] for other in loops)]
    if not inner:
        return everything, False
    return max(inner, key=lambda body: (_matrices(body), len(body))), True


def _matrices(body: Sequence[Instruction]) -> int:
    return sum(_class(x.opcode) == "matrix" for x in body)


def count_classes(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Counts the instructions of each class."""
    return dict(Counter(_class(x.opcode) for x in instructions).most_common())


def count_opcodes(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Counts the instructions of each opcode; a load into LDS has " lds" after its opcode."""
    return dict(Counter(x.opcode for x in instructions).most_common())


@functools.cache
def _class(opcode: str) -> str:
    classes = _NVIDIA if opcode[0].isupper() else _AMD
    return next(name for name, pattern in classes if re.match(pattern, opcode))
