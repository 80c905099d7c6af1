"""`trace`: a function of pytrees as a jaxpr, and the origins of its arguments."""

import pathlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from mxjax.transform.origins import CONSTANT, DATA, Origin, dotted

LIBRARIES = (str(pathlib.Path(__file__).parents[1]), str(pathlib.Path(jax.__file__).parent))
"""Files that warnings skip, so that they point to the caller's line."""
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


class Traced(NamedTuple):
    """A traced function, its arguments' arrays, their origins, and the structure of its results.

    Attributes:
      constants: the results that are no JAX arrays, such as Python numbers, by their place; the jaxpr has
        none of them.
    """

    jaxpr: Jaxpr
    arrays: list[Any]
    origins: list[Origin]
    results: Any  # a PyTreeDef
    constants: dict[int, Any]

    def results_of(self, arrays: Iterable[Any]) -> Any:
        """Returns the function's results, given those that the jaxpr computes."""
        computed = iter(arrays)
        places = range(self.results.num_leaves)
        return self.results.unflatten(
            [self.constants[i] if i in self.constants else next(computed) for i in places]
        )


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
    structure: Any = None
    constants: dict[int, Any] = {}

    def flat(*arrays):
        nonlocal structure, constants
        values = [leaf for _, leaf in leaves]
        for i, array in zip(traced, arrays, strict=True):
            values[i] = array
        args, kwargs = tree.unflatten(values)
        results, structure = jax.tree.flatten(f(*args, **kwargs))
        paths = [path for path, _ in leaves]
        _warn_of_updates({paths[i]: values[i] for i in traced}, args[weights], results, weights)
        constants = {i: r for i, r in enumerate(results) if not isinstance(r, jax.Array)}
        return [r for i, r in enumerate(results) if i not in constants]

    arrays = [leaves[i][1] for i in traced]
    jaxpr = jax.make_jaxpr(flat)(*arrays)
    return Traced(jaxpr, arrays, [_origin(*leaves[i], weights) for i in traced], structure, constants)


def _warn_of_updates(before: dict[Any, Any], after: Any, results: list[Any], weights: int) -> None:
    """Warns if f put other arrays into the weights' argument, as an NNX module with state does, and returns
    them nowhere."""
    begin = (jax.tree_util.SequenceKey(0), jax.tree_util.SequenceKey(weights))
    returned = {id(result) for result in results}
    changed = [
        dotted(path)
        for path, value in jax.tree_util.tree_flatten_with_path(after)[0]
        if before.get((*begin, *path), value) is not value and id(value) not in returned
    ]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        warnings.warn(
            f"transform loses what f writes into its arguments, here {changed[0]}{more}; return what is to "
            "be kept, such as batch statistics, and give dropout a key of its own",
            skip_file_prefixes=LIBRARIES,
        )


def _origin(path: tuple[Any, ...], array: Any, weights: int) -> Origin:
    """Returns the origin of an argument's array, whose path begins in (args, kwargs)."""
    if [key.idx for key in path[:2] if isinstance(key, jax.tree_util.SequenceKey)] != [0, weights]:
        return DATA
    return Origin((dotted(path[2:]),)) if jnp.issubdtype(array.dtype, jnp.floating) else CONSTANT
