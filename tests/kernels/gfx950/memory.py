"""Global memory and LDS; touching an address that was not allocated is an error."""

import numpy as np

GUARD = 4096  # bytes between arrays, which nothing may touch
BASE = 0x7F00_0000_0000


class Memory:
    """Bytes from `base` on; unwritten ones contain noise."""

    def __init__(self, base: int, size: int, allocated: bool = False):
        self.base, self.end = base, GUARD
        self.bytes = np.random.default_rng(1).integers(0, 256, size, np.uint8)
        self.allocated = np.full(size, allocated)

    def allocate(self, size: int, alignment: int) -> int:
        """Allocates bytes at an address that is not aligned to more than asked for."""
        start = -(-self.end // 256) * 256 + alignment
        self.end = start + size + GUARD
        assert self.end <= len(self.bytes)
        self.allocated[start : start + size] = True
        return self.base + start

    def at(self, address: int, size: int) -> np.ndarray:
        return self.bytes[address - self.base : address - self.base + size]

    def places(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns indices of [lanes, size] bytes."""
        first = addresses.astype(np.int64) - self.base
        assert np.all((first >= 0) & (first + size <= len(self.bytes))), hex(int(addresses[0]))
        assert np.all(first % min(size, 4) == 0), f"unaligned: {hex(int(addresses[0]))}"
        places = first[:, None] + np.arange(size)
        outside = ~self.allocated[places].all(axis=1)
        assert not outside.any(), f"outside of every array: {hex(int(addresses[outside][0]))}"
        return places

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        return self.bytes[self.places(addresses, size)]

    def store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Writes uint8[lanes, size]."""
        self.bytes[self.places(addresses, values.shape[1])] = values
