"""Sharding of a product's arrays on a mesh.

With Auto axes, a weight is stored sharded and gathered for each product. Without the constraints here XLA may
all-gather float32 weights and quantize afterwards. With Explicit axes, the operands' types determine the
result's sharding; inside the product these axes are Auto. Under `jax.shard_map`, types say which arrays vary
across devices.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec, auto_axes
from jaxtyping import Array, Shaped


class Layout(NamedTuple):
    """Shardings of a weight [d_in, d_out] by axes of the mesh that `jax.set_mesh` has set.

    Attributes:
      stored: sharding of the weight itself and of its gradient.
      multiplied: sharding of the operand that a GEMM reads. Axes that only `stored` names are gathered after
        quantization: as packed elements and scales, FP8 or bfloat16, never as master weights.
      whole_sums: whether each device computes whole sums in Fprop and Dgrad: no mesh axis of more than one
        device shards what they contract, in the weight or in the other operand.
    """

    stored: PartitionSpec
    multiplied: PartitionSpec
    whole_sums: bool = False

    @property
    def transposed(self) -> "Layout":
        """The layout of the weight's transpose: the last two axes change places."""
        stored, multiplied = (PartitionSpec(*spec[:-2], *spec[:-3:-1]) for spec in self[:2])
        return Layout(stored, multiplied, self.whole_sums)

    @property
    def stacked(self) -> "Layout":
        """The layout of several such weights along a new first axis, which is not sharded."""
        stored, multiplied = (PartitionSpec(None, *spec) for spec in self[:2])
        return Layout(stored, multiplied, self.whole_sums)


def check_layout(function: str, layout: object) -> None:
    """Raises TypeError unless `layout` is a `Layout` or None, ValueError unless the mesh has its axes.

    XLA would say so from within the product, where nobody finds the argument.
    """
    if layout is None:
        return
    if not isinstance(layout, Layout):
        raise TypeError(f"{function} needs layout to be an mxjax.Layout or None, got {layout!r}")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(f"{function} got a layout, but no mesh is set; call it within jax.set_mesh(mesh)")
    for name, spec in (("stored", layout.stored), ("multiplied", layout.multiplied)):
        if not isinstance(spec, PartitionSpec) or len(spec) > 2:
            raise ValueError(
                f"{function} needs layout.{name} to be a PartitionSpec of [d_in, d_out], got {spec!r}"
            )
        named = {axis for axis in jax.tree.leaves(tuple(spec)) if isinstance(axis, str)}
        unknown = sorted(named - set(mesh.axis_names))
        if unknown:
            raise ValueError(
                f"{function} got layout.{name} {spec}, but the mesh has the axes {mesh.axis_names}, "
                f"not {', '.join(map(repr, unknown))}"
            )


def sums_on_each_device(layout: Layout | None) -> bool:
    """Returns whether each device computes whole sums of a product, as far as is known."""
    if layout is not None:
        return layout.whole_sums
    return jax.device_count() == 1 and jax.sharding.get_abstract_mesh().size <= 1


def to_multiply(x: Shaped[Array, "*shape"], layout: Layout | None) -> Shaped[Array, "*shape"]:
    """Returns x, a weight's quantized operand or its scales, sharded as the GEMM reads it."""
    if layout is None:
        return x
    # The first constraint keeps quantization where the weight is stored.
    return lax.with_sharding_constraint(lax.with_sharding_constraint(x, layout.stored), layout.multiplied)


def bytes_to_multiply(
    elements: Shaped[Array, "*rows bytes"], layout: Layout | None
) -> Shaped[Array, "*rows bytes"]:
    """Returns `to_multiply` of elements in FP8, or packed.

    Where the bytes of a row are gathered, the parts of all rows arrive device by device, and rows are then
    put together by words. XLA's own gather transposes single bytes before and after it.
    """
    if layout is None:
        return elements
    stored, multiplied = ((*spec, *(None for _ in elements.shape))[: elements.ndim] for spec in layout[:2])
    names = (stored[-1],) if isinstance(stored[-1], str) else tuple(stored[-1] or ())
    parts = math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in names)
    if parts == 1 or multiplied[-1] is not None or elements.shape[-1] % (4 * parts):
        return to_multiply(elements, layout)
    words = lax.bitcast_convert_type(elements.reshape(*elements.shape[:-1], parts, -1, 4), jnp.int32)
    first = Layout(PartitionSpec(names, *stored[:-1]), PartitionSpec(None, *multiplied[:-1]))
    gathered = jnp.moveaxis(to_multiply(jnp.moveaxis(words, -2, 0), first), 0, -2)
    whole = lax.bitcast_convert_type(gathered, elements.dtype).reshape(elements.shape)
    return lax.with_sharding_constraint(whole, PartitionSpec(*multiplied))


def as_stored(gradient: jax.Array, layout: Layout | None) -> jax.Array:
    """Returns a weight's gradient, sharded as the weight is stored, and row-major like it.

    XLA's reduce-scatter puts the scattered axis first in memory. It would update the optimizer's state in
    that order too, then transpose and copy parameters and moments back.
    """
    if layout is None:
        return gradient
    gradient = lax.with_sharding_constraint(gradient, layout.stored)
    return with_layout_constraint(gradient, MemoryLayout(tuple(range(gradient.ndim))))


def on_auto_axes(
    product: Callable[..., jax.Array],
    lhs: jax.Array,
    rhs: Any,
    *,
    kept: tuple[Sequence[int], Sequence[int]],
) -> Callable[..., jax.Array]:
    """Returns `product`, computed with the Explicit axes of its operands' mesh made Auto.

    Args:
      product: a function of lhs, rhs and more.
      rhs: an array, or an `MXArray`, whose elements have the sharding that counts.
      kept: axes of lhs and of rhs that the result has, in order. The result is sharded like them, except
        that it uses each mesh axis once.
    """
    types = [jax.typeof(getattr(x, "elements", x)) for x in (lhs, rhs)]
    meshes = [t.sharding.mesh for t in types if t.sharding.mesh.explicit_axes]
    if not meshes:
        return product
    used: set[str] = set()
    shardings = []
    for t, axes in zip(types, kept, strict=True):
        spec = (*t.sharding.spec, *(None for _ in t.shape))
        for axis in axes:
            axis_names: Any = spec[axis]
            names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names or ())
            shardings.append(tuple(name for name in names if name not in used) or None)
            used.update(names)
    on_auto: Any = auto_axes(product, axes=tuple(meshes[0].explicit_axes))
    return functools.partial(on_auto, out_sharding=NamedSharding(meshes[0], PartitionSpec(*shardings)))


def maximum_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns x; under `jax.shard_map`, its maximum over the mesh axes that x varies over and `like` not."""
    axes = tuple(sorted(jax.typeof(x).mat.varying - jax.typeof(like).mat.varying))
    return lax.pmax(x, axes) if axes else x


def varying_as(x: jax.Array, *like: jax.Array | np.ndarray | None) -> jax.Array:
    """Returns x; under `jax.shard_map`, made to vary over all mesh axes that `like` varies over."""
    axes = {axis for other in like if other is not None for axis in jax.typeof(other).mat.varying}
    more = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return lax.pcast(x, more, to="varying") if more else x
