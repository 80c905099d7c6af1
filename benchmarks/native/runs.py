"""What runs leave in metrics.jsonl, and how two of them differ."""

import json
import math
import pathlib
import statistics
from collections.abc import Container
from typing import Any

from benchmarks.native.program import CheckFailed
from training.files import whole_lines

TIMES = {"tokens_per_s", "tflops_per_device", "step_s", "mfu", "memory_bytes", "memory_peak_bytes"}
"""The values that may differ between runs with the same numbers."""


def records(run: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of a run, times included."""
    return [json.loads(line) for line in whole_lines(run / "metrics.jsonl")]


def without_times(run: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the records of steps and evaluations, without times; those of statistics are left out."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records(run) if "layers" not in r]


def series(run: pathlib.Path, name: str) -> dict[int, float]:
    """Returns a value by step; NaN and infinity are text in the file."""
    return {r["step"]: float(r[name]) for r in records(run) if name in r}


def final(run: pathlib.Path, name: str) -> float:
    """Returns the last value of that name."""
    return list(series(run, name).values())[-1]


def differing(run: pathlib.Path, other: pathlib.Path) -> int:
    """Returns the number of records, without times, in which two runs differ."""
    a, b = without_times(run), without_times(other)
    return abs(len(a) - len(b)) + sum(x != y for x, y in zip(a, b, strict=False))


def difference(
    run: pathlib.Path, other: pathlib.Path, name: str, steps: Container[int] | None = None
) -> float:
    """Returns the largest relative difference of a value of two runs, at the given steps or all."""
    a, b = (
        {step: x for step, x in series(folder, name).items() if steps is None or step in steps}
        for folder in (run, other)
    )
    if a.keys() != b.keys() or not a:
        raise CheckFailed(f"{run.name} and {other.name} do not have {name} at the same steps")
    return max(abs(a[s] - b[s]) / abs(b[s]) if math.isfinite(a[s]) else math.inf for s in a)


def step_ms(run: pathlib.Path) -> float:
    """Returns the median milliseconds of a step, without the first."""
    return 1000 * statistics.median(list(series(run, "step_s").values())[1:])


def peak_gib(run: pathlib.Path) -> float | None:
    """Returns the highest use of device memory; None on CPUs."""
    peaks = series(run, "memory_peak_bytes").values()
    return max(peaks) / 2**30 if peaks else None
