"""Program of test_context.py and test_expert_parallel.py on 8 virtual devices, in a process of its own."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from models import decoder
from models.configs import DecoderConfig, ExpertsConfig
from training.process.environment import enable_compilation_cache
from training.sharding import compiler_options, make_mesh, param_shardings, parameter_axes

# Two blocks with another window each, sinks, and two query heads a key/value head.
MODEL = DecoderConfig(256, 256, 2, 8, 4, 32, 256, rope_theta=10_000.0, windows=(0, 40), sinks=True)
EXPERTS = DecoderConfig(
    *(256, 128, 2, 4, 4, 32, 64),
    rope_theta=10_000.0,
    init_std=0.1,  # so that routers prefer some experts
    experts=ExpertsConfig(8, 2, biased=True, balance_loss=0.01, z_loss=1e-3),
)


def main(*cases: str) -> None:
    """For each POLICY:MESH:SEQUENCES:LENGTH prints how far the loss and the gradients are from one device's.

    Errors are relative: the loss's, and of each gradient its norm's.
    """
    for case in cases:
        policy, text, sequences, length = case.split(":")
        model = EXPERTS if "expert" in text else MODEL
        params = decoder.init(model, jax.random.key(0))
        policies = decoder.layer_policies(
            model, mxjax.get_policy(policy), [("blocks.*.attention.[sv]*", mxjax.get_policy("fp32"))]
        )
        batch = np.random.default_rng(0).integers(0, 256, (int(sequences), int(length) + 1), np.int32)

        def loss(params, batch, model=model, policies=policies):
            options = {"policies": policies, "key": jax.random.key(1), "dtype": jnp.float32}
            return decoder.mean_loss(model, params, batch, **options)

        found = []
        for mesh in (make_mesh(text), make_mesh(devices=jax.devices()[:1])):
            options = compiler_options(mesh, policies.policies, None)
            with jax.set_mesh(mesh):
                given = jax.device_put(params, param_shardings(mesh, parameter_axes(model)))
                run = jax.jit(jax.value_and_grad(loss), compiler_options=options)
                found.append(jax.device_get(run(given, batch)))
        (a, da), (b, db) = found
        errors = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), da, db)
        record = {"loss": float(abs(a / b - 1)), "gradients": float(max(jax.tree.leaves(errors)))}
        print(json.dumps({"case": case} | record), flush=True)


if __name__ == "__main__":
    enable_compilation_cache()
    main(*sys.argv[1:])
