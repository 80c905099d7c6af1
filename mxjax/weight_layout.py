"""Where the arrays of a product lie on a mesh.

With Auto axes, a weight is cut up while it is stored, and put together for each product: without a word from
here the partitioner may move the float32 master weights, and quantize what has arrived. With Explicit axes,
which are Auto inside of a product, the types of its operands say where its result lies. In `jax.shard_map`
they say what differs from device to device.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array, Shaped


class Layout(NamedTuple):
    """How a weight [d_in, d_out] is cut up, by axes of the mesh that `jax.set_mesh` has set.

    Attributes:
      stored: of the weight itself and of its gradient.
      multiplied: of what a GEMM reads of it. An axis that only `stored` names is gathered, after
        quantization: packed elements and scales, FP8 or bfloat16, never the master weights.
    """

    stored: PartitionSpec
    multiplied: PartitionSpec

    @property
    def transposed(self) -> "Layout":
        """The layout of the weight's transpose."""
        return Layout(*(PartitionSpec(*spec[::-1]) for spec in self))


def to_multiply(x: Shaped[Array, "*shape"], layout: Layout | None) -> Shaped[Array, "*shape"]:
    """Returns x, an operand or its scales made of a weight of this layout, as the GEMM reads it."""
    if layout is None:
        return x
    # The first constraint keeps what made x where the weight is stored.
    return lax.with_sharding_constraint(lax.with_sharding_constraint(x, layout.stored), layout.multiplied)


def as_stored(gradient: jax.Array, layout: Layout | None) -> jax.Array:
    """Returns a weight's gradient cut up as the weight is."""
    return gradient if layout is None else lax.with_sharding_constraint(gradient, layout.stored)


def on_auto_axes(
    product: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    *more: Any,
    kept: tuple[Sequence[int], Sequence[int]],
) -> jax.Array:
    """Returns product(lhs, rhs, *more), computed where the Explicit axes of the operands' mesh are Auto.

    Args:
      kept: the axes of lhs, and those of rhs after them, that the result has; it is cut up as these are, and
        by no mesh axis twice.
    """
    meshes = [mesh for mesh in (jax.typeof(x).sharding.mesh for x in (lhs, rhs)) if mesh.explicit_axes]
    if not meshes:
        return product(lhs, rhs, *more)
    used: set[str] = set()
    cuts = []
    for x, axes in zip((lhs, rhs), kept, strict=True):
        spec = (*jax.typeof(x).sharding.spec, *(None for _ in x.shape))
        for axis in axes:
            cut: Any = spec[axis]
            names = (cut,) if isinstance(cut, str) else tuple(cut or ())
            cuts.append(tuple(name for name in names if name not in used) or None)
            used.update(names)
    on_auto: Any = auto_axes(product, axes=tuple(meshes[0].explicit_axes))
    return on_auto(lhs, rhs, *more, out_sharding=NamedSharding(meshes[0], PartitionSpec(*cuts)))


def varying_as(x: jax.Array, *like: jax.Array | np.ndarray | None) -> jax.Array:
    """Returns x with the type that, in `jax.shard_map`, it has where it varies with any of the others."""
    axes = {axis for other in like if other is not None for axis in jax.typeof(other).mat.varying}
    more = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return lax.pcast(x, more, to="varying") if more else x
