"""The record of a compiled build, written as JSON: how to launch it, what it computes, how its code looks.

The fields:

  `name`, `target`, `triton`, `files`: the build, its target, the version of Triton, and the files beside
    the record
  `kernel`, `descriptor_symbol`: the symbol of the entry; on AMD also that of the kernel descriptor, an
    object of 64 bytes
  `source`: module and name of the Triton function
  `arguments`: the arrays, in order
  `more_arguments`: the arguments after them: on CUDA numbers of rows, of 32 bits, in whose place others may
    be passed that have the same greatest common divisor with 128 and lead to the same `constants`
    otherwise; two of Triton's buffers that these kernels do not use (null), and on AMD the hidden
    arguments, which no instruction reads. `value` is the value to pass
  `kernarg_bytes`: size of the kernel argument segment, on CUDA of the parameters; align it to 16
  `constants`: compile-time constants, and on CUDA the numbers of rows
  `grid`, `block`: programs (work-groups), and threads of a program, along x, y, z
  `warps`, `threads_per_warp`: waves of a program and their size
  `shared_bytes`: dynamic LDS or shared memory of a program. There is no static part, except 1024 bytes that
    CUDA reserves (`static_lds_bytes` of `resources`); do not add them
  `stages`, `options`, `settings`: compiler options, and the knobs of Triton set for all kernels of the
    backend. On gfx950 `use_block_pingpong` is false: `lowering.SETTINGS` says why
  `expected`: how to compute inputs and outputs: `kind`, `arguments` and `tolerance`, 0 for equal bits
  `resources`: registers, spills, scratch. `waves_per_simd` is the occupancy on gfx950,
    `warps_per_multiprocessor` (of 64) on CUDA; the printed table shows both as waves a scheduler
  `descriptor`: the kernel descriptor's fields, named as LLVM's `.amdhsa_` directives
  `main_loop`, `whole_kernel`: instructions by class and by opcode; `main_loop` counts the whole kernel if
    there is no loop (`is_loop`). A load into LDS has " lds" after its opcode

Each argument has these fields: `name`; `type`, the pointer's type in Triton; `offset` and `size`, its place
in the segment; `kind` and `address_space`, as in the code object's metadata; `shape`, `dtype`, `bytes` and
`alignment` of the row-major array at the address; `role`, `same_as` and `view`. The docstring of `source`
says what it contains. A `role` of "input" or "output" needs no explanation. `same_as` names the earlier array
whose address stands in for an input that the build does not read. An "unused" output belongs to a side that
the build leaves out: pass any address, nothing is read or written there. Every output is written completely,
except `out` of `correct_…`: it shares its address with `before`, and only the rows and columns that lost
elements change. "scratch" is memory of any content for the kernel alone; `grouped`, `group_scales` and
`lost_sum` of `carry_…` have this role too, because only programs that lost elements write them. `view` is the
shape and dtype in which the expected result is defined: the quantizer and the carrier write words of 32 bits.

Launching on gfx950:

- The code object is an ELF file of code object version 5. Waves begin at the descriptor's entry with the
  registers that `descriptor` asks for: `user_sgpr_*` first, then the work-group ids, then v0 with the
  packed work-item ids.
- `user_sgpr_kernarg_preload_length` words of the argument segment are preloaded into registers. The code
  that relies on this begins 256 bytes after the entry. The 256 bytes before load the words themselves, for
  firmware that does not preload. Begin at either.
- Buffer loads and stores have descriptors of 0x7ffffffe bytes. Masked lanes get the offset 0x80000000, for
  which a load gives 0 and a store does nothing.
- `v_cvt_scalef32_pk_fp4_f32` divides two float32 by the power of two given by the exponent of its third
  operand, rounds to nearest even, and saturates. It writes the byte that `op_sel` selects and keeps the
  others. For scale byte 0 the operand is 2**-127, a subnormal.
- Loads into LDS write lane n's bytes at `M0[17:0]` plus n times their number. Tiles reach past 64 KiB.
- Subnormals are kept (`float_denorm_mode_32` is 3). A product and a sum are fused only where the source
  says so. In attention the compiler fuses them too, and `v_exp_f32` and `v_log_f32` flush subnormals.
- The quantizer finds NaN by `v_maximum3_f32`. The document notes there that `DX10_CLAMP forces a NAN to
  zero`, and the descriptor sets that mode, as LLVM always does. LLVM takes the instruction for IEEE's
  maximum all the same. The inputs of the quantizers contain NaN, so a run on the device shows it.
- `ds_read_b64_tr_b16` reads four 16-bit elements a lane and transposes those of each 16 lanes, as a matrix
  of 4 x 16.

Sources: LLVM's User Guide for the AMDGPU Backend; AMD Instinct CDNA4 Instruction Set Architecture, 9.1.9.
"""

import math
import re
from typing import Any, NamedTuple

import numpy as np
import triton
from jax.numpy import dtype as to_dtype
from triton.compiler import CompiledKernel

from mxjax.kernels.call_message import ALIGNMENT
from mxjax.kernels.cases import assembly
from mxjax.kernels.cases.builds import Argument, Build
from mxjax.kernels.lowering import SETTINGS, TYPES, sizes_of

POINTER, SIZE = 8, 4  # bytes
SCRATCH = ("global_scratch", "profile_scratch")  # Triton's own arguments, after a kernel's


def make_record(build: Build, target: str, compiled: CompiledKernel, resource_usage: str) -> dict[str, Any]:
    """Returns the record of a build; `resource_usage` is cuobjdump's output for a cubin.

    Raises:
      RuntimeError: the compiled kernel takes other arguments than the build says.
    """
    metadata = compiled.metadata
    check_order(build, compiled.asm["ttir"])
    # Triton 3.6 and 3.7 name neither for gfx950.
    if any(getattr(metadata, f"{name}_size", 0) for name in SCRATCH):
        raise RuntimeError(f"{build.name} needs scratch buffers, which no launch here provides")
    block = (metadata.num_warps * metadata.target.warp_size, 1, 1)
    grid = (*build.grid, 1, 1)[:3]
    code = _amd_code(compiled) if target.startswith("gfx") else _cuda_code(compiled, resource_usage)
    sizes = sizes_of(build.kernel, metadata.target.backend, build.constants)
    values = launch_values(grid, block, metadata.shared)
    arguments, more = _arguments(build, code.fields, sizes, values)
    body, is_loop = assembly.main_loop(code.instructions)
    return {
        "name": build.name,
        "target": target,
        "kernel": metadata.name,
        "descriptor_symbol": f"{metadata.name}.kd" if code.descriptor else None,
        "source": f"{build.kernel.__module__}:{build.kernel.__name__}",
        "arguments": arguments,
        "more_arguments": more,
        "kernarg_bytes": code.kernarg_bytes,
        "constants": build.constants,
        "grid": grid,
        "block": block,
        "warps": metadata.num_warps,
        "threads_per_warp": metadata.target.warp_size,
        "stages": build.num_stages,
        "options": build.options,
        "settings": SETTINGS[metadata.target.backend],
        "shared_bytes": metadata.shared,
        "expected": build.expected._asdict(),
        "resources": code.resources,
        "descriptor": code.descriptor,
        "main_loop": {"is_loop": is_loop, **_count(body)},
        "whole_kernel": _count([x for x in code.instructions if not isinstance(x, str)]),
        "triton": triton.__version__,
    }


class _Code(NamedTuple):
    fields: list[dict[str, Any]]
    kernarg_bytes: int
    resources: dict[str, int]
    descriptor: dict[str, int] | None
    instructions: list[assembly.Instruction | str]


def _amd_code(compiled: CompiledKernel) -> _Code:
    metadata, text = compiled.metadata, compiled.asm["amdgcn"]
    resources = assembly.amd_resources(text)
    waves = assembly.amd_occupancy(resources["vgprs"], metadata.shared, metadata.num_warps)
    return _Code(
        assembly.amd_arguments(text),
        resources["kernarg_bytes"],
        resources | {"waves_per_simd": waves},
        assembly.amd_descriptor(text),
        assembly.amd_instructions(text),
    )


def _cuda_code(compiled: CompiledKernel, resource_usage: str) -> _Code:
    metadata = compiled.metadata
    fields = assembly.cuda_arguments(compiled.asm["ptx"])
    instructions = assembly.cuda_instructions(compiled.asm["sass"])
    resources = assembly.cuda_resources(resource_usage)
    resources["spills"] = assembly.cuda_spills(instructions)
    resources["warps_per_multiprocessor"] = assembly.cuda_occupancy(
        resources["registers"], metadata.shared, metadata.num_warps
    )
    end = fields[-1]["offset"] + fields[-1]["size"]
    return _Code(fields, end, resources, None, instructions)


_IN_TTIR = {"float8_e4m3fn": "f8E4M3FN", "float8_e5m2": "f8E5M2"}


def check_order(build: Build, ttir: str) -> None:
    """Raises RuntimeError unless the kernel that Triton compiled takes the build's arrays in its order."""
    [parameters] = re.findall(r"tt\.func public @\w+\((.*)\) attributes", ttir)
    compiled = re.findall(r"%(\w+): !tt\.ptr<(\w+)>", parameters)
    # Triton's IR has no signs.
    wanted = [
        (name, _IN_TTIR.get(a.dtype) or TYPES[a.dtype].replace("u", "i").replace("fp", "f"))
        for name, a in build.signature.items()
    ]
    if compiled != wanted:
        raise RuntimeError(f"{build.name} takes {wanted}, but the compiled kernel {compiled}")


def launch_values(grid, block, shared_bytes: int) -> dict[str, int]:
    """Returns the values of the arguments that a runtime adds: 0 for buffers that these kernels do not use.

    Source: LLVM's User Guide for the AMDGPU Backend, code object V5 metadata.
    """
    values = {}
    for i, axis in enumerate("xyz"):
        values |= {f"hidden_block_count_{axis}": grid[i], f"hidden_group_size_{axis}": block[i]}
        values |= {f"hidden_remainder_{axis}": 0, f"hidden_global_offset_{axis}": 0}
    values |= {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": shared_bytes}
    pointers = ("hostcall_buffer", "multigrid_sync_arg", "heap_v1", "default_queue", "completion_action")
    return values | {f"hidden_{p}": 0 for p in (*pointers, "queue_ptr")} | dict.fromkeys(SCRATCH, 0)


def _arguments(
    build: Build, fields: list[dict], sizes: dict[str, int], values: dict[str, int]
) -> tuple[list[dict], list[dict]]:
    """Returns the arrays and the arguments after them, each with its place in the argument segment."""
    explicit = [f for f in fields if not f["kind"].startswith("hidden_")]
    hidden = fields[len(explicit) :]
    names = [*build.signature, *sizes, *SCRATCH]
    if [f["size"] for f in explicit] != [SIZE if name in sizes else POINTER for name in names]:
        raise RuntimeError(f"{build.name} takes {names}, but the compiled kernel {explicit}")
    arrays = [
        _array(name, a) | field for (name, a), field in zip(build.signature.items(), explicit, strict=False)
    ]
    others = zip((*sizes, *SCRATCH), explicit[len(arrays) :], strict=True)
    more = [{"name": name, **field} for name, field in (*others, *((f["kind"], f) for f in hidden))]
    values = values | sizes
    for field in more:
        if field["name"] not in values:
            raise RuntimeError(
                f"{build.name}: no value is known for {field['name']}; add it to launch_values"
            )
        field["value"] = values[field["name"]]
    return arrays, more


def _array(name: str, argument: Argument) -> dict[str, Any]:
    shape, dtype = argument.view or (argument.shape, argument.dtype)
    return {
        "name": name,
        "type": "*" + TYPES[argument.dtype],
        "shape": argument.shape,
        "dtype": argument.dtype,
        "bytes": math.prod(argument.shape) * to_dtype(argument.dtype).itemsize,
        "alignment": ALIGNMENT,
        "role": argument.role,
        "same_as": argument.same_as,
        "view": {"shape": shape, "dtype": np.dtype(dtype).name},
    }


def _count(instructions) -> dict[str, dict[str, int]]:
    return {"classes": assembly.count_classes(instructions), "opcodes": assembly.count_opcodes(instructions)}
