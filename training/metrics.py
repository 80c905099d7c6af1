"""metrics.jsonl: one JSON object a line for every step, evaluation and change of policy of a run."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from training.files import whole_lines, write_atomically


class MetricsLog:
    """Appends one JSON object a line to a file, NaN and infinity as strings. A context manager."""

    def __init__(self, path: pathlib.Path | None, keep_steps: int = 0):
        """Opens the file and drops its lines after step `keep_steps`; None writes no file."""
        self._file = None
        if path is None:
            return
        kept = [line for line in whole_lines(path) if json.loads(line)["step"] <= keep_steps]
        write_atomically(path, "".join(line + "\n" for line in kept))
        self._file = path.open("a")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def write(self, **values: Any) -> None:
        """Writes one line."""
        if self._file is None:
            return
        self._file.write(json_line(values) + "\n")
        self._file.flush()


def evaluations(folder: pathlib.Path) -> dict[int, float]:
    """Returns the loss of every evaluation of a run, by step."""
    lines = map(json.loads, whole_lines(folder / "metrics.jsonl"))
    return {line["step"]: float(line["eval_loss"]) for line in lines if "eval_loss" in line}


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
