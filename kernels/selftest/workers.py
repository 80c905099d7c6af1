"""Runs worker processes to their end, whatever they do: what fails, crashes or hangs becomes a result."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Result = dict[str, Any]
"""A case's name as "case", its "outcome" ("passed", "failed", "crashed", "hung"), and what it reports."""
LOST_IN_A_ROW = 3
"""Processes that may end in cases one after another before the rest of a group is given up."""


class Limits(NamedTuple):
    """Seconds that a process may be silent at its start and in a case, and the time at which all ends."""

    start: float
    case: float
    deadline: float


class Worker:
    """A process that answers a request by messages; its own standard output and error go to a file."""

    def __init__(self, command: Sequence[str], request: Mapping[str, Any], environment: Mapping[str, str]):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the worker
        self._messages: queue.SimpleQueue[Result | None] = queue.SimpleQueue()
        receive, send = os.pipe()
        self._process = subprocess.Popen(
            [*command, str(send)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(send,),
            start_new_session=True,
            env=dict(environment),
        )
        os.close(send)
        threading.Thread(target=self._read, args=(receive,), daemon=True).start()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode())
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, as its exit status will say

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as pipe:
            for line in pipe:
                try:
                    self._messages.put(json.loads(line))
                except ValueError:  # cut off when the process ended
                    break
        self._messages.put(None)

    def next(self, seconds: float) -> Result | None:
        """Returns the next message, or None when the process has ended.

        Raises:
          TimeoutError: there is none in so many seconds.
        """
        try:
            return self._messages.get(timeout=max(seconds, 0))
        except queue.Empty:
            raise TimeoutError from None

    def end(self, patience: float) -> str:
        """Kills the process with its children after `patience` seconds, and says how it ended by itself."""
        how = ""
        try:
            status = self._process.wait(timeout=patience)
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)
        except (ProcessLookupError, PermissionError):
            pass
        except subprocess.TimeoutExpired:
            return "it cannot be killed: the driver holds it"
        return how

    def close(self) -> None:
        """Ends the process, and forgets its log."""
        self.end(0)
        self._log.close()

    def log(self) -> str:
        """Returns the end of what the process printed."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        return self._log.read().decode(errors="replace").strip()


def run_cases(
    start: Callable[[Sequence[str]], Worker],
    skip: Sequence[str],
    limits: Limits,
    add: Callable[[Result], None],
) -> str | None:
    """Runs a group's cases in as many processes as it takes; returns why some did not run, if so.

    Args:
      start: starts a process that runs the group without the named cases.
      skip: cases that need not run.
      add: takes each result when it is there.
    """
    done, lost = list(skip), 0
    while True:
        results: list[Result] = []
        with contextlib.closing(start(done)) as worker:
            try:
                lost_in = follow(worker, limits, results, add)
            except TimeoutError:
                return "the time is over"
            if lost_in is None:
                return None
            lost_in["details"] = worker.log()
        if lost_in["case"] is None:
            add(lost_in | {"case": "start"})
            return f"its process {lost_in['outcome']} before the first case"
        add(lost_in)
        done += [result["case"] for result in (*results, lost_in)]
        lost = 1 if results else lost + 1
        if lost == LOST_IN_A_ROW:
            return f"{lost} cases in a row ended their process"


def follow(
    worker: Worker, limits: Limits, results: list[Result], add: Callable[[Result], None]
) -> Result | None:
    """Passes a worker's results on; returns the result of the case in which it was lost, or None.

    The lost case is None if there was none yet.

    Raises:
      TimeoutError: the deadline passed.
    """
    current, begun = None, False
    while True:
        limit = limits.case if begun else limits.start
        try:
            message = worker.next(min(limit, limits.deadline - time.monotonic()))
        except TimeoutError:
            if time.monotonic() >= limits.deadline:
                raise
            held = worker.end(0)
            error = f"no answer in {limit:.0f} s" + (f"; {held}" if held else "")
            return {"case": current, "outcome": "hung", "error": error}
        if message is None:
            return {"case": current, "outcome": "crashed", "error": worker.end(10) or "it closed its pipe"}
        if "end" in message:
            return None
        if "cases" in message:
            begun = True
        elif "start" in message:
            current = message["start"]
        else:
            current = None
            results.append(message)
            add(message)
