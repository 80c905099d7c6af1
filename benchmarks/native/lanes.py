"""Runs the checks in their lanes, and records what each finds."""

import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.native.plan import CHECKS, LANES, gpus_of
from benchmarks.native.program import CheckFailed
from benchmarks.native.work import Found, Work

SHORTEST = 12.0
"""Seconds that must be left for a check to begin."""

Record = dict[str, Any]


class Lanes:
    """Runs checks side by side on GPUs, one after another on CPUs."""

    def __init__(
        self,
        chosen: set[str],
        folder: pathlib.Path,
        data: Sequence[str],
        gpus: Sequence[str],
        cpu: bool,
        seconds: float,
        keep: Callable[[dict[str, Record]], None],
    ):
        """Takes the checks to run.

        Args:
          chosen: names of checks.
          folder: where runs and logs are written.
          data: flags that name the datasets.
          gpus: the GPUs there are; on CPUs, names of virtual devices.
          cpu: run small models on virtual CPU devices.
          seconds: time in all.
          keep: called with all records after each check.
        """
        self._chosen, self._folder, self._data, self._gpus, self._cpu = chosen, folder, data, gpus, cpu
        self._end, self._keep, self._lock = time.monotonic() + seconds, keep, threading.Lock()
        self._ended = {name: threading.Event() for name in chosen}
        self._works: list[Work] = []
        self.records: dict[str, Record] = {}

    def run(self) -> dict[str, Record]:
        """Runs the checks; returns their records in the order of `CHECKS`."""
        lanes = [[name for name in lane if name in self._chosen] for lane in LANES]
        lanes = [list(itertools.chain.from_iterable(lanes))] if self._cpu else lanes
        threads = [threading.Thread(target=self._run_lane, args=(lane,), daemon=True) for lane in lanes]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # also when this program is ended
            self._end = 0.0
            for work in self._works:
                work.end_programs()
        return self.records

    def _run_lane(self, lane: Sequence[str]) -> None:
        for name in lane:
            try:
                record = self._check(name)
            except OSError as error:  # those that need it must not wait for ever
                record = {"outcome": "fail", "reason": str(error), "seconds": 0.0, "figures": {}}
            with self._lock:
                self.records[name] = record
                self.records = {n: self.records[n] for n in CHECKS if n in self.records}
                self._ended[name].set()
                self._keep(self.records)

    def _check(self, name: str) -> Record:
        check = CHECKS[name]
        if check.gpus > len(self._gpus):
            return _skipped(f"needs {check.gpus} devices")
        for need in check.needs:
            self._ended[need].wait()
            if self.records[need]["outcome"] != "pass":
                return _skipped(f"needs {need}, which did not pass")
        began = time.monotonic()
        if self._end - began < SHORTEST:
            return _skipped("no time was left")
        with (self._folder / f"{name}.log").open("w") as log:
            gpus = gpus_of(name, self._gpus)
            work = Work(self._folder, self._data, gpus, self._cpu, self._end, log)
            work.end = min(self._end, began + check.seconds * work.sizes.patience)
            self._works.append(work)
            record = _outcome(check.run, work)
        return record | {"seconds": round(time.monotonic() - began, 1)}


def _outcome(run: Callable[[Work], Found], work: Work) -> Record:
    """Returns a check's outcome, figures and bounds, or why it could not be carried out."""
    try:
        found = run(work)
        broken = found.broken
    except CheckFailed as error:
        return {"outcome": "fail", "reason": str(error), "figures": {}}
    except Exception as error:  # the others go on, and the reason is on record
        return {"outcome": "fail", "reason": f"{type(error).__name__}: {error}", "figures": {}}
    finally:
        work.end_programs()
    figures, bounds = dict(found.figures), {name: list(bound) for name, bound in found.bounds.items()}
    if broken:
        reason = f"outside of its bounds: {', '.join(broken)}"
        return {"outcome": "fail", "reason": reason, "figures": figures, "bounds": bounds}
    return {"outcome": "pass", "figures": figures, "bounds": bounds}


def _skipped(reason: str) -> Record:
    return {"outcome": "skip", "reason": reason, "seconds": 0.0, "figures": {}}
