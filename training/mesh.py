"""The mesh of a run: its sizes, what they must divide, and how states and batches lie on it.

`models.sharding` has the rules by which arrays are cut up.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.sharding import AXES, RULES, batch_parts_of, spec
from mxjax import implementations
from mxjax.formats import get_format
from mxjax.implementations import Implementation
from mxjax.policy import Policy


def parse_mesh(text: str | None, devices: int) -> dict[str, int]:
    """Returns the size of each of AXES that e.g. "fsdp=4,tensor=2" asks for; None is fsdp over all devices.

    Raises:
      ValueError: it is written otherwise, or the sizes do not multiply to the number of devices.
    """
    if text is None:
        return {"data": 1, "fsdp": devices, "tensor": 1}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh takes AXIS=SIZE,..., of the axes {', '.join(AXES)}; got {part!r}")
        if name in sizes:
            raise ValueError(f"--mesh {text} names {name} twice; give each axis one size")
        sizes[name] = int(size)
    sizes = {name: sizes.get(name, 1) for name in AXES}
    if (product := math.prod(sizes.values())) != devices:
        raise ValueError(
            f"--mesh {text} is for {product} devices and there are {devices}; choose sizes that multiply to "
            f"{devices}, e.g. --mesh fsdp={devices}, or leave --mesh out"
        )
    return sizes


def make_mesh(text: str | None = None, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh that `parse_mesh` describes, over the devices given or all of all processes, with Auto
    axes."""
    # In the order of processes, so that each one's part of a batch is a run of rows.
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(text, len(devices))
    return Mesh(np.array(devices).reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compiler_options(
    mesh: Mesh, policies: Iterable[Policy], implementation: Implementation | None
) -> dict[str, bool]:
    """Returns options for `jax.jit(compiler_options=)` of steps on a mesh: those of `mxjax.implementations`,
    and on GPUs to send weights and gradients while other layers are computed."""
    options = implementations.compiler_options(policies, implementation)
    if mesh.size > 1 and mesh.devices.flat[0].platform == "gpu":
        options["xla_gpu_enable_latency_hiding_scheduler"] = True
    return options


def param_shardings(mesh: Mesh, axes: Any) -> Any:
    """Returns the sharding of each parameter, of a tree of their logical axes."""
    return jax.tree.map(lambda a: NamedSharding(mesh, spec(a)), axes, is_leaf=lambda a: isinstance(a, tuple))


def state_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, state: Any, params: Any) -> Any:
    """Returns the sharding of each array of a training state (or of its shapes): of what goes with a
    parameter that one's, of `params`; all others are on every device."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return jax.tree.map(lambda _: everywhere, state._replace(params=None, opt_state=None))._replace(
        params=params, opt_state=opt_state
    )


def check_params(sizes: Mapping[str, int], params: Any, axes: Any, units: Any) -> None:
    """Raises ValueError unless a mesh of these sizes cuts every parameter into whole units.

    Args:
      params: the parameters or their shapes.
      axes, units: of each parameter, its logical axes, and for each of them the length of what must stay
        together, such as a block.
    """
    flat, structure = jax.tree.flatten_with_path(params)
    for (path, x), names, lengths in zip(
        flat, structure.flatten_up_to(axes), structure.flatten_up_to(units), strict=True
    ):
        for name, size, unit in zip(names, x.shape, lengths, strict=True):
            cut = RULES[name]
            if cut is None or (parts := sizes[str(cut)]) == 1 or size % (parts * unit) == 0:
                continue
            parameter = ".".join(str(key.key) for key in path)
            most = max(n for n in range(1, parts) if size % (n * unit) == 0 or n == 1)
            whole = f", whole runs of {unit} (a block, rotation or key/value head)" if unit > 1 else ""
            more = f", or take --vocab-size {-(-size // parts) * parts}" if name == "vocab" else ""
            raise ValueError(
                f"--mesh {cut}={parts} cannot cut {parameter}'s axis {name!r} of {size} into equal "
                f"parts{whole}; reduce {cut}, to {most} at most{more}"
            )


def whole_units(policy: Policy) -> int:
    """Returns how many elements of a weight's axis a device must have, or a multiple of them: those of the
    Fprop's and Dgrad's blocks and rotations."""
    sizes = [1]
    for gemm in (policy.fprop, policy.dgrad):
        sizes += [gemm.rotation.size] if gemm.rotation else []
        for operand in (gemm.lhs, gemm.rhs):
            block = operand.block_shape or get_format(operand.format).block or 1
            sizes += block if isinstance(block, tuple) else [block]
    return math.lcm(*sizes)


def check_batch(
    sizes: Mapping[str, int],
    batch_size: int,
    accumulate: int,
    flags: Callable[[Mapping[str, int]], str | None] = lambda sizes: "",
) -> None:
    """Raises ValueError unless every device gets equally many sequences of each part of a batch.

    The message names batch sizes and, if there is one, a mesh that would do: `flags` returns what else the
    command line needs for a mesh of some sizes, None if the parameters cannot be cut so.
    """
    unit = batch_parts_of(sizes) * accumulate
    if batch_size % unit == 0:
        return
    below, above = batch_size // unit * unit, -(-batch_size // unit) * unit
    advice = f"take --batch-size {f'{below} or ' if below else ''}{above}"
    devices = math.prod(sizes.values())
    for tensor in (n for n in range(2, devices + 1) if devices % n == 0):
        rest = devices // tensor
        further = flags({"data": 1, "fsdp": rest, "tensor": tensor})
        if batch_size % (rest * accumulate) == 0 and further is not None:
            fsdp = f"fsdp={rest}," if rest > 1 else ""
            advice += f", or --mesh {fsdp}tensor={tensor}{further}"
            break
    times = f" times --accumulate {accumulate}" if accumulate > 1 else ""
    raise ValueError(
        f"--batch-size {batch_size} must be a multiple of the mesh's data x fsdp = "
        f"{unit // accumulate}{times}; {advice}"
    )


def process_part(mesh: Mesh, rows: int) -> tuple[int, int]:
    """Returns (i, n): this process's devices hold the i-th of n equal parts of a batch of so many rows.

    Raises:
      ValueError: the devices of a process do not hold such a part.
    """
    found = NamedSharding(mesh, spec(("batch",))).addressable_devices_indices_map((rows,)).values()
    starts, stops = zip(*(index[0].indices(rows)[:2] for index in found if index is not None), strict=True)
    start, length = min(starts), max(stops) - min(starts)
    if rows % length or start % length:
        raise ValueError(
            f"--mesh tensor={mesh.shape['tensor']} must divide, or be a multiple of, "
            f"the {jax.local_device_count()} devices of a process"
        )
    return start // length, rows // length


def global_batch(mesh: Mesh, rows: np.ndarray) -> jax.Array:
    """Returns the batch [batch, length] of which each process gives the rows that it holds, cut up."""
    _, parts = process_part(mesh, batch_parts_of(mesh.shape))
    sharding = NamedSharding(mesh, spec(("batch", None)))
    shape = (len(rows) * parts, *rows.shape[1:])
    return jax.make_array_from_process_local_data(sharding, rows, shape)


def on_mesh(mesh: Mesh, eval_step: Any) -> Any:
    """Returns `eval_step` of `training.step` for batches of any size, which every process has whole.

    A batch that the mesh cannot cut into equal parts is filled up with its last sequence, whose losses weigh
    nothing: so filled up, the scales of whole tensors stay those of the batch.
    """
    parts = batch_parts_of(mesh.shape)

    def step(params, batch: np.ndarray, key: jax.Array) -> jax.Array:
        missing, weights = -len(batch) % parts, None
        if missing:
            weights = np.repeat(np.array([1, 0], np.float32), [len(batch), missing])
            batch = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)])
        index, count = process_part(mesh, len(batch))
        return eval_step(params, global_batch(mesh, np.split(batch, count)[index]), key, weights)

    return step
