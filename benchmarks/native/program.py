"""A program that a check runs: its lines are kept and logged, and it ends by a deadline."""

import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

ROOT = pathlib.Path(__file__).parents[2]


def python_path() -> str:
    """Returns PYTHONPATH with the repository first."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


class CheckFailed(Exception):
    """A check could not be carried out; the message is its reason."""


class Program:
    """A Python program that runs; `lines` are what it has printed."""

    def __init__(
        self, name: str, arguments: Sequence[object], environment: Mapping[str, str], log: IO[str], end: float
    ):
        """Starts the program.

        Args:
          name: begins its lines in the log.
          arguments: what follows `python`.
          environment: variables beyond this process's.
          log: file to write its lines to, behind the time of day.
          end: `time.monotonic()` at which waiting for it fails.
        """
        self.name, self.lines = name, list[str]()
        self._log, self._end = log, end
        self._write("$ " + " ".join(map(str, arguments)))
        self.process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path(), "PYTHONUNBUFFERED": "1", **environment},
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the program still runs; raises CheckFailed if its time is over."""
        alive = self.process.poll() is None
        if alive and time.monotonic() > self._end:
            raise CheckFailed(f"not finished: no time was left for {self.name}, last: {self.last}")
        return alive

    @property
    def last(self) -> str:
        """The last line that is not empty."""
        return next((line for line in reversed(self.lines) if line.strip()), "")[:200]

    @property
    def last_json(self) -> str:
        """The last line that holds a JSON object; raises CheckFailed if there is none."""
        for line in reversed(self.lines):
            if line.startswith("{"):
                return line
        raise CheckFailed(f"{self.name} printed no JSON, last: {self.last}")

    def wait(self) -> int:
        """Returns the exit status."""
        while self.alive:
            time.sleep(0.01)
        self._reader.join(10)
        self._write(f"status {self.process.returncode}")
        return self.process.returncode

    def done(self) -> "Program":
        """Waits for its end; raises CheckFailed unless it succeeded."""
        if status := self.wait():
            raise CheckFailed(f"{self.name} ended with status {status}: {self.last}")
        return self

    def kill(self) -> None:
        """Sends SIGKILL, if it still runs, and waits for its end."""
        self.process.kill()
        self.process.wait()
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))
                self._write(self.lines[-1])

    def _write(self, line: str) -> None:
        if not self._log.closed:
            self._log.write(f"{time.strftime('%H:%M:%S')} {self.name}: {line}\n")
            self._log.flush()
