"""The self-test's report: a file of JSON lines that grows with every result, and its summary."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mxjax.kernels.selftest.workers import Result
from mxjax.runtime.tables import table


class SelfTestReport:
    """Results by group and case; the last of a case counts, and none of another environment."""

    def __init__(self, path: Path, environment: Mapping[str, Any]):
        """Reads the results that an earlier start left in the file, if its environment was the same.

        Raises:
          ValueError: the file is something else.
        """
        self.path = path
        self.results: dict[tuple[str, str], Result] = {}
        self.not_run: dict[str, str] = {}
        same = False
        for line in _lines(path):
            if "environment" in line:
                same = line["environment"] == environment
            elif same:
                self.results[line["group"], line["case"]] = line
        self.resumed = len(self.passed())
        self._write({"environment": environment})

    def add(self, group: str, result: Result) -> None:
        """Adds a result, and prints a case that did not pass."""
        self.results[group, result["case"]] = {"group": group} | result
        self._write(self.results[group, result["case"]])
        if result["outcome"] != "passed":
            print(f"  {result['outcome']}: {result['case']}: {result['error']}", flush=True)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a+b") as file:
            cut_off = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
            file.write((b"\n" if cut_off else b"") + json.dumps(line).encode() + b"\n")

    def passed(self, group: str | None = None) -> list[str]:
        """Returns the names of the cases that passed, of a group or all."""
        return [
            case
            for (of, case), result in self.results.items()
            if result["outcome"] == "passed" and group in (None, of)
        ]

    def give_up(self, group: str, reason: str | None) -> None:
        """Notes why the rest of a group did not run; None if all ran."""
        if reason is not None:
            self.not_run[group] = reason
            print(f"  the rest is not run: {reason}", flush=True)

    @property
    def ok(self) -> bool:
        """Whether every case ran and passed."""
        return not self.not_run and len(self.passed()) == len(self.results)

    def summary(self, groups: tuple[str, ...]) -> str:
        """Returns a table of outcomes by group, and the cases that did not pass."""
        outcomes = ("passed", "failed", "crashed", "hung")
        rows = []
        for group in groups:
            found = [r["outcome"] for (of, _), r in self.results.items() if of == group]
            rows.append([group, *(found.count(o) for o in outcomes), self.not_run.get(group, "")])
        lines = [table("group | passed | failed | crashed | hung | not run", rows, padded=True), ""]
        for (group, case), result in self.results.items():
            if result["outcome"] != "passed":
                lines.append(f"{result['outcome']}: {group}: {case}: {result['error']}")
        return "\n".join(lines)


def _lines(path: Path) -> Iterator[Result]:
    """Yields a report's lines, without those that were cut off."""
    if not path.exists():
        return
    for number, text in enumerate(path.read_text().splitlines()):
        line = None
        try:
            line = json.loads(text)
            known = "environment" in line or (number > 0 and {"group", "case", "outcome"} <= line.keys())
        except (ValueError, AttributeError, TypeError):
            known = False
        if known:
            yield line
        elif number == 0:
            raise ValueError(
                f"{path} is no report of a self-test: name another file with --report, or remove this one"
            )
