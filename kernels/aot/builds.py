"""What a kernel module says of each of its ahead-of-time builds, as plain data."""

import dataclasses
from typing import Any, NamedTuple

from mxjax.gemm_input import GemmInput
from mxjax.kernels.quantize.kernel import Form
from mxjax.operand import Operand
from mxjax.policy import Rotation


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array that a kernel takes a pointer to.

    Attributes:
      shape, dtype: as the kernel is compiled for it; row-major.
      output: whether the kernel writes it.
      meaning: what it holds, in words.
      view: shape and dtype by which the reference takes the same bytes, if others.
    """

    shape: tuple[int, ...]
    dtype: str
    output: bool = False
    meaning: str = ""
    view: tuple[tuple[int, ...], str] | None = None


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a kernel computes, as Python expressions in mxjax's public functions, evaluated in order.

    Each is a value of the namespace under its key. Names of arguments are the arguments' arrays.

    Attributes:
      given: an example of what may be chosen freely.
      inputs: the inputs that follow from it.
      expected: what the outputs hold, and what leads there. An output that is missing is not written.
      agrees: for each output whether `got`, what the kernel wrote, is right.
      note: what bounds the choice.
    """

    given: dict[str, str]
    inputs: dict[str, str]
    expected: dict[str, str]
    agrees: dict[str, str]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Build:
    """One kernel to compile.

    Attributes:
      name: of the files written.
      kernel: a function decorated with `triton.jit`.
      signature: its pointer arguments in order.
      constants: its constexpr arguments.
      grid: programs along each axis.
      reference: what it computes.
      options: of the compiler's backend.
    """

    name: str
    kernel: Any
    signature: dict[str, Argument]
    constants: dict[str, Any]
    grid: tuple[int, ...]
    reference: Reference
    num_warps: int = 4
    num_stages: int = 1
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class Side(NamedTuple):
    """How a build of the quantizer takes a tensor along one of its axes, and the form that it writes."""

    operand: Operand
    rotation: Rotation | None = None
    form: Form = "packed"

    def along(self, axis: int) -> GemmInput:
        """Returns it as the input of a GEMM that contracts `axis`."""
        return GemmInput(axis, self.operand, self.rotation)
