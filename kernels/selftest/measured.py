"""Measurements of kernels: times of asynchronous calls, cases that are checked first, their table and report.

Every benchmark of a kernel yields `Case`s. `time_cases` checks each, times it, and prints one table: the
median, 10th and 90th percentile, the rate, and the rate as a share of the measured ceiling, which is the
fastest of the cases that are marked as such. A wrong result gets no time. `Report` collects all records with
device, versions and command, and prints them as the last line, as JSON.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mxjax.kernels.selftest.device import installed
from mxjax.runtime.checkout import commit
from mxjax.runtime.devices import current_target
from mxjax.runtime.tables import table

PACKAGES = ("jaxlib", "triton", "torch", "torchao", "qwix", "flax")
LATE = "not run: --seconds have passed"


class Timing(NamedTuple):
    """Seconds a call: the median, the 10th and the 90th percentile over rounds."""

    median: float
    p10: float
    p90: float


def measure(
    run: Callable[..., object],
    *args: object,
    rounds: int = 20,
    round_seconds: float = 0.02,
    wait: Callable[[Any], object] = jax.block_until_ready,
) -> Timing:
    """Times `run(*args)` in rounds of as many calls as fill `round_seconds`.

    Args:
      wait: takes the last call's result and returns once all calls are done.
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


class Checked(NamedTuple):
    """A call whose result was right.

    Attributes:
      run: the call to time; takes no arguments.
      error: distance of its result from the expected one, as the case defines it.
      calls: executions of the case in one `run`.
      wait: waits for the result of the last `run`.
    """

    run: Callable[[], object]
    error: float = 0.0
    calls: int = 1
    wait: Callable[[Any], object] = jax.block_until_ready


class Case(NamedTuple):
    """A case to measure.

    Attributes:
      check: checks the result and returns the call to time; raises if the result is wrong or nothing can run.
      work: bytes or operations of one execution.
      ours: mxjax's own, so that the benchmark fails if the case does.
      is_ceiling: its rate is one that the others could at best have.
      fields: further entries of the record.
    """

    name: str
    check: Callable[[], Checked]
    work: float
    ours: bool = True
    is_ceiling: bool = False
    fields: Mapping[str, Any] = {}

    def record(self, timing: Timing | None = None, error: float = 0.0) -> dict[str, Any]:
        """Returns the case as JSON holds it; times are in seconds."""
        about = {"name": self.name, **self.fields, "work": self.work, "is_ceiling": self.is_ceiling}
        return about | ({**timing._asdict(), "error": error} if timing else {})


class Absent(NamedTuple):
    """A case without a time, and the reason; `ours` as in `Case`."""

    name: str
    reason: str
    ours: bool = False


class Report:
    """The records of a benchmark with device, versions and command; `--out` has them while they grow."""

    def __init__(self, module: str, arguments: Sequence[str] | None, options: argparse.Namespace):
        given = sys.argv[1:] if arguments is None else arguments
        self.rounds, self.out = options.rounds, options.out
        self._end = time.monotonic() + options.seconds
        self._failures: list[str] = []
        self.content: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "kernels": " ".join(current_target() or ["none: the definitions run"]),
            "jax": jax.__version__,
            "packages": versions(),
            "commit": options.commit or commit() or "unknown",
            "command": shlex.join(["python", "-m", module, *given]),
            "records": [],
        }

    @property
    def is_late(self) -> bool:
        """Whether `--seconds` have passed."""
        return time.monotonic() > self._end

    def add(self, record: dict[str, Any], absent: Absent | None = None) -> None:
        """Adds a case's record, with the reason if it has no time."""
        if absent is not None:
            record = record | {"absent": absent.reason}
            if absent.ours:
                self._failures.append(f"{absent.name}: {absent.reason}")
        self.content["records"].append(record)
        if self.out is not None:
            self.out.write_text(json.dumps(self.content, indent=1) + "\n")

    def print(self) -> None:
        """Prints the report as one line of JSON.

        Raises:
          SystemExit: a case of ours failed.
        """
        print(flush=True)
        print(json.dumps(self.content), flush=True)
        if self._failures:
            raise SystemExit("failed: " + "; ".join(self._failures))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every benchmark."""
    parser.add_argument("--rounds", type=int, default=20, help="rounds of about 20 ms for each time")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no case after this many seconds"
    )
    parser.add_argument("--commit", help="the code's commit; default: from git")
    parser.add_argument("--out", type=Path, help="file for the numbers as JSON, written after every case")


def time_cases(report: Report, title: str, unit: str, cases: Iterable[Case]) -> list[dict[str, Any]]:
    """Measures cases, prints their table and why others are absent, and returns the records with times.

    Args:
      unit: what `Case.work` counts, such as "FLOP".
    """
    timed, missing = [], []
    for case in cases:
        result = _time(case, report)
        if isinstance(result, Absent):
            report.add(case.record(), result)
            missing.append(result)
        else:
            report.add(result)
            timed.append(result)
    print(f"\n{title}\n")
    print(table(header(unit), rows(timed), padded=True), flush=True)
    for absent in missing:
        print(f"absent: {absent.name}: {absent.reason}", flush=True)
    return timed


def _time(case: Case, report: Report) -> dict[str, Any] | Absent:
    if report.is_late:
        return Absent(case.name, LATE)
    try:
        checked = case.check()
        timing = measure(checked.run, rounds=report.rounds, wait=checked.wait)
        return case.record(Timing(*(t / checked.calls for t in timing)), checked.error)
    except Exception as error:  # the other cases go on
        return Absent(case.name, first_line(error), case.ours)


def header(unit: str) -> str:
    """Returns the head of a table of `rows`."""
    return f" | microseconds | p10 | p90 | T{unit}/s | of the ceiling | error"


def rows(records: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the rows of a table."""
    rates = [r["work"] / r["median"] for r in records]
    ceiling = max((rate for rate, r in zip(rates, records, strict=True) if r["is_ceiling"]), default=0.0)
    return [
        [
            r["name"],
            *(f"{1e6 * r[key]:.1f}" for key in ("median", "p10", "p90")),
            f"{rate / 1e12:.3g}",
            f"{rate / ceiling:.0%}" if ceiling else "",
            f"{r['error']:.1e}",
        ]
        for rate, r in zip(rates, records, strict=True)
    ]


def first_line(error: Exception) -> str:
    """Returns an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def versions() -> dict[str, str]:
    """Returns the versions of the packages on which results depend."""
    return dict.fromkeys(PACKAGES, "not installed") | installed(PACKAGES)
