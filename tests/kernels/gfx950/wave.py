"""The registers of a wave of 64 lanes."""

from collections.abc import Callable, Collection

import numpy as np

from gfx950.assembly import EXEC, Operand
from gfx950.memory import Memory
from gfx950.races import Access, Accesses

U32, U64, LANES = np.uint32, np.uint64, 64
VIEWS = {"u": np.uint32, "i": np.int32, "f": np.float32}


class Wave:
    """A wave's registers: v of uint32[512, 64], s of integers, SCC; `lanes` is the mask of EXEC.

    Transfers are done at once, or, if their counter is in `late`, only when the wave waits for them: code
    that is right gives the same either way.

    Attributes:
        number: The wave's place in its work-group.
        place: The index of its next instruction.
        interval: The number of barriers that it has passed.
        pending: For each counter what is not waited for: an effect if it is late, and an access to LDS.
    """

    def __init__(self, number: int, memory: Memory, lds: Memory, accesses: Accesses, late: Collection[str]):
        self.number, self.memory, self.lds, self.accesses = number, memory, lds, accesses
        self.late, self.scc, self.place, self.interval = late, False, 0, 0
        self.pending: dict[str, list[tuple[Callable[[], None] | None, Access | None]]]
        self.pending = {"vmcnt": [], "lgkmcnt": []}
        self.scalar_loads: list[Callable[[], None]] = []
        noise = np.random.default_rng(2)  # what nothing has written must not matter
        self.v = noise.integers(0, 2**32, (512, LANES), U32)
        self.s = [int(x) for x in noise.integers(0, 2**32, 128)]
        self.write_scalar(EXEC, 2**64 - 1, 2)

    def later(self, counter: str, effect: Callable[[], None], access: Access | None = None) -> None:
        """Begins a transfer, whose effect is done now or late."""
        if access:
            self.accesses.begin(access, self.interval)
        if counter not in self.late:
            effect()
        self.pending[counter].append((effect if counter in self.late else None, access))

    def later_scalar(self, effect: Callable[[], None]) -> None:
        """Begins a scalar load, whose effect is done now or late."""
        if "lgkmcnt" in self.late:
            self.scalar_loads.append(effect)
        else:
            effect()

    def wait(self, counter: str, most: int) -> None:
        """Completes the oldest transfers until at most `most` are left; scalar loads have no order."""
        pending = self.pending[counter]
        if counter == "lgkmcnt" and self.scalar_loads:
            assert most == 0, "a scalar load is waited for by its number"
            pending += [(effect, None) for effect in self.scalar_loads]
            self.scalar_loads = []
        while len(pending) > most:
            effect, access = pending.pop(0)
            if effect:
                effect()
            if access:
                self.accesses.end(access, self.interval)

    def read_scalar(self, o: Operand, words: int) -> int:
        if o.kind == "constant":
            return o.value & (2 ** (32 * words) - 1)
        assert o.kind == "s", o
        return sum(self.s[o.index + i] << (32 * i) for i in range(words))

    def write_scalar(self, index: int, value: int, words: int) -> None:
        for i in range(words):
            self.s[index + i] = value >> (32 * i) & (2**32 - 1)
        if index == EXEC:
            self.lanes = as_mask(value)

    def read(self, o: Operand, kind: str) -> np.ndarray:
        """Returns an operand's values of [64] as a kind in arithmetic.OPERATIONS."""
        assert kind == "f" or not (o.negative or o.absolute), o
        if kind == "w":
            if o.kind == "v":
                return self.v[o.index].astype(U64) | (self.v[o.index + 1].astype(U64) << U64(32))
            return np.full(LANES, self.read_scalar(o, 2), U64)
        bits = self.v[o.index] if o.kind == "v" else np.full(LANES, self.read_scalar(o, 1), U32)
        values = bits.view(VIEWS[kind])
        if kind == "f":
            values = np.abs(values) if o.absolute else values
            values = -values if o.negative else values
        return values

    def write(self, index: int, values: np.ndarray) -> None:
        """Writes words, or pairs of them, in the lanes of EXEC."""
        if values.dtype == U64:
            self.write(index + 1, (values >> U64(32)).astype(U32))
            values = values.astype(U32)
        np.copyto(self.v[index], np.asarray(values).view(U32), where=self.lanes)

    def write_mask(self, o: Operand, mask: np.ndarray) -> None:
        bits = np.packbits(mask & self.lanes, bitorder="little").tobytes()
        self.write_scalar(o.index, int.from_bytes(bits, "little"), 2)


def as_mask(value: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(value.to_bytes(8, "little"), np.uint8), bitorder="little").astype(bool)
