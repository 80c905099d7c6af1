"""Reports of the kernels' benchmarks: the machine, the command, every result, and why others are absent."""

import argparse
import importlib.metadata
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from mxjax.devices import current_target

PACKAGES = ("jaxlib", "triton", "torch", "torchao", "qwix", "flax")


class Absent(NamedTuple):
    """A case without a time, and the reason.

    Attributes:
      ours: the case is mxjax's, so the benchmark fails after the other cases.
    """

    name: str
    reason: str
    ours: bool = False


LATE = "not run: --seconds have passed"


def print_absent(results: Iterable[object]) -> None:
    """Prints the cases that are absent, and why."""
    for result in results:
        if isinstance(result, Absent):
            print(f"absent: {result.name}: {result.reason}", flush=True)


def first_line(error: Exception) -> str:
    """Returns an error's type and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of every benchmark."""
    parser.add_argument("--rounds", type=int, default=20, help="rounds of about 20 ms for each time")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start no case after this many seconds"
    )
    parser.add_argument("--commit", help="the code's commit; default: from git")
    parser.add_argument("--out", type=Path, help="file for the numbers as JSON, written after every case")


class Report:
    """The results of a benchmark with device, versions and command; `--out` has it while it grows."""

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
            "commit": options.commit or commit(),
            "command": shlex.join(["python", "-m", module, *given]),
            "records": [],
        }

    @property
    def is_late(self) -> bool:
        """Whether `--seconds` have passed."""
        return time.monotonic() > self._end

    def add(self, result: object, **record: object) -> None:
        """Adds a case's record, or the reason why it is absent."""
        if isinstance(result, Absent):
            record["absent"] = result.reason
            if result.ours:
                self._failures.append(f"{result.name}: {result.reason}")
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


def versions() -> dict[str, str]:
    """Returns the versions of the packages on which results depend."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def commit() -> str:
    """Returns the commit of the code from git, "unknown" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()
