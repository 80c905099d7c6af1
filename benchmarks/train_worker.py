"""Measures training steps of one policy in its own process, which `benchmarks.train_speed` starts.

    python -m benchmarks.train_worker JOB.json OUTCOME.json

`Job` says what to measure; `benchmarks.train_peer` takes one too, and trains on the same batches.
"""

import collections
import dataclasses
import functools
import gzip
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder
from models.configs import get_config
from mxjax.kernels.selftest.measured import measure
from mxjax.products.implementations import check_remat, choose_implementation
from mxjax.recipes import get_policy
from mxjax.runtime.tables import table
from training import sharding as parameter_sharding
from training.config import DataConfig, OptimizerConfig, parse_rules
from training.data.load import load_data
from training.optimizer.delayed import is_delayed, scales_of, with_histories
from training.optimizer.optimizers import keeps_finite, make_optimizer
from training.optimizer.schedule import learning_rate
from training.process.environment import facts
from training.sharding import check_batch, compiler_options, filled_size, global_batch, make_mesh, resize
from training.step import ScheduledStep, TrainState, make_train_step

OURS, PEER = "benchmarks.train_worker", "benchmarks.train_peer"
RANDOM_RATE = 1e-5
"""Learning rate on random tokens, without warm-up: too small to raise the loss in a few steps."""
TEXT_RATE, WARMUP = 1e-3, 100
"""Learning rate on text, after so many steps of linear warm-up."""
GEMMS = ((8192, 8192, 8192), (8192, 4096, 14336))
TRACED_STEPS, LONGEST = 3, 15
# The first pattern that a kernel's name matches decides.
KINDS = {
    "collectives": r"nccl|rccl|all_?reduce_kernel|ragged_all_to_all",
    "attention": r"sdpa|flash|fmha|attention",
    "quantize": r"quantize_(\w+_)?kernel|(draw|largest|cast|cast_gradient)_kernel",
    "carrier": r"carry_(both_)?kernel",
    "correction": r"(sift|correct)_(experts_)?kernel",
    "GEMM": r"(value|grouped)_(rows|sums)_|scaled_blocks|gemm|nvjet|cutlass|cublas|xmma|wgmma|Cijk|splitk",
    "copies": r"memcpy|memset",
    "elementwise": r"",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """The measurement of one process.

    Attributes:
      program: the module to run, "benchmarks.train_worker" or "benchmarks.train_peer".
      subject: a policy of ours, or a precision of the peer's.
      batch: sequences a step on all devices together.
      steps: steps to time.
      before: steps to train before these, at least 1.
      tokens: an .npy file of the tokens of each step, int32 [steps, batch, seq + 1]; None draws them.
      devices: number of devices to use.
      remat, implementation, mesh, layers: train.py's flags.
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
    layers: tuple[str, ...] = ()
    loss: str = "whole"
    rows: int = 2048
    trace: str | None = None

    @property
    def name(self) -> str:
        """The line's name in the table."""
        return " ".join((self.subject, *self.layers)) if self.program == OURS else f"PyTorch, {self.subject}"


def rate_of(job: Job) -> tuple[float, int]:
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


def write_tokens(path: pathlib.Path, job: Job, data: str | None) -> dict[str, int | str]:
    """Writes the first batches of a training run as int32 [steps, batch, seq + 1].

    Returns the identity of the data: the name of its source, its sizes, and a checksum.

    Args:
      job: any of the jobs, which agree in model, batch, sequence length and number of steps.
      data: a text file, a folder or a dataset's prefix, as train.py's --data; None reads the source of
        Python's standard library as bytes.

    Raises:
      ValueError: the data cannot be read, or holds ids that the model's vocabulary does not.
    """
    size = get_config(job.model).vocab_size
    config = DataConfig(
        () if data is None else (data,), vocab_size=size, batch_size=job.batch, seq_len=job.seq
    )
    corpus, steps = load_data(config, size), number_of_steps(job)
    batches = corpus.batches(config, 0, steps)
    np.save(path, np.stack([next(batches) for _ in range(steps)]).astype(np.int32))
    return corpus.facts | {"source": os.path.basename(corpus.source)}


def run(job: Job) -> dict[str, Any]:
    """Measures a job's step times in seconds, losses, compile times, peak memory, and the GEMMs' rates."""
    if job.devices != jax.device_count():
        raise ValueError(f"--devices is {job.devices}, but JAX sees {jax.device_count()}")
    mesh = make_mesh(job.mesh)
    with jax.set_mesh(mesh):
        return {"gemm_flops": gemm_rates()} | measure_steps(job, mesh)


def measure_steps(job: Job, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Measures all that `run` returns except the GEMMs' rates."""
    compiled_step, state, seconds = prepare(job, mesh)
    inputs, key = batches(job, get_config(job.model).vocab_size), jax.random.key(0)

    def step(tokens: np.ndarray):
        nonlocal state
        state, metrics = compiled_step(state, global_batch(mesh, tokens), key)
        return metrics.loss

    losses, times = run_steps(step, float, inputs)
    outcome = {
        "times": times[job.before - 1 :],
        "times_before": times[: job.before - 1],
        "losses": losses,
        **seconds,
        "peak_bytes": peak_bytes(),
        "implementation": choose_implementation(job.implementation),
        "environment": facts(),
    }
    if job.trace is not None:
        outcome["trace"] = trace(step, inputs, pathlib.Path(job.trace))
    return outcome


def prepare(job: Job, mesh: jax.sharding.Mesh) -> tuple[ScheduledStep, TrainState, dict[str, float]]:
    """Returns a job's compiled step, which donates its state, the first state, and seconds of compilation."""
    model = get_config(job.model)
    rate, warmup = rate_of(job)
    config = OptimizerConfig(lr=rate, warmup_steps=warmup)
    optimizer, schedule = make_optimizer(config), learning_rate(config, 1_000_000_000)
    policies = decoder.layer_policies(model, get_policy(job.subject), parse_rules(job.layers))
    optimizer = with_histories(optimizer, model, [policies], policies)
    options = {"policies": policies, "remat": job.remat, "implementation": job.implementation}
    check_remat(job.remat, policies.policies, job.implementation)
    check_batch(mesh.shape, job.batch, 1)
    parameter_sharding.check_shards(mesh.shape, model, policies)
    fill = functools.partial(resize, size=filled_size(mesh.shape, model, [policies]))
    state, shardings = parameter_sharding.first_state(model, optimizer, mesh, jax.random.key(0), fill)
    loss = functools.partial(_loss, model, options)
    told = compiler_options(mesh, policies.policies, job.implementation)
    train_step = make_train_step(
        loss,
        optimizer,
        shardings=shardings,
        compiler_options=told,
        keeps_finite=keeps_finite(config),
        scales_of=functools.partial(scales_of, model=model) if is_delayed(policies) else None,
    )
    batch = global_batch(mesh, batches(job, model.vocab_size)[0])
    start = time.perf_counter()
    lowered = train_step.lower(state, batch, jax.random.key(0), jax.jit(schedule)(state.step))
    lower_seconds = time.perf_counter() - start
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start - lower_seconds
    seconds = {"lower_seconds": lower_seconds, "compile_seconds": compile_seconds}
    return ScheduledStep(compiled, schedule), state, seconds


def _loss(model, options, params, batch, key, scales=None):
    return decoder.mean_loss(model, params, batch, key=key, slots=scales, **options)


def gemm_rates() -> dict[str, float]:
    """Measures the FLOP/s of bfloat16 products of random numbers, by size; none on a CPU."""
    if jax.default_backend() == "cpu":
        return {}
    found = {}
    for m, n, k in GEMMS:
        keys = jax.random.split(jax.random.key(0))
        x, w = (
            jax.random.normal(keys[0], (m, k), jnp.bfloat16),
            jax.random.normal(keys[1], (k, n), jnp.bfloat16),
        )
        found[f"{m}x{n}x{k}"] = 2 * m * n * k / measure(jax.jit(jnp.dot), x, w, rounds=10).median
    return found


def peak_bytes() -> int | None:
    """Returns the peak memory in use on any device; None if the devices do not report it."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    return max((s["peak_bytes_in_use"] for s in stats if s), default=None)


def trace(step, inputs: list[np.ndarray], folder: pathlib.Path) -> dict[str, Any]:
    """Profiles a few more steps; returns their time by kind of kernel and for the longest kernels."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 1  # a trace holds at most a million events
    with jax.profiler.trace(str(folder), profiler_options=options):
        jax.block_until_ready([step(tokens) for tokens in inputs[:TRACED_STEPS]])
    return summarize(read_trace(folder), TRACED_STEPS)


class Kernel(NamedTuple):
    """One kernel's run on a device; times in microseconds."""

    device: str
    name: str
    start: float
    duration: float


def read_trace(folder: pathlib.Path) -> list[Kernel]:
    """Reads the kernels of the newest profile under a folder.

    Raises:
      ValueError: there is no profile.
    """
    paths = sorted(folder.rglob("*.trace.json.gz"))
    if not paths:
        raise ValueError(
            f"{folder} holds no *.trace.json.gz; name the folder that jax.profiler.trace wrote to"
        )
    newest = [path for path in paths if path.parent == paths[-1].parent]
    return [
        k for path in newest for k in kernels(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    ]


def kernels(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """Returns the kernels on GPU streams; a device's other threads repeat them by module, step or scope."""
    names: dict[tuple[str, Any, Any], str] = {}
    complete = []
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            thread = event["tid"] if event["name"] == "thread_name" else None
            names[event["name"], event["pid"], thread] = event["args"]["name"]
        elif event.get("ph") == "X":
            complete.append(event)
    found = []
    for event in complete:
        device = names.get(("process_name", event["pid"], None), "")
        thread = names.get(("thread_name", event["pid"], event["tid"]), "")
        if device.startswith("/device:GPU") and thread.startswith("Stream #"):
            found.append(Kernel(device, event["name"], event["ts"], event.get("dur", 0.0)))
    return found


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def summarize(found: list[Kernel], steps: int) -> dict[str, Any]:
    """Returns milliseconds and launches a step and device, by kind and by longest kernel, and "idle"."""
    devices = sorted({k.device for k in found})
    if not devices:
        return {"devices": 0, "kinds": {}, "longest": {}, "idle": 0.0, "span": 0.0}
    each = steps * len(devices)
    by_kind: dict[str, list[float]] = collections.defaultdict(list)
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in found:
        by_kind[kind_of(kernel.name)].append(kernel.duration)
        by_name[kernel.name].append(kernel.duration)
    span = busy = 0.0
    for device in devices:
        mine = [k for k in found if k.device == device]
        span += max(k.start + k.duration for k in mine) - min(k.start for k in mine)
        busy += covered(mine)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "devices": len(devices),
        "kinds": {kind: _each(by_kind[kind], each) for kind in KINDS if kind in by_kind},
        "longest": {name: _each(times, each) | {"kind": kind_of(name)} for name, times in longest},
        "idle": (span - busy) / each / 1e3,
        "span": span / each / 1e3,
    }


def covered(found: list[Kernel]) -> float:
    """Returns the microseconds in which at least one of the kernels runs."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(found, key=lambda k: k.start):
        stop = kernel.start + kernel.duration
        total += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return total


def _each(times: list[float], runs: int) -> dict[str, Any]:
    return {"ms": sum(times) / runs / 1e3, "launches": len(times) / runs}


def print_trace(summary: dict[str, Any]) -> None:
    """Prints the tables of a summary."""
    if not summary["devices"]:
        print("the profile holds no kernel of a GPU")
        return
    span = summary["span"]
    rows = [
        [kind, f"{v['ms']:.2f}", f"{v['ms'] / span:.1%}", f"{v['launches']:.0f}"]
        for kind, v in summary["kinds"].items()
    ]
    rows += [["idle", f"{summary['idle']:.2f}", f"{summary['idle'] / span:.1%}", ""]]
    rows.append(["step", f"{span:.2f}", "", ""])
    print(table("kind | ms a step | of the step | launches", rows, padded=True))
    rows = [
        [name[:80], v["kind"], f"{v['ms']:.2f}", f"{v['launches']:.0f}"]
        for name, v in summary["longest"].items()
    ]
    print()
    print(table("kernel | kind | ms a step | launches", rows, padded=True))


def read_job() -> tuple[Job, pathlib.Path]:
    """Reads the job from the file that the command line names; returns it and the outcome's path."""
    job, outcome = map(pathlib.Path, sys.argv[1:])
    return Job(**json.loads(job.read_text())), outcome


def main() -> None:
    """Measures the job that the command line names."""
    job, path = read_job()
    path.write_text(json.dumps(run(job)))


if __name__ == "__main__":
    main()
