"""Loads of the quantizer's tiles: as groups along columns or along rows, in 16-byte loads or row by row.

A tile becomes GROUP tensors, one for each element of a group; a group lies in the registers of one thread.
"""

import triton
import triton.language as tl


@triton.jit
def column_groups(
    x, rows, columns, C: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Returns GROUP tensors [GROUPS, WIDTH]: rows GROUP * g + i of x [rows, columns] with stride C.

    Elements outside x are zero; with EXACT there are none. With groups of 8 a thread has 8 adjacent columns.
    """
    xs = ()
    for i in tl.static_range(GROUP):
        xs = xs + (_load_rows(x + i * C, rows - i, columns, C, GROUP, GROUPS, WIDTH, EXACT),)
    return xs


@triton.jit
def row_groups(
    x, rows, columns, C: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, HEIGHT: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Returns GROUP tensors [GROUPS, HEIGHT]: columns GROUP * g + i of x, transposed; see `column_groups`."""
    PART: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    r = tl.arange(0, HEIGHT)[:, None, None]
    c = tl.arange(0, GROUPS)[None, :, None] * GROUP + tl.arange(0, PART)[None, None, :]
    pointers = x + (r * C + c)
    xs = ()
    for i in tl.static_range(0, GROUP, PART):
        xs = xs + _split(
            load_inside(pointers + i, (r < rows) & (c + i < columns), EXACT), HEIGHT, GROUPS, PART
        )
    return xs


@triton.jit
def transpose_groups(xs, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the row groups of a tile, made in registers from its column groups; both have 8 elements."""
    low = tl.join(tl.join(xs[0], xs[1]), tl.join(xs[2], xs[3]))
    high = tl.join(tl.join(xs[4], xs[5]), tl.join(xs[6], xs[7]))
    x = tl.permute(tl.join(low, high), [0, 4, 3, 2, 1])
    return _split(tl.reshape(x, [8 * GROUPS, WIDTH // 8, 8]), 8 * GROUPS, WIDTH // 8, 8)


@triton.jit
def load_words(
    x, i: tl.constexpr, rows, words, STRIDE: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Returns the int32 words of row i of each group, [BLOCK_R / GROUP, BLOCK_C / 2]; zeros outside of x."""
    row, word = tl.arange(0, BLOCK_R // GROUP)[:, None] * GROUP, tl.arange(0, BLOCK_C // 2)[None, :]
    pointers = x + i * STRIDE + (row * STRIDE + word)
    if EXACT:
        return tl.load(pointers)
    return tl.load(pointers, (row + i < rows) & (word < words), 0)


@triton.jit
def split_words(loaded, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Returns 4 tuples of GROUP tensors [BLOCK_R / GROUP, BLOCK_C / 8]: word 4 q + j of row GROUP g + i."""
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    QUADS: tl.constexpr = BLOCK_C // 8
    w0 = ()
    w1 = ()
    w2 = ()
    w3 = ()
    for i in tl.static_range(GROUP):
        even, odd = tl.split(tl.reshape(loaded[i], [GROUPS, QUADS, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        w0 = w0 + (first,)
        w1 = w1 + (second,)
        w2 = w2 + (third,)
        w3 = w3 + (fourth,)
    return w0, w1, w2, w3


@triton.jit
def _load_rows(
    x, rows, columns, C: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    if GROUP == 8 and x.dtype.element_ty.primitive_bitwidth == 32:
        # 16-byte loads: the even runs of 4 columns, then the odd ones.
        r = tl.arange(0, GROUPS)[:, None, None] * 8
        c = tl.arange(0, WIDTH // 8)[None, :, None] * 8 + tl.arange(0, 4)[None, None, :]
        low = load_inside(x + (r * C + c), (r < rows) & (c < columns), EXACT)
        high = load_inside(x + (r * C + c) + 4, (r < rows) & (c + 4 < columns), EXACT)
        y = tl.reshape(tl.permute(tl.join(low, high), [0, 1, 3, 2]), [GROUPS, WIDTH])
    else:
        r, c = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, WIDTH)[None, :]
        y = load_inside(x + (r * C + c), (r < rows) & (c < columns), EXACT)
    return y


@triton.jit
def load_inside(pointers, inside, EXACT: tl.constexpr):
    """Loads a tile; elements that are not inside, of which an EXACT tile has none, are zero."""
    return tl.load(pointers) if EXACT else tl.load(pointers, inside, 0)


@triton.jit
def _split(x, R: tl.constexpr, G: tl.constexpr, PART: tl.constexpr):
    """Returns x [R, G, PART] as PART tensors [G, R]; PART is 4 or 8."""
    if PART == 8:
        even, odd = tl.split(tl.reshape(x, [R, G, 2, 2, 2]))
        even04, even26 = tl.split(even)
        odd15, odd37 = tl.split(odd)
        x0, x4 = tl.split(even04)
        x2, x6 = tl.split(even26)
        x1, x5 = tl.split(odd15)
        x3, x7 = tl.split(odd37)
        y = (
            tl.trans(x0),
            tl.trans(x1),
            tl.trans(x2),
            tl.trans(x3),
            tl.trans(x4),
            tl.trans(x5),
            tl.trans(x6),
            tl.trans(x7),
        )
    else:
        even, odd = tl.split(tl.reshape(x, [R, G, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        y = (tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3))
    return y


@triton.jit
def join_tensors(tensors, COUNT: tl.constexpr):
    """Returns 1, 2, 4, 8, 16 or 32 tensors as one, with an axis of size 2 for each bit of their index.

    These axes follow the tensors' own, that of the highest bit first.
    """
    for stage in tl.static_range(5):
        if COUNT >> stage > 1:
            joined = ()
            for i in tl.static_range(COUNT >> (stage + 1)):
                joined = joined + (tl.join(tensors[i], tensors[i + (COUNT >> (stage + 1))]),)
            tensors = joined
    return tensors[0]


@triton.jit
def store_inside(pointers, value, inside, EXACT: tl.constexpr):
    """Stores a tile; elements that are not inside are left out, which an EXACT tile has none of."""
    if EXACT:
        tl.store(pointers, value)
    else:
        tl.store(pointers, value, inside)
