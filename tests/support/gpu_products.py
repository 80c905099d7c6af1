"""The program of tests/gpu/test_meshes.py: products on two devices beside one, as JSON.

    python -m support.gpu_products POLICY BATCH TOKENS D_IN D_OUT

Prints the largest differences of y, dx and dw over their largest magnitude, for each layout on a mesh with
Explicit axes.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.products.implementations import compiler_options
from training.process.environment import enable_compilation_cache

LAYOUTS = {
    "batch": ((2, 1), (P("d"), P(None, None), P("d", None, None))),
    "d_in of w, d_out": ((1, 2), (P("d"), P("d", "t"), P("d", None, "t"))),
    "sequence, d_in of w": ((1, 2), (P("d", "t"), P("t", None), P("d", "t", None))),
    "d_in of x, d_out": ((1, 2), (P("d", None, "t"), P(None, ("d", "t")), P("d", None, "t"))),
}
"""Sizes of a mesh (d, t) of two devices, and how x, w and y are sharded on it."""


def draw(batch, tokens, d_in, d_out):
    """Returns x, w and the gradient of y, some columns of which exceed what FP8 holds."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (batch, tokens, d_in)) * jnp.exp2(2 * jax.random.normal(keys[3], (d_in,)))
    w = jax.random.normal(keys[1], (d_in, d_out))
    size = jnp.exp2(6 * jax.random.normal(keys[4], (batch, tokens, 1)))
    return x, w, jax.random.normal(keys[2], (batch, tokens, d_out)) * size


def main(policy, *sizes):
    """Prints the differences."""
    assert len(jax.devices()) == 2, jax.devices()
    arrays, key, found = draw(*map(int, sizes)), jax.random.key(2), {}

    @functools.partial(jax.jit, compiler_options=compiler_options([mxjax.get_policy(policy)], None))
    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: mxjax.dot(x, w, policy=policy, key=key), x, w)
        return y, *back(dy)

    wanted = [np.asarray(x, np.float64) for x in run(*arrays)]
    for name, (shape, specs) in LAYOUTS.items():
        mesh = jax.make_mesh(shape, ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        with jax.set_mesh(mesh):
            results = run(*map(jax.device_put, arrays, shardings))
        for result, sharding in zip(results, (shardings[2], *shardings[:2]), strict=True):
            assert result.sharding.is_equivalent_to(sharding, result.ndim), (name, sharding)
        pairs = zip(results, wanted, strict=True)
        found[name] = [float(np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max()) for a, b in pairs]
    print(json.dumps(found))


if __name__ == "__main__":
    enable_compilation_cache()
    main(*sys.argv[1:])
