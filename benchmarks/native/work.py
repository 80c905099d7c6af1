"""`Work`: what a check works with, and `Found`: what it reports."""

import dataclasses
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO

from benchmarks.native.program import CheckFailed, Program
from benchmarks.native.runs import series
from benchmarks.native.sizes import CPU, GPU, Sizes

Bounds = Mapping[str, tuple[float | None, float | None]]
ZERO = (0.0, 0.0)
SOME = (1.0, None)


@dataclasses.dataclass(frozen=True)
class Found:
    """The figures of a check, and the bounds, inclusive, of those that decide; None is no bound.

    A figure that a device cannot give, such as memory on CPUs, is None and breaks no bound.
    """

    figures: Mapping[str, float | None]
    bounds: Bounds = dataclasses.field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        """The figures outside of their bounds; NaN is outside."""
        return [
            name for name, (low, high) in self.bounds.items() if not _within(self.figures[name], low, high)
        ]


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    return value is None or ((low is None or low <= value) and (high is None or value <= high))


@dataclasses.dataclass
class Work:
    """What a check works with.

    Attributes:
      folder: where runs are written.
      data: the flags that name the datasets.
      gpus: the GPUs that this check may use; on CPUs, names of virtual devices.
      cpu: run small models on virtual CPU devices.
      end: `time.monotonic()` by which the check must have ended.
      log: the file of its programs' lines.
      programs: those that it has started.
      ended: they were ended, and no more are started.
      starting: held while `programs` and `ended` change.
    """

    folder: pathlib.Path
    data: Sequence[str]
    gpus: Sequence[str]
    cpu: bool
    end: float
    log: IO[str]
    programs: list[Program] = dataclasses.field(default_factory=list)
    ended: bool = False
    starting: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the check's runs."""
        return CPU if self.cpu else GPU

    def small(self) -> list[str]:
        """Returns the flags of a small run with checkpoints."""
        steps = ["--steps", str(self.sizes.steps), "--checkpoint-every", str(self.sizes.every)]
        return [*self.sizes.small.split(), *steps, *self.data]

    def start(self, *arguments: object, name: str = "", **environment: object) -> Program:
        """Starts a Python program on the check's GPUs; raises CheckFailed once programs were ended."""
        variables = device_variables(self.gpus, self.cpu) | {k: str(v) for k, v in environment.items()}
        name = name or pathlib.Path(str(arguments[0])).stem
        with self.starting:
            if self.ended:
                raise CheckFailed("not finished: the checks were ended")
            program = Program(name, arguments, variables, self.log, self.end)
            self.programs.append(program)
        return program

    def train(self, run: str, *flags: object) -> Program:
        """Trains a run to its end."""
        return self.begin(run, *flags).done()

    def begin(self, run: str, *flags: object) -> Program:
        """Starts a run."""
        return self.start("train.py", *flags, "--out", self.folder / run, name=run)

    def begin_two(self, run: str, *flags: object) -> list[Program]:
        """Starts a run as two processes of one device each."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        return [
            self.start(
                *("train.py", *flags, "--out", self.folder / run, "--distributed"),
                name=f"{run}, process {i}",
                JAX_COORDINATOR_ADDRESS=address,
                JAX_NUM_PROCESSES=2,
                JAX_PROCESS_ID=i,
                **device_variables(self.gpus[i : i + 1], self.cpu),
            )
            for i in range(2)
        ]

    def kill_at(self, program: Program, run: str, steps: int) -> int:
        """Sends SIGKILL once so many steps are on record; returns the steps then on record."""
        while program.alive and self.steps_on_record(run) < steps:
            time.sleep(0.002)
        program.kill()
        on_record = self.steps_on_record(run)
        if program.wait() != -signal.SIGKILL:
            raise CheckFailed(f"{program.name} ended before it was killed: {program.last}")
        return on_record

    def steps_on_record(self, run: str) -> int:
        """Returns the number of steps in a run's metrics."""
        return len(series(self.folder / run, "loss"))

    def end_programs(self) -> None:
        """Ends the programs that still run; no more are started."""
        with self.starting:
            self.ended = True
        for program in self.programs:
            program.kill()


def device_variables(gpus: Sequence[str], cpu: bool) -> dict[str, str]:
    """Returns the environment of a process that sees only these devices."""
    if cpu:
        return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(len(gpus))}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),  # HIP reads it too
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".15",  # up to six processes share a GPU
        "XLA_PYTHON_CLIENT_ALLOCATOR": "default",  # which measures peaks
    }
