"""The one place where Triton kernels meet JAX: as calls inside jit on GPUs, or in Triton's interpreter.

`triton_call` takes the same arguments with jax-triton 0.3 and 0.4, and runs under `TRITON_INTERPRET=1` on the
CPU (as a host callback), so that every function built on a kernel can be tested without a GPU.
"""

import concurrent.futures
import functools
import inspect
import math
import warnings
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.devices import current_target
from mxjax.weight_layout import varying_as

try:
    from triton.runtime.interpreter import InterpretedFunction
except ImportError as error:
    raise ImportError(
        "mxjax.kernels needs Triton: install mxjax[cuda] or mxjax[rocm], or mxjax[kernels] without a GPU"
    ) from error


MOST_PROGRAMS = 65535  # CUDA's limit along every grid axis but the first


def triton_call(
    kernel,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    options: Mapping[str, object] | None = None,
    in_place: bool = False,
    **constants,
) -> list[jax.Array]:
    """Returns the arrays that `kernel` writes, its pointer parameters after those of `arrays`, in order.

    Under `jax.shard_map` the outputs vary over every mesh axis that an input varies over.

    Args:
      kernel: a function decorated with `triton.jit`. All parameters but the pointers are constexpr.
      arrays: inputs, passed as pointers aligned to 16 bytes.
      out: shapes and dtypes of the outputs. The kernel must write every element, except those
        of an `in_place` output.
      grid: programs along up to three axes.
      options: options of the target's compiler. jax-triton 0.3 ignores them, which costs only speed.
      in_place: whether the first output starts as the first array and reuses its memory if nothing else
        reads it. The kernel must not use its first parameter: jax-triton 0.4 passes no pointer there.
      constants: the kernel's constexpr arguments.
    """
    if 0 in grid:
        return [jnp.zeros(o.shape, o.dtype) for o in out]
    if isinstance(kernel, InterpretedFunction):
        _interpreter_thread()
        run = functools.partial(_interpret, kernel, tuple(out), grid, constants, in_place)
        written = jax.pure_callback(run, tuple(out), *arrays, vmap_method="sequential")
        return [varying_as(y, *arrays) for y in written]
    target = current_target()
    if target is None:
        raise NotImplementedError(
            "triton_call needs a GPU and jax-triton (install mxjax[cuda] or mxjax[rocm]), or Triton's "
            "interpreter (set TRITON_INTERPRET=1 and call use_target(INTERPRETER))"
        )
    if target.backend == "cuda" and max(grid[1:], default=1) > MOST_PROGRAMS:
        raise ValueError(
            f"triton_call needs at most {MOST_PROGRAMS} programs along each axis but the first on CUDA, "
            f"got {grid}; split the tensor"
        )
    call = functools.partial(
        _import_jax_triton().triton_call,
        kernel=kernel,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=target.compute_capability,
        **_version_arguments(tuple(out), dict(options or {})),
        **constants,
    )
    written = _call_in_place(call, arrays) if in_place else call(*arrays)
    return [varying_as(y, *arrays) for y in written]


@functools.cache
def _import_jax_triton():
    try:
        import jax_triton
    except ImportError as error:
        raise ImportError("Triton kernels need jax-triton: install mxjax[cuda] or mxjax[rocm]") from error
    return jax_triton


def _call_in_place(call, arrays: tuple[jax.Array, ...]):
    """Calls jax-triton with the first array's memory for the first output.

    Version 0.3 passes the kernel both pointers. Version 0.4 passes one, here in the output's place. It
    deprecates `input_output_aliases` in favour of `jax.Ref`s, which 0.3 does not take.
    """
    if not _names_out_type():
        return call(*arrays, input_output_aliases={0: 0})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return call(0, *arrays[1:], arrays[0], input_output_aliases={len(arrays): 0})


def _version_arguments(out: tuple[jax.ShapeDtypeStruct, ...], options: dict) -> dict:
    """Returns the outputs and the compiler's options under the names that this jax-triton gives them.

    Multiply-add fusion is off: it would round once where the definitions round twice.
    """
    if _names_out_type():
        return {"out_type": out, "backend_options": {"enable_fp_fusion": False, **options}}
    return {"out_shape": out, "enable_fp_fusion": False}


def _names_out_type() -> bool:
    """Whether this is jax-triton 0.4, not 0.3."""
    return "out_type" in inspect.signature(_import_jax_triton().triton_call).parameters


def _interpret(kernel, out, grid, constants, in_place, *arrays) -> tuple[np.ndarray, ...]:
    """Runs a kernel in Triton's interpreter on host copies of the arrays."""
    inputs = [_HostTensor(np.array(a)) for a in arrays]
    # Poison the outputs, so that elements which the kernel fails to write show.
    outputs = [_HostTensor(np.frombuffer(b"\xa5" * (o.size * o.dtype.itemsize), o.dtype).copy()) for o in out]
    if in_place:
        outputs[0] = inputs[0]
    _interpreter_thread().submit(kernel[grid], *inputs, *outputs, **constants).result()
    return tuple(t.array.reshape(o.shape) for t, o in zip(outputs, out, strict=True))


@functools.cache
def _interpreter_thread() -> concurrent.futures.Executor:
    """Returns a dedicated thread for the interpreter, because XLA's CPU threads flush subnormals to zero.

    numpy's warnings about NaN and infinity are off in it.
    """
    executor = concurrent.futures.ThreadPoolExecutor(1, initializer=np.seterr, initargs=("ignore",))
    executor.submit(int).result()
    return executor


_TRITON_DTYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "uint8": "u8",
    "int8": "i8",
    "uint16": "u16",
    "int32": "i32",
    "uint32": "u32",
}


class _HostTensor:
    """The part of a torch.Tensor that Triton's interpreter uses, around a numpy array."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _TRITON_DTYPES[array.dtype.name]
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self) -> "_HostTensor":
        return self

    def cpu(self) -> "_HostTensor":
        return self

    def copy_(self, other: "_HostTensor") -> None:
        del other  # the same memory

    def new_empty(self, *args, **kwargs) -> "_HostTensor":
        return self

    def set_(self, *args) -> None:
        pass

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(s // self.array.itemsize for s in self.array.strides)


def ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up."""
    return math.ceil(a / b)
