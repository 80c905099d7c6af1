"""The one place where Triton kernels meet JAX: as calls inside jit on GPUs, or in Triton's interpreter.

On a GPU a call is `lowering.kernel_call`. Under `TRITON_INTERPRET=1` it is a host callback on the CPU: every
function built on a kernel can be tested without a GPU.
"""

import concurrent.futures
import contextvars
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mxjax.kernels.lowering import TYPES, kernel_call
from mxjax.runtime.devices import current_target
from mxjax.runtime.mesh import varying_as

try:
    import triton
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
except ImportError as error:
    raise ImportError(
        "mxjax.kernels needs Triton: install mxjax[cuda] or mxjax[rocm], or mxjax[kernels] without a GPU"
    ) from error


MOST_PROGRAMS = 65535  # CUDA's limit along every grid axis but the first


class Call(NamedTuple):
    """The arguments of `triton_call`."""

    kernel: Any
    arrays: tuple[jax.Array, ...]
    out: Sequence[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    num_warps: int
    num_stages: int
    options: Mapping[str, Any]
    constants: dict[str, Any]


_recorded: contextvars.ContextVar[list[Call] | None] = contextvars.ContextVar("recorded", default=None)


def calls_of(function: Callable[..., Any], *arrays: Any) -> list[Call]:
    """Returns the calls of `triton_call` in a function of arrays with these shapes and dtypes; none runs.

    The function must not call another whose trace JAX caches, such as one of `jax.jit`: the cache would keep
    a trace without kernels.
    """
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        jax.eval_shape(lambda *arrays: [function(*arrays)][:0], *arrays)  # whose result is nothing
    finally:
        _recorded.reset(token)
    assert calls, "the function launches nothing, or JAX has a trace of it"
    return calls


def triton_call(
    kernel,
    *arrays: jax.Array,
    out: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int = 4,
    num_stages: int = 1,
    options: Mapping[str, object] | None = None,
    in_place: bool = False,
    multiplies: bool = False,
    **constants,
) -> list[jax.Array]:
    """Returns the arrays that `kernel` writes, its pointer parameters after those of `arrays`, in order.

    Under `jax.shard_map` the outputs vary over every mesh axis that an input varies over.

    Args:
      kernel: a function decorated with `triton.jit`. Its pointers come first; the other parameters are
        constexpr, or sizes (see `mxjax.kernels.lowering.sizes_of`).
      arrays: inputs, passed as pointers aligned to 16 bytes.
      out: shapes and dtypes of the outputs, which the kernel must fill, but for in_place and scratch memory.
      grid: programs along up to three axes.
      options: options of the target's compiler, which ignores those that it does not know.
      in_place: whether the first output starts as the first array and reuses its memory if nothing else
        reads it. The kernel gets a pointer to that memory for both.
      multiplies: whether the kernel has products. Then the interpreter gets bfloat16 arrays in float32: it
        would multiply their bits as integers, and truncate to bfloat16 where GPUs round.
      constants: the kernel's arguments after the pointers.
    """
    if (calls := _recorded.get()) is not None:
        calls.append(Call(kernel, arrays, out, grid, num_warps, num_stages, options or {}, constants))
    if 0 in grid or calls is not None:
        return [varying_as(jnp.zeros(o.shape, o.dtype), *arrays) for o in out]
    if isinstance(kernel, InterpretedFunction):
        written = _interpret(kernel, arrays, out, grid, constants, in_place, multiplies)
        return [varying_as(y, *arrays) for y in written]
    target = current_target()
    if target is None or target.backend == "interpreter":
        raise NotImplementedError(
            "triton_call needs a GPU and Triton (install mxjax[cuda] or mxjax[rocm]), or Triton's "
            "interpreter (set TRITON_INTERPRET=1 before kernels are imported, and call "
            "use_target(INTERPRETER))"
        )
    if target.backend == "cuda" and max(grid[1:], default=1) > MOST_PROGRAMS:
        raise ValueError(
            f"triton_call needs at most {MOST_PROGRAMS} programs along each axis but the first on CUDA, "
            f"got {grid}; split the tensor"
        )
    # Products are not fused with sums, which would round once where the definitions round twice.
    how = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False} | dict(options or {})
    written = kernel_call(
        kernel, arrays, out, grid, backend=target.backend, arch=target.arch, options=how,
        constants=constants, in_place=in_place,
    )  # fmt: skip
    return [varying_as(y, *arrays) for y in written]


def _interpret(kernel, arrays, out, grid, constants, in_place, multiplies) -> list[jax.Array]:
    _interpreter_thread()
    wide = {jnp.dtype(jnp.bfloat16): jnp.float32} if multiplies else {}
    made = tuple(jax.ShapeDtypeStruct(o.shape, wide.get(jnp.dtype(o.dtype), o.dtype)) for o in out)
    run = functools.partial(_on_host, kernel, made, grid, constants, in_place)
    given = (x.astype(wide.get(x.dtype, x.dtype)) for x in arrays)
    written = jax.pure_callback(run, made, *given, vmap_method="sequential")
    return [y.astype(o.dtype) for y, o in zip(written, out, strict=True)]


def _on_host(kernel, out, grid, constants, in_place, *arrays) -> tuple[np.ndarray, ...]:
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


class _HostTensor:
    """The part of a torch.Tensor that Triton's interpreter uses, around a numpy array."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = TYPES[array.dtype.name]
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


@triton.jit
def order_on_dies(program, total, XCDS: tl.constexpr):
    """Returns the place of a program such that neighbouring places run on one die.

    The GPU assigns programs in turn to XCDS dies.
    """
    if XCDS > 1:
        die = program % XCDS
        program = die * (total // XCDS) + tl.minimum(die, total % XCDS) + program // XCDS
    return program
