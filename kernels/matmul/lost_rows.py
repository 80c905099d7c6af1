"""The rows of an operand that lost elements in FP8: whether there are any, how many, and those of a strip."""

import triton
import triton.language as tl


@triton.jit
def some_lost(flags, batch, length):
    """Returns 1024 words, of which one is not 0 if one of a batch's `length` flags is.

    It may also be one of the three words before them: so loads are aligned, and all but the last have no
    mask, which makes them 16 bytes a thread.
    """
    WIDTH: tl.constexpr = 1024
    at = tl.arange(0, WIDTH)
    first, end = batch * length // 4 * 4, (batch + 1) * length
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
    flags,
    without,
    scratch,
    strip,
    LENGTH,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
