"""Files to which a run appends lines, such as metrics.jsonl: writing whole lines, finding damaged ones.

Only a kill or a crash can leave half a line, at the end; readers leave it out.
"""

import pathlib
import shlex
import shutil
from collections.abc import Callable, Iterable

from training.files import sync, unused, whole_lines, write_atomically

_MOST_RANGES = 5


class LineFile:
    """Appends lines to a file."""

    def __init__(self, path: pathlib.Path, kept: Iterable[bytes]):
        """Replaces the file by one with the lines `kept`, and opens it."""
        write_atomically(path, b"".join(line + b"\n" for line in kept))
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Appends a line, or nothing if there is no room for it.

        Raises:
          OSError: the line could not be written.
        """
        end, rest = self._file.seek(0, 2), line.encode() + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise

    def sync(self) -> None:
        """Waits until everything written is on the disk."""
        sync(self._file)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def read_lines[T](path: pathlib.Path, parse: Callable[[bytes], T]) -> list[tuple[bytes, T]]:
    """Returns each line with what `parse` makes of it; `parse` raises ValueError for a damaged line.

    Raises:
      ValueError: a line is damaged; the message says which.
    """
    found, damaged = _parse_lines(path, parse)
    if damaged:
        raise ValueError(
            f"line {in_ranges(damaged)} of {path} cannot be read; to set it aside and keep the rest: "
            f"python train.py --resume --out {shlex.quote(str(path.parent))}"
        )
    return found


def set_aside_damaged_lines(path: pathlib.Path, parse: Callable[[bytes], object]) -> list[str]:
    """Removes damaged lines from a file, of which a copy is kept; returns a message if there were any."""
    found, damaged = _parse_lines(path, parse)
    if not damaged:
        return []
    copy = unused(path.with_name(f"damaged-{path.name}"))
    shutil.copyfile(path, copy)
    write_atomically(path, b"".join(line + b"\n" for line, _ in found))
    return [
        f"line {in_ranges(damaged)} of {path} cannot be read: the other {len(found)} stay, "
        f"and {copy.name} is the file as it was"
    ]


def _parse_lines[T](
    path: pathlib.Path, parse: Callable[[bytes], T]
) -> tuple[list[tuple[bytes, T]], list[int]]:
    """Returns the lines that can be read, and the numbers, from 1, of those that cannot."""
    found, damaged = [], []
    for number, line in enumerate(whole_lines(path), 1):
        try:
            found.append((line, parse(line)))
        except (ValueError, OverflowError, RecursionError):
            damaged.append(number)
    return found, damaged


def in_ranges(numbers: Iterable[int]) -> str:
    """Returns ascending numbers as text such as "3, 5 to 9"; at most five ranges, and how many more."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [f"{first} to {last}" if last > first else str(first) for first, last in ranges]
    more = sum(last - first + 1 for first, last in ranges[_MOST_RANGES:])
    return ", ".join(parts[:_MOST_RANGES]) + (f" and {more} more" if more else "")
