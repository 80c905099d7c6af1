"""The job that `benchmarks.train_speed` gives to a measuring process, and its outcome; needs no JAX."""

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np


@dataclasses.dataclass(frozen=True)
class Job:
    """The measurement of one process.

    Attributes:
      program: the module to run, "benchmarks.train_ours" or "benchmarks.train_peer".
      subject: a policy of ours, or a precision of the peer's.
      batch: sequences a step on all devices together.
      steps: steps to time.
      before: steps to train before these, at least 1.
      tokens: an .npy file of the tokens of each step, int32 [steps, batch, seq + 1]; None draws them.
      devices: number of devices to use.
      remat, implementation, mesh: train.py's flags.
      loss: "whole" logits, or "chunked" in the peer.
      rows: tokens in a chunk of the peer's loss.
      trace: folder for a profile of a few steps after the timed ones, or None.
    """

    program: str
    subject: str
    model: str
    batch: int
    seq: int
    steps: int
    before: int
    tokens: str | None = None
    devices: int = 1
    remat: Literal["none", "dots", "fp4", "full"] = "none"
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
RANDOM_RATE = 1e-5
"""Learning rate on random tokens, without warm-up: too small to raise the loss in a few steps."""
TEXT_RATE, WARMUP = 1e-3, 100
"""Learning rate on text, after so many steps of linear warm-up."""


def learning_rate(job: Job) -> tuple[float, int]:
    """Returns the learning rate, which stays constant, and the steps of warm-up before it."""
    return (RANDOM_RATE, 0) if job.tokens is None else (TEXT_RATE, WARMUP)


def batches(job: Job, vocab_size: int) -> list[np.ndarray]:
    """Returns the int32 [batch, seq + 1] tokens of each step, the same for all jobs.

    They suffice for the steps before, the timed steps and a last step that is not timed.
    """
    if job.tokens is not None:
        return list(np.load(job.tokens, mmap_mode="r"))
    generator, shape = np.random.default_rng(0), (job.batch, job.seq + 1)
    return [generator.integers(vocab_size, size=shape, dtype=np.int32) for _ in range(number_of_steps(job))]


def number_of_steps(job: Job) -> int:
    """Returns the number of steps to run: the last, which is not timed, included."""
    return job.before + job.steps + 1


def run_steps(
    step: Callable[[np.ndarray], Any], fetch: Callable[[Any], float], inputs: Sequence[np.ndarray]
) -> tuple[list[float], list[float]]:
    """Runs the steps as training does: fetches each loss after it has dispatched the next step.

    Returns:
      The losses, and the seconds from each loss to the next. The last loss has no time, because no step
      follows it.
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
    """Reads the job from the file that the command line names; returns it and the outcome's path."""
    job, outcome = map(pathlib.Path, sys.argv[1:])
    return Job(**json.loads(job.read_text())), outcome


def write(path: pathlib.Path, outcome: dict[str, Any]) -> None:
    """Writes the outcome for the parent process."""
    path.write_text(json.dumps(outcome))
