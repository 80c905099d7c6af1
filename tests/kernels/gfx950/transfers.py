"""The instructions that move data between registers, LDS and global memory.

Each reads its registers at once. What it does with them is returned, to be done by the time it is waited for,
with the bytes of LDS that it reads or writes.
"""

import re
from collections.abc import Callable

import numpy as np

from gfx950.assembly import M0, Instruction
from gfx950.races import Access
from gfx950.wave import U32, Wave

Transfer = tuple[Callable[[], None], Access | None]
"""What a transfer does, and its access to LDS."""


def words_of(wave: Wave, first: int, size: int) -> np.ndarray:
    """Returns uint8[64, size] from the registers from `first` on."""
    count = -(-size // 4)
    words = np.ascontiguousarray(wave.v[first : first + count].T)
    return words.view(np.uint8)[:, :size]


def write_words(wave: Wave, first: int, data: np.ndarray, mask: np.ndarray) -> None:
    """Writes uint8[64, size] to registers, and zeros above narrow values."""
    size = data.shape[1]
    filled = np.zeros((64, -(-size // 4) * 4), np.uint8)
    filled[:, :size] = data
    for i, word in enumerate(filled.view(U32).T):
        np.copyto(wave.v[first + i], word, where=mask)


def size_of(opcode: str) -> int:
    """Returns the number of bytes that an opcode moves in a lane."""
    if wide := re.search(r"dword(?:x(\d))?$", opcode):
        return 4 * int(wide[1] or 1)
    narrow = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2}
    return narrow[opcode.rsplit("_", 1)[1]]


def load(memory, addresses: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
    data = np.zeros((64, size), np.uint8)
    if mask.any():
        data[mask] = memory.load(addresses[mask], size)
    return data


def access(wave: Wave, i: Instruction, addresses: np.ndarray, size: int, writes: bool) -> Access:
    return Access(wave.number, writes, np.unique(wave.lds.places(addresses, size)), i.text)


def into_lds(wave: Wave, i: Instruction, addresses: np.ndarray, size: int, mask: np.ndarray) -> Transfer:
    """Writes each lane's bytes to LDS, one lane after another from M0[17:0] on."""
    assert not i.integer("offset"), i.text
    lanes, places = wave.lanes, (wave.s[M0] & 0x3FFFF) + size * np.arange(64)

    def store():
        wave.lds.store(places[lanes], load(wave.memory, addresses, size, mask)[lanes])

    return store, access(wave, i, places[lanes], size, writes=True)


def buffer(wave: Wave, i: Instruction) -> Transfer:
    """Transfers through a descriptor; offsets past its size load zeros and store nothing.

    The scalar offset does not count in that (section 9.1.5.1). Each word would be checked for itself, but
    none of this project's lanes is partly inside.
    """
    *data, offsets, descriptor, scalar_offset = i.operands
    base = wave.read_scalar(descriptor, 2) & (2**48 - 1)
    stride = wave.s[descriptor.index + 1] >> 16 & 0x3FFF
    records = wave.s[descriptor.index + 2]
    assert "offen" in i.modifiers, i.text
    assert stride == 0, i.text
    within = wave.v[offsets.index].astype(np.int64) + i.integer("offset")
    added = wave.read_scalar(scalar_offset, 1)
    inside = within < records
    assert np.all(within[inside] + size_of(i.opcode) <= records), i.text
    return transfer(wave, i, data, base + within + added, inside)


def through_global(wave: Wave, i: Instruction) -> Transfer:
    *data, address, base = i.operands
    if base.kind == "s":
        addresses = wave.read_scalar(base, 2) + wave.v[address.index].astype(np.int64)
    else:
        addresses = wave.read(address, "w").astype(np.int64)
    return transfer(wave, i, data, addresses + i.integer("offset"), np.ones(64, bool))


def transfer(wave: Wave, i: Instruction, data, addresses: np.ndarray, inside: np.ndarray) -> Transfer:
    size, lanes = size_of(i.opcode), wave.lanes
    mask = lanes & inside
    if "store" in i.opcode:
        values = words_of(wave, data[0].index, size)[mask]
        return lambda: wave.memory.store(addresses[mask], values), None
    if "lds" in i.modifiers or "_lds_" in i.opcode:
        return into_lds(wave, i, addresses, size, mask)
    first = data[0].index
    return lambda: write_words(wave, first, load(wave.memory, addresses, size, mask), lanes), None


def permute(wave: Wave, i: Instruction) -> Transfer:
    to, address, source = i.operands
    lanes = (wave.v[address.index] + U32(i.integer("offset"))) // U32(4) % U32(64)
    mask, values = wave.lanes, np.where(wave.lanes, wave.v[source.index], U32(0))[lanes]
    return lambda: np.copyto(wave.v[to.index], values, where=mask), None


def share(wave: Wave, i: Instruction) -> Transfer:
    """LDS: one place an instruction, or two, whose offsets count elements, or 64 of them."""
    name = re.fullmatch(r"ds_(read|write)(2?)(st64)?_[bu](\d+)(_d16_hi)?", i.opcode)
    assert name, i.text
    kind, two, far, bits, high = name.groups()
    assert kind == "write" or not high, i.text
    size = int(bits) // 8
    address, values = (i.operands[1], i.operands[:1]) if kind == "read" else (i.operands[0], i.operands[1:])
    unit = size * (64 if far else 1)
    offsets = [i.integer("offset")]
    if two:
        offsets = [unit * i.integer("offset0"), unit * i.integer("offset1")]
    places = [wave.v[address.index].astype(np.int64) + offset for offset in offsets]
    mask = wave.lanes

    def write(taken):
        for place, data in zip(places, taken, strict=True):
            wave.lds.store(place[mask], data[mask])

    def read():
        for n, place in enumerate(places):
            data = load(wave.lds, place, size, mask)
            write_words(wave, values[0].index + n * size // 4, data, mask)

    touched = access(wave, i, np.concatenate(places)[np.tile(mask, len(places))], size, kind == "write")
    if kind == "read":
        return read, touched
    whole = [words_of(wave, o.index, 4 if high else size).copy() for o in values]
    return lambda: write([data[:, 2 : 2 + size] if high else data for data in whole]), touched


def transposed(wave: Wave, i: Instruction) -> Transfer:
    """Reads four 16-bit elements a lane and transposes those of each 16 lanes, as a matrix of 4 x 16.

    Lane l reads elements 4 (l % 4) to 4 (l % 4) + 3 of row l // 4 % 4, and receives column l % 16.
    """
    to, address = i.operands
    assert wave.lanes.all(), i.text
    places = wave.v[address.index].astype(np.int64) + i.integer("offset")

    def read():
        data = load(wave.lds, places, 8, wave.lanes).view(np.uint16).reshape(4, 4, 16)
        columns = np.ascontiguousarray(data.swapaxes(1, 2)).view(np.uint8).reshape(64, 8)
        write_words(wave, to.index, columns, wave.lanes)

    return read, access(wave, i, places, 8, writes=False)


KNOWN = {"offset", "offset0", "offset1", "offen", "lds"}


def run(wave: Wave, i: Instruction) -> None:
    assert i.modifiers.keys() <= KNOWN, i.text
    if i.opcode == "ds_bpermute_b32":
        wave.later("lgkmcnt", *permute(wave, i))
    elif i.opcode == "ds_read_b64_tr_b16":
        wave.later("lgkmcnt", *transposed(wave, i))
    elif i.opcode.startswith("ds_"):
        wave.later("lgkmcnt", *share(wave, i))
    else:
        move = {"buffer": buffer, "global": through_global}[i.opcode.split("_")[0]]
        wave.later("vmcnt", *move(wave, i))
