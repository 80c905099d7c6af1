"""Updates on 8 virtual devices, for training/optimizer/test_optimizer_runs.py, in a process of their own.

For each line, of a model's name and flags, prints the largest difference of parameters and moments from one
device's after three updates by the same gradients, relative to each array's largest value, and how many
elements differ.
"""

import dataclasses
import functools
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from models.configs import DecoderConfig, ExpertsConfig
from mxjax.policy.layers import resolve
from mxjax.recipes import get_policy
from training.command_line import parse
from training.optimizer.optimizers import optimizer_of
from training.sharding import first_state, make_mesh
from training.step import make_train_step

DENSE = DecoderConfig(64, 128, 2, 8, 4, 8, 64, qkv_bias=True)
MODELS = {"dense": DENSE, "experts": dataclasses.replace(DENSE, experts=ExpertsConfig(2, 1, shared=1))}
MESH = "data=2,fsdp=2,tensor=2"


def updated(line: str, mesh):
    """Returns a state after three steps whose gradients are those of a plain function of the parameters."""
    name, *flags = line.split()
    config, model = parse(flags).optimizer, MODELS[name]
    optimizer = optimizer_of(config, model, None, resolve(["head"], get_policy("bf16")))
    with jax.set_mesh(mesh):
        stored = functools.partial(jax.tree.map, lambda w: w.astype(jnp.dtype(config.master)))
        state, shardings = first_state(model, optimizer, mesh, jax.random.key(0), stored)

        def loss(params, batch, key):  # elementwise, so that gradients are the same on all meshes
            parts = itertools.count(1)
            return sum(jnp.sum(jnp.sin(p * 40 + next(parts))) for p in jax.tree.leaves(params))

        step = make_train_step(loss, optimizer, shardings=shardings)
        for _ in range(3):
            state, metrics = step(state, np.zeros((8, 2), np.int32), jax.random.key(1), jnp.float32(0.02))
            assert metrics.finite
        same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, shardings)
        assert all(jax.tree.leaves(same))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.size > 3]
    assert any(not x.sharding.is_fully_replicated for x in moments) or mesh.size == 1
    return jax.tree.map(np.asarray, (state.params, state.opt_state))


def difference(found, expected) -> tuple[float, int]:
    """Returns the largest difference relative to an array's largest value, and how many elements differ."""
    pairs = list(zip(*map(jax.tree.leaves, (found, expected)), strict=True))
    pairs = [(np.float64(a), np.float64(b)) for a, b in pairs]
    return (
        max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-30)) for a, b in pairs),
        sum(int(np.sum(a != b)) for a, b in pairs),
    )


if __name__ == "__main__":
    for line in sys.argv[1:]:
        expected = updated(line, make_mesh(devices=jax.devices()[:1]))
        largest, differ = difference(updated(line, make_mesh(MESH)), expected)
        elements = sum(x.size for x in jax.tree.leaves(expected))
        record = {"line": line, "largest": largest, "differ": differ, "elements": elements}
        print(json.dumps(record), flush=True)
