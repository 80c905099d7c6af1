"""Measures training steps of one policy in its own process, which `benchmarks.train_speed` starts."""

import functools
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import trace_table, train_job
from benchmarks.train_job import Job
from models import llama
from models.configs import get_config
from mxjax.implementations import choose_implementation
from mxjax.kernels.selftest.timing import measure
from mxjax.recipes import get_policy
from mxjax.remat import check_remat
from training import parameter_sharding
from training.config import OptimizerConfig
from training.environment import facts
from training.learning_rate import learning_rate
from training.mesh import check_batch, compiler_options, global_batch, make_mesh
from training.optimizer import keeps_finite, make_optimizer
from training.step import ScheduledStep, TrainState, make_train_step
from training.vocabulary import filled_size, resize

GEMMS = ((8192, 8192, 8192), (8192, 4096, 14336))
TRACED_STEPS = 3


def main() -> None:
    """Measures the job that the command line names."""
    job, path = train_job.read()
    train_job.write(path, run(job))


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
    inputs, key = train_job.batches(job, get_config(job.model).vocab_size), jax.random.key(0)

    def step(tokens: np.ndarray):
        nonlocal state
        state, metrics = compiled_step(state, global_batch(mesh, tokens), key)
        return metrics.loss

    losses, times = train_job.run_steps(step, float, inputs)
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
    config = OptimizerConfig(*train_job.learning_rate(job))
    optimizer, schedule = make_optimizer(config), learning_rate(config, 1_000_000_000)
    policies = llama.layer_policies(model, get_policy(job.subject))
    options = {"policies": policies, "remat": job.remat, "implementation": job.implementation}
    check_remat(job.remat, policies.policies, job.implementation)
    check_batch(mesh.shape, job.batch, 1)
    parameter_sharding.check_shards(mesh.shape, model, policies)
    fill = functools.partial(resize, size=filled_size(mesh.shape, model, [policies]))
    state, shardings = parameter_sharding.first_state(model, optimizer, mesh, jax.random.key(0), fill)
    loss = functools.partial(_loss, model, options)
    told = compiler_options(mesh, policies.policies, job.implementation)
    train_step = make_train_step(
        loss, optimizer, shardings=shardings, compiler_options=told, keeps_finite=keeps_finite(config)
    )
    batch = global_batch(mesh, train_job.batches(job, model.vocab_size)[0])
    start = time.perf_counter()
    lowered = train_step.lower(state, batch, jax.random.key(0), jax.jit(schedule)(state.step))
    lower_seconds = time.perf_counter() - start
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - start - lower_seconds
    seconds = {"lower_seconds": lower_seconds, "compile_seconds": compile_seconds}
    return ScheduledStep(compiled, schedule), state, seconds


def _loss(model, options, params, batch, key):
    return llama.mean_loss(model, params, batch, key=key, **options)


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
    return trace_table.summarize(trace_table.read(folder), TRACED_STEPS)


if __name__ == "__main__":
    main()
