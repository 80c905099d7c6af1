"""Finds races in LDS: a read and a write of a byte by two waves that no barrier separates.

An access lasts from its instruction to the wait for it, and so may last beyond barriers. Whether two accesses
race does not depend on the order in which the emulator runs the waves, nor on when it completes a transfer.
Two writes are no race here: Triton lets waves write the same value to the same place.
"""

from typing import NamedTuple

import numpy as np

UNFINISHED = np.iinfo(np.int16).max


class Access(NamedTuple):
    """The bytes of LDS that an instruction of a wave reads or writes."""

    wave: int
    writes: bool
    places: np.ndarray
    text: str


class Accesses:
    """The accesses of a work-group to LDS: for each byte and wave the last barrier interval of each kind."""

    def __init__(self, waves: int, size: int):
        self.last = {writes: np.full((waves, size), -1, np.int16) for writes in (False, True)}

    def begin(self, access: Access, interval: int) -> None:
        """Records an access that begins after so many barriers; fails if another wave's may be under way."""
        last = self.last[not access.writes][:, access.places].max(axis=1, initial=-1)
        if access.text.startswith("ds_") or last[access.wave] < UNFINISHED:
            last[access.wave] = -1  # LDS instructions of a wave are done in order, loads into LDS are not
        other = int(np.argmax(last))
        assert last[other] < interval, (
            f"race in LDS: wave {access.wave} runs {access.text!r} while a "
            f"{'read' if access.writes else 'write'} of the same bytes by wave {other} may be under way"
        )
        self.last[access.writes][access.wave, access.places] = UNFINISHED

    def end(self, access: Access, interval: int) -> None:
        self.last[access.writes][access.wave, access.places] = interval
