"""`dot` on meshes of four virtual devices: the values and gradients of one device, on both kinds of axes."""

import os
import subprocess
import sys

import pytest

# In a process of its own, since the number of devices is fixed when JAX starts.
PROGRAM = """
import sys
import jax, numpy as np
import mxjax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

kind = AxisType[sys.argv[1]]
x = jax.random.normal(jax.random.key(0), (8, 64, 128))
w = jax.random.normal(jax.random.key(1), (128, 64))
layouts = {"data": P(None, None), "tensor": P(None, "t"), "fsdp": P("d", None), "both": P("d", "t")}

def loss(x, w, policy):
    return (mxjax.dot(x, w, policy=policy, key=jax.random.key(2)) ** 2).sum()

gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
for policy in ("wgrad_hadamard", "full_sr", "full_rht", "fp8"):
    one = gradients(x, w, policy)
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        x_sharded = jax.device_put(x, NamedSharding(mesh, P("d", None, None)))
        for name, layout in layouts.items():
            four = gradients(x_sharded, jax.device_put(w, NamedSharding(mesh, layout)), policy)
            assert len(four[1].devices()) == 4
            for a, b in zip(one, four):
                # Quantized values and their random bits are the same, so only the order of sums differs.
                error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max()
                assert error < 1e-6, (policy, name, error)
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_gradients_do_not_depend_on_sharding(kind):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    flags |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    subprocess.run([sys.executable, "-c", PROGRAM, kind], check=True, env=os.environ | flags)
