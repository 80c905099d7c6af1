"""`transform` on meshes of four virtual devices: bit for bit the function written by hand."""

import pytest
from support.programs import on_devices

# In a process of its own, since the number of devices is fixed when JAX starts.
PROGRAM = """
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np
import mxjax
from jax.sharding import AxisType, PartitionSpec as P

key, fold = jax.random.key(0), jax.random.fold_in
policy = dataclasses.replace(mxjax.get_policy("bf16"), fprop=mxjax.get_policy("full_sr").fprop)

def by_hand(number, *loops):
    return lambda x, w: mxjax.dot(x, w, policy=policy, key=functools.reduce(fold, loops, fold(key, number)))

def plain(number, *loops):
    return jnp.dot

def loss(product, w, x):
    x = jax.jit(lambda x, w: jnp.tanh(product(0)(x, w)))(x, w)

    @jax.shard_map(in_specs=(P(), P("d", None)), out_specs=P("d", None))
    def shards(w, x):
        def step(x, i):
            return jnp.tanh(product(1, i, jax.lax.axis_index("d"))(x, w)), None
        return jax.lax.scan(step, x, jnp.arange(2))[0]

    return jnp.sum(shards(w, x) ** 2)

for kind in (AxisType.Auto, AxisType.Explicit):
    with jax.set_mesh(jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind, kind))):
        w = jax.device_put(jax.random.normal(fold(key, 1), (40, 40)), P())
        x = jax.device_put(jax.random.normal(fold(key, 2), (8, 40)), P("d", None))
        transformed = mxjax.transform(functools.partial(loss, plain), policy)
        actual = jax.jit(jax.value_and_grad(transformed))(w, x, mxjax_key=key)
        expected = jax.jit(jax.value_and_grad(functools.partial(loss, by_hand)))(w, x)
        assert len(transformed.report(w, x).products) == 2
        for a, b in zip(actual, expected):
            assert a.sharding == b.sharding
            np.testing.assert_array_equal(a, b)
print(jax.device_count())
"""


@pytest.mark.slow
def test_it_is_what_is_written_by_hand():
    assert on_devices(4, PROGRAM) == [4]
