"""Checks training on real devices, on one GPU or several, and writes what was found as JSON.

    python -m benchmarks.native --data PREFIX --eval-data PREFIX --out FILE.json

Two GPUs take three minutes. With one, the checks that need two are skipped. Runs and logs stay in the folder
FILE.runs, which must not exist. The exit status is 1 if a check fails.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import tyro

from benchmarks.native.lanes import Lanes
from benchmarks.native.plan import with_needed
from benchmarks.native.program import python_path
from benchmarks.native.table import table
from benchmarks.native.work import device_variables
from benchmarks.study.runner import current_commit
from training.environment import input_errors
from training.files import write_atomically
from training.startup import unwinding_signals

FACTS = "import json; from training.environment import facts; print(json.dumps(facts()))"


def main(
    *,
    data: str,
    eval_data: str,
    out: pathlib.Path,
    checks: tuple[str, ...] = (),
    seconds: float = 240.0,
    cpu: bool = False,
    commit: str | None = None,
) -> int:
    """Checks training on real devices.

    Args:
      data: prefix of the tokenized dataset to train on.
      eval_data: prefix of the dataset to evaluate on.
      out: the JSON file to write.
      checks: names of checks, and those that they need; default, all.
      seconds: time in all: no check begins later, and none runs on.
      cpu: small models on two virtual CPU devices, one check after another, ten times as long each.
      commit: commit for the record; default, the checkout's.
    """
    began = time.monotonic()
    with input_errors():
        chosen = with_needed(checks)
        folder = out.with_suffix(".runs").absolute()
        folder.mkdir(parents=True)
    results: dict[str, Any] = {
        "commit": commit or current_commit(),
        "command": " ".join(["python -m benchmarks.native", *sys.argv[1:]]),
        "seconds": 0.0,
        **_facts(cpu),
        "checks": {},
    }

    def keep(records: dict[str, Any]) -> None:
        results["checks"] = records
        results["seconds"] = round(time.monotonic() - began, 1)
        write_atomically(out, json.dumps(results, indent=1) + "\n")

    flags = ["--data", str(pathlib.Path(data).absolute())]
    flags += ["--eval-data", str(pathlib.Path(eval_data).absolute())]
    left = seconds - (time.monotonic() - began)
    records = Lanes(chosen, folder, flags, _devices(results["devices"], cpu), cpu, left, keep).run()
    print(table(results))
    return int(any(record["outcome"] == "fail" for record in records.values()))


def _facts(cpu: bool) -> dict[str, Any]:
    """Returns the versions and devices from another process, so that this one holds no GPU."""
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | (device_variables("01", cpu) if cpu else {})
    environment = {**os.environ, "PYTHONPATH": python_path(), **variables}
    found = subprocess.run([sys.executable, "-c", FACTS], env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def _devices(count: int, cpu: bool) -> list[str]:
    """Returns the names of the devices: those of CUDA_VISIBLE_DEVICES, or their numbers."""
    visible = None if cpu else os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(count)]


if __name__ == "__main__":
    with unwinding_signals():
        sys.exit(tyro.cli(main, description=__doc__))
