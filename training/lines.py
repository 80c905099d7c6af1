"""Files to which a run appends lines, such as metrics.jsonl: writing whole lines, finding damaged ones.

Only a kill or a crash can leave half a line, at the end; readers leave it out.
"""

import bisect
import json
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from training.files import is_same, sync, unused, whole_lines, write_atomically
from training.startup import program_name

_MOST_RANGES, _MOST_REASONS = 5, 3

type Order[T] = Callable[[T], tuple[str, int]]
"""Returns the series that a line belongs to, and its number, which ascends strictly within the series."""


class LineFile:
    """Appends lines to a file, which is put back if it is removed or replaced meanwhile.

    In a folder that is moved the file gets its lines all the same; one in its place is left alone.
    """

    def __init__(self, path: pathlib.Path, kept: Iterable[bytes]):
        """Replaces the file by one with the lines `kept`, and opens it."""
        write_atomically(path, b"".join(line + b"\n" for line in kept))
        self._path, self._file = path, path.open("a+b", buffering=0)
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, line: str) -> None:
        """Appends a line, or nothing if there is no room for it.

        Raises:
          OSError: the line could not be written.
        """
        if not is_same(self._file.fileno(), self._path) and is_same(self._folder, self._path.parent):
            self._put_back()
        end, rest = self._file.seek(0, 2), line.encode() + b"\n"
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            raise

    def _put_back(self) -> None:
        """Writes the lines so far to a new file of that name; a file that is there gets another."""
        self._file.seek(0)
        lines, said = self._file.read(), "was removed"
        if os.path.lexists(self._path):
            other = unused(self._path.with_name(f"replaced-{self._path.name}"))
            self._path.rename(other)
            said = f"was replaced by another file, which is now {other.name}"
        write_atomically(self._path, lines)
        self._file.close()
        self._file = self._path.open("a+b", buffering=0)
        print(f"{program_name()}: warning: {self._path} {said}; it is put back", file=sys.stderr)

    def sync(self) -> None:
        """Waits until everything written is on the disk."""
        sync(self._file)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        os.close(self._folder)


def read_lines[T](
    path: pathlib.Path, parse: Callable[[bytes], T], order: Order[T] | None = None
) -> list[tuple[bytes, T]]:
    """Returns each line with what `parse` makes of it.

    Args:
      path: the file.
      parse: raises ValueError, with the reason, for a damaged line.
      order: None for lines in any order.
    Raises:
      ValueError: a line is damaged or out of order; the message says which.
    """
    found, damaged = _parse_lines(path, parse, order)
    if damaged:
        raise ValueError(
            f"{_describe(path, damaged)}; to set it aside and keep the rest: "
            f"python train.py --resume --out {shlex.quote(str(path.parent))}"
        )
    return found


def set_aside_damaged_lines[T](
    path: pathlib.Path, parse: Callable[[bytes], T], order: Order[T] | None = None
) -> list[str]:
    """Removes the lines at which `read_lines` raises; the file's copy is kept.

    Returns a message if there were any.
    """
    found, damaged = _parse_lines(path, parse, order)
    if not damaged:
        return []
    copy = unused(path.with_name(f"damaged-{path.name}"))
    shutil.copyfile(path, copy)
    write_atomically(path, b"".join(line + b"\n" for line, _ in found))
    return [f"{_describe(path, damaged)}: the other {len(found)} stay, and {copy.name} is the file as it was"]


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the JSON object that a line holds; raises ValueError if it holds anything else."""
    try:
        found = json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _parse_lines[T](
    path: pathlib.Path, parse: Callable[[bytes], T], order: Order[T] | None
) -> tuple[list[tuple[bytes, T]], dict[int, str]]:
    """Returns the good lines, and the reason against each other one by its number, from 1."""
    found: dict[int, tuple[bytes, T]] = {}
    damaged: dict[int, str] = {}
    for number, line in enumerate(whole_lines(path), 1):
        try:
            found[number] = line, parse(line)
        except ValueError as error:
            damaged[number] = str(error)
    if order is not None:
        damaged |= _misplaced({number: order(value) for number, (_, value) in found.items()})
    good = [line for number, line in found.items() if number not in damaged]
    return good, dict(sorted(damaged.items()))


def _misplaced(places: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Returns the reason against each of the fewest lines without which every series ascends.

    Args:
      places: what `Order` returns, by the line's number.
    """
    series: dict[str, dict[int, int]] = {}
    for number, (name, place) in places.items():
        series.setdefault(name, {})[number] = place
    reasons = {}
    for members in series.values():
        kept = longest_ascending(members)
        values = {members[number] for number in kept}
        for number in members.keys() - kept:
            reasons[number] = "it is there twice" if members[number] in values else "it is out of order"
    return reasons


def longest_ascending(values: Mapping[int, int]) -> list[int]:
    """Returns the keys of a longest sequence of values, in their order, that ascend strictly.

    Of equal values in a row, the first belongs to it. Source: Fredman, "On computing the length of longest
    increasing subsequences", Discrete Mathematics 11 (1975).
    """
    ends: list[int] = []  # the key of the smallest value with which a sequence of each length ends
    before: dict[int, int | None] = {}
    for key, value in values.items():
        length = bisect.bisect_left(ends, value, key=values.__getitem__)
        before[key] = ends[length - 1] if length else None
        if length == len(ends):
            ends.append(key)
        elif value < values[ends[length]]:
            ends[length] = key
    found, key = [], ends[-1] if ends else None
    while key is not None:
        found.append(key)
        key = before[key]
    return found[::-1]


def _describe(path: pathlib.Path, damaged: Mapping[int, str]) -> str:
    """Returns which lines of a file are damaged, and why the first of them are."""
    reasons = [f"line {number}: {reason}" for number, reason in damaged.items()][:_MOST_REASONS]
    more = ["..."] if len(damaged) > len(reasons) else []
    return f"line {in_ranges(damaged)} of {path} cannot be used ({'; '.join(reasons + more)})"


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
