"""Ahead-of-time builds as plain data: kernels, their arrays and constants, how to compute their results.

They are calls that the functions around the kernels make, recorded.
"""

import dataclasses
import types
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from jax.numpy import dtype as to_dtype

from mxjax.kernels.launch import Call


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array whose address a kernel takes.

    Attributes:
      shape, dtype: as the kernel is compiled for; row-major.
      role: "unused" is an output that this build neither reads nor writes; "scratch" is memory for the kernel
        alone.
      view: shape and dtype in which the result is defined, if the kernel writes its bytes as other words.
      same_as: the earlier array that stands in for an input that this build does not read.
    """

    shape: tuple[int, ...]
    dtype: str
    role: Literal["input", "output", "scratch", "unused"] = "input"
    view: tuple[tuple[int, ...], str] | None = None
    same_as: str | None = None


class Expected(NamedTuple):
    """Names the functions of `expected` or `expected_operands` that compute a build's inputs and outputs.

    Attributes:
      kind: `gemm` stands for `gemm_inputs` and `gemm_outputs`.
      arguments: keyword arguments of both, as JSON can hold them.
      tolerance: largest difference from an element, in units of its dtype's epsilon times the sum of its
        magnitude and the output's root mean square; 0 asks for equal bits.
    """

    kind: str
    arguments: dict[str, Any]
    tolerance: int = 0


@dataclasses.dataclass(frozen=True)
class Build:
    """One kernel to compile.

    Attributes:
      name: stem of the files that are written.
      kernel: a function decorated with `triton.jit`.
      signature: its pointer arguments in order.
      constants: its other arguments.
      grid: programs along each axis.
      expected: how to compute what it must write.
      options: options of the compiler's backend.
    """

    name: str
    kernel: Any
    signature: dict[str, Argument]
    constants: dict[str, Any]
    grid: tuple[int, ...]
    expected: Expected
    num_warps: int = 4
    num_stages: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


_SCRATCH = {"scratch", "grouped", "group_scales", "lost_sum"}
"""Memory for a kernel alone, or that only some programs write."""


def build_of(
    name: str,
    call: Call,
    expected: Expected,
    views: Mapping[str, Any] = types.MappingProxyType({}),
    unused: Collection[str] = (),
) -> Build:
    """Returns the build of a recorded call.

    Args:
      views: dtypes in which results are defined that the kernel writes as other words, by name.
      unused: results that this build does not write.
    """
    names = call.kernel.arg_names
    arguments = dict[str, Argument]()
    for i, (argument, x) in enumerate(zip(names, call.arrays, strict=False)):
        first = next(j for j, other in enumerate(call.arrays) if other is x)
        same_as = names[first] if first < i else None
        arguments[argument] = Argument(x.shape, x.dtype.name, "input", None, same_as)
    for argument, x in zip(names[len(call.arrays) :], call.out, strict=False):
        dtype = to_dtype(x.dtype)
        view, role = None, "scratch" if argument in _SCRATCH else "output"
        if argument in unused:
            role = "unused"
        elif argument in views:
            element = to_dtype(views[argument])
            view = (*x.shape[:-1], x.shape[-1] * dtype.itemsize // element.itemsize), element.name
        arguments[argument] = Argument(x.shape, dtype.name, role, view)
    return Build(
        name,
        call.kernel,
        arguments,
        call.constants,
        call.grid,
        expected,
        call.num_warps,
        call.num_stages,
        dict(call.options),
    )
