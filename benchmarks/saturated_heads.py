"""What a training step costs once heads are saturated on purpose, so that FP8 loses rows of a gradient.

    python -m benchmarks.saturated_heads --model 125m --batch 64 --seq 512 --data PREFIX --factors 1 4 16

Trains `--before` steps on text, as `benchmarks.train_speed` does. Then it multiplies the weights of all
queries and keys by each factor, from the same state, and times `--steps` steps. Scores of attention grow with
the factor's square: the softmax saturates, and the gradients of queries and keys become tiny beside those of
values, which share their rows. Such rows are computed again. Prints a table with the share of the rows of
attention.qkv's gradient that FP8 loses, in a few sequences, and JSON as the last line.
"""

import argparse
import json
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import train_job, train_ours
from benchmarks.train_job import OURS, Job
from benchmarks.train_tokens import write_tokens
from models import llama
from models.configs import LlamaConfig, get_config
from mxjax.fp8_carriers import carry
from mxjax.gemm_input import gemm_inputs
from mxjax.kernels.bench.report import commit
from mxjax.kmajor import pack_by_definition
from mxjax.policy import Policy
from mxjax.recipes import get_policy
from mxjax.tables import table
from training.diagnosis.capture import make_pass
from training.environment import facts, input_errors
from training.mesh import make_mesh

FEW = 8
"""Sequences in which lost rows are counted."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the command line names and prints it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saturated_heads", description=__doc__)
    parser.add_argument("--model", default="125m", help="a name of models/configs.py")
    parser.add_argument("--policy", default="wgrad_hadamard")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--before", type=int, default=100, help="steps of training before these")
    parser.add_argument("--steps", type=int, default=20, help="timed for each factor")
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0, 16.0])
    parser.add_argument("--data", help="text or dataset PREFIX; default: the source of Python's library")
    parser.add_argument("--commit", help="of the code; default: what git says")
    options = parser.parse_args(arguments)
    if min(options.before, options.steps) < 1:
        parser.error("--before and --steps must be at least 1")
    with input_errors(), tempfile.TemporaryDirectory() as folder:
        tokens = pathlib.Path(folder) / "tokens.npy"
        job = Job(
            OURS,
            options.policy,
            options.model,
            options.batch,
            options.seq,
            options.steps,
            options.before,
            tokens=str(tokens),
        )
        data = write_tokens(tokens, job, options.data)
        seconds, lost = measure(job, options.factors)
    first = statistics.median(seconds[0])
    rows = []
    for factor, times, share in zip(options.factors, seconds, lost, strict=True):
        median = statistics.median(times)
        rows.append([f"{factor:g}", f"{share:.3f}", f"{1e3 * median:.1f}", f"{median / first:.3f}"])
    print(table("factor | rows lost | step ms | of the first", rows, padded=True))
    numbers = {"factors": options.factors, "seconds": seconds, "lost": lost}
    environment = {
        "commit": options.commit or commit(),
        "device": jax.devices()[0].device_kind,
        "versions": facts(),
    }
    print(json.dumps(environment | {"policy": job.subject, "model": job.model, "data": data} | numbers))


def measure(job: Job, factors: Sequence[float]) -> tuple[list[list[float]], list[float]]:
    """Returns the seconds of each timed step, and the share of lost rows, for each factor."""
    mesh, key = make_mesh(None), jax.random.key(0)
    with jax.set_mesh(mesh):
        step, state, _ = train_ours.prepare(job, mesh)
        model = get_config(job.model)
        share = make_lost_share(model, get_policy(job.subject))
        inputs = train_job.batches(job, model.vocab_size)
        for tokens in inputs[: job.before]:
            state, _ = step(state, np.asarray(tokens), key)
        seconds, lost = [], []
        for factor in factors:
            changed = jax.tree.map(jnp.copy, state)  # the step donates it
            changed = changed._replace(params=saturated(changed.params, model, factor))
            lost.append(float(share(changed.params, np.asarray(inputs[job.before])[:FEW], key)))

            def run(tokens: np.ndarray):
                nonlocal changed
                changed, metrics = step(changed, np.asarray(tokens), key)
                return metrics.loss

            seconds.append(
                train_job.run_steps(run, float, inputs[job.before - 1 :])[1]
            )  # the first has no time
    return seconds, lost


def saturated(params: llama.Params, model: LlamaConfig, factor: float) -> llama.Params:
    """Returns the parameters with the weights of all queries and keys times the factor."""
    heads = model.n_heads // model.n_kv_heads + 2  # a key/value head's columns: its queries, key and value
    scale = np.ones((model.n_kv_heads, heads, model.head_dim), np.float32)
    scale[:, :-1] = factor
    blocks = params["blocks"]
    attention = blocks["attention"] | {"qkv": blocks["attention"]["qkv"] * scale.reshape(1, 1, -1)}
    return params | {"blocks": blocks | {"attention": attention}}


def make_lost_share(model: LlamaConfig, policy: Policy):
    """Returns the jitted `share(params, batch, key)`: the rows of qkv's gradient that E5M2 loses."""
    run = make_pass(model, llama.layer_policies(model, policy), None)

    @jax.jit
    def lost(dy: jax.Array, key: jax.Array):
        how, _ = gemm_inputs(policy.dgrad, -1, -1, key)
        packed = pack_by_definition(dy.reshape(-1, dy.shape[-1]), how)
        return jnp.mean(carry(packed, "e5m2").lost.astype(jnp.float32))

    return lambda params, batch, key: lost(run(params, batch, key).tensors["attention.qkv"].dy, key)


if __name__ == "__main__":
    main()
