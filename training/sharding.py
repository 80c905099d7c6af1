"""The mesh of a run, and the training state on it. `models.sharding` has the rules for all arrays.

The embedding and the head are filled so that the axis `tensor` divides the vocabulary. Training states are
filled. Checkpoints, evaluations of them and exports have the model's own vocabulary, so that a run can
resume on any mesh. Filler is zero and stays zero: no token looks it up, and the loss masks its logits
(`models.loss`). Megatron fills likewise, to a multiple of 128 times the tensor-parallel size, and keeps it
in checkpoints.
"""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from models import decoder
from models.attention.context import fewest_sequences
from models.block import DENSE
from models.configs import DecoderConfig
from models.decoder import PARAMETER_AXES, Params, abstract_params
from models.sharding import MESH_AXES, RULES, batch_parts_of, parts_of, spec
from mxjax.numerics.formats import get_format
from mxjax.policy import Policy
from mxjax.policy.layers import LayerPolicies
from mxjax.products import implementations
from mxjax.products.implementations import Implementation
from mxjax.runtime.devices import current_target
from training.step import TrainState, init_state

_MOST_DEVICES = 2**20  # the sizes of other meshes are tried one by one


def parse_mesh(text: str | None, devices: int | None) -> dict[str, int]:
    """Returns the size of each mesh axis, e.g. of "fsdp=4,tensor=2"; None is fsdp over all devices.

    Without a number of devices a text may name any.

    Raises:
      ValueError: malformed text, or sizes that multiply to another number of devices or to more than 2**20.
    """
    if text is None:
        return dict.fromkeys(MESH_AXES, 1) | {"fsdp": devices or 1}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in MESH_AXES or not re.fullmatch("[1-9][0-9]{0,12}", size):
            axes = ", ".join(MESH_AXES)
            raise ValueError(
                f"--mesh takes AXIS=SIZE,... with sizes from 1, of the axes {axes}; got {part!r:.60}"
            )
        if name in sizes:
            raise ValueError(f"--mesh {text} names {name} twice; give each axis one size")
        sizes[name] = int(size)
    sizes = {name: sizes.get(name, 1) for name in MESH_AXES}
    if (product := math.prod(sizes.values())) > _MOST_DEVICES:
        raise ValueError(f"--mesh {text} is for {product:,} devices; name at most {_MOST_DEVICES:,}")
    if product != devices and devices is not None:
        raise ValueError(
            f"--mesh {text} is for {product} devices and there are {devices}; choose sizes that multiply to "
            f"{devices}, e.g. --mesh fsdp={devices}, or leave --mesh out; --devices {product} divides a CPU"
        )
    return sizes


def make_mesh(text: str | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh that `parse_mesh` reads, with Auto axes, over the given devices or all devices."""
    # In the order of processes, so that each process holds consecutive rows of a batch.
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(text, len(devices))
    return Mesh(
        np.array(devices).reshape(*sizes.values()), MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES)
    )


def compiler_options(
    mesh: Mesh, policies: Iterable[Policy], implementation: Implementation | None
) -> dict[str, bool]:
    """Returns XLA options for `jax.jit` of a step: those of `mxjax.products.implementations`, and latency
    hiding.

    On GPUs latency hiding overlaps the communication of weights and gradients with the computation. On
    Hopper Triton's GEMMs are then off: 8B in bfloat16 on two H200 is 0.7 % faster without, and compiles in
    9 s instead of 13.
    """
    options = implementations.compiler_options(policies, implementation)
    if mesh.size > 1 and mesh.devices.flat[0].platform == "gpu":
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
        if (target := current_target()) is not None and target.arch == "sm_90":
            options["xla_gpu_enable_triton_gemm"] = False
    return options


def check_batch(
    sizes: Mapping[str, int],
    batch_size: int,
    accumulate: int,
    fits: Callable[[Mapping[str, int]], bool] = lambda sizes: True,
) -> None:
    """Raises ValueError unless every device gets equally many sequences of each part of a batch.

    The message suggests batch sizes and, if there is one, a mesh that fits.

    Args:
      fits: returns whether the parameters can be sharded on a mesh.
    """
    unit = batch_parts_of(sizes) * accumulate
    if batch_size % unit == 0:
        return
    below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
    advice = f"take --batch-size {f'{below} or ' if below else ''}{above}"
    devices = math.prod(sizes.values())
    for tensor in (n for n in range(2, devices + 1) if devices % n == 0):
        rest = devices // tensor
        found = dict.fromkeys(MESH_AXES, 1) | {"fsdp": rest, "tensor": tensor}
        if batch_size % (rest * accumulate) == 0 and fits(found):
            fsdp = f"fsdp={rest}," if rest > 1 else ""
            advice += f", or --mesh {fsdp}tensor={tensor}"
            break
    times = f" times --accumulate {accumulate}" if accumulate > 1 else ""
    axes = "data x fsdp" if sizes["expert"] == 1 else "data x expert x fsdp"
    raise ValueError(
        f"--batch-size {batch_size} must be a multiple of the mesh's {axes} = "
        f"{unit // accumulate}{times}; {advice}"
    )


def process_part(mesh: Mesh, rows: int) -> tuple[int, int]:
    """Returns (i, n): this process's devices hold the i-th of n equal parts of a batch of `rows` rows.

    Raises:
      ValueError: the devices of a process hold no such part.
    """
    found = NamedSharding(mesh, spec(("batch",))).addressable_devices_indices_map((rows,)).values()
    starts, stops = zip(*(index[0].indices(rows)[:2] for index in found if index is not None), strict=True)
    start, length = min(starts), max(stops) - min(starts)
    if rows % length or start % length:
        raise ValueError(
            f"--mesh context x tensor = {mesh.shape['context'] * mesh.shape['tensor']} must divide, or be a "
            f"multiple of, the {jax.local_device_count()} devices of a process"
        )
    return start // length, rows // length


def global_batch(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """Returns the sharded batch [batch, length], to which each process contributes the rows it holds."""
    _, parts = process_part(mesh, batch_parts_of(mesh.shape))
    shape = (len(rows) * parts, *rows.shape[1:])
    return jax.make_array_from_process_local_data(_batch_sharding(mesh), rows, shape)


def abstract_batch(mesh: Mesh, sequences: int, length: int) -> jax.ShapeDtypeStruct:
    """Returns the shape, dtype and sharding of what `global_batch` returns for so many sequences."""
    return jax.ShapeDtypeStruct((sequences, length), np.int32, sharding=_batch_sharding(mesh))


def _batch_sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, spec(("batch", None)))


def on_mesh(mesh: Mesh, eval_step: Any) -> Any:
    """Returns `eval_step` of `training.step` for whole batches of any size, the same in every process.

    A batch that the mesh does not divide is padded with copies of its last sequence, whose losses get weight
    0. Copies leave the scales of whole tensors unchanged.
    """
    whole = batch_parts_of(mesh.shape) * mesh.shape["context"]  # a sequence for each device

    def step(params, batch: np.ndarray, key: jax.Array) -> jax.Array:
        few, _ = fewest_sequences(mesh.shape, whole, batch.shape[1] - 1)
        unit = few if len(batch) <= few else whole
        missing, weights = -len(batch) % unit, None
        if missing:
            weights = np.repeat(np.array([1, 0], np.float32), [len(batch), missing])
            batch = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)])
        index, count = process_part(mesh, len(batch))
        return eval_step(params, global_batch(mesh, np.split(batch, count)[index]), key, weights)

    return step


def abstract_state(
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    fill: Callable[[Params], Params] = lambda params: params,
) -> TrainState:
    """Returns the shapes, dtypes and shardings of what `first_state` creates."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_state(fill(decoder.init(config, key)), optimizer), key)
    shardings = state_shardings(mesh, optimizer, state, param_shardings(mesh, parameter_axes(state.params)))
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings)


def first_state(
    config: DecoderConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    key: jax.Array,
    fill: Callable[[Params], Params] = lambda params: params,
) -> tuple[TrainState, TrainState]:
    """Returns a state of random parameters, created shard by shard, and its shardings."""

    def make(key: jax.Array) -> TrainState:
        return init_state(fill(decoder.init(config, key)), optimizer)

    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(config, optimizer, mesh, fill))
    return jax.jit(make, out_shardings=shardings)(key), shardings


def param_shardings(mesh: Mesh | AbstractMesh, axes: Any) -> Any:
    """Returns the sharding of each parameter, from a tree of their logical axes."""
    return jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), axes, is_leaf=lambda a: isinstance(a, tuple))


def state_shardings(
    mesh: Mesh | AbstractMesh, optimizer: optax.GradientTransformation, state: Any, params: Any
) -> Any:
    """Returns the sharding of each array of a training state.

    Moments are sharded as their parameters are, by `params`; everything else is replicated.

    Args:
      optimizer: tells which arrays of its state belong to parameters.
      params: the shardings of the parameters.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda moment, sharding: moment if _is_masked(moment) else sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: replicated,
        is_leaf=_is_masked,
    )
    return jax.tree.map(lambda _: replicated, state._replace(params=None, opt_state=None))._replace(
        params=params, opt_state=opt_state
    )


def _is_masked(x: Any) -> bool:
    """Returns whether this stands for a parameter's moment that an optimizer does not have."""
    return isinstance(x, optax.MaskedNode)


def check_shards(sizes: Mapping[str, int], config: DecoderConfig, policies: LayerPolicies) -> None:
    """Raises ValueError unless a mesh of these sizes shards every parameter into whole units.

    A unit is a run of elements that must stay on one device, such as a block of 32 along an axis that a GEMM
    quantizes. The vocabulary fits every mesh, because it is filled (`training.sharding`).
    """
    units = parameter_units(config, policies)
    flat, structure = jax.tree.flatten_with_path(abstract_params(config))
    for (path, x), names, lengths in zip(
        flat,
        structure.flatten_up_to(parameter_axes(abstract_params(config))),
        structure.flatten_up_to(units),
        strict=True,
    ):
        for name, size, unit in zip(names, x.shape, lengths, strict=True):
            parts = 1 if name == "vocab" else parts_of(sizes, name)
            if size % (parts * unit) == 0 or parts == 1:
                continue
            rule = RULES[name] or ()
            axis = " x ".join(a for a in ((rule,) if isinstance(rule, str) else rule) if sizes[a] > 1)
            parameter = ".".join(str(key.key) for key in path)
            fewer = (n for n in range(1, parts) if parts % n == 0)
            most = max(n for n in fewer if size % (n * unit) == 0 or n == 1)
            whole = f", whole runs of {unit} (a block, rotation or key/value head)" if unit > 1 else ""
            instead = f"reduce {axis}, to {most} at most," if most > 1 else f"leave {axis} out"
            others = "data=N" if config.experts is None or name == "experts" else "expert=N or data=N"
            raise ValueError(
                f"--mesh {axis}={parts} cannot split {parameter}'s axis {name!r} of {size} into equal "
                f"parts{whole}; {instead} and let {others} take the other devices"
            )


def parameter_axes(params: Params) -> Params:
    """Returns the logical axes of every parameter; those of blocks begin with "layers"."""

    def axes(name: str, x: jax.ShapeDtypeStruct) -> tuple[str, ...]:
        own = _own_axes(name.removeprefix("blocks."), x.ndim - name.startswith("blocks."))
        return ("layers", *own) if name.startswith("blocks.") else own

    return _map_named(axes, params)


def parameter_units(config: DecoderConfig, policies: LayerPolicies) -> Params:
    """Returns the unit along each axis of every parameter: whole blocks, rotations and key/value heads."""

    def units(name: str, x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
        name = "head" if config.tied and name == "embedding" else name.replace("blocks.", "blocks.*.")
        layers = name.replace(DENSE, "mlp")
        own = [p for layer, p in policies.items() if fnmatch.fnmatch(layer, layers)]
        unit = math.lcm(*map(weight_unit, own))
        own_name = name.removeprefix("blocks.*.")
        axes = _own_axes(own_name, x.ndim - (own_name != name))
        sizes = zip(x.shape[x.ndim - len(axes) :], axes, strict=True)
        of_axis = {"heads": lambda n: math.lcm(unit, n // config.n_kv_heads), "experts": lambda n: 1}
        last = (of_axis.get(axis, lambda n: unit)(n) for n, axis in sizes)
        return (*(1 for _ in x.shape[len(axes) :]), *last)

    return _map_named(units, abstract_params(config))


def _own_axes(name: str, ndim: int) -> tuple[str, ...]:
    """Returns the logical axes of a parameter, those of one block; an expert's have one before them."""
    if name in PARAMETER_AXES:
        return ("experts", *PARAMETER_AXES[name])[-ndim:]
    return ("norm",) * ndim


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


def filled_size(sizes: Mapping[str, int], config: DecoderConfig, policies: Sequence[LayerPolicies]) -> int:
    """Returns the model's vocabulary, filled so that each device of a `tensor` group gets whole units.

    Args:
      policies: the policies of all phases; the head's decide the unit, see `weight_unit`.
    """
    if sizes["tensor"] == 1:
        return config.vocab_size
    multiple = sizes["tensor"] * math.lcm(*(weight_unit(of_phase["head"]) for of_phase in policies))
    return -(-config.vocab_size // multiple) * multiple


def resize(tree: Any, size: int) -> Any:
    """Returns parameters, or a training state, whose vocabulary is cut, or filled with zeros, to `size`."""

    def of_leaf(path: Any, x: Array) -> Array:
        axes = _axes(path)
        return _resize(x, axes.index("vocab"), size) if "vocab" in axes else x

    return jax.tree.map_with_path(of_leaf, tree)


def resize_on(mesh: Mesh, tree: Any, size: int) -> Any:
    """Returns `resize` of arrays on a mesh, sharded over `tensor` if it divides `size`."""
    kept = {"vocab"} if size % mesh.shape["tensor"] else set()

    def of_leaf(path: Any, x: Array) -> Array:
        axes = _axes(path)
        if "vocab" not in axes or x.shape[axes.index("vocab")] == size:
            return x
        sharding = NamedSharding(mesh, spec([None if axis in kept else axis for axis in axes]))
        return jax.jit(_resize, static_argnums=(1, 2), out_shardings=sharding)(x, axes.index("vocab"), size)

    return jax.tree.map_with_path(of_leaf, tree)


def _axes(path: Any) -> tuple[str, ...]:
    """Returns the logical axes of an embedding or head, or of its moments; none for other arrays."""
    name = getattr(path[-1], "key", None)
    return PARAMETER_AXES[name] if name in ("embedding", "head") else ()


def _resize(x: Array, axis: int, size: int) -> Array:
    if size <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    return jnp.pad(x, [(0, size - x.shape[axis] if i == axis else 0) for i in range(x.ndim)])
