"""The lost rows of an FP8 product that need not be recomputed, since what was lost does not show: a kernel.

Training's gradients lose blocks some 2**-30 of the largest in their row. Their part in a result is below what
rounding leaves of it, unless the others cancel.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from mxjax.fp8_carriers import Carried
from mxjax.kernels.launch import ceil_div, triton_call

ROWS = 32
"""Rows per program, a bit of its flags each."""
WARPS = 4
WIDTH = 64
"""Columns that a program reads at a time."""
GUARD_BITS = 2
"""What was lost is negligible below 2**-GUARD_BITS of what rounding to the result's dtype may change."""


def sift(y: Float[Array, "batch m n"], left: Carried, right: Carried, rows: int) -> Carried:
    """Returns `left` without the flags of rows in which what was lost is negligible, ROWS of them a word.

    An element of y lacks at most `left.lost_sum` times the largest number of right's dtype. A row keeps its
    flag if that may be more than 2**-10 of one of its elements in bfloat16, 2**-13 in float16 or 2**-26 in
    float32, which is 2**-GUARD_BITS of what rounding may change, or if an element is NaN.

    Args:
      y: the product of the elements of `left` and `right`, before factors.
      left: with groups.
      rows: those of a word of `left.lost`, a power of two up to ROWS.
    """
    batch, m, n = y.shape
    flags = jax.ShapeDtypeStruct((batch, ceil_div(m, ROWS)), jnp.uint32)
    lost, far = triton_call(
        sift_kernel,
        y,
        left.lost_sum,
        left.lost,
        left.far,
        out=[flags, flags],
        grid=(flags.shape[1], batch),
        num_warps=WARPS,
        **constants_of(m, n, y.dtype, right.elements.dtype, rows),
    )
    return left._replace(lost=lost, far=far)


def constants_of(m: int, n: int, dtype: jnp.dtype, right: jnp.dtype, rows: int) -> dict[str, float]:
    """Returns the kernel's arguments other than arrays; `right` is the dtype of the second operand."""
    factor = float(jnp.finfo(right).max) * 2.0 ** (jnp.finfo(dtype).nmant + 1 + GUARD_BITS)
    return {"M": m, "N": n, "FROM": rows, "ROWS": ROWS, "WIDTH": WIDTH, "FACTOR": factor}


@triton.jit
def sift_kernel(
    y,
    lost_sum,
    lost,
    far,
    still_lost,
    still_far,
    M,
    N,
    FROM: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Writes still_lost and still_far [v, ceil(M / ROWS)], the flags of rows with an element below a bound.

    The inputs are y [v, M, N], lost_sum [v, M], read in lost rows, and the flags lost and far
    [v, ceil(M / FROM)]. A row's bound is its lost_sum times FACTOR. The grid is (ceil(M / ROWS), v).
    """
    AT_ONCE: tl.constexpr = 64 // y.dtype.element_ty.primitive_bitwidth  # more of float32 have no registers
    v = tl.program_id(1).to(tl.int64)
    index = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + index
    at = v * tl.cdiv(M, FROM) + row // FROM
    bit = (row % FROM).to(tl.uint32)
    is_lost = (tl.load(lost + at, row < M, 0) >> bit) & 1
    if tl.max(is_lost.to(tl.int32), 0) > 0:
        bound = tl.load(lost_sum + v * M + row, is_lost > 0, 0.0) * FACTOR
        least = tl.full([ROWS, WIDTH], float("inf"), tl.float32)
        for start in tl.range(0, N, WIDTH, loop_unroll_factor=AT_ONCE):
            column = start + tl.arange(0, WIDTH)
            wanted = (is_lost > 0)[:, None] & (column < N)[None, :]
            element = tl.load(y + (v * M + row)[:, None] * N + column[None, :], wanted, float("inf"))
            magnitude = tl.abs(element.to(tl.float32))
            least = tl.minimum(least, tl.where(magnitude == magnitude, magnitude, 0))
        is_lost &= (tl.min(least, 1) < bound).to(tl.uint32)
    place = v * tl.num_programs(0) + tl.program_id(0)
    tl.store(still_lost + place, tl.sum(is_lost << index.to(tl.uint32), 0).to(tl.uint32))
    is_far = is_lost & (tl.load(far + at, row < M, 0) >> bit)
    tl.store(still_far + place, tl.sum(is_far << index.to(tl.uint32), 0).to(tl.uint32))
