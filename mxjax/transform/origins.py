"""`Origin`: where a value of a traced function comes from, which tells weights from activations.

| origin | computed from |
| --- | --- |
| constant | neither the weights nor the data: literals, `jnp.arange`, a loop's counter |
| weight | floating-point arrays of the weights argument, and constants |
| data | any other argument, or an array that the function closes over |

An embedding that tokens select is data: its rows depend on the tokens.

A weight's casts between floating-point dtypes are deferred: the interpreter carries the value before the
cast, so that a product quantizes float32 master weights. `seen` casts where another operation reads it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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
