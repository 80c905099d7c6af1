"""Delayed scaling of FP8 beside Flax's, which follows TransformerEngine's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import fp8_ops
from support.dots import assert_near, assert_same, products, with_gradients
from support.programs import run_compiled

import mxjax
from mxjax.numerics.delayed import History, Scales, first_history, updated
from mxjax.numerics.formats import get_format
from mxjax.policy.policy import with_current_scales

E4M3, E5M2 = 448.0, 57344.0
POLICY = mxjax.get_policy("fp8_delayed")
LARGEST = Scales(E4M3, E4M3, E5M2)


@pytest.mark.parametrize("largest", [E4M3, E5M2])
@pytest.mark.parametrize("length", [1, 4, 1024])
def test_histories_and_scales_are_those_of_flax(largest, length):
    """Flax takes the scale of a step from the history before it; ours is ready when that step ends."""
    rng = np.random.default_rng(0)
    amaxes = (rng.standard_normal(12).astype(np.float32) ** 2) * np.float32(2.0) ** rng.integers(-20, 20, 12)
    amaxes[[0, 5, 6, 7, 8, 9]] = 0.0, 0.0, 0.0, 0.0, 0.0, np.inf  # a factor stays where a history has none
    ours, (scale, history) = first_history(length=length), (jnp.ones(1), jnp.zeros(length))
    dtype = {E4M3: jnp.float8_e4m3fn, E5M2: jnp.float8_e5m2}[largest]
    for amax in amaxes:
        scale, history = fp8_ops.update_fp8_meta(jnp.array([amax]), dtype, scale, history)
        np.testing.assert_allclose(1 / ours.scale, scale[0], rtol=2e-7)
        ours = updated(ours, jnp.float32(amax), largest)
        newest_first = np.r_[history[0], history[1:][::-1]]
        np.testing.assert_array_equal(ours.amax[1:][::-1], newest_first[: length - 1])
        assert ours.amax[0] == 0


def test_stacked_histories_are_separate():
    history = History(jnp.ones((2, 3)), jnp.zeros((2, 3, 4)))
    amax = jnp.arange(6.0).reshape(2, 3)
    new = updated(history, amax, jnp.array([[E4M3], [E5M2]]))
    for i, j in np.ndindex(2, 3):
        one = updated(first_history(length=4), amax[i, j], (E4M3, E5M2)[i])
        np.testing.assert_array_equal(new.scale[i, j], one.scale)
        np.testing.assert_array_equal(new.amax[i, j], one.amax)


def test_a_scale_past_float32_is_its_largest_number():
    """As TransformerEngine has it; Flax's is infinite there."""
    largest = jnp.finfo(jnp.float32).max
    assert updated(first_history(), jnp.float32(2.0**-120), E5M2).scale == largest


def arrays(step: int, dtype=jnp.float32):
    """x [16, 32], w [32, 48] and dy [16, 48], whose largest magnitudes make scales powers of two."""
    shapes, tops = ((16, 32), (32, 48), (16, 48)), (7.0, 3.5, 14.0)
    drawn = (jax.random.normal(jax.random.key(10 * step + i), shape, dtype) for i, shape in enumerate(shapes))
    return [t.at[step, 3].set(-top * 2.0**step) for t, top in zip(drawn, tops, strict=True)]


def ours(scales: Scales, x, w, dy, **options):
    def product(x, w, scales):
        return mxjax.dot(x, w, policy=POLICY, scales=scales, **options)

    return with_gradients(product, x, w, scales, dy=dy)


@pytest.mark.parametrize("implementation", ["reference", "fp8_carriers"])
def test_steps_of_dot_are_those_of_flax(implementation):
    """Three steps: products, gradients, and the state after each."""
    histories = Scales(*[first_history(length=2)] * 3)
    names = ("lhs", "rhs", "grad")
    theirs = {f"{n}_scale": jnp.ones(1) for n in names}
    theirs |= {f"{n}_amax_history": jnp.zeros(2) for n in names}
    run = jax.jit(functools.partial(ours, implementation=implementation))

    @jax.jit
    def flax_step(state, x, w, dy):
        def product(x, w, state):
            return fp8_ops.fp8_scaled_dot_general(
                x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32, **state
            )

        return with_gradients(product, x, w, state, dy=dy)

    for step in range(3):
        x, w, dy = arrays(step)
        *found, amax = run(Scales(*(history.scale for history in histories)), x, w, dy)
        *wanted, theirs = flax_step(theirs, x, w, dy)
        assert_near(found, wanted, 2e-5, 2e-5)
        histories = Scales(*map(updated, histories, amax, LARGEST))
        for name, history in zip(names, histories, strict=True):
            assert set(np.asarray(history.amax[1:])) <= set(np.asarray(theirs[f"{name}_amax_history"]))
    assert [history.scale for history in histories] == [E4M3 / 28, E4M3 / 14, E5M2 / 56]


def test_a_dot_with_its_tensors_own_scales_is_that_of_current_scaling():
    x, w, dy = arrays(0)
    scales = Scales(*(jnp.float32(m) / jnp.max(jnp.abs(t)) for m, t in zip(LARGEST, (x, w, dy), strict=True)))
    assert_same(ours(scales, x, w, dy)[:3], products(x, w, dy, policy="fp8"))
    assert with_current_scales(POLICY) == mxjax.get_policy("fp8")


def test_the_gradient_of_a_loop_has_each_layers_magnitudes():
    weights = jax.random.normal(jax.random.key(1), (3, 32, 32)) * jnp.array([1.0, 2.0, 4.0])[:, None, None]
    scales = Scales(*[jnp.ones(3)] * 3)
    x = jax.random.normal(jax.random.key(0), (16, 32))

    def loss(scales):
        def layer(x, part):
            w, scales = part
            return mxjax.dot(x, w, policy=POLICY, scales=scales), jnp.max(jnp.abs(x))

        y, inputs = jax.lax.scan(layer, x, (weights, scales))
        return jnp.sum(y), inputs

    amax, inputs = jax.jit(jax.grad(loss, has_aux=True))(scales)
    np.testing.assert_array_equal(amax.x, inputs)
    np.testing.assert_array_equal(amax.w, jnp.max(jnp.abs(weights), (1, 2)))
    assert amax.dy[0] > amax.dy[1] > amax.dy[2] == 1


@pytest.mark.parametrize("axes", [(0, None, 0, None), (0, 0, 0, None), (0, 0, 0, 0)], ids=str)
def test_under_vmap_magnitudes_are_those_of_all_calls_that_share_a_scale(axes):
    x, w, dy = (jnp.stack([t, 2 * t]) for t in arrays(0))
    w = w if axes[1] == 0 else w[0]
    scales = Scales(*map(jnp.float32, (2.0, 4.0, 8.0)))
    if axes[3] == 0:
        scales = Scales(*(jnp.stack([s, s]) for s in scales))

    def loss(scales):
        y = jax.vmap(
            lambda x, w, scales: mxjax.dot(x, w, policy=POLICY, scales=scales), (*axes[:2], axes[3])
        )(x, w, scales)
        return jnp.vdot(y, dy)

    over = (1, 2) if axes[3] == 0 else None
    amax = jax.grad(loss)(scales)
    np.testing.assert_array_equal(amax.x, jnp.max(jnp.abs(x), over))
    np.testing.assert_array_equal(amax.w, jnp.max(jnp.abs(w), over))
    np.testing.assert_array_equal(amax.dy, jnp.max(jnp.abs(dy), over))


# In a process of its own, since the number of devices is fixed when JAX starts.
ON_FOUR = """
import jax, jax.numpy as jnp, numpy as np
import mxjax
from jax.sharding import AxisType, PartitionSpec as P
from mxjax.numerics.delayed import Scales

keys, shapes = jax.random.split(jax.random.key(0), 3), ((16, 32), (32, 48), (16, 48))
x, w, dy = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))
scales = Scales(*map(jnp.float32, (2.0, 4.0, 8.0)))

def gradients(x, w, dy, scales):
    y, vjp = jax.vjp(lambda *each: mxjax.dot(*each[:2], policy="fp8_delayed", scales=each[2]), x, w, scales)
    return y, *vjp(dy)

expected, rows = gradients(x, w, dy, scales), P("data")
specs = {"in_specs": (rows, P(), rows, P()), "out_specs": (rows, rows, P(), P())}
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(t, jax.NamedSharding(mesh, rows)) for t in (x, dy)]
        for run in (gradients, jax.shard_map(gradients, **specs)):
            found = jax.jit(run)(placed[0], w, placed[1], scales)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
            assert found[-1] == expected[-1] == Scales(*(jnp.max(jnp.abs(t)) for t in (x, w, dy)))
print("equal")
"""


@pytest.mark.slow
def test_on_a_mesh_magnitudes_are_those_of_all_devices():
    assert run_compiled(ON_FOUR, JAX_NUM_CPU_DEVICES="4") == "equal\n"


def test_a_policy_with_delayed_scales_says_what_it_needs():
    x, w, _ = arrays(0)
    with pytest.raises(ValueError, match=r"scales of x, w, dy come from earlier steps.* as scales="):
        mxjax.dot(x, w, policy="fp8_delayed")
    with pytest.raises(TypeError, match=r"mxjax.numerics.delayed.Scales"):
        mxjax.dot(x, w, policy="fp8_delayed", scales=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="such as 'fp8'"):
        mxjax.dot_general(x, w, (((1,), (0,)), ((), ())), policy="fp8_delayed")
    with pytest.raises(ValueError, match="use scaling='current'"):
        mxjax.quantize(x, mxjax.Operand("fp8_e4m3", scaling="delayed"))


def test_a_policy_as_json_keeps_its_scaling():
    assert mxjax.set_fields(mxjax.get_policy("fp8"), ["*.*.scaling=delayed"]) == POLICY
    assert POLICY.delayed == {"x": "fp8_e4m3", "w": "fp8_e4m3", "dy": "fp8_e5m2"}
    assert [get_format(name).element.max for name in POLICY.delayed.values()] == list(LARGEST)
