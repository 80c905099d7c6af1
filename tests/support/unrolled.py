"""Prints, for a mesh of two devices, how gradients of unrolled blocks differ from those of a loop over them.

One JSON object: the loss's difference, the largest difference of each gradient relative to its largest
element, the number of barriers: of the loop, unrolled, and unrolled without ties between blocks; and how
often the unrolled program concatenates gradients of `gate_up`.
"""

import functools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from models import decoder
from models import sharding as backward_order
from models.configs import DecoderConfig
from training import sharding as parameter_sharding
from training.config import OptimizerConfig
from training.optimizer.optimizers import make_optimizer
from training.sharding import global_batch, make_mesh

MODEL = DecoderConfig(256, 128, 3, 4, 2, 32, 256, rope_theta=10_000.0, tied="tied" in sys.argv)


def main(shape: str, policy: str) -> None:
    """Compares the two on a mesh of this shape."""
    mesh = make_mesh(shape)
    policies = decoder.layer_policies(MODEL, mxjax.get_policy(policy))
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(OptimizerConfig())
        state, _ = parameter_sharding.first_state(MODEL, optimizer, mesh, jax.random.key(0))
        batch = global_batch(mesh, np.random.default_rng(0).integers(256, size=(4, 33), dtype=np.int32))
        results, barriers, concatenations = [], [], []
        for unroll, tied in ((1, True), (MODEL.n_layers, True), (MODEL.n_layers, False)):
            if not tied:  # without the ties between blocks
                backward_order.after_gradients = lambda x, weights: (x, weights)
            options = {"policies": policies, "key": jax.random.key(1), "dtype": jnp.float32, "unroll": unroll}
            loss = functools.partial(decoder.mean_loss, MODEL, **options)
            step = jax.jit(jax.value_and_grad(loss)).lower(state.params, batch)
            barriers.append(step.as_text().count("optimization_barrier"))
            if tied:
                compiled = step.compile()
                results.append(jax.device_get(compiled(state.params, batch)))
                concatenations = re.findall(r"= f32\[3,\d+,512\]\S* concatenate\(", compiled.as_text())
        (loss, gradients), (unrolled_loss, unrolled) = results
        difference = jax.tree.map(
            lambda a, b: float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a))), gradients, unrolled
        )
    found = {"loss": abs(float(loss - unrolled_loss)), "gradients": jax.tree.leaves(difference)}
    print(json.dumps(found | {"barriers": barriers, "concatenations": len(concatenations)}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
