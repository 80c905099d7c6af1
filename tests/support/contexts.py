"""Program of training/test_context.py on 8 virtual devices, in a process of its own."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from models import decoder
from models.configs import DecoderConfig
from training.process.environment import enable_compilation_cache
from training.sharding import compiler_options, make_mesh, param_shardings, parameter_axes

# Two blocks with another window each, sinks, and two query heads a key/value head.
MODEL = DecoderConfig(256, 256, 2, 8, 4, 32, 256, rope_theta=10_000.0, windows=(0, 40), sinks=True)


def main(*cases: str) -> None:
    """For each POLICY:MESH:SEQUENCES:LENGTH prints how far the loss and the gradients are from one device's.

    Errors are relative: the loss's, and of each gradient its norm's.
    """
    params = decoder.init(MODEL, jax.random.key(0))
    for case in cases:
        policy, text, sequences, length = case.split(":")
        policies = decoder.layer_policies(
            MODEL, mxjax.get_policy(policy), [("blocks.*.attention.[sv]*", mxjax.get_policy("fp32"))]
        )
        batch = np.random.default_rng(0).integers(0, 256, (int(sequences), int(length) + 1), np.int32)

        def loss(params, batch, policies=policies):
            options = {"policies": policies, "key": jax.random.key(1), "dtype": jnp.float32}
            return decoder.mean_loss(MODEL, params, batch, **options)

        found = []
        for mesh in (make_mesh(text), make_mesh(devices=jax.devices()[:1])):
            options = compiler_options(mesh, policies.policies, None)
            with jax.set_mesh(mesh):
                given = jax.device_put(params, param_shardings(mesh, parameter_axes(MODEL)))
                run = jax.jit(jax.value_and_grad(loss), compiler_options=options)
                found.append(jax.device_get(run(given, batch)))
        (a, da), (b, db) = found
        errors = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), da, db)
        record = {"loss": float(abs(a / b - 1)), "gradients": float(max(jax.tree.leaves(errors)))}
        print(json.dumps({"case": case} | record), flush=True)


if __name__ == "__main__":
    enable_compilation_cache()
    main(*sys.argv[1:])
