"""What `benchmarks.train_speed` asks of a process that measures, and what it answers. Needs numpy alone."""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Job:
    """What one process measures.

    Attributes:
      program: the module to run, "benchmarks.train_ours" or "benchmarks.train_peer".
      subject: a policy of ours, or a precision of the peer's.
      batch: sequences a step, of all devices together.
      devices: how many of the machine's to use.
      remat, implementation, mesh: as train.py has them.
      loss: how the peer computes it, "whole" or "chunked".
      rows: tokens whose logits a chunk of the peer's loss holds.
      trace: folder for a profile of a few steps after the timed ones, or None.
    """

    program: str
    subject: str
    model: str
    batch: int
    seq: int
    steps: int
    warmup: int
    devices: int = 1
    remat: str = "none"
    implementation: Any = None
    mesh: str | None = None
    loss: str = "whole"
    rows: int = 2048
    trace: str | None = None

    @property
    def name(self) -> str:
        """The line's name in the table."""
        return self.subject if self.program == OURS else f"PyTorch, {self.subject}"


OURS, PEER = "benchmarks.train_ours", "benchmarks.train_peer"
LEARNING_RATE = 1e-5
"""Of both, without warm-up, so small that a few steps on random tokens do not raise the loss."""


def batches(job: Job, vocab_size: int) -> list[np.ndarray]:
    """Returns the int32 [batch, seq + 1] tokens of each step, random, and the same for all jobs.

    They are for the warm-up, the timed steps and a last one that is not timed.
    """
    generator, shape = np.random.default_rng(0), (job.batch, job.seq + 1)
    return [
        generator.integers(vocab_size, size=shape, dtype=np.int32) for _ in range(job.warmup + job.steps + 1)
    ]


def run_steps(
    step: Callable[[np.ndarray], Any], fetch: Callable[[Any], float], inputs: Sequence[np.ndarray]
) -> tuple[list[float], list[float]]:
    """Runs the steps as training does, each loss fetched once the next step is under way.

    Returns:
      The losses, and the seconds from one loss to the next, but to the last: nothing is dispatched before it.
    """
    losses, arrivals = [], []
    pending = step(inputs[0])
    for tokens in inputs[1:]:
        current = step(tokens)
        losses.append(fetch(pending))
        arrivals.append(time.perf_counter())
        pending = current
    return [*losses, fetch(pending)], np.diff(arrivals).tolist()


def read() -> tuple[Job, pathlib.Path]:
    """Returns the job in the file that the command line names, and the file for its outcome."""
    job, outcome = map(pathlib.Path, sys.argv[1:])
    return Job(**json.loads(job.read_text())), outcome


def write(path: pathlib.Path, outcome: dict[str, Any]) -> None:
    """Writes what was measured, all of it or nothing."""
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(outcome))
    partial.replace(path)
