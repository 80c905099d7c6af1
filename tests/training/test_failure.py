"""An error in one of two processes ends both, within a minute and with that error."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = (
    "--distributed --batch-size 2 --seq-len 16 --eval-batches 1 --warmup-steps 1 --steps 200 --policy bf16"
)
PROGRAM = """
import os, runpy, sys, time
from training import loop
take_step, bad = loop.Loop._take_step, os.environ["BAD"]

def fails(self):
    if self.step == 3 and os.environ["JAX_PROCESS_ID"] == bad:
        print("now", time.time(), flush=True)
        raise {error}
    take_step(self)

loop.Loop._take_step = fails
runpy.run_path("train.py", run_name="__main__")
"""


def start(tmp_path, bad: int, error: str):
    """Starts train.py as two processes, one of which raises an error before the fourth step."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address, "BAD": str(bad)}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # LLVM's, which would take longer than the steps
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", PROGRAM.replace("{error}", error), "--distributed", *FLAGS.split()]
    return [
        subprocess.Popen(
            [*command, "--data", str(ROOT / "docs"), "--out", str(tmp_path / f"run-{bad}")],
            cwd=ROOT,
            env=environment | {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)},
            **pipes,
        )
        for index in range(2)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_one_process_between_steps_ends_both(tmp_path, bad):
    runs = start(tmp_path, bad, 'OSError(5, "Input/output error", "/data/c4.bin")')
    outputs = [run.communicate(timeout=400) for run in runs]
    ended = time.time()
    failed = float(outputs[bad][0].partition("now ")[2].split()[0])
    assert ended - failed < 60
    assert [run.returncode for run in runs] == [1, 1], outputs
    assert "train.py: error: /data/c4.bin: Input/output error" in outputs[bad][1]
    message = f"error: process {bad}: OSError: [Errno 5] Input/output error: '/data/c4.bin'\n"
    assert outputs[1 - bad][1].endswith(message), outputs
