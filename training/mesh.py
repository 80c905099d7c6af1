"""The mesh of a run: the flag --mesh, the batch on the mesh, and XLA's options.

`training.parameter_sharding` has the sharding of parameters, `models.sharding` the rules for all arrays.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from models.sharding import AXES, batch_parts_of, spec
from mxjax import implementations
from mxjax.devices import current_target
from mxjax.implementations import Implementation
from mxjax.policy import Policy


def parse_mesh(text: str | None, devices: int) -> dict[str, int]:
    """Returns the size of each mesh axis, e.g. of "fsdp=4,tensor=2"; None is fsdp over all devices.

    Raises:
      ValueError: malformed text, or sizes that do not multiply to the number of devices.
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
    """Returns the mesh that `parse_mesh` reads, with Auto axes, over the given devices or all devices."""
    # In the order of processes, so that each process holds consecutive rows of a batch.
    devices = jax.devices() if devices is None else devices
    sizes = parse_mesh(text, len(devices))
    return Mesh(np.array(devices).reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def compiler_options(
    mesh: Mesh, policies: Iterable[Policy], implementation: Implementation | None
) -> dict[str, bool]:
    """Returns XLA options for `jax.jit` of a step: those of `mxjax.implementations`, and latency hiding.

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
      sizes: the size of each mesh axis.
      batch_size: sequences a step.
      accumulate: parts of a batch.
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
        if batch_size % (rest * accumulate) == 0 and fits({"data": 1, "fsdp": rest, "tensor": tensor}):
            fsdp = f"fsdp={rest}," if rest > 1 else ""
            advice += f", or --mesh {fsdp}tensor={tensor}"
            break
    times = f" times --accumulate {accumulate}" if accumulate > 1 else ""
    raise ValueError(
        f"--batch-size {batch_size} must be a multiple of the mesh's data x fsdp = "
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
            f"--mesh tensor={mesh.shape['tensor']} must divide, or be a multiple of, "
            f"the {jax.local_device_count()} devices of a process"
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
    parts = batch_parts_of(mesh.shape)

    def step(params, batch: np.ndarray, key: jax.Array) -> jax.Array:
        missing, weights = -len(batch) % parts, None
        if missing:
            weights = np.repeat(np.array([1, 0], np.float32), [len(batch), missing])
            batch = np.concatenate([batch, np.repeat(batch[-1:], missing, axis=0)])
        index, count = process_part(mesh, len(batch))
        return eval_step(params, global_batch(mesh, np.split(batch, count)[index]), key, weights)

    return step
