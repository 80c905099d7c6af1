"""The checks: what each needs, and the lanes in which they run side by side."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from benchmarks.native import features, memory, meshes, resuming, sharded
from benchmarks.native.work import Found, Work


@dataclasses.dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
      run: the check.
      seconds: time that it has on GPUs.
      gpus: GPUs that it needs.
      needs: the checks whose runs it reads.
    """

    run: Callable[[Work], Found]
    seconds: float
    gpus: int = 1
    needs: Sequence[str] = ()


CHECKS: Mapping[str, Check] = {
    "axes": Check(sharded.axes, 150, gpus=2),
    "shard_map": Check(sharded.shard_map, 90, gpus=2),
    "mesh_one": Check(meshes.mesh_one, 80),
    "mesh_tensor": Check(meshes.mesh_tensor, 110, gpus=2, needs=("mesh_one",)),
    "mesh_fsdp": Check(meshes.mesh_fsdp, 90, gpus=2, needs=("mesh_one",)),
    "mesh_data": Check(meshes.mesh_data, 90, gpus=2, needs=("mesh_one",)),
    "distributed": Check(resuming.distributed, 220, gpus=2),
    "whole": Check(resuming.whole, 80),
    "resume": Check(resuming.resume, 100, needs=("whole",)),
    "remat_none": Check(memory.remat_none, 70),
    "remat_dots": Check(memory.remat_dots, 60),
    "remat_fp4": Check(memory.remat_fp4, 70),
    "remat_full": Check(memory.remat_full, 60),
    "schedule": Check(features.schedule, 80, needs=("whole",)),
    "layers": Check(features.layers, 70, needs=("whole",)),
    "observed": Check(features.observed, 90, needs=("schedule",)),
    "mlperf": Check(features.mlperf, 70),
    "eval": Check(features.evaluate, 60, needs=("whole",)),
}
LANES: Sequence[Sequence[str]] = (
    ("whole", "resume", "eval"),
    ("mlperf", "schedule", "observed", "layers"),
    ("remat_none", "remat_fp4", "remat_dots", "remat_full"),
    ("axes", "shard_map"),
    ("mesh_one", "mesh_tensor", "mesh_fsdp", "mesh_data"),
    ("distributed",),
)
"""Checks that run one after another; the lanes run side by side. A check never waits for a later lane."""


def with_needed(names: Sequence[str]) -> set[str]:
    """Returns the checks and those that they need, all if none is named.

    Raises:
      ValueError: a name is unknown.
    """
    if unknown := [name for name in names if name not in CHECKS]:
        raise ValueError(f"unknown check {', '.join(unknown)}; the checks are {', '.join(CHECKS)}")
    chosen = set(names or CHECKS)
    while more := {need for name in chosen for need in CHECKS[name].needs} - chosen:
        chosen |= more
    return chosen


def gpus_of(name: str, gpus: Sequence[str]) -> list[str]:
    """Returns the GPUs of a check: lanes begin at one GPU after another, and share GPUs if they must."""
    before = 0
    for lane in LANES:
        if name in lane:
            return [gpus[(before + i) % len(gpus)] for i in range(CHECKS[name].gpus)]
        before += max(CHECKS[other].gpus for other in lane)
    raise ValueError(f"no lane has {name}")
