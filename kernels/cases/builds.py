"""Ahead-of-time builds as plain data: kernels, their arrays and constants, how to compute their results."""

import dataclasses
from typing import Any, Literal, NamedTuple


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array whose address a kernel takes.

    Attributes:
      shape, dtype: as the kernel is compiled for; row-major.
      role: "unused" is an output that this build neither reads nor writes; "scratch" is memory for the kernel
        alone.
      meaning: what it contains, in words.
      view: shape and dtype in which the result is defined, if the kernel writes its bytes as other words.
    """

    shape: tuple[int, ...]
    dtype: str
    role: Literal["input", "output", "scratch", "unused"] = "input"
    meaning: str = ""
    view: tuple[tuple[int, ...], str] | None = None


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
