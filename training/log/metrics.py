"""metrics.jsonl: one JSON object a line for every step, evaluation and change of policy of a run.

Only a kill or a crash can leave half a line, at the end; readers leave it out.
"""

import bisect
import contextlib
import functools
import json
import math
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from training.config import Config
from training.files import is_same, sync, unused, whole_lines, write_atomically
from training.process.start import program_name

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


FILE = "metrics.jsonl"
SPIKES = "spikes.jsonl"


class Sink(Protocol):
    """Another place to which metrics go; `name` is its flag."""

    name: str

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values of a step, numbers or text; those of a layer are named LAYER/GEMM/NAME."""
        ...

    def close(self, failed: bool) -> None:
        """Closes it, after an error or not."""
        ...


class MetricsLog:
    """Appends one JSON object a line to a file, NaN and infinity as strings. A context manager."""

    def __init__(
        self,
        path: pathlib.Path | None,
        keep_steps: int = 0,
        sinks: Sequence[Sink] = (),
        check_place: Callable[[], None] = lambda: None,
    ):
        """Opens the file and drops its lines after step `keep_steps`; None writes no file.

        Everything written goes to the sinks too, which are closed with the file. `check_place` is called
        before each line; it raises an error if the folder is no longer this run's.
        """
        self._file, self._sinks, self._check_place = None, sinks, check_place
        with contextlib.ExitStack() as stack:
            for sink in sinks:
                stack.push(functools.partial(_close, sink))
            if path is not None:
                parsed = read_lines(path, parse_record, series_of)
                self._file = LineFile(path, [line for line, record in parsed if record["step"] <= keep_steps])
                stack.callback(self._file.close)
            self._open = stack.pop_all()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception) -> None:
        """Closes the file and every sink, whichever of them fail."""
        self._open.__exit__(*exception)

    def write(self, *, step: int, **values: Any) -> None:
        """Writes one line, or nothing if there is no room for it."""
        self._check_place()
        if self._file is not None:
            self._file.write(json_line({"step": step, **values}))
        for sink in self._sinks:
            with _naming(sink):
                sink.write(step, dict(_flat(values)))

    def sync(self) -> None:
        """Waits until every line is on the disk."""
        if self._file is not None:
            self._file.sync()


def _close(sink: Sink, *exception) -> None:
    """Closes a sink; its own error is dropped if one ends the run already."""
    try:
        with _naming(sink):
            sink.close(failed=any(exception))
    except OSError:
        if not any(exception):
            raise


@contextlib.contextmanager
def _naming(sink: Sink) -> Iterator[None]:
    """Adds the sink's flag to an error of the operating system."""
    try:
        yield
    except OSError as error:
        cause = f"{error.strerror or error} (writing the files of {sink.name})"
        raise OSError(error.errno, cause, error.filename) from error


def _flat(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for every leaf; names join the keys on the path except the outermost."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        else:
            yield "/".join((*path[1:], name)), value


def parse_record(line: bytes) -> dict[str, Any]:
    """Returns the values of a line of metrics.jsonl or spikes.jsonl; raises ValueError if it is damaged."""
    values = parse_object(line)
    step = values.get("step")
    if type(step) is not int or not 1 <= step < 2**63:
        raise ValueError(f"its step is {_short(step)}")
    for name in ("loss", "eval_loss"):
        if name in values:
            values[name] = _loss(name, values[name])
    if not isinstance(values.get("skipped", False), bool):
        raise ValueError(f"skipped is {_short(values['skipped'])}")
    return values


def _loss(name: str, value: Any) -> float:
    """Returns a loss as a number; raises ValueError unless it is one, or what `json_line` writes for one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        if is_number or value in ("nan", "inf", "-inf"):
            return float(value)
    except OverflowError:
        pass
    raise ValueError(f"{name} is {_short(value)}")


def _short(value: Any) -> str:
    """Returns a value as JSON has it, at most 20 characters of it; "missing or null" for None."""
    text = "missing or null" if value is None else json.dumps(value)
    return text if len(text) <= 20 else f"{text[:17]}..."


def series_of(record: Mapping[str, Any]) -> tuple[str, int]:
    """Returns the kind of a record and its step, which ascends among the records of a kind."""
    kinds = ("eval_loss", "loss", "layers", "policy")
    return next((name for name in kinds if name in record), ""), record["step"]


def read_records(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics.jsonl; losses that were NaN or infinite are floats again.

    Raises:
      ValueError: a line is damaged, doubled or out of order; the message says which.
    """
    return [record for _, record in read_lines(folder / FILE, parse_record, series_of)]


def evaluations(folder: pathlib.Path) -> dict[int, float]:
    """Returns the loss of every evaluation of a run, by step."""
    return {r["step"]: r["eval_loss"] for r in read_records(folder) if "eval_loss" in r}


def set_aside_damaged_records(folder: pathlib.Path) -> list[str]:
    """Removes damaged lines from the run's metrics.jsonl and spikes.jsonl; returns messages about them."""
    paths = folder / FILE, folder / SPIKES
    return [said for path in paths for said in set_aside_damaged_lines(path, parse_record, series_of)]


def missing_steps(folder: pathlib.Path, last: int) -> list[str]:
    """Returns a message if metrics.jsonl lacks steps from 1 to `last`, which have been taken."""
    missing = set(range(1, last + 1)) - {r["step"] for r in read_records(folder) if "loss" in r}
    if not missing:
        return []
    return [
        f"{folder / FILE} lacks step {in_ranges(sorted(missing))} of the {last} taken: "
        "their metrics are lost, the training is not"
    ]


def in_words(evaluation: Mapping[str, float]) -> str:
    """Returns the printed form of an evaluation."""
    return f"eval loss {evaluation['eval_loss']:.4f}  perplexity {evaluation['eval_perplexity']:.3f}"


def json_line(values: Mapping[str, Any]) -> str:
    """Returns the values as one line of JSON; NaN and infinity, which JSON lacks, become strings."""

    def jsonable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: jsonable(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [jsonable(part) for part in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(jsonable(values))


def owes_evaluation(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the evaluation after a step is missing because the run was interrupted in it."""
    regular = step % config.eval_every == 0 or step == config.steps
    return step > 0 and regular and step not in evaluations(folder)


def is_done(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the run ends with a step: the schedule's last, or one that reached the target."""
    if owes_evaluation(config, folder, step):
        return False
    return step >= config.steps or (config.target_loss is not None and is_on_target(config, folder, step))


def is_on_target(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the evaluation after a step reached the target; True if the run has no target."""
    loss = evaluations(folder).get(step, math.inf)
    return config.target_loss is None or reaches_target(config, loss)


def reaches_target(config: Config, loss: float) -> bool:
    """Returns whether an evaluation's loss is at most the target; False if the run has no target."""
    return config.target_loss is not None and loss <= config.target_loss
