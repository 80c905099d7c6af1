"""The order of programs on a GPU of several dies, each with an L2 cache of its own."""

import triton
import triton.language as tl


@triton.jit
def order_on_dies(program, total, XCDS: tl.constexpr):
    """Returns the place of a program such that neighbouring places run on one die.

    The GPU assigns programs in turn to XCDS dies.
    """
    if XCDS > 1:
        die = program % XCDS
        program = die * (total // XCDS) + tl.minimum(die, total % XCDS) + program // XCDS
    return program
