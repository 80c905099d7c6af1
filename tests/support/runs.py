"""Small runs of train.py in the tests' process, and what they leave."""

import json

import jax
import numpy as np
import pytest

import train as training_program
from training.command_line import parse
from training.run.checkpoints import Checkpoints

# Random bits in every GEMM of a layer of each block; what has none compiles faster.
LAYERS = ("head=bf16", "*.attention.*=bf16", "*.gate_up=bf16")
STOCHASTIC = ("--policy", "full_sr", "--layers", *LAYERS)
SMALL = ["--batch-size", "4", "--seq-len", "32", "--eval-batches", "2", "--warmup-steps", "2", "--steps", "6"]


def run(text, out, *flags):
    return training_program.train(parse([*SMALL, "--data", str(text), "--out", str(out), *flags]))


def resume(out, *flags):
    return training_program.train(parse(["--resume", "--out", str(out), *flags]))


def error_of(*arguments, program=training_program.main):
    """Returns the line with which a program ends with status 1."""
    with pytest.raises(SystemExit) as ended:
        program([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, str)  # so that the status is 1
    assert "\n" not in ended.value.code
    return ended.value.code


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def at_step(state, step):
    """Returns a training state as if after this step."""
    return state._replace(step=jax.numpy.int32(step))


def weights(out):
    """Every array of the last checkpoint, as orbax wrote it."""
    with Checkpoints(out / "checkpoints") as checkpoints:
        step = checkpoints.latest
        restored = checkpoints._manager.restore(step)
    return step, jax.tree.map(np.asarray, dict(restored))


def untimed(out):
    times = {"tokens_per_s", "tflops_per_device", "step_s"}  # no two runs have the same
    return [{k: v for k, v in record.items() if k not in times} for record in lines(out)]


def event_files(folder):
    """Returns what TensorBoard's own reader finds in a folder."""
    # It takes a second, which few processes need.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def scalars(folder, tag):
    """Returns (step, value) of each scalar of this name."""
    return [(event.step, event.value) for event in event_files(folder).Scalars(tag)]
