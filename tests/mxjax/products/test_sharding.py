"""`dot` on meshes of four virtual devices: the values and gradients of one device, on both kinds of axes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.marks import parametrize
from support.programs import on_devices

import mxjax

# In a process of its own, since the number of devices is fixed when JAX starts.
PROGRAM = """
import sys
import jax, numpy as np
import mxjax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from support.gpu_products import LAYOUTS

kind = AxisType[sys.argv[1]]
x = jax.random.normal(jax.random.key(0), (8, 64, 128))
w = jax.random.normal(jax.random.key(1), (128, 64))

def put(array, spec):
    return jax.device_put(array, NamedSharding(mesh, spec))

def loss(x, w, key, policy, implementation):
    y = mxjax.dot(x, w, policy=policy, key=key, implementation=implementation)
    return (y**2).sum(), y

key = jax.random.key(2)
gradients = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=(3, 4))
mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, AxisType[sys.argv[2]]))
cases = [("wgrad_hadamard", "fp8_carriers"), ("full_sr", "xla"), ("full_rht", "scaled_dot"), ("fp8", None)]
cases.append(("wgrad", "reference"))
some = {"AutoAuto": cases, "ExplicitExplicit": cases, "ExplicitAuto": cases[:1]}
for case in some["".join(sys.argv[1:])]:
    one = gradients(x, w, key, *case)
    with jax.set_mesh(mesh):
        for _, specs in LAYOUTS.values():
            (dx, dw), y = gradients(put(x, specs[0]), put(w, specs[1]), key, *case)
            assert len(dw.devices()) == 4
            for a, b, spec in zip((*one[0], one[1]), (dx, dw, y), specs):
                assert b.sharding.is_equivalent_to(NamedSharding(mesh, spec), b.ndim) or "Auto" in sys.argv
                # Quantized values and their random bits are the same, so only the order of sums differs.
                error = np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max()
                assert error < 1e-6, (case, specs, error)

def rows_loss(x, w, key, policy):
    y = jax.vmap(jax.vmap(lambda row: mxjax.dot(row, w, policy=policy, key=key)))(x)
    return (y**2).sum()

if "Explicit" in sys.argv:  # rows that vmap maps are tokens, on a mesh too
    one, _ = gradients(x, w, key, "full_sr", "xla")
    with jax.set_mesh(mesh):
        of_rows = jax.jit(jax.grad(rows_loss, (0, 1)), static_argnums=3)
        for a, b in zip(one, of_rows(put(x, P("d", "t")), put(w, P("t", None)), key, "full_sr")):
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-6 * np.abs(a).max())

def by_hand(x, w, key, policy, implementation):
    def of_part(x, w, key):
        return jax.lax.psum(loss(x, w, key, policy, implementation)[0], "d")

    specs = P("d"), P(), P()
    return jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=P())(x, w, key)

for implementation in ("fp8_carriers", "scaled_dot"):
    case = "wgrad_hadamard", implementation
    one, _ = gradients(x, w, key, *case)
    with jax.set_mesh(mesh):
        of_parts = jax.jit(jax.grad(by_hand, (0, 1)), static_argnums=(3, 4))
        for a, b in zip(one, of_parts(put(x, P("d")), put(w, P()), key, *case)):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-4)
print(jax.device_count())
"""


@parametrize("kinds", ("Explicit", "Explicit"), exhaustive=[("Auto", "Auto"), ("Explicit", "Auto")])
@pytest.mark.slow
def test_gradients_do_not_depend_on_sharding(kinds):
    strict = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
    assert on_devices(4, PROGRAM, *kinds, **strict) == [4]


SCALES = """
import jax, numpy as np
import mxjax
from jax.sharding import NamedSharding, PartitionSpec as P

x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
operands = ["fp8_e4m3", "fp8_e5m2", "nvfp4", mxjax.Operand("fp4_ue5m3", scale_max=2048)]
operands.append(mxjax.Operand(rounding="stochastic"))

@jax.jit
def quantized(x):
    return [mxjax.quantize(x, operand, key=jax.random.key(0)) for operand in operands]

expected = quantized(x)
for size in (2, 8):
    mesh = jax.make_mesh((size,), ("d",), devices=jax.devices()[:size])
    for spec in (P("d"), P(None, "d")):
        found = quantized(jax.device_put(x, NamedSharding(mesh, spec)))
        jax.tree.map(np.testing.assert_array_equal, found, expected)
print(jax.device_count())
"""


def test_tensor_scales_elements_and_random_bits_agree_over_meshes():
    assert on_devices(8, SCALES) == [8]


def test_a_gradient_is_row_major():
    """Else XLA keeps a reduce-scatter's order in memory, and transposes and copies the optimizer's state."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    x, w = jnp.ones((64, 64)), jnp.ones((64, 32))
    layout = mxjax.Layout(P(None, "d"), P(None, None))

    def loss(w):
        return mxjax.dot(x, w, policy="wgrad", layout=layout).sum()

    with jax.set_mesh(mesh):
        lines = jax.jit(jax.grad(loss)).lower(w).as_text().splitlines()
    [constraint] = [line for line in lines if "LayoutConstraint" in line]
    assert "result_layouts = [dense<[1, 0]>" in constraint
    assert "tensor<64x32xf32>" in constraint
