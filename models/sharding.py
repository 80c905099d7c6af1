"""How arrays are cut up on a mesh: rules from logical axes to those of the mesh.

A batch is cut by `data` and `fsdp`; parameters, gradients and optimizer state by `fsdp` and `tensor`. Models
name the logical axes of what they compute; what lies between is left to XLA's partitioner. On one device, or
without `jax.set_mesh`, nothing here changes a program.

What the partitioned program of a step holds (read on 8 virtual devices; `tests/training/test_mesh.py` keeps
it so):
  - Each iteration of the loops over layers gathers the weights of its own layer over fsdp, once for the Fprop
    and once for the Dgrad (and once more with remat), as the GEMM reads them: bfloat16, FP8, or packed
    elements and scales.
  - Wgrad is summed and cut up in the same loop, in float32: an all-reduce and a slice, of which XLA makes a
    reduce-scatter where it has that pass (not on CPUs).
  - Embedding rows travel by an all-to-all; no other activations move over data or fsdp.
  - tensor adds an all-reduce of float32 activations behind `attention.out` and `mlp.down`, forward, and
    behind `attention.qkv` and `mlp.gate_up`, backward. `mlp.gate_up` keeps the gate's columns before the up
    projection's, an order that its blocks depend on, so that splitting it moves half of both.
  - The head is gathered, and its gradient summed, once a step, but with `tensor` or a quantized head once for
    each piece of the loss; a piece has so many tokens a device, so that larger meshes make no more of them.
"""

import math
import types
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from mxjax.weight_layout import Layout

AXES = ("data", "fsdp", "tensor")
"""Of every mesh, the slowest first: the devices of a `tensor` group are neighbours."""

RULES: Mapping[str, str | tuple[str, ...] | None] = types.MappingProxyType(
    {
        "batch": ("data", "fsdp"),
        "data": "data",
        "embed": "fsdp",
        "heads": "tensor",
        "mlp": "tensor",
        "vocab": "tensor",
        "layers": None,
        "norm": None,
    }
)
"""The axes of the mesh that cut each logical axis."""

LogicalAxes = Sequence[str | None]


def spec(axes: LogicalAxes) -> PartitionSpec:
    """Returns how an array with these logical axes is cut up; None is an axis that is not."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Returns x, cut up by the rules on the mesh that is set."""
    return jax.lax.with_sharding_constraint(x, spec(axes)) if _cuts() else x


def weight_layout(axes: LogicalAxes) -> Layout | None:
    """Returns the layout of a weight matrix for `mxjax.dot` on the mesh that is set: gathered over fsdp."""
    whole = [None if RULES[axis or "layers"] == "fsdp" else axis for axis in axes]
    return Layout(spec(axes), spec(whole)) if _cuts() else None


def is_data_parallel() -> bool:
    """Returns whether the mesh that is set cuts batches, and weights by their axes over `fsdp` at most."""
    return _cuts() and jax.sharding.get_abstract_mesh().shape["tensor"] == 1


def gather(x: jax.Array, cut: str, axis: int) -> jax.Array:
    """Returns, inside `jax.shard_map`, the whole of x, whose `axis` is cut as logical axis `cut` is."""
    return jax.lax.all_gather(x, RULES[cut], axis=axis, tiled=True)


def sum_over_batch(x: jax.Array, scattered: str | None = None, axis: int = 0) -> jax.Array:
    """Returns, inside `jax.shard_map`, the sum over all parts of a batch.

    Of it a device gets the part of `axis` that it holds of logical axis `scattered`, if one is named.
    """
    rest = tuple(RULES["batch"] or ())
    if scattered is not None:
        x = jax.lax.psum_scatter(x, RULES[scattered], scatter_dimension=axis, tiled=True)
        rest = tuple(name for name in rest if name != RULES[scattered])
    return jax.lax.psum(x, rest)


def batch_parts() -> int:
    """Returns in how many parts a batch is cut on the mesh that is set."""
    return batch_parts_of(jax.sharding.get_abstract_mesh().shape) if _cuts() else 1


def batch_parts_of(sizes: Mapping[str, int]) -> int:
    """Returns in how many parts a mesh of these sizes cuts a batch."""
    return math.prod(sizes[axis] for axis in RULES["batch"] or ())


def _cuts() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and mesh.axis_names == AXES and mesh.are_all_axes_auto
