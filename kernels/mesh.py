"""Kernels on a mesh, where each device runs one on its shard as a sharding rule says, and under vmap.

A rule is Shardy's: `v b (ro ri) c -> …` names the factors of each axis. Some factors are never sharded, such
as the elements of a block.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import (
    AbstractMesh,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    use_abstract_mesh,
)

_log = logging.getLogger("mxjax")


def batched_by_vmap(
    run: Callable[..., list[jax.Array]], shared: int | None = None
) -> Callable[..., list[jax.Array]]:
    """Returns `run` of arrays and results that begin with a batch axis, which vmap's mapped axis joins.

    Args:
      shared: the number of an array, not the first, whose batch axis may be 1: one for all others.
    """

    @jax.custom_batching.custom_vmap
    def call(*arrays):
        return run(*arrays)

    @call.def_vmap
    def _(size, mapped, *arrays):
        batch = arrays[0].shape[int(mapped[0])]

        def joined(i: int, x: jax.Array) -> jax.Array:
            if i == shared and not mapped[i] and x.shape[0] == 1:
                return x
            x = x if mapped[i] else jnp.broadcast_to(x, (size, *x.shape))
            return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])

        results = call(*(joined(i, x) for i, x in enumerate(arrays)))
        return [y.reshape(size, batch, *y.shape[1:]) for y in results], [True] * len(results)

    return call


def partitioned(
    run: Callable[..., list[jax.Array]],
    rule: str,
    sizes: Mapping[str, int],
    whole: Sequence[str],
    summed: str | None = None,
    reduced: Sequence[str] = (),
) -> Callable[..., list[jax.Array]]:
    """Returns `run`, partitioned on meshes: each device computes shards of the results from shards.

    Args:
      run: a function of the arguments or their shards. With `summed` or `reduced`, it also takes the names
        of the mesh axes that shard those factors, and must sum or reduce over them.
      rule: Shardy's rule; every axis of an argument or result is one factor or a compound.
      sizes: sizes of the factors in compounds, except those that are a whole axis elsewhere.
      whole: the factors that are never sharded.
      summed: a factor of the arguments that the results lack.
      reduced: factors of the arguments that one of the results lacks.
    """
    over = [summed] if summed else list(reduced)
    arguments_rule, results_rule = (_parse(side) for side in rule.split("->"))

    def partition(traced: AbstractMesh, mesh: Mesh, arguments, results):
        mesh = _mesh_of(traced, arguments) if mesh.empty else mesh
        cuts = _cuts(mesh, arguments_rule, arguments, sizes, whole)
        of_arguments = [_sharding(mesh, axes, cuts) for axes in arguments_rule]
        of_results = [_sharding(mesh, axes, cuts) for axes in results_rule]

        def on_part(*parts):
            with use_abstract_mesh(AbstractMesh((), ())):  # the shard is a whole tensor to its device
                return run(*parts, tuple(n for f in over for n in cuts.get(f, ()))) if over else run(*parts)

        return mesh, on_part, jax.tree.unflatten(jax.tree.structure(results), of_results), tuple(of_arguments)

    def on_all(*arguments):
        return run(*arguments, ()) if over else run(*arguments)

    function = custom_partitioning(lambda _, *arguments: on_all(*arguments), static_argnums=(0,))
    factors = dict.fromkeys(re.findall(r"\w+", rule))
    axes = [axis[0] for term in (*arguments_rule, *results_rule) for axis in term if len(axis) == 1]
    function.def_partition(
        partition,
        sharding_rule=rule,
        need_replication_factors=tuple(f for f in factors if f in whole),  # in the rule's order, for Shardy
        reduction_factors=(summed,) if summed else (),
        **{factor: size for factor, size in sizes.items() if factor not in axes},
    )

    return functools.partial(_call_on_mesh, on_all, function)


def _call_on_mesh(direct: Callable, partitioned: Callable, *arguments: jax.Array):
    """Calls the kernel directly under `jax.shard_map` over all axes: the arguments are shards already.

    Under one over some axes the arguments are gathered over the others, which JAX cannot partition here.
    """
    mesh = get_abstract_mesh()
    if mesh.are_all_axes_manual:
        return direct(*arguments)
    if not mesh.manual_axes:
        return partitioned(mesh, *arguments)
    _warn_of_gathering()
    rest = set(mesh.axis_names) - set(mesh.manual_axes)
    whole = PartitionSpec()
    return jax.shard_map(direct, in_specs=whole, out_specs=whole, axis_names=rest)(*arguments)


@functools.cache
def _warn_of_gathering() -> None:
    _log.warning("kernels under jax.shard_map over some mesh axes gather over the others: map over all axes")


def _parse(terms: str) -> list[list[tuple[str, ...]]]:
    """Returns the factors of each axis of each term."""
    return [
        [tuple(axis.strip("()").split()) for axis in re.findall(r"\([^)]*\)|\S+", term)]
        for term in terms.split(",")
    ]


def _cuts(mesh, rule, arguments, sizes, whole) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes that shard each factor, from the first argument whose sharding is possible.

    Shardy may propagate a sharding that splits a unit, or shards two factors of a result by one mesh axis.
    """
    cuts: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    for axes, argument in zip(rule, arguments, strict=True):
        spec = _spec(mesh, argument.sharding, len(axes))
        for factors, length, names in zip(axes, argument.shape, spec, strict=True):
            factor, parts = factors[0], math.prod(mesh.shape[name] for name in names)
            size = sizes[factor] if len(factors) > 1 else length
            if names and factor not in (*whole, *cuts) and not used.intersection(names) and size % parts == 0:
                cuts[factor] = names
                used.update(names)
    return cuts


def _mesh_of(traced: AbstractMesh, arguments) -> Mesh:
    """Returns the mesh that was set while tracing.

    JAX forgets it if no argument and no result of the program lies on a mesh.
    """
    first = arguments[0]
    devices = list(first.sharding.devices_indices_map((traced.size,) * len(first.shape)))
    return Mesh(np.array(devices).reshape(traced.axis_sizes), traced.axis_names)


def _spec(mesh: Mesh, sharding, ndim: int) -> list[tuple[str, ...]]:
    """Returns the mesh axes that shard each axis of an array; none for an axis that parts of them shard."""
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *(None for _ in range(ndim)))[:ndim]
        return [(names,) if isinstance(names, str) else tuple(names or ()) for names in spec]
    slices = sharding.devices_indices_map((mesh.size,) * ndim).values()
    starts = np.array([[s.start or 0 for s in part] for part in slices]).reshape(*mesh.devices.shape, ndim)
    return [_axes_of(mesh, starts[..., i]) for i in range(ndim)]


def _axes_of(mesh: Mesh, starts: np.ndarray) -> tuple[str, ...]:
    """Returns the mesh axes along which each device's first index grows, the one by most first."""
    corners = [(starts.take(1, i).flat[0], name) for i, (name, n) in enumerate(mesh.shape.items()) if n > 1]
    names = tuple(name for step, name in sorted(corners, reverse=True) if step)
    parts = math.prod(mesh.shape[name] for name in names)
    return names if len(np.unique(starts)) == parts else ()


def _sharding(mesh, axes, cuts) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(cuts.get(factors[0]) for factors in axes)))


class RuleAxes:
    """The axes of a rule, as it writes them.

    Attributes:
      sizes: sizes of the factors in compounds.
      whole: the factors that are never sharded.
    """

    def __init__(self, *whole: str):
        self.sizes: dict[str, int] = {}
        self.whole = [*whole]

    def compound(self, name: str, size: int, unit: int) -> str:
        """Returns an axis that is sharded only between runs of `unit`: factors name + "o" and name + "i".

        It is sharded only if the number of devices divides the number of runs, which Shardy does not check.
        """
        if unit == 1:
            return name
        if size % unit or size == unit or size // unit % jax.device_count():
            self.whole.append(name)
            return name
        outer, inner = f"{name}o", f"{name}i"
        self.sizes |= {outer: size // unit, inner: unit}
        self.whole.append(inner)
        return f"({outer} {inner})"

    def along(self, name: str, what: str, each: int) -> str:
        """Returns an axis of a result that has an element for each `each` of the axis `name`."""
        size = self.sizes.get(f"{name}i", 0) // each
        if size == 1:
            return f"{name}o"
        inner = f"{name}{what}"
        self.whole.append(inner)
        if not size:
            return inner
        self.sizes[inner] = size
        return f"({name}o {inner})"
