"""Sharding of arrays on a mesh: rules from logical axes to mesh axes, constraints, weight layouts.

`data`, `expert` and `fsdp` shard a batch, `context` its sequences (`models.attention.context`); `fsdp`,
`context` and `tensor` shard parameters, gradients and optimizer state, and `expert` those of experts
(`models.experts.parallel`). Models name the logical axes of their results; XLA's partitioner decides the
rest. On one device, or without `jax.set_mesh`, nothing here but `run_blocks` changes a program. Below, fsdp
means fsdp and context together.

The partitioned program of a step (read on 8 virtual devices; `tests/training/test_mesh.py` checks it):
  - Each iteration of the loops over layers gathers the weights of its own layer over fsdp, once for Fprop and
    once for Dgrad (and once more with remat), in the form that the GEMM reads: bfloat16, FP8, or packed
    elements and scales.
  - The same loop sums Wgrad in float32 and shards it: an all-reduce and a slice, which XLA turns into a
    reduce-scatter where it has that pass (not on CPUs).
  - Embedding rows move by an all-to-all. No other activations move over data or fsdp.
  - tensor adds all-reduces of float32 activations: after `attention.out` and `mlp.down` in the forward pass,
    after `attention.qkv` and `mlp.gate_up` in the backward pass. `mlp.gate_up` holds the gate's columns, then
    those of the up projection, because its blocks depend on the order; splitting it moves half of both.
  - The head is gathered, and its gradient summed, once a step; with `tensor`, or quantized otherwise than in
    `fp8`, once for each piece of the loss. A piece has as many tokens a device on larger meshes.

The order of the backward pass on a mesh, which decides what hides the sums of gradients over devices.

A scheduler sees that only the optimizer reads the gradients of weights. XLA's computes those of all blocks at
the end of the step, one product after another. There nothing hides their reduce-scatters: by a trace on two
H200 each starts when the next product frees multiprocessors, and the product after that waits for it.

Here the backward pass waits for them earlier. It leaves the MLP after the gradient of `down`, the attention
after that of `out`, and the block after those of `gate_up`, of `qkv` in the block above, and of the head two
blocks above: each time there is something else to compute in the meantime.
"""

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from mxjax.kernels.mesh import partitioned
from mxjax.runtime.mesh import Layout

MESH_AXES = ("data", "expert", "fsdp", "context", "tensor")
"""The axes of every mesh, slowest first: the devices of a `tensor` group are neighbours."""

RULES: Mapping[str, str | tuple[str, ...] | None] = types.MappingProxyType(
    {
        "batch": ("data", "expert", "fsdp"),
        "rows": ("data", "expert", "fsdp", "context"),
        "data": ("data", "expert"),
        "embed": ("fsdp", "context"),
        "experts": "expert",
        "heads": "tensor",
        "mlp": "tensor",
        "vocab": "tensor",
        "layers": None,
        "norm": None,
    }
)
"""The mesh axes that shard each logical axis. Rows are sequences, or parts of one with `context`."""

LogicalAxes = Sequence[str | None]


def spec(axes: LogicalAxes) -> PartitionSpec:
    """Returns the partition of an array with these logical axes; None is not sharded."""
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Returns x, sharded by the rules on the current mesh."""
    return jax.lax.with_sharding_constraint(x, spec(axes)) if _is_sharded() else x


def weight_layout(axes: LogicalAxes) -> Layout | None:
    """Returns the layout of a weight matrix for `mxjax.dot` on the current mesh: gathered over fsdp."""
    whole = [None if axis == "embed" else axis for axis in axes]
    return Layout(spec(axes), spec(whole), is_data_parallel()) if _is_sharded() else None


def is_data_parallel() -> bool:
    """Returns whether the current mesh shards tokens, and weights over `fsdp` and `context` at most."""
    return _is_sharded() and mesh_sizes()["tensor"] == 1


def gather(x: jax.Array, logical: str, axis: int) -> jax.Array:
    """Gathers x inside `jax.shard_map`; its `axis` is sharded as the logical axis is."""
    return jax.lax.all_gather(x, RULES[logical], axis=axis, tiled=True)


def sum_over_rows(x: jax.Array, scattered: str | None = None, axis: int = 0) -> jax.Array:
    """Returns the sum over the devices that share the tokens, inside `jax.shard_map`.

    If `scattered` names a logical axis, each device gets its shard of the sum along `axis`.
    """
    rest = tuple(RULES["rows"] or ())
    if scattered is not None:
        x = jax.lax.psum_scatter(x, RULES[scattered], scatter_dimension=axis, tiled=True)
        rest = tuple(name for name in rest if name not in (RULES[scattered] or ()))
    return jax.lax.psum(x, rest)


def mesh_sizes() -> Mapping[str, int]:
    """Returns the size of each axis of the current mesh; 1 without."""
    return jax.sharding.get_abstract_mesh().shape if _is_sharded() else dict.fromkeys(MESH_AXES, 1)


def row_parts() -> int:
    """Returns among how many devices the current mesh shares the tokens of a batch."""
    return parts_of(mesh_sizes(), "rows")


def batch_parts_of(sizes: Mapping[str, int]) -> int:
    """Returns the number of parts of a batch on a mesh of these sizes."""
    return parts_of(sizes, "batch")


def parts_of(sizes: Mapping[str, int], logical: str) -> int:
    """Returns the number of parts of a logical axis on a mesh of these sizes."""
    names = RULES[logical] or ()
    return math.prod(sizes[axis] for axis in ((names,) if isinstance(names, str) else names))


def _is_sharded() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1 and mesh.axis_names == MESH_AXES and mesh.are_all_axes_auto


def after_gradients[T](x: jax.Array, weights: T) -> tuple[jax.Array, T]:
    """Returns both. On a mesh the gradient of x is used only after those of the weights are summed."""
    return _tied(x, weights) if row_parts() > 1 else (x, weights)


@jax.custom_vjp
def _tied(x, weights):
    return x, weights


_tied.defvjp(lambda x, weights: ((x, weights), None), lambda _, given: jax.lax.optimization_barrier(given))


def run_blocks(run: Callable[..., Any], x: jax.Array, layers: Any, n: int, head: jax.Array):
    """Returns x after `run(x, layer)` of each of n blocks, the head, and the stacked results of the blocks
    besides x: a loop, but unrolled.

    Args:
      run: one block; returns x and other results, as the body of `jax.lax.scan` does.
      layers: ((parameters, other arrays of floats), other arrays), all stacked over blocks. Parameters are
        nested dicts.
      head: the weight that is read after these blocks.
    """
    floats, others = layers
    parts = _unstack(floats, n)
    blocks, results = [weights for weights, _ in parts], []
    for i, block in enumerate(blocks):
        x, block["mlp"]["gate_up"] = after_gradients(x, block["mlp"]["gate_up"])
        if i + 1 < n:
            above = blocks[i + 1]["attention"]
            x, above["qkv"] = after_gradients(x, above["qkv"])
        if i == max(n - 2, 0):
            x, head = after_gradients(x, head)
        x, result = run(x, ((block, parts[i][1]), jax.tree.map(lambda a, i=i: a[i], others)))
        results.append(result)
    return x, head, jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def _unstack(stacked: Any, n: int) -> list[Any]:
    """Returns the n parts of stacked arrays. Their gradients are stacked, not padded and added."""

    @jax.custom_vjp
    def parts(stacked):
        return [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(n)]

    def stack(_, given):
        return (jax.tree.map(lambda *leaves: _stacked(leaves), *given),)

    parts.defvjp(lambda stacked: (parts(stacked), None), stack)
    return parts(stacked)


def _stacked(leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns the arrays stacked; scales of norms by one pass over all, of weights each device its shards."""
    if leaves[0].ndim < 2:
        return jnp.stack(leaves)

    def stack(*parts: jax.Array) -> list[jax.Array]:
        return [joined([part[None] for part in parts], 0)]

    if jax.sharding.get_abstract_mesh().size > 1:  # XLA would allocate the whole stack on every device
        axes = " ".join(f"d{i}" for i in range(leaves[0].ndim))
        stack = partitioned(stack, f"{', '.join([axes] * len(leaves))} -> l {axes}", {}, ["l"])
    return stack(*leaves)[0]


def joined(parts: Sequence[jax.Array], axis: int) -> jax.Array:
    """Returns gradients concatenated along an axis. On one device each is written as soon as it is known.

    XLA's own concatenation is one pass over all, with a branch for each. Of 16 arrays, or of arrays of
    several sizes, it takes twice as long.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return jnp.concatenate(parts, axis)
    end = sum(part.shape[axis] for part in parts)
    whole = jax.lax.empty((*parts[0].shape[:axis], end, *parts[0].shape[axis + 1 :]), parts[0].dtype)
    for part in reversed(parts):  # the gradient of the last block is known first
        end -= part.shape[axis]
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, end, axis)
    return whole
