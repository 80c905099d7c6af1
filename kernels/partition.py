"""How kernels are cut up on a mesh: each device runs a kernel on the part that it holds, by a rule of axes.

A rule is Shardy's: `v b (ro ri) c -> …` names the factors of each axis. Some of them stay whole, as the
elements of a block do.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.experimental.custom_partitioning import custom_partitioning

Axis = tuple[str, dict[str, int], list[str]]
"""How a rule writes an axis; the sizes of the factors of compounds; the factors that stay whole."""


def partitioned(
    run: Callable[..., list[jax.Array]], rule: str, sizes: Mapping[str, int], whole: Sequence[str]
) -> Callable[..., list[jax.Array]]:
    """Returns `run`, each part of whose results takes parts of the arguments alone, for meshes to cut up.

    Args:
      rule: an axis of every argument and result as one factor or a compound of them.
      sizes: of the factors that occur in compounds; those that are an axis elsewhere have its size.
      whole: the factors that are never cut.
    """

    def partition(mesh, arguments, results):
        arguments, results = jax.tree.map(lambda x: x.sharding, (arguments, results))
        return mesh, run, results, arguments

    axes = re.sub(r"\([^)]*\)", "", rule).replace(",", " ").split()
    sizes = {factor: size for factor, size in sizes.items() if factor not in axes}
    function = custom_partitioning(run)
    function.def_partition(partition, sharding_rule=rule, need_replication_factors=tuple(whole), **sizes)
    return function


def compound(name: str, size: int, unit: int) -> Axis:
    """Returns an axis that may be cut between runs of `unit` only: into factors name + "o" and name + "i"."""
    if unit == 1:
        return name, {}, []
    if size % unit or size == unit:
        return name, {}, [name]
    outer, inner = f"{name}o", f"{name}i"
    return f"({outer} {inner})", {outer: size // unit, inner: unit}, [inner]


def along(name: str, what: str, size: int) -> Axis:
    """Returns an axis of a result with `size` elements a run of a `compound` axis; 0 if that is whole."""
    if size == 1:
        return f"{name}o", {}, []
    inner = f"{name}{what}"
    return (f"({name}o {inner})", {inner: size}, [inner]) if size else (inner, {}, [inner])
