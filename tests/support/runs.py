"""Small runs of train.py in the tests' process, and what they leave."""

import contextlib
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import train as training_program
from training.command_line import parse
from training.run.checkpoints import Checkpoints
from training.run.record import to_json

ROOT = pathlib.Path(__file__).parents[2]
# Random bits in every GEMM of a layer of each block; what has none compiles faster.
LAYERS = ("head=bf16", "*.attention.*=bf16", "*.gate_up=bf16")
STOCHASTIC = ("--policy", "full_sr", "--layers", *LAYERS)
SMALL = ["--batch-size", "4", "--seq-len", "32", "--eval-batches", "2", "--warmup-steps", "2", "--steps", "6"]


def make_run(folder, losses, flags=(), train=None):
    """Writes the description and the losses by step, of 32 x 64 tokens, of a run that nobody trained."""
    folder.mkdir(parents=True)
    config = parse(["--batch-size", "32", "--seq-len", "64", *flags])
    (folder / "config.json").write_text(json.dumps({"config": to_json(config)}))
    records = [{"step": s, "loss": loss} for s, loss in ({1: 9.0} if train is None else train).items()]
    records += [{"step": s, "eval_loss": loss} for s, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


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


@contextlib.contextmanager
def file_sizes(limit):
    """Limits the bytes of a file: writing more fails as on a full disk, for any user."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def free_address() -> str:
    """Returns an address of this machine at which nothing listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{unused.getsockname()[1]}"


def start(*arguments, folder=ROOT, **environment):
    """Starts a Python program on the CPU. LLVM does not optimize: it would take longer than small steps."""
    environment = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=os.environ | environment, **pipes)


def start_pair(*of_each, folders=(ROOT, ROOT), **environment):
    """Starts a program as two processes of one run, by the arguments of each."""
    environment |= {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": "2"}
    return [
        start(*arguments, folder=folder, JAX_PROCESS_ID=str(i), **environment)
        for i, (arguments, folder) in enumerate(zip(of_each, folders, strict=True))
    ]


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
