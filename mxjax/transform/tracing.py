"""`trace`: a function of pytrees as a jaxpr, and the origins of its arguments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from mxjax.transform.origins import CONSTANT, DATA, Origin, dotted

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


class Traced(NamedTuple):
    """A traced function, its arguments' arrays, their origins, and the structure of its results."""

    jaxpr: Jaxpr
    arrays: list[Any]
    origins: list[Origin]
    results: Any  # a PyTreeDef


def trace(f: Callable[..., Any], weights: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
    """Returns f, traced for these arguments. Leaves that are no arrays are static.

    Raises:
      ValueError: there is no positional argument of number `weights`.
    """
    if not 0 <= weights < len(args):
        raise ValueError(
            f"transform takes the weights from positional argument {weights}, but {len(args)} arrived; "
            "pass the weights by position, or their number as weights="
        )
    leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    traced = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
    trees: list[Any] = []

    def flat(*arrays):
        values = [leaf for _, leaf in leaves]
        for i, array in zip(traced, arrays, strict=True):
            values[i] = array
        args, kwargs = tree.unflatten(values)
        results, structure = jax.tree.flatten(f(*args, **kwargs))
        trees.append(structure)
        return results

    arrays = [leaves[i][1] for i in traced]
    jaxpr = jax.make_jaxpr(flat)(*arrays)
    return Traced(jaxpr, arrays, [_origin(*leaves[i], weights) for i in traced], trees[0])


def _origin(path: tuple[Any, ...], array: Any, weights: int) -> Origin:
    """Returns the origin of an argument's array, whose path begins in (args, kwargs)."""
    if [key.idx for key in path[:2] if isinstance(key, jax.tree_util.SequenceKey)] != [0, weights]:
        return DATA
    return Origin((dotted(path[2:]),)) if jnp.issubdtype(array.dtype, jnp.floating) else CONSTANT
