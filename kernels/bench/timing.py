"""How the kernels' benchmarks measure: many calls in flight, several times over, and what they print."""

import argparse
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mxjax.packing import kernel_target

PACKAGES = ("jaxlib", "triton", "torch", "torchao", "qwix", "flax")


class Timing(NamedTuple):
    """Seconds a call: the median, the 10th and the 90th percentile over rounds."""

    median: float
    p10: float
    p90: float


class Absent(NamedTuple):
    """A line that has no time, and why; `ours` fails the benchmark, once all else is measured."""

    name: str
    reason: str
    ours: bool = False


LATE = "not run: --seconds have passed"


def measure(
    run: Callable[..., object],
    *args: object,
    rounds: int = 20,
    round_seconds: float = 0.02,
    wait: Callable[[Any], object] = jax.block_until_ready,
) -> Timing:
    """Times `run(*args)`, which is asynchronous: rounds of as many calls as fill `round_seconds`.

    `wait` is given the last call's result and returns once all calls are done.
    """
    wait(run(*args))  # compiles
    calls = 1
    while (seconds := _round(run, args, calls, wait)) < round_seconds and calls < 1000:
        calls = max(calls + 1, int(calls * min(10, 1.2 * round_seconds / max(seconds, 1e-6))))
    times = [_round(run, args, calls, wait) / calls for _ in range(rounds)]
    return Timing(*(float(np.quantile(times, q)) for q in (0.5, 0.1, 0.9)))


def _round(run, args, calls: int, wait) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = run(*args)
    wait(result)
    return time.perf_counter() - start


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints a Markdown table."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, ["-" * w for w in widths], *rows]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")
    sys.stdout.flush()


def print_absent(results: Iterable[object]) -> None:
    """Prints which lines are absent, and why."""
    for result in results:
        if isinstance(result, Absent):
            print(f"absent: {result.name}: {result.reason}", flush=True)


def first_line(error: Exception) -> str:
    """Returns an error's type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every benchmark takes."""
    parser.add_argument("--rounds", type=int, default=20, help="of some 20 ms, for each time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no line after so long")
    parser.add_argument("--commit", help="of the code; default: what git says")
    parser.add_argument("--out", type=Path, help="file for the numbers as JSON, written after every line")


class Report:
    """What was measured, on what and by which command; kept in `--out` while it grows."""

    def __init__(self, module: str, arguments: Sequence[str] | None, options: argparse.Namespace):
        given = sys.argv[1:] if arguments is None else arguments
        self.rounds, self.out = options.rounds, options.out
        self._end = time.monotonic() + options.seconds
        self._failures: list[str] = []
        self.content: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "kernels": " ".join(kernel_target() or ["not run: these are the definitions"]),
            "jax": jax.__version__,
            "packages": _versions(),
            "commit": options.commit or commit(),
            "command": shlex.join(["python", "-m", module, *given]),
            "records": [],
        }

    @property
    def is_late(self) -> bool:
        """Whether `--seconds` have passed."""
        return time.monotonic() > self._end

    def add(self, result: object, **record: object) -> None:
        """Adds a line's record, or why there is none."""
        if isinstance(result, Absent):
            record["absent"] = result.reason
            if result.ours:
                self._failures.append(f"{result.name}: {result.reason}")
        self.content["records"].append(record)
        if self.out is not None:
            temporary = self.out.with_name(self.out.name + ".tmp")
            temporary.write_text(json.dumps(self.content, indent=1) + "\n")
            os.replace(temporary, self.out)

    def print(self) -> None:
        """Prints everything as one line.

        Raises:
          SystemExit: a line of ours has failed.
        """
        print(flush=True)
        print(json.dumps(self.content), flush=True)
        if self._failures:
            raise SystemExit("failed: " + "; ".join(self._failures))


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def commit() -> str:
    """Returns what git says of the code, "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()
