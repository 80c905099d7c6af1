"""What is written of a compiled build as JSON: all that launching it takes, what it computes, how it looks.

docs/kernels-aot.md describes the fields.
"""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import triton
from jax.numpy import dtype as to_dtype
from triton.compiler import CompiledKernel

from mxjax.kernels.aot import assembly
from mxjax.kernels.aot.builds import Argument, Build
from mxjax.kernels.aot.expected import PREAMBLE

ALIGNMENT = 16  # of every array, which the compiled code relies on
POINTER = 8
SCRATCH = ("global_scratch", "profile_scratch")  # Triton's own arguments, after a kernel's
TYPES = {
    "uint8": "u8",
    "uint32": "u32",
    "int32": "i32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
}
"""Triton's names of dtypes."""


def describe(build: Build, target: str, compiled: CompiledKernel, resource_usage: str) -> dict[str, Any]:
    """Returns what is written as JSON; `resource_usage` is what cuobjdump says of a cubin.

    Raises:
      RuntimeError: the compiled kernel takes other arguments than the build says.
    """
    metadata = compiled.metadata
    check_order(build, compiled.asm["ttir"])
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError(f"{build.name} needs scratch buffers, which no launch here provides")
    block = (metadata.num_warps * metadata.target.warp_size, 1, 1)
    grid = (*build.grid, 1, 1)[:3]
    if target.startswith("gfx"):
        text = compiled.asm["amdgcn"]
        fields = assembly.amd_arguments(text)
        resources = assembly.amd_resources(text)
        resources["waves_per_simd"] = assembly.amd_occupancy(
            resources["vgprs"], metadata.shared, metadata.num_warps
        )
        kernarg_bytes, descriptor = resources["kernarg_bytes"], assembly.amd_descriptor(text)
        instructions = assembly.amd_instructions(text)
    else:
        fields = assembly.cuda_arguments(compiled.asm["ptx"])
        resources = assembly.cuda_resources(resource_usage)
        kernarg_bytes, descriptor = POINTER * len(fields), None
        instructions = assembly.cuda_instructions(compiled.asm["sass"])
        resources["spills"] = assembly.cuda_spills(instructions)
        resources["warps_per_multiprocessor"] = assembly.cuda_occupancy(
            resources["registers"], metadata.shared, metadata.num_warps
        )
    arguments, more = _arguments(build, fields, launch_values(grid, block, metadata.shared))
    body, is_loop = assembly.main_loop(instructions)
    everything = [x for x in instructions if not isinstance(x, str)]
    return {
        "name": build.name,
        "target": target,
        "kernel": metadata.name,
        "descriptor_symbol": f"{metadata.name}.kd" if descriptor else None,
        "source": f"{build.kernel.__module__}:{build.kernel.__name__}",
        "arguments": arguments,
        "more_arguments": more,
        "kernarg_bytes": kernarg_bytes,
        "constants": build.constants,
        "grid": grid,
        "block": block,
        "warps": metadata.num_warps,
        "threads_per_warp": metadata.target.warp_size,
        "stages": build.num_stages,
        "options": build.options,
        "shared_bytes": metadata.shared,
        "reference": {"preamble": PREAMBLE, **dataclasses.asdict(build.reference)},
        "resources": resources,
        "descriptor": descriptor,
        "main_loop": {"is_loop": is_loop, **_count(body)},
        "whole_kernel": _count(everything),
        "triton": triton.__version__,
    }


def check_order(build: Build, ttir: str) -> None:
    """Raises RuntimeError unless the kernel that Triton compiled takes the build's arrays in its order."""
    [parameters] = re.findall(r"tt\.func public @\w+\((.*)\) attributes", ttir)
    compiled = re.findall(r"%(\w+): !tt\.ptr<(\w+)>", parameters)
    # Triton's IR has no signs.
    wanted = [
        (name, TYPES[a.dtype].replace("u", "i").replace("fp", "f").replace("f8e4nv", "f8E4M3FN"))
        for name, a in build.signature.items()
    ]
    if compiled != wanted:
        raise RuntimeError(f"{build.name} takes {wanted}, but the compiled kernel {compiled}")


def launch_values(grid, block, shared_bytes: int) -> dict[str, int]:
    """Returns the values of arguments that a runtime adds: 0 for buffers that these kernels have no use for.

    Source: LLVM's User Guide for the AMDGPU Backend, code object V5 metadata.
    """
    values = {}
    for i, axis in enumerate("xyz"):
        values |= {f"hidden_block_count_{axis}": grid[i], f"hidden_group_size_{axis}": block[i]}
        values |= {f"hidden_remainder_{axis}": 0, f"hidden_global_offset_{axis}": 0}
    values |= {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": shared_bytes}
    pointers = ("hostcall_buffer", "multigrid_sync_arg", "heap_v1", "default_queue", "completion_action")
    return values | {f"hidden_{p}": 0 for p in (*pointers, "queue_ptr")} | dict.fromkeys(SCRATCH, 0)


def _arguments(build: Build, fields: list[dict], values: dict[str, int]) -> tuple[list[dict], list[dict]]:
    """Returns the arrays and what follows them, each with its place among the compiled kernel's arguments."""
    explicit = [f for f in fields if not f["kind"].startswith("hidden_")]
    hidden = fields[len(explicit) :]
    names = [*build.signature, *SCRATCH]
    if [f["size"] for f in explicit] != [POINTER] * len(names):
        raise RuntimeError(f"{build.name} takes {names}, but the compiled kernel {explicit}")
    arrays = [
        _array(name, a, build) | field
        for (name, a), field in zip(build.signature.items(), explicit, strict=False)
    ]
    scratch = zip(SCRATCH, explicit[len(arrays) :], strict=True)
    more = [{"name": name, **field} for name, field in (*scratch, *((f["kind"], f) for f in hidden))]
    for field in more:
        if field["name"] not in values:
            raise RuntimeError(f"{build.name}: nobody says what value {field['name']} takes")
        field["value"] = values[field["name"]]
    return arrays, more


def _array(name: str, argument: Argument, build: Build) -> dict[str, Any]:
    shape, dtype = argument.view or (argument.shape, argument.dtype)
    return {
        "name": name,
        "type": "*" + TYPES[argument.dtype],
        "shape": argument.shape,
        "dtype": argument.dtype,
        "bytes": math.prod(argument.shape) * to_dtype(argument.dtype).itemsize,
        "alignment": ALIGNMENT,
        "output": argument.output,
        "written": name in build.reference.agrees,
        "meaning": argument.meaning,
        "view": {"shape": shape, "dtype": np.dtype(dtype).name},
    }


def _count(instructions) -> dict[str, dict[str, int]]:
    return {
        "classes": assembly.count_classes(instructions),
        "opcodes": assembly.count_opcodes(instructions),
    }
