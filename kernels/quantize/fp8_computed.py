"""FP8 operands by delayed scales of tensors that the kernel computes: of RMSNorm, SwiGLU and its gradient.

Their values (`mxjax.operands.computed`) are rounded to bfloat16 and cast in registers, along rows and along
columns, so that they are never stored. The kernel finds their largest magnitude too.
"""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax
from jaxtyping import Array, Float32

from mxjax.kernels.device.elements import widen
from mxjax.kernels.device.loads import load_inside
from mxjax.kernels.launch import triton_call
from mxjax.kernels.mesh import RuleAxes, batched_by_vmap, partitioned
from mxjax.kernels.quantize.fp8 import (
    TILE,
    UNIT,
    Axes,
    Sides,
    cast_tile,
    constants_of,
    grid_of,
    in_fp8,
    takes,
)
from mxjax.kernels.quantize.launches import ComputedKind
from mxjax.kernels.quantize.quantizer import arrays_of
from mxjax.numerics.formats import get_format
from mxjax.operands.computed import Computed
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target


def takes_computed(rows: OperandUse, columns: OperandUse, target: Target | None, r: int, c: int) -> bool:
    """Whether the kernels cast a tensor [r, c] that they compute for these two uses.

    The two parts of SwiGLU's gradient are multiples of 16 too.
    """
    delayed = rows.operand.is_delayed and columns.operand.is_delayed
    return delayed and takes((rows, columns), target, (r, c))


def quantize_fp8_computed(x: Computed, rows: OperandUse, columns: OperandUse) -> list[KernelOperand]:
    """Returns the values of x, rounded to bfloat16, in FP8 for both uses by delayed scales, with `amax`.

    They are those of `x.value()`, computed in float32 and rounded to bfloat16 where that says: a product with
    its factors, the norm before its scale, and the result. XLA for GPUs leaves out the first where it fuses
    `x.value()`: factors other than powers of two then change 2 to 3 % of the elements.

    Args:
      x: made of tensors in bfloat16; products have one factor for all, or none.
      rows, columns: uses along -1 and -2 that `takes_computed` accepts.
    Raises:
      TypeError: a tensor in another dtype.
    """
    kind, arrays = arrays_of(x, _with_factor)
    if any(array.dtype != jnp.bfloat16 for array in arrays[:: 3 if kind == "normed" else 2]):
        raise TypeError("quantize_fp8_computed needs tensors in bfloat16")
    *batch, _, _ = arrays[0].shape
    v = math.prod(batch)
    flat = [array.reshape(v, *array.shape[len(batch) :]) for array in arrays]
    sides = tuple(jnp.dtype(get_format(use.operand.format).dtype).name for use in (rows, columns))
    scales = [use.scale for use in (rows, columns)]
    assert scales[0] is not None
    assert scales[1] is not None
    run = _caster(sides, kind)
    *elements, maxima = run(*flat, *(jnp.broadcast_to(scale, (v,)) for scale in scales))
    amax = lax.bitcast_convert_type(jnp.max(maxima, initial=0), jnp.float32)
    return [
        KernelOperand(t.reshape(*batch, *t.shape[1:]), None, None, 1 / scale, amax=amax)
        for t, scale in zip(elements, scales, strict=True)
    ]


def _with_factor(product: Product) -> tuple[jax.Array, Float32[Array, "*batch"]]:
    """Returns a product, and its one factor."""
    rows, columns = product.factors or (jnp.ones((), jnp.float32),) * 2
    factor = rows.reshape(()) * columns.reshape(())  # one for all
    return product.raw, jnp.broadcast_to(factor, product.raw.shape[:-2])


@functools.cache
def _caster(sides: Sides, kind: ComputedKind):
    """Returns a function of the arrays of a kind and two scales [v]; vmap grows v.

    It returns the elements along rows and columns and the bits of the largest magnitudes [v]. A mesh may
    shard it along rows, between whole words.
    """

    def run(*arrays):
        axes = RuleAxes("c", "two_c")
        r_axis = axes.compound("r", arrays[0].shape[1], UNIT)
        tensors = [term.format(r=r_axis) for term in _TENSORS[kind]]
        out = "two_c" if kind == "gradient" else "c"
        rule = ", ".join([*tensors, "v", "v"]) + f" -> v {r_axis} {out}, v {out} {r_axis}, v"
        [first, *_] = re.findall(r"\w+", r_axis)
        call = functools.partial(launch_computed_cast, sides, kind)
        return partitioned(call, rule, axes.sizes, axes.whole, reduced=[first])(*arrays)

    return batched_by_vmap(run)


_TENSORS: dict[ComputedKind, tuple[str, ...]] = {
    "normed": ("v {r} c", "v {r}", "v c"),
    "gated": ("v {r} two_c", "v"),
    "gradient": ("v {r} two_c", "v", "v {r} c", "v"),
}


def launch_computed_cast(sides: Sides, kind: ComputedKind, *arguments: Any) -> list[jax.Array]:
    """Runs the kernel on tensors, or on shards of their rows by the mesh axes that come last."""
    *arrays, sharding = arguments
    axes: Axes = sharding
    v, r, n = arrays[0].shape
    c, parts = (n, 1) if kind == "normed" else (n // 2, 2 if kind == "gradient" else 1)
    along, down, _ = grid_of(v, r, c)
    grid = (parts * along, down, v)
    rows, columns, tiles = triton_call(
        KERNELS[kind],
        *arrays,
        out=[
            jax.ShapeDtypeStruct((v, r, parts * c // 4), jnp.int32),
            jax.ShapeDtypeStruct((v, parts * c, r // 4), jnp.int32),
            jax.ShapeDtypeStruct(grid[::-1], jnp.int32),
        ],
        grid=grid,
        num_warps=TILE.warps,
        **constants_of(sides, r, c, True),
    )
    row_dtype, column_dtype = sides
    assert row_dtype is not None
    assert column_dtype is not None
    found = jnp.max(tiles, axis=(1, 2))
    found = lax.pmax(found, axes) if axes else found
    return [in_fp8(rows, row_dtype), in_fp8(columns, column_dtype), found]


@triton.jit
def cast_normed_kernel(
    x, factors, scale, row_factor, column_factor, row_words, column_words, maxima, R, C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr,
    ROW_E5M2: tl.constexpr, COLUMN_E5M2: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Casts x * factors * scale, each product rounded to bfloat16.

    x [V, R, C] and scale [V, C] are in bfloat16, factors [V, R] in float32. Results and the other arguments
    are as in `mxjax.kernels.quantize.fp8.cast_kernel`.
    """
    r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    v = tl.program_id(2).to(tl.int64)
    row, column = _rows(BLOCK_R, GROUP), tl.arange(0, BLOCK_C)[None, :]
    columns = widen(load_inside(scale + v * C + c0 + column, column < C - c0, EXACT))
    xs = ()
    for i in tl.static_range(GROUP):
        inside = (row + i < R - r0) & (column < C - c0)
        pointers = x + (v * R + r0 + i) * C + c0 + (row * C + column)
        factor = load_inside(factors + v * R + r0 + i + row, row + i < R - r0, EXACT)
        y = (widen(load_inside(pointers, inside, EXACT)) * factor).to(tl.bfloat16)
        xs = xs + ((widen(y) * columns).to(tl.bfloat16),)
    scales, out, place = (row_factor, column_factor), (row_words, column_words, maxima), (v, r0, c0)
    cast_tile(xs, scales, out, place, R, C, C, BLOCK_R, BLOCK_C, GROUP, EXACT, ROW_E5M2, COLUMN_E5M2, MAXIMA)


@triton.jit
def cast_gated_kernel(
    product, factor, row_factor, column_factor, row_words, column_words, maxima, R, C: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr,
    ROW_E5M2: tl.constexpr, COLUMN_E5M2: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Casts silu(gate) * up [V, R, C] of a product [V, R, 2 C] in bfloat16, times factor [V] in float32.

    Gate's columns come first. Results and the other arguments are as in `cast_kernel`.
    """
    r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    v = tl.program_id(2).to(tl.int64)
    row, column, f = _rows(BLOCK_R, GROUP), tl.arange(0, BLOCK_C)[None, :], tl.load(factor + v)
    xs = ()
    for i in tl.static_range(GROUP):
        inside = (row + i < R - r0) & (column < C - c0)
        gate = product + (v * R + r0 + i) * (2 * C) + c0 + (row * (2 * C) + column)
        g, u = _load_times(gate, f, inside, EXACT), _load_times(gate + C, f, inside, EXACT)
        xs = xs + ((g * _logistic(g) * u).to(tl.bfloat16),)
    scales, out, place = (row_factor, column_factor), (row_words, column_words, maxima), (v, r0, c0)
    cast_tile(xs, scales, out, place, R, C, C, BLOCK_R, BLOCK_C, GROUP, EXACT, ROW_E5M2, COLUMN_E5M2, MAXIMA)


@triton.jit
def cast_gated_gradient_kernel(
    product, factor, gradient, gradient_factor, row_factor, column_factor, row_words, column_words, maxima, R,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr,
    ROW_E5M2: tl.constexpr, COLUMN_E5M2: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Casts the gradient [V, R, 2 C] of a product, from that of its silu(gate) * up [V, R, C].

    The arguments are those of `cast_gated_kernel`, and the gradient as a product. The grid is (2 * tiles
    along C, tiles along R, V): the first half along C computes the gate's part, the second the up
    projection's of the same elements, which it finds in the L2 cache.
    """
    tiles = tl.num_programs(0) // 2
    r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) % tiles * BLOCK_C
    of_up, v = tl.program_id(0) // tiles, tl.program_id(2).to(tl.int64)
    gate, gradient = product + (v * R + r0) * (2 * C) + c0, gradient + (v * R + r0) * C + c0
    both, rows, columns = (tl.load(factor + v), tl.load(gradient_factor + v)), R - r0, C - c0
    if of_up:
        xs = _gradient(gate, gradient, both, rows, columns, C, BLOCK_R, BLOCK_C, GROUP, EXACT, True)
    else:
        xs = _gradient(gate, gradient, both, rows, columns, C, BLOCK_R, BLOCK_C, GROUP, EXACT, False)
    scales, out = (row_factor, column_factor), (row_words, column_words, maxima)
    place, end = (v, r0, of_up * C + c0), of_up * C + C
    cast_tile(
        xs, scales, out, place, R, 2 * C, end, BLOCK_R, BLOCK_C, GROUP, EXACT, ROW_E5M2, COLUMN_E5M2, MAXIMA
    )


@triton.jit
def _gradient(
    gate, gradient, factors, rows, columns, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr, EXACT: tl.constexpr, OF_UP: tl.constexpr,
):  # fmt: skip
    """Returns the groups of the gradient of the up projection's part, or else of the gate's."""
    row, column = _rows(BLOCK_R, GROUP), tl.arange(0, BLOCK_C)[None, :]
    factor, gradient_factor = factors
    xs = ()
    for i in tl.static_range(GROUP):
        inside = (row + i < rows) & (column < columns)
        of_gate = gate + i * (2 * C) + (row * (2 * C) + column)
        g = _load_times(of_gate, factor, inside, EXACT)
        d = _load_times(gradient + i * C + (row * C + column), gradient_factor, inside, EXACT)
        s = _logistic(g)
        if OF_UP:
            y = g * s * d
        else:
            y = (1 + g * (1 - s)) * s * (d * _load_times(of_gate + C, factor, inside, EXACT))
        xs = xs + (y.to(tl.bfloat16),)
    return xs


@triton.jit
def _rows(BLOCK_R: tl.constexpr, GROUP: tl.constexpr):
    """Returns the first row of each group."""
    return tl.arange(0, BLOCK_R // GROUP)[:, None] * GROUP


@triton.jit
def _load_times(pointers, factor, inside, EXACT: tl.constexpr):
    """Loads a tile times a factor, rounded to bfloat16, in float32."""
    return widen((widen(load_inside(pointers, inside, EXACT)) * factor).to(tl.bfloat16))


@triton.jit
def _logistic(x):
    return 1 / (1 + tl.exp(-x))


KERNELS = {
    "normed": cast_normed_kernel,
    "gated": cast_gated_kernel,
    "gradient": cast_gated_gradient_kernel,
}
"""The kernel of each kind of `Computed`."""
