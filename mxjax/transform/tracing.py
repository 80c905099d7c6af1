"""`trace` makes a jaxpr of a function; `Origin` says where a value of it comes from: weights or activations.

| origin | computed from |
| --- | --- |
| constant | neither the weights nor the data: literals, `jnp.arange`, a loop's counter |
| weight | floating-point arrays of the weights argument, and constants |
| data | any other argument, or an array that the function closes over |

An embedding that tokens select is data: its rows depend on the tokens.

A weight's casts between floating-point dtypes are deferred: the interpreter carries the value before the
cast, so that a product quantizes float32 master weights. `seen` casts where another operation reads it.
"""

import pathlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr

CASTS = (jnp.float32, jnp.bfloat16, jnp.float16)
"""The dtypes of a product's operands; casts between them are deferred."""


class Origin(NamedTuple):
    """Where a value comes from.

    Attributes:
      paths: dotted paths of the parameters that it is computed from.
      data: whether it depends on data.
      casts: the carried value's dtype, then those that the function has cast it to since; empty if none.
    """

    paths: tuple[str, ...] = ()
    data: bool = False
    casts: tuple[Any, ...] = ()

    @property
    def is_weight(self) -> bool:
        """Whether it is computed from parameters and constants alone."""
        return bool(self.paths) and not self.data


CONSTANT, DATA = Origin(), Origin(data=True)


def join(origins: Iterable[Origin]) -> Origin:
    """Returns the origin of a value that is computed from values of these origins."""
    origins = list(origins)
    if any(origin.data for origin in origins):
        return DATA
    return Origin(tuple(dict.fromkeys(path for origin in origins for path in origin.paths)))


def cast(origins: Sequence[Origin]) -> list[Origin]:
    """Returns the origins of the values as `all_seen` returns them, with no cast deferred."""
    return [origin._replace(casts=()) for origin in origins]


def seen(value: Any, origin: Origin) -> Any:
    """Returns the value as the function sees it, after its casts."""
    for dtype in origin.casts[1:]:
        value = lax.convert_element_type(value, dtype)
    return value


def all_seen(values: Sequence[Any], origins: Sequence[Origin]) -> list[Any]:
    """Returns all values as the function sees them."""
    return [seen(value, origin) for value, origin in zip(values, origins, strict=True)]


def dotted(path: tuple[Any, ...]) -> str:
    """Returns the name of a leaf, e.g. "blocks.0.mlp.up"; "weights" for an argument that is one array."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "weights"


def quoted(paths: Iterable[str], separator: str = ", ") -> str:
    """Returns paths for a message, in quotes, because that of a tuple's element is a number."""
    return separator.join(map(repr, paths))


def aval(atom: Any) -> Any:
    """Returns the type of a jaxpr's variable or literal: an array's, with dtype and shape."""
    return atom.aval


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
    if [key.idx for key in path[:2] if isinstance(key, jax.tree_util.SequenceKey)] != [0, weights]:
        return DATA
    return Origin((dotted(path[2:]),)) if jnp.issubdtype(array.dtype, jnp.floating) else CONSTANT
