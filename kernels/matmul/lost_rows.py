"""Rows of an operand that lost elements in FP8: how many there are, and which of them must be multiplied
again.

Training's gradients lose blocks some 2**-30 of the largest in their row. Their part in a result is below what
rounding leaves of it, unless the others cancel. A kernel sifts out the rows where that is certain.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.operands.carriers import Carried


@triton.jit
def some_lost(flags, start, length):
    """Returns 1024 words, of which one is not 0 if one of `length` flags from `start` on is.

    It may also be one of the three words before them: so loads are aligned, and all but the last have no
    mask, which makes them 16 bytes a thread.
    """
    WIDTH: tl.constexpr = 1024
    at = tl.arange(0, WIDTH)
    first, end = start // 4 * 4, start + length
    rest = first + (end - first) // WIDTH * WIDTH
    some = tl.load(flags + rest + at, rest + at < end, 0)
    for start in tl.range(first, rest, WIDTH, loop_unroll_factor=4):
        some |= tl.load(flags + start + at)
    return some


@triton.jit
def count_lost(flags, without, LENGTH, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Returns the number of rows that lost elements; `without` as in `_group_flags`."""
    WIDTH: tl.constexpr = 4096
    GROUPS = tl.cdiv(LENGTH, ROWS)
    count = tl.zeros([WIDTH], tl.int32)
    for start in range(0, GROUPS, WIDTH):
        count += _ones(_group_flags(flags, without, start + tl.arange(0, WIDTH), GROUPS, PARTS))
    return tl.sum(count, 0)


@triton.jit
def find_lost(
    flags, without, scratch, strip, LENGTH, ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes to scratch a strip's BLOCK rows of those that lost elements; past the last of them, LENGTH.

    `without` is as in `_group_flags`.
    """
    WIDTH: tl.constexpr = 1024
    GROUPS = tl.cdiv(LENGTH, ROWS)
    first = strip * BLOCK  # of the strip's rows, counted among those that lost elements
    before = 0
    tl.debug_barrier()  # all threads have read the last strip's
    tl.store(scratch + tl.arange(0, BLOCK), LENGTH)
    tl.debug_barrier()
    for start in range(0, GROUPS, WIDTH):
        group = start + tl.arange(0, WIDTH)
        found = _group_flags(flags, without, group, GROUPS, PARTS)
        count = _ones(found)
        more = tl.sum(count, 0)
        if (before + more > first) & (before < first + BLOCK):
            slot = before - first + tl.cumsum(count, 0) - count
            for i in range(ROWS):
                is_lost = (found >> i & 1).to(tl.int32)
                tl.store(scratch + slot, group * ROWS + i, mask=(is_lost > 0) & (slot >= 0) & (slot < BLOCK))
                slot += is_lost
        before += more
    tl.debug_barrier()


@triton.jit
def _group_flags(flags, without, group, GROUPS, PARTS: tl.constexpr):
    """Returns for each group, by its index, a bit for each of its rows, over all parts; 0 past the last.

    Those of `without` are left out, unless it is None.
    """
    found = tl.zeros(group.shape, tl.uint32)
    for part in tl.static_range(PARTS):
        found |= tl.load(flags + group * PARTS + part, group < GROUPS, 0)
    if without is not None:
        found &= ~tl.load(without + group, group < GROUPS, 0)  # of whole rows
    return found


@triton.jit
def _ones(bits):
    """Returns the number of ones in each of 32 bits."""
    pairs = bits - (bits >> 1 & 0x55555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    return (((fours + (fours >> 4)) & 0x0F0F0F0F) * 0x01010101 >> 24).to(tl.int32)


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
    y, lost_sum, lost, far, still_lost, still_far, M, N, FROM: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Writes still_lost and still_far [v, ceil(M / ROWS)], the flags of rows with an element below a bound.

    The inputs are y [v, M, N], lost_sum [v, M], read in lost rows, and the flags lost and far
    [v, ceil(M / FROM)]. A row's bound is its lost_sum times FACTOR. The grid is (ceil(M / ROWS), v).
    """
    v = tl.program_id(1).to(tl.int64)
    index = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + index
    at = v * tl.cdiv(M, FROM) + row // FROM
    bit = (row % FROM).to(tl.uint32)
    is_lost = (tl.load(lost + at, row < M, 0) >> bit) & 1
    if tl.max(is_lost.to(tl.int32), 0) > 0:
        bound = tl.load(lost_sum + v * M + row, is_lost > 0, 0.0) * FACTOR
        is_lost &= (least_of_rows(y, v * M + row, is_lost, None, N, ROWS, WIDTH) < bound).to(tl.uint32)
    place = v * tl.num_programs(0) + tl.program_id(0)
    tl.store(still_lost + place, tl.sum(is_lost << index.to(tl.uint32), 0).to(tl.uint32))
    is_far = is_lost & (tl.load(far + at, row < M, 0) >> bit)
    tl.store(still_far + place, tl.sum(is_far << index.to(tl.uint32), 0).to(tl.uint32))


@triton.jit
def least_of_rows(y, rows, is_lost, column_unit, N, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the least magnitude in each of the rows of y [..., N] with a flag, 0 if one is NaN.

    Args:
      column_unit: unit bytes of the columns, by whose factors the elements are divided; None divides by none.
    """
    AT_ONCE: tl.constexpr = 64 // y.dtype.element_ty.primitive_bitwidth  # more of float32 have no registers
    least = tl.full([ROWS, WIDTH], float("inf"), tl.float32)
    for start in tl.range(0, N, WIDTH, loop_unroll_factor=AT_ONCE):
        column = start + tl.arange(0, WIDTH)
        wanted = (is_lost > 0)[:, None] & (column < N)[None, :]
        element = tl.load(y + rows[:, None] * N + column[None, :], wanted, float("inf"))
        magnitude = tl.abs(element.to(tl.float32))
        if column_unit is not None:
            unit = tl.load(column_unit + column, column < N, 127).to(tl.int32)
            magnitude *= ((254 - unit) << 23).to(tl.float32, bitcast=True)[None, :]
        least = tl.minimum(least, tl.where(magnitude == magnitude, magnitude, 0))
    return tl.min(least, 1)
