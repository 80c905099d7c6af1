"""The part of partitioned.py about attention: batch and heads are sharded, masks and sinks with them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plain_kernels import plain_attention, plain_gradients

from mxjax.kernels.attention import launches
from mxjax.kernels.attention.fused import fused_attention


def check_attention(mesh) -> None:
    """Batch and heads are sharded without a gather; also under shard_map and with Explicit axes."""
    launches.forward, launches.backward = plain_attention, plain_gradients
    keys = jax.random.split(jax.random.key(9), 4)
    q, dy = (jax.random.normal(key, (8, 6, 8, 64), jnp.bfloat16) for key in keys[:2])
    k, v = (jax.random.normal(key, (8, 6, 4, 64), jnp.bfloat16) for key in keys[2:])

    def attend(q, k, v, dy):
        out, vjp = jax.vjp(fused_attention, q, k, v)
        return out, *vjp(dy)

    wanted = jax.jit(attend)(q, k, v, dy)
    for spec in (P("b", None, "a"), P("a", "b")):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v, dy)]
        compiled = jax.jit(lambda *arrays: attend(*arrays)).lower(*placed).compile()
        compare(compiled(*placed), wanted)
        assert ("all-gather" in compiled.as_text()) == (spec == P("a", "b")), spec
    # More parts than heads of keys: these are gathered.
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, None, ("a", "b")))) for x in (q, dy)]
    compare(jax.jit(lambda q, dy: attend(q, k, v, dy))(*placed), wanted)
    by_hand = jax.shard_map(attend, mesh=mesh, in_specs=P("b", None, "a"), out_specs=P("b", None, "a"))
    compare(jax.jit(by_hand)(q, k, v, dy), wanted)
    with jax.set_mesh(jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)):
        placed = [jax.device_put(x, P("b", None, "a")) for x in (q, k, v, dy)]
        got = jax.jit(attend)(*placed)
        compare(got, wanted)
        assert all(x.sharding.is_equivalent_to(placed[0].sharding, 4) for x in got)
    check_masked_attention(mesh, q, k, v, dy)


def check_masked_attention(mesh, q, k, v, dy) -> None:
    """Masks and sinks are sharded with the batch and the heads."""
    sinks = jnp.linspace(-1, 1, 8)
    begin, position = jnp.arange(8)[:, None] % 3, jnp.arange(6)[None]  # of a second document
    first_key = jnp.maximum(jnp.where(position >= begin, begin, 0), position - 2)

    def attend(q, k, v, dy, first_key, sinks):
        out, vjp = jax.vjp(
            lambda *x: fused_attention(*x[:3], first_key=first_key, sinks=x[3]), q, k, v, sinks
        )
        return out, *vjp(dy)

    wanted = jax.jit(attend)(q, k, v, dy, first_key, sinks)
    specs = (*[P("b", None, "a")] * 4, P("b"), P("a"))
    arrays = zip((q, k, v, dy, first_key, sinks), specs, strict=True)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays]
    compiled = jax.jit(lambda *arrays: attend(*arrays)).lower(*placed).compile()
    compare(compiled(*placed), wanted)
    assert "all-gather" not in compiled.as_text()


def compare(got, wanted) -> None:
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02, atol=0.02)
