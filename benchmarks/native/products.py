"""Programs that multiply on two devices and compare with one: `axes` and `shard_map`. They import JAX.

    python -m benchmarks.native.products axes|shard_map BATCH TOKENS D_IN D_OUT

Each prints as JSON the largest differences of y, dx and dw over their largest magnitude, by policy.
"""

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mxjax
from mxjax.implementations import compiler_options
from training.environment import enable_compilation_cache

POLICIES = ("wgrad_hadamard", "full_sr")
LAYOUTS: dict[str, tuple[tuple[int, int], Sequence[P]]] = {
    "batch": ((2, 1), (P("d"), P(None, None), P("d", None, None))),
    "d_in of w, d_out": ((1, 2), (P("d"), P("d", "t"), P("d", None, "t"))),
    "sequence, d_in of w": ((1, 2), (P("d", "t"), P("t", None), P("d", "t", None))),
    "d_in of x, d_out": ((1, 2), (P("d", None, "t"), P(None, ("d", "t")), P("d", None, "t"))),
}
"""Sizes of a mesh (d, t), and how x, w and y are sharded on it, as in `tests/mxjax/test_sharding.py`."""


def tensors(batch: int, tokens: int, d_in: int, d_out: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns x, w and the gradient of y, whose channels and tokens have other sizes, as in training.

    Some columns of the gradient exceed what FP8 holds and are computed again.
    """
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (batch, tokens, d_in)) * jnp.exp2(2 * jax.random.normal(keys[3], (d_in,)))
    w = jax.random.normal(keys[1], (d_in, d_out))
    size = jnp.exp2(6 * jax.random.normal(keys[4], (batch, tokens, 1)))
    return x, w, jax.random.normal(keys[2], (batch, tokens, d_out)) * size


@functools.cache
def compiled(policy: str, function: Any = None) -> Any:
    """Returns a jitted function of x, w, the gradient of y and a key: y, dx and dw.

    Args:
      policy: the product's.
      function: the product, of x, w, key and policy; `mxjax.dot` by default.
    """
    product = function or _dot

    def all_of(x, w, dy, key):
        y, back = jax.vjp(lambda x, w: product(x, w, key, policy), x, w)
        return y, *back(dy)

    return jax.jit(all_of, compiler_options=compiler_options([mxjax.get_policy(policy)], None))


def _dot(x, w, key, policy):
    return mxjax.dot(x, w, policy=policy, key=key)


def on_mesh(mesh: jax.sharding.Mesh, specs: Sequence[P], run: Any, arrays: Sequence[Any], key) -> list[Any]:
    """Returns run(*arrays, key) with the arrays sharded on a mesh."""
    with jax.set_mesh(mesh):
        put = [jax.device_put(t, NamedSharding(mesh, s)) for t, s in zip(arrays, specs, strict=True)]
        return list(run(*put, key))


def axes(arrays: Sequence[jax.Array], policy: str) -> list[float]:
    """Returns the largest differences on meshes with Explicit axes; infinity if a result is misplaced."""
    key, run, largest = jax.random.key(2), compiled(policy), [0.0] * 3
    wanted = run(*arrays, key)
    for sizes, specs in LAYOUTS.values():
        mesh = jax.make_mesh(sizes, ("d", "t"), axis_types=(AxisType.Explicit,) * 2)
        y, dx, dw = on_mesh(mesh, specs, run, arrays, key)
        for i, (found, spec, index) in enumerate(((y, specs[2], 0), (dx, specs[0], 1), (dw, specs[1], 2))):
            is_placed = found.sharding.is_equivalent_to(NamedSharding(mesh, spec), found.ndim)
            largest[i] = max(largest[i], _difference(found, wanted[index]) if is_placed else np.inf)
    return largest


def shard_map(arrays: Sequence[jax.Array], policy: str) -> list[float]:
    """Returns the largest differences of shards, whose keys hold their index, from halves on one device."""
    x, w, dy = arrays
    key, run = jax.random.key(2), compiled(policy)
    halves = [
        run(a, w, b, jax.random.fold_in(key, i))
        for i, (a, b) in enumerate(zip(np.split(x, 2), np.split(dy, 2), strict=True))
    ]
    wanted = [np.concatenate([half[i] for half in halves]) for i in (0, 1)]
    wanted.append(np.sum([np.asarray(half[2]) for half in halves], axis=0))
    largest = [0.0] * 3
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,))
        found = on_mesh(mesh, (P("d"), P(), P("d")), compiled(policy, _by_shards(mesh)), arrays, key)
        largest = [max(a, _difference(b, c)) for a, b, c in zip(largest, found, wanted, strict=True)]
    return largest


def _by_shards(mesh: jax.sharding.Mesh) -> Any:
    def product(x, w, key, policy):
        def of_shard(x, w, key):
            return _dot(x, w, jax.random.fold_in(key, jax.lax.axis_index("d")), policy)

        return jax.shard_map(of_shard, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P("d"))(x, w, key)

    return product


def _difference(found: Any, wanted: Any) -> float:
    a, b = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def main() -> None:
    """Runs the program that the command line names."""
    enable_compilation_cache()
    assert len(jax.devices()) == 2, jax.devices()
    program = {"axes": axes, "shard_map": shard_map}[sys.argv[1]]
    arrays = tensors(*map(int, sys.argv[2:]))
    print(json.dumps({p: dict(zip(("y", "dx", "dw"), program(arrays, p), strict=True)) for p in POLICIES}))


if __name__ == "__main__":
    main()
