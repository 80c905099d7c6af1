"""train.py and eval.py as programs on the GPUs of this machine, and what their runs leave.

Programs run in processes of their own, so that the tests' process holds no GPU. With MXJAX_GPU_TESTS_ON_CPU=1
they run on virtual CPU devices, in small sizes: that tries the tests, not the GPUs.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
ON_CPU = bool(os.environ.get("MXJAX_GPU_TESTS_ON_CPU"))
TIMES = {"tokens_per_s", "tflops_per_device", "step_s", "mfu", "memory_bytes", "memory_peak_bytes"}
STEPS, EVERY = (12, 3) if ON_CPU else (40, 10)  # of the small runs, and from checkpoint to checkpoint
SMALL = [
    *(
        "--model tiny --batch-size 4 --seq-len 32" if ON_CPU else "--model 20m --batch-size 16 --seq-len 256"
    ).split(),
    *f"--steps {STEPS} --checkpoint-every {EVERY}".split(),
    *("--lr", "1e-3", "--warmup-steps", "5", "--eval-batches", "2", "--log-every", "5"),
]
"""Flags of a small run with checkpoints, on the source of Python's library."""


def visible_gpus() -> list[str]:
    """Returns the numbers of the GPUs that a process may use."""
    if ON_CPU:
        return ["0", "1"]
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES") or os.environ.get("HIP_VISIBLE_DEVICES"):
        return chosen.split(",")
    nvidia, amd = (list(pathlib.Path("/dev").glob(p)) for p in ("nvidia[0-9]*", "dri/renderD*"))
    return [str(i) for i in range(len(nvidia) or len(amd) * pathlib.Path("/dev/kfd").exists())]


class Program(subprocess.Popen):
    """A Python program; its output goes to a file."""

    def __init__(self, log: pathlib.Path, arguments, **environment):
        self.log = log
        flags = {} if ON_CPU else {"XLA_FLAGS": ""}  # tests/conftest.py sets a CPU's
        with log.open("w") as output:
            super().__init__(
                [sys.executable, *map(str, arguments)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"} | flags | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()


class Programs:
    """Starts programs on GPUs, and ends those that still run when a test is over."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._started: list[Program] = []

    def start(self, *arguments, gpus=("0",), **environment) -> Program:
        """Starts a Python program on these GPUs, which are counted among the visible ones."""
        if ON_CPU:
            devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(gpus))}
        else:
            devices = {
                "CUDA_VISIBLE_DEVICES": ",".join(visible_gpus()[int(i)] for i in gpus),  # HIP reads it too
                "XLA_PYTHON_CLIENT_MEM_FRACTION": ".15",  # other tests may use the GPU
                "XLA_PYTHON_CLIENT_ALLOCATOR": "default",  # which measures peaks
            }
        log = self.folder / f"output-{len(self._started)}"
        self._started.append(Program(log, arguments, **devices, **environment))
        return self._started[-1]

    def begin(self, run: str, *flags, **options) -> Program:
        """Starts train.py."""
        return self.start("train.py", *flags, "--out", self.folder / run, **options)

    def train(self, run: str, *flags, **options) -> pathlib.Path:
        """Trains a run to its end and returns its folder."""
        finish(self.begin(run, *flags, **options))
        return self.folder / run

    def begin_two(self, run: str, *flags) -> list[Program]:
        """Starts a run as two processes of one device each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        together = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        return [
            self.begin(run, *flags, "--distributed", gpus=[i], JAX_PROCESS_ID=str(i), **together)
            for i in range(2)
        ]

    def end(self) -> None:
        """Ends what still runs."""
        for process in self._started:
            process.kill()
            process.wait()


def finish(process: Program) -> str:
    """Waits for a program's success and returns its output."""
    process.wait()
    assert process.returncode == 0, process.output[-3000:]
    return process.output


def kill_at(process: Program, run: pathlib.Path, steps: int) -> None:
    """Sends SIGKILL once so many steps are on record."""
    while process.poll() is None and len(series(run, "loss")) < steps:
        time.sleep(0.002)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL, process.output[-3000:]


def records(run: pathlib.Path) -> list[dict]:
    """Returns the records of a run; a last line that is being written is left out."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def without_times(run: pathlib.Path) -> list[dict]:
    """Returns the records of steps and evaluations, without times; those of statistics are left out."""
    return [{k: v for k, v in r.items() if k not in TIMES} for r in records(run) if "layers" not in r]


def series(run: pathlib.Path, name: str) -> dict[int, float]:
    """Returns a value by step; NaN and infinity are text in the file."""
    return {r["step"]: float(r[name]) for r in records(run) if name in r}


def final(run: pathlib.Path, name: str) -> float:
    """Returns the last value of that name."""
    return list(series(run, name).values())[-1]


def assert_near(run: pathlib.Path, other: pathlib.Path, name: str, steps, bound: float) -> None:
    """Asserts that a value of two runs differs relatively by at most the bound at these steps."""
    found, wanted = ({s: x for s, x in series(r, name).items() if s in steps} for r in (run, other))
    assert found.keys() == wanted.keys() != set()
    assert found == {s: pytest.approx(x, rel=bound, abs=0) for s, x in wanted.items()}, name
