"""The gradient through E2M1 quantization that clips, in one pass: mask, and rotation back.

`mxjax.products.gradients.through_quantization` defines it, for the estimate `clipped`.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mxjax.kernels.device.elements import INFINITY, MAGNITUDE, block_scale, inverse_scale, largest, widen
from mxjax.kernels.device.hadamard import rotate_groups
from mxjax.kernels.device.loads import column_groups, row_groups
from mxjax.kernels.device.quest import QUEST, quest_bytes
from mxjax.kernels.launch import MOST_PROGRAMS, ceil_div, triton_call
from mxjax.kernels.lowering import TYPES
from mxjax.kernels.mesh import RuleAxes, batched_by_vmap, partitioned
from mxjax.kernels.quantize.kernel import join_words
from mxjax.kernels.quantize.launches import LONGEST_AXIS, carry_of
from mxjax.numerics.formats import BLOCK
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target

GROUP = tl.constexpr(32)
OUT_DTYPES = (jnp.bfloat16, jnp.float32)


def takes(x: jax.Array, use: OperandUse, dtype: DTypeLike, target: Target | None) -> bool:
    """Whether the kernel computes the gradient of x, an operand of the Fprop, in dtype on this target.

    Nobody has run it on HIP.
    """
    rotation, operand = use.rotation, use.operand
    plain = rotation is None or (rotation.is_hadamard and rotation.signs == "none" and rotation.size <= BLOCK)
    if target is None or target.backend == "hip" or not plain or use.order is not None:
        return False
    blocks = operand.is_packable and not operand.is_square and operand.gradient == "clipped"
    *_, r, c = x.shape
    tall = ceil_div(r, 8) > MOST_PROGRAMS or math.prod(x.shape[:-2]) > MOST_PROGRAMS
    fits = x.size > 0 and x.shape[use.axis] % BLOCK == 0 and c % 2 == 0 and max(r, c) < LONGEST_AXIS
    return blocks and fits and not tall and dtype in OUT_DTYPES and x.dtype.name in TYPES


def clipped_gradient(
    product: Product, x: Float[Array, "*b r c"], use: OperandUse, dtype: DTypeLike
) -> Float[Array, "*b r c"]:
    """Returns the gradient of x from a product that is the gradient of the rotated x; see `takes`."""
    *batch, r, c = x.shape
    v = math.prod(batch)
    arrays = [product.raw.reshape(v, r, c), x.reshape(v, r, c)]
    for factors, n in zip(product.factors or (), (r, c), strict=False):
        arrays.append(jnp.broadcast_to(factors, (*batch, n)).reshape(v, n))
    [y] = _clipping(use.options, jnp.dtype(dtype))(*arrays)
    return y.reshape(x.shape)


@functools.cache
def _clipping(use: OperandUse, dtype):
    """Returns a function of a product and x [v, r, c], and the product's factors if any; vmap grows v."""

    def run(raw, x, *factors):
        _, r, c = x.shape
        axes = RuleAxes()
        r_axis = axes.compound("r", r, BLOCK if use.axis == -2 else 1)
        c_axis = axes.compound("c", c, BLOCK if use.axis == -1 else 1)
        terms = [f"v {r_axis} {c_axis}"] * 2 + [f"v {r_axis}", f"v {c_axis}"][: len(factors)]
        rule = ", ".join(terms) + f" -> v {r_axis} {c_axis}"
        call = functools.partial(_clip, use, dtype)
        return partitioned(call, rule, axes.sizes, axes.whole)(raw, x, *factors)

    return batched_by_vmap(run)


def _clip(use: OperandUse, dtype, raw, x, *factors) -> list[jax.Array]:
    v, r, c = x.shape
    rows, columns = (64, 64) if use.axis == -2 else (8, 512)
    size = use.rotation_size
    return triton_call(
        clip_kernel,
        raw,
        x,
        *(factors or (raw, raw)),
        out=[jax.ShapeDtypeStruct(x.shape, dtype)],
        grid=(ceil_div(c, columns), ceil_div(r, rows), v),
        num_warps=4,
        R=r,
        C=c,
        BLOCK_R=rows,
        BLOCK_C=columns,
        EXACT=r % rows == 0 and c % columns == 0,
        COLUMNS=use.axis == -2,
        FACTORED=bool(factors),
        ROTATION=size,
        FACTOR=float(np.float32(size**-0.5)),
        CARRY=carry_of(use),
    )


@triton.jit
def clip_kernel(
    raw, x, row_factors, column_factors, out, R, C: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, EXACT: tl.constexpr, COLUMNS: tl.constexpr, FACTORED: tl.constexpr,
    ROTATION: tl.constexpr, FACTOR: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """Writes raw times its factors where the rotated x does not clip, else zero, and rotates that.

    The grid is (tiles along C, tiles along R, V).

    Args:
      raw, x: [V, R, C] in any float dtype, as out in bfloat16 or float32.
      row_factors, column_factors: [V, R] and [V, C] in float32, read if FACTORED.
      COLUMNS: whether blocks and the rotation are along R, else along C, whose length is of whole blocks.
      ROTATION, FACTOR, CARRY: as in `mxjax.kernels.quantize.kernel`.
    """
    r0, c0 = tl.program_id(1) * BLOCK_R, tl.program_id(0) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    start = matrix * R * C + r0.to(tl.int64) * C + c0
    rows, columns = R - r0, C - c0
    GROUPS: tl.constexpr = (BLOCK_R if COLUMNS else BLOCK_C) // GROUP
    OTHER: tl.constexpr = BLOCK_C if COLUMNS else BLOCK_R
    if COLUMNS:
        xs = column_groups(x + start, rows, columns, C, GROUP, GROUPS, OTHER, EXACT)
        gs = column_groups(raw + start, rows, columns, C, GROUP, GROUPS, OTHER, EXACT)
    else:
        xs = row_groups(x + start, rows, columns, C, GROUP, GROUPS, OTHER, EXACT)
        gs = row_groups(raw + start, rows, columns, C, GROUP, GROUPS, OTHER, EXACT)
    kept = _kept(xs, GROUPS, OTHER, ROTATION, FACTOR, CARRY)
    group, other = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, OTHER)[None, :]
    row_factors += matrix * R + r0
    column_factors += matrix * C + c0
    along, across = (row_factors, column_factors) if COLUMNS else (column_factors, row_factors)
    length, others = (rows, columns) if COLUMNS else (columns, rows)
    if FACTORED:
        of_other = tl.load(across + other, other < others, 0)
    ys = ()
    for i in tl.static_range(GROUP):
        y = widen(gs[i])
        if FACTORED:
            y = y * (tl.load(along + group + i, group + i < length, 0) * of_other)
        ys = ys + (y * kept[i],)
    if ROTATION > 1:
        ys = rotate_groups(ys, ROTATION, GROUP, GROUPS, OTHER, FACTOR)
    if COLUMNS:
        for i in tl.static_range(GROUP):
            inside = (group + i < rows) & (other < columns)
            tl.store(out + start + ((group + i) * C + other), _rounded(ys[i], out.dtype.element_ty), inside)
    else:
        _store_rows(ys, out, start, rows, columns, C, GROUPS, OTHER)


@triton.jit
def _kept(
    xs, GROUPS: tl.constexpr, OTHER: tl.constexpr, ROTATION: tl.constexpr, FACTOR: tl.constexpr,
    CARRY: tl.constexpr,
):  # fmt: skip
    """Returns 1 for the elements of blocks that do not clip, else 0."""
    ys = ()
    for i in tl.static_range(GROUP):
        ys = ys + (widen(xs[i]),)
    if ROTATION > 1:
        ys = rotate_groups(ys, ROTATION, GROUP, GROUPS, OTHER, FACTOR)
    quest: tl.constexpr = CARRY == QUEST
    byte = quest_bytes(ys, GROUP, GROUPS, OTHER) if quest else block_scale(largest(ys, GROUP), CARRY)
    inverse = inverse_scale(byte)
    kept = ()
    for i in tl.static_range(GROUP):
        kept = kept + (tl.where((tl.abs(ys[i] * inverse) < 6.0) | (byte == 255), 1.0, 0.0),)
    return kept


@triton.jit
def _rounded(y, DTYPE: tl.constexpr):
    """Returns float32 values in DTYPE; bfloat16 from bits, since Triton's interpreter truncates."""
    if tl.bfloat16 == DTYPE:
        y = (_bfloat16_bits(y) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y


@triton.jit
def _bfloat16_bits(y):
    """Returns the bits of float32 values rounded to bfloat16's, in the upper half; the lower is not zero."""
    bits = y.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return tl.where((bits & MAGNITUDE) > INFINITY, 0x7FC00000, rounded)


@triton.jit
def _store_rows(ys, out, start, rows, columns, C: tl.constexpr, GROUPS: tl.constexpr, OTHER: tl.constexpr):
    """Stores groups along rows, 16 words of each at a time."""
    PER_WORD: tl.constexpr = 32 // out.dtype.element_ty.primitive_bitwidth
    ws = ()
    for i in tl.static_range(0, GROUP, PER_WORD):
        if PER_WORD == 2:
            word = (_bfloat16_bits(ys[i]) >> 16) | (_bfloat16_bits(ys[i + 1]) & 0xFFFF0000)
        else:
            word = ys[i].to(tl.uint32, bitcast=True)
        ws = ws + (word.to(tl.int32, bitcast=True),)
    words = out.to(tl.pointer_type(tl.int32)) + start // PER_WORD
    at, other = tl.arange(0, GROUPS * 16)[:, None], tl.arange(0, OTHER)[None, :]
    for first in tl.static_range(0, GROUP // PER_WORD, 16):
        sixteen = ()
        for i in tl.static_range(16):
            sixteen = sixteen + (ws[first + i],)
        place = at // 16 * (GROUP // PER_WORD) + first + at % 16
        inside = (place < columns // PER_WORD) & (other < rows)
        tl.store(words + (other * (C // PER_WORD) + place), join_words(sixteen, 16, GROUPS, OTHER), inside)
