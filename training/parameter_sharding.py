"""The sharding of parameters and training state: shardings, the checks they need, and the first state.

`models.sharding` maps logical axes to axes of the mesh.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import llama
from models.configs import LlamaConfig
from models.llama import AXES, Params, abstract_params
from models.sharding import RULES, spec
from mxjax.formats import get_format
from mxjax.layers import LayerPolicies
from mxjax.policy import Policy
from training.step import TrainState, init_state


def abstract_state(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    fill: Callable[[Params], Params] = lambda params: params,
) -> TrainState:
    """Returns the shapes, dtypes and shardings of what `first_state` creates."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_state(fill(llama.init(config, key)), optimizer), key)
    shardings = state_shardings(mesh, optimizer, state, param_shardings(mesh, parameter_axes(config)))
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings)


def first_state(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    key: jax.Array,
    fill: Callable[[Params], Params] = lambda params: params,
) -> tuple[TrainState, TrainState]:
    """Returns a state of random parameters, created shard by shard, and its shardings.

    Args:
      config: the model.
      optimizer: creates its own state.
      mesh: the devices.
      key: draws the parameters.
      fill: fills the vocabulary, see `training.vocabulary`.
    """

    def make(key: jax.Array) -> TrainState:
        return init_state(fill(llama.init(config, key)), optimizer)

    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(config, optimizer, mesh, fill))
    return jax.jit(make, out_shardings=shardings)(key), shardings


def param_shardings(mesh: Mesh, axes: Any) -> Any:
    """Returns the sharding of each parameter, from a tree of their logical axes."""
    return jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), axes, is_leaf=lambda a: isinstance(a, tuple))


def state_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, state: Any, params: Any) -> Any:
    """Returns the sharding of each array of a training state.

    Moments are sharded as their parameters are, by `params`; everything else is replicated.

    Args:
      mesh: the devices.
      optimizer: tells which arrays of its state belong to parameters.
      state: the state, or its shapes.
      params: the shardings of the parameters.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: replicated,
    )
    return jax.tree.map(lambda _: replicated, state._replace(params=None, opt_state=None))._replace(
        params=params, opt_state=opt_state
    )


def check_shards(sizes: Mapping[str, int], config: LlamaConfig, policies: LayerPolicies) -> None:
    """Raises ValueError unless a mesh of these sizes shards every parameter into whole units.

    A unit is a run of elements that must stay on one device, such as a block of 32 along an axis that a GEMM
    quantizes. The vocabulary fits every mesh, because it is filled (`training.vocabulary`).
    """
    units = parameter_units(config, policies)
    flat, structure = jax.tree.flatten_with_path(abstract_params(config))
    for (path, x), names, lengths in zip(
        flat,
        structure.flatten_up_to(parameter_axes(config)),
        structure.flatten_up_to(units),
        strict=True,
    ):
        for name, size, unit in zip(names, x.shape, lengths, strict=True):
            axis = None if name == "vocab" else RULES[name]
            if axis is None or (parts := sizes[str(axis)]) == 1 or size % (parts * unit) == 0:
                continue
            parameter = ".".join(str(key.key) for key in path)
            most = max(n for n in range(1, parts) if size % (n * unit) == 0 or n == 1)
            whole = f", whole runs of {unit} (a block, rotation or key/value head)" if unit > 1 else ""
            raise ValueError(
                f"--mesh {axis}={parts} cannot split {parameter}'s axis {name!r} of {size} into equal "
                f"parts{whole}; reduce {axis}, to {most} at most"
            )


def parameter_axes(config: LlamaConfig) -> Params:
    """Returns the logical axes of every parameter; those of blocks begin with "layers"."""

    def axes(name: str, x: jax.ShapeDtypeStruct) -> tuple[str, ...]:
        own = AXES.get(name.removeprefix("blocks."), ("norm",))
        return ("layers", *own) if name.startswith("blocks.") else own

    return _map_named(axes, abstract_params(config))


def parameter_units(config: LlamaConfig, policies: LayerPolicies) -> Params:
    """Returns the unit along each axis of every parameter: whole blocks, rotations and key/value heads."""

    def units(name: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        name = "head" if config.tied and name == "embedding" else name.replace("blocks.", "blocks.*.")
        own = [p for layer, p in policies.items() if fnmatch.fnmatch(layer, name)]
        unit = math.lcm(*map(weight_unit, own))
        axes = AXES.get(name.removeprefix("blocks.*."), ("norm",))
        sizes = zip(x.shape[-len(axes) :], axes, strict=True)
        last = (math.lcm(unit, n // config.n_kv_heads) if axis == "heads" else unit for n, axis in sizes)
        return (*(1 for _ in x.shape[len(axes) :]), *last)

    return _map_named(units, abstract_params(config))


def weight_unit(policy: Policy) -> int:
    """Returns the unit along a weight's axes: a multiple of Fprop's and Dgrad's blocks and rotations."""
    sizes = [1]
    for gemm in (policy.fprop, policy.dgrad):
        sizes += [gemm.rotation.size] if gemm.rotation else []
        for operand in (gemm.lhs, gemm.rhs):
            f = get_format(operand.format)
            block = operand.block_shape or f.block or 1
            sizes += block if isinstance(block, tuple) else [block]
            sizes += [f.outer_block or 1, operand.eden or 1]
    return math.lcm(*sizes)


def _map_named(function: Callable[[str, Any], Any], params: Params) -> Params:
    return jax.tree.map_with_path(lambda path, x: function(".".join(str(p.key) for p in path), x), params)
