"""Triton kernels in JAX programs: a primitive that becomes a custom call with the compiled kernel inside.

A program depends only on the kernels' source, constants, options, target and the installed versions. It names
no file, so JAX's caches hit and all processes of a job compile the same program. Lowering needs no GPU and no
GPU plugin. A kernel is compiled when it is lowered, not when it is traced, once a process, together with all
others that were traced, in threads. Triton's cache keeps it on disk.
"""

import collections
import contextlib
import functools
import importlib
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mxjax.kernels.call_message import ALIGNMENT, MachineCode, encode_call

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

PLATFORMS = {"cuda": "cuda", "hip": "rocm"}
"""JAX's name of the platform of each of Triton's backends."""

CALL = "triton_kernel_call_ffi"
"""jaxlib's custom call for Triton kernels."""

TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "uint8": "u8",
    "int8": "i8",
    "uint16": "u16",
    "int16": "i16",
    "uint32": "u32",
    "int32": "i32",
}
"""Triton's names of dtypes."""

MOST_THREADS = 16
"""Kernels that are compiled at a time."""

LARGEST_DIVISOR = 128
"""The largest divisor that is told of sizes: enough for the widest loads and stores of rows."""

Frozen = tuple[tuple[str, type, Any], ...]
"""A mapping as a hashable value, with types: 1, 1.0 and True are equal, but compile to different kernels."""


class Size(NamedTuple):
    """An integer that a kernel gets at run time, of which only a divisor is known when it is compiled."""

    divisor: int


def sizes_of(kernel, backend: str, constants: Mapping[str, Any]) -> dict[str, int]:
    """Returns the arguments after the pointers that a kernel gets at run time, in its order.

    On CUDA these are the ones that the kernel does not annotate as constexpr. One kernel then serves many
    arrays, and a program compiles fewer. On HIP all are constants.
    """
    if backend != "cuda":
        return {}
    return {p.name: constants[p.name] for p in kernel.params if p.name in constants and not p.is_constexpr}


def specialized(kernel, backend: str, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments after the pointers as the kernel is compiled for them: constants and sizes."""
    sizes = sizes_of(kernel, backend, constants)
    return {**constants, **{name: Size(math.gcd(value, LARGEST_DIVISOR)) for name, value in sizes.items()}}


def kernel_call(
    kernel,
    arrays: Sequence[jax.Array],
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    *,
    backend: str,
    arch: str,
    options: Mapping[str, Any],
    constants: Mapping[str, Any],
    in_place: bool = False,
) -> list[jax.Array]:
    """Returns the arrays that `kernel` writes: it takes pointers to `arrays`, then to the results.

    Args:
      backend, arch: Triton's target, "cuda" and "sm_90" or "hip" and "gfx950".
      options: the compiler's, with num_warps and num_stages.
      constants: the kernel's arguments after the pointers; see `sizes_of`.
      in_place: the first result takes the memory of the first array, and the kernel gets both pointers.
    """
    sizes = tuple(sizes_of(kernel, backend, constants).values())
    options, constants = _freeze(options), _freeze(specialized(kernel, backend, constants))
    dtypes = tuple(x.dtype.name for x in (*arrays, *out))
    _traced.append((kernel, dtypes, backend, arch, options, constants))
    # Without barriers XLA lets a call read slices, or write a slice, of the arrays of a loop around it, and
    # forgets that its result has the memory of an argument (DynamicSliceFusionRewriterV2 sets no aliasing).
    hidden = jax.lax.optimization_barrier if in_place else list
    written = _kernel_call.bind(
        *hidden(arrays),
        kernel=kernel,
        out=tuple((o.shape, jax.numpy.dtype(o.dtype)) for o in out),
        grid=grid,
        target=(backend, arch),
        options=options,
        constants=constants,
        sizes=sizes,
        in_place=in_place,
    )
    return hidden(written)


def _freeze(values: Mapping[str, Any]) -> Frozen:
    return tuple((name, type(value), value) for name, value in sorted(values.items()))


def _thaw(values: Frozen) -> dict[str, Any]:
    return {name: value for name, _, value in values}


# Kernels that were traced and not lowered yet.
_traced: collections.deque[tuple[Any, tuple[str, ...], str, str, Frozen, Frozen]] = collections.deque(
    maxlen=1000
)
_starting = threading.Lock()
_kernel_call = Primitive("mxjax_kernel_call")
_kernel_call.multiple_results = True


@_kernel_call.def_abstract_eval
def _(*arrays, out, **_):
    return [ShapedArray(shape, dtype) for shape, dtype in out]


@_kernel_call.def_impl
def _(*arrays, **parameters):
    return _jitted(**parameters)(*arrays)


@functools.cache
def _jitted(**parameters):
    return jax.jit(functools.partial(_kernel_call.bind, **parameters))


def _lower(platform: str, context, *operands, kernel, out, grid, target, options, constants, sizes, in_place):
    if PLATFORMS[target[0]] != platform:
        raise ValueError(
            f"{kernel.__name__} was traced for {target[1]}, and cannot be lowered for {platform}: "
            f"lower for {PLATFORMS[target[0]]}, or trace it within use_target"
        )
    del out
    _register()
    avals = (*context.avals_in, *context.avals_out)
    dtypes = tuple(a.dtype.name for a in avals)
    start_traced()
    code = start_compiling(kernel, dtypes, *target, options, constants).result()
    aliases = {0: 0} if in_place else {}
    lower = jax.ffi.ffi_lowering(CALL, operand_output_aliases=aliases)
    if code.scratch_bytes:  # one more result, which nothing reads
        scratch = ShapedArray((math.prod(grid) * code.scratch_bytes,), jax.numpy.uint8)
        context = context.replace(avals_out=[*context.avals_out, scratch])
    results = lower(context, *operands, opaque=encode_call(code, grid, len(avals), sizes))
    return results[: len(avals) - len(operands)]


for _platform in PLATFORMS.values():
    mlir.register_lowering(_kernel_call, functools.partial(_lower, _platform), platform=_platform)


@functools.cache
def _register() -> None:
    """Registers jaxlib's custom call where a GPU plugin is installed, for the program to run."""
    importlib.import_module("jaxlib.gpu_triton")


def start_traced() -> None:
    """Begins to compile all kernels that were traced and not lowered yet."""
    with contextlib.suppress(IndexError):  # another thread may take the last
        while _traced:
            start_compiling(*_traced.popleft())


def start_compiling(
    kernel, dtypes: tuple[str, ...], backend: str, arch: str, options: Frozen, constants: Frozen
) -> Future[MachineCode]:
    """Begins `compile_kernel` in a thread, once a process. Triton compiles partly outside Python's lock."""
    with _starting:  # two threads may lower the same kernel
        return _submitted((kernel, dtypes, backend, arch, options, constants))


@functools.cache
def _submitted(job: tuple) -> Future[MachineCode]:
    return _pool().submit(compile_kernel, *job)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "mxjax-compile")


def compile_kernel(
    kernel, dtypes: tuple[str, ...], backend: str, arch: str, options: Frozen, constants: Frozen
) -> MachineCode:
    """Returns a kernel compiled for pointers to arrays of `dtypes`, which are multiples of 16 bytes.

    Without line information, which would name the folder of the installation and quadruple the size.
    """
    names, values = kernel.arg_names, _thaw(constants)
    pointers = [name for name in names if name not in values]
    if len(pointers) != len(dtypes):
        raise TypeError(
            f"{kernel.__name__} takes pointers to {', '.join(pointers)}; "
            f"it was called with {len(dtypes)} arrays"
        )
    compiled = build_kernel(
        kernel, dict(zip(pointers, dtypes, strict=True)), values, backend, arch, _thaw(options)
    )
    about = compiled.metadata
    return MachineCode(
        image=compiled.asm["cubin" if backend == "cuda" else "hsaco"],
        name=about.name,
        num_warps=about.num_warps,
        shared_bytes=about.shared,
        scratch_bytes=getattr(about, "global_scratch_size", 0) or 0,
        scratch_alignment=getattr(about, "global_scratch_align", 1) or 1,
        compute_capability=compute_capability(backend, arch),
    )


def build_kernel(
    kernel,
    dtypes: Mapping[str, str],
    constants: Mapping[str, Any],
    backend: str,
    arch: str,
    options: Mapping[str, Any],
    line_info: bool = False,
) -> "CompiledKernel":
    """Compiles a kernel by Triton, in the same way for programs and for builds without a GPU.

    Args:
      dtypes: the dtype of each pointer's array, by parameter; pointers are multiples of 16 bytes.
      constants: all other arguments, `specialized`.
      line_info: whether the code names the lines of its source.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    sizes = {name: value.divisor for name, value in constants.items() if isinstance(value, Size)}
    if names[: len(dtypes)] != list(dtypes):  # programs pass pointers, then sizes
        raise TypeError(f"{kernel.__name__} must take {', '.join(dtypes)} before its other parameters")
    divisors = dict.fromkeys(dtypes, ALIGNMENT) | sizes
    types = {name: f"*{TYPES[dtype]}" for name, dtype in dtypes.items()} | dict.fromkeys(sizes, "i32")
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name not in sizes},
        attrs={(names.index(name),): [["tt.divisibility", divisor]] for name, divisor in divisors.items()},
    )
    capability = compute_capability(backend, arch)
    target = GPUTarget("cuda", capability, 32) if capability else GPUTarget("hip", arch, 64)
    with compiler_knobs(backend, line_info):
        return triton.compile(source, target=target, options=dict(options))


def compute_capability(backend: str, arch: str) -> int:
    """Returns 90 for sm_90, and 0 on HIP."""
    return int(arch.removeprefix("sm_")) if backend == "cuda" else 0


SETTINGS: dict[str, dict[str, bool]] = {"cuda": {}, "hip": {"use_block_pingpong": False}}
"""Triton's AMD knobs with which every kernel of a backend is compiled, whatever the environment says.

In Triton 3.9's ping-pong schedule, waves of a 256x256x256 GEMM on gfx950 pass a barrier with a read of LDS
outstanding. Other waves may then load into the buffer that is being read: if reads are as late and loads as
early as the code allows, 2,041 of a tile's 65,536 elements are wrong in the emulator. Triton had such a race
on gfx942 (triton#11696).
"""

_changed = threading.Condition()
_users = 0  # compilations that run now
_current: tuple[str, bool] | None = None  # the backend and line_info that all of them have
_scopes = contextlib.ExitStack()


@contextlib.contextmanager
def compiler_knobs(backend: str, line_info: bool) -> Iterator[None]:
    """A context in which Triton's knobs are set; compilations that need others wait.

    Args:
      line_info: whether the code names the lines of its source.
    """
    global _users, _current
    with _changed:
        _changed.wait_for(lambda: not _users or _current == (backend, line_info))
        if not _users:
            _set(backend, line_info)
            _current = backend, line_info
        _users += 1
    try:
        yield
    finally:
        with _changed:
            _users -= 1
            if not _users:
                _scopes.close()
                _changed.notify_all()


def _set(backend: str, line_info: bool) -> None:
    from triton import knobs

    _scopes.enter_context(knobs.compilation.scope())
    _scopes.enter_context(knobs.amd.scope())
    knobs.compilation.disable_line_info = not line_info
    for name, value in SETTINGS[backend].items():
        setattr(knobs.amd, name, value)
