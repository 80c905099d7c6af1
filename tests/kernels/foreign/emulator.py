"""Runs builds for gfx950 in tinygrad's emulator of AMD's machine code, which decodes the code objects' bytes.

tinygrad computes most instructions from the pseudocode of AMD's document. What it lacks or has otherwise is
in foreign.instructions. It runs work-groups of one process's own memory, waves one after another from barrier
to barrier; a wrong address may end the process.

Source: github.com/tinygrad/tinygrad, test/mockgpu/amd/emu.py at a9069c177a9d.
"""

import ctypes
import itertools
import json
import pathlib
import struct
import sys
import types
from typing import Any

import numpy as np

from foreign.instructions import State, function_of, memory
from mxjax.kernels.cases import check

GUARD, FILL = 4096, 0xA5  # bytes around each array that nothing may write, and what they contain
REGISTERS = 256
# What run takes of tinygrad's buffers: scalar and vector registers, LDS, accumulation registers.
BUFFERS = types.SimpleNamespace(arg=types.SimpleNamespace(globals=[0, 1, 3, 5]))
LDS_UNIT = 512  # bytes, in which tinygrad counts LDS


def code_of(elf: bytes, name: str) -> np.ndarray:
    """Returns the bytes of a function in a code object, aligned to 256, and 256 more."""
    sections_at, (width, count) = struct.unpack_from("<Q", elf, 0x28)[0], struct.unpack_from("<HH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + i * width) for i in range(count)]
    for _, kind, _, _, start, length, strings, *_ in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        for place in range(start, start + length, 24):
            text, _, _, section, value, size = struct.unpack_from("<IBBHQQ", elf, place)
            first = sections[strings][4] + text
            if elf[first : elf.index(b"\0", first)].decode() == name:
                offset = sections[section][4] + value - sections[section][3]
                return aligned(np.frombuffer(elf[offset : offset + size] + bytes(256), np.uint8))
    raise KeyError(name)


def aligned(data: np.ndarray) -> np.ndarray:
    """Copies bytes to an address that is a multiple of 256."""
    raw = np.zeros(len(data) + 256, np.uint8)
    first = -raw.ctypes.data % 256
    raw[first : first + len(data)] = data
    return raw[first : first + len(data)]


def supplement(emu: Any, lds_bytes: int) -> None:
    """Makes tinygrad's emulator run the instructions of foreign.instructions by their functions."""
    original = emu._decode_at
    emu._get_ftz_lib = lambda: (None, 0)  # these kernels keep subnormal numbers

    def decode(pc: int, arch: str):
        inst = emu.decode_inst(bytes((ctypes.c_char * 16).from_address(pc).raw), arch)
        function = function_of(inst)
        if function is None:
            return original(pc, arch)

        def run(s, v, lds, a):
            scalars = memory(s.value, 4 * emu.SGPR_COUNT).view(np.uint32)
            vectors, accumulators = (
                memory(x.value, 256 * REGISTERS).view(np.uint32).reshape(REGISTERS, 64) for x in (v, a)
            )
            function(inst, State(scalars, vectors, accumulators, memory(lds.value, lds_bytes)))
            count = scalars[emu.PC_LO_IDX : emu.PC_HI_IDX + 1].view(np.uint64)
            count += np.uint64(inst.size())

        return (BUFFERS, types.SimpleNamespace(fxn=run)), inst

    emu._decode_at = decode


def run(record: dict[str, Any], elf: bytes) -> dict[str, bool]:
    """Returns, for each output of a record, whether it is as expected and nothing around it was written."""
    from test.mockgpu.amd import emu

    inputs = check.make_inputs(record)
    addresses, arrays = place(record, inputs)
    segment = aligned(np.frombuffer(check.argument_segment(record, addresses), np.uint8))
    code, (user, settings) = code_of(elf, record["kernel"]), registers(record, segment.ctypes.data)
    grid, threads = (*record["grid"], 1, 1)[:3], (record["block"][0], 1, 1)
    launch = code.ctypes.data, len(code), *grid, *threads, segment.ctypes.data, settings, 0, "cdna", user
    original = emu._decode_at
    supplement(emu, LDS_UNIT * -(-record["shared_bytes"] // LDS_UNIT))
    try:
        emu.run_asm(*launch)
    finally:
        emu._decode_at = original
    wanted, agree = check.expected_outputs(record, inputs), {}
    for a in (a for a in record["arguments"] if a["role"] == "output"):
        name, end = a["name"], GUARD + a["bytes"]
        raw = arrays[name]
        untouched = np.all(raw[:GUARD] == FILL) and np.all(raw[end:] == FILL)
        right = check.output_agrees(record, name, raw[GUARD:end].tobytes(), wanted[name])
        agree[name] = bool(untouched and right)
    return agree


def place(
    record: dict[str, Any], inputs: dict[str, np.ndarray]
) -> tuple[dict[str, int], dict[str, np.ndarray]]:
    """Returns the address of each argument, and the arrays with the bytes around them."""
    addresses, arrays = {a["name"]: 1 << 44 for a in record["arguments"]}, {}
    for a in (a for a in record["arguments"] if a["role"] != "unused"):
        raw = aligned(np.full(a["bytes"] + 2 * GUARD, FILL, np.uint8))
        if a["role"] == "input":
            data = np.ascontiguousarray(inputs[a["name"]]).view(np.uint8).reshape(-1)
            raw[GUARD : GUARD + a["bytes"]] = data
        addresses[a["name"]], arrays[a["name"]] = raw.ctypes.data + GUARD, raw
    return addresses, arrays


def registers(record: dict[str, Any], segment: int) -> tuple[list[int], int]:
    """Returns the initial scalar registers, and the settings in the descriptor that tinygrad reads."""
    d, user = record["descriptor"], []
    for name in ("dispatch_ptr", "queue_ptr", "kernarg_segment_ptr", "dispatch_id"):
        if d[f"user_sgpr_{name}"]:
            address = segment if name == "kernarg_segment_ptr" else 0
            user += [address & 0xFFFFFFFF, address >> 32]
    user += [0xDEAD] * d["user_sgpr_kernarg_preload_length"]  # the code loads them itself
    settings = len(user) << 1 | -(-record["shared_bytes"] // LDS_UNIT) << 15
    for bit, axis in zip(itertools.count(7), "xyz"):
        settings |= d[f"system_sgpr_workgroup_id_{axis}"] << bit
    return user, settings


def main(snapshot: str, folder: str, patterns: list[str]) -> None:
    """Runs the builds in a folder whose names match, and prints a line of JSON for each."""
    sys.path.insert(0, snapshot)
    for pattern in patterns:
        for path in sorted(pathlib.Path(folder).glob(f"{pattern}.json")):
            record = json.loads(path.read_text())
            agree = run(record, path.with_suffix(".hsaco").read_bytes())
            print(json.dumps({"name": record["name"], "agree": agree}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
