"""metrics.jsonl: one JSON object a line for every step, evaluation and change of policy of a run.

Only a kill or a crash can leave half a line, at the end; readers leave it out.
"""

import contextlib
import functools
import json
import math
import pathlib
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from models.received import parse_json
from training.files import sync, unused, whole_lines, write_atomically


class LineFile:
    """Appends whole lines to a file."""

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
    """Returns each line with what `parse` makes of it; half a last line is left out.

    Args:
      path: the file; without one there are no lines.
      parse: raises ValueError, with the reason, for a damaged line.
    Raises:
      ValueError: a line is damaged; the message says which.
    """
    found = []
    for number, line in enumerate(whole_lines(path), 1):
        try:
            found.append((line, parse(line)))
        except ValueError as error:
            command = f"python train.py --resume --out {shlex.quote(str(path.parent))}"
            raise ValueError(
                f"{path} is damaged (line {number}: {error}); to set it aside: {command}"
            ) from None
    return found


def set_aside_if_damaged(path: pathlib.Path, parse: Callable[[bytes], Any]) -> list[str]:
    """Renames a file at which `read_lines` raises to damaged-NAME; returns a message if it did."""
    for number, line in enumerate(whole_lines(path), 1):
        try:
            parse(line)
        except ValueError as error:
            target = unused(path.with_name(f"damaged-{path.name}"))
            path.rename(target)
            return [f"{path} is damaged (line {number}: {error}); renamed it {target.name}"]
    return []


def parse_object(text: str | bytes) -> dict[str, Any]:
    """Returns the JSON object that a line holds; raises ValueError if it holds anything else."""
    try:
        found = parse_json(text if isinstance(text, str) else text.decode())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


METRICS = "metrics.jsonl"
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
                parsed = read_lines(path, parse_record)
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


_NUMBERS = ("loss", "grad_norm", "lr", "step_s", "tokens_per_s", "tflops_per_device", "mfu")
_NUMBERS += ("memory_peak_bytes", "eval_loss", "ema_eval_loss", "eval_perplexity", "eval_bits_per_byte")
_NUMBERS += ("sqnr_db",)


def parse_record(line: bytes) -> dict[str, Any]:
    """Returns the values of a line of metrics.jsonl or spikes.jsonl; raises ValueError if it is damaged.

    Numbers that were NaN or infinite are floats again.
    """
    values = parse_object(line)
    step = values.get("step")
    if type(step) is not int or not 1 <= step < 2**63:
        raise ValueError(f"its step is {_short(step)}")
    sets, layers = (_of_objects(values, name) for name in ("eval_sets", "layers"))
    for one in sets:
        one["eval_loss"] = one.get("eval_loss")
    measured = [gemm for layer in layers for gemm in layer.values() if isinstance(gemm, dict)]
    for record in (values, *sets, *measured):
        for name in _NUMBERS:
            if name in record:
                record[name] = _number(name, record[name])
    if not isinstance(values.get("skipped", False), bool):
        raise ValueError(f"skipped is {_short(values['skipped'])}")
    return values


def _of_objects(values: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the values of an object of objects; none if the name is missing."""
    found = values.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        raise ValueError(f"{name} is {_short(found)}")
    return list(found.values())


def _number(name: str, value: Any) -> float:
    """Returns a value as a number; raises ValueError unless it is one, or what `json_line` writes for one."""
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


def read_records(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of a run's metrics.jsonl; see `parse_record`.

    Raises:
      ValueError: a line is damaged; the message says which.
    """
    return [record for _, record in read_lines(folder / METRICS, parse_record)]


def evaluations(folder: pathlib.Path, weights: str | None = None) -> dict[int, float]:
    """Returns the loss of every evaluation of a run, by step; with "ema" that of the parameters' average."""
    measured = "eval_loss" if weights is None else f"{weights}_eval_loss"
    return {r["step"]: r[measured] for r in read_records(folder) if measured in r}


def best_step(folder: pathlib.Path, saved: Iterable[int], weights: str | None = None) -> int:
    """Returns the one of a run's saved steps at which these weights had the lowest evaluation loss.

    Raises:
      ValueError: they were evaluated at none of them.
    """
    losses, steps = evaluations(folder, weights), sorted(saved)
    if not (found := [step for step in steps if math.isfinite(losses.get(step, math.nan))]):
        of_weights = "" if weights is None else f" of --weights {weights}"
        raise ValueError(
            f"--step best: {folder} has no checkpoint at a step with an evaluation{of_weights}; name a "
            f"--step, of {steps or 'none'}"
        )
    return min(found, key=lambda step: losses[step])


def in_words(evaluation: Mapping[str, Any]) -> str:
    """Returns the printed form of an evaluation, of each set that has a name."""
    sets = evaluation.get("eval_sets", {"": evaluation})
    return "; ".join(f"{f'{name}: ' if name else ''}{_one_in_words(one)}" for name, one in sets.items())


def _one_in_words(one: Mapping[str, Any]) -> str:
    text = f"eval loss {one['eval_loss']:.4f}  perplexity {one['eval_perplexity']:.3f}"
    bits, average = one.get("eval_bits_per_byte"), one.get("ema_eval_loss")
    text = text if bits is None else f"{text}  bits per byte {bits:.4f}"
    return text if average is None else f"{text}  average's loss {average:.4f}"


def json_line(values: Mapping[str, Any]) -> str:
    """Returns the values as one line of JSON; NaN and infinity, which JSON lacks, become strings."""

    def jsonable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: jsonable(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [jsonable(part) for part in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(jsonable(values))
