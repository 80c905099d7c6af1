"""The quantizer of E2M1 with E4M3 or UE5M3 scales, blocks of 16 or 16x16, as a JAX function.

The operands are K-major values in bfloat16, without the tensor scale, which is a factor of the product.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, UInt32

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.lowering import TYPES
from mxjax.kernels.mesh import RuleAxes, batched_by_vmap, partitioned
from mxjax.kernels.quantize.block16_kernel import GROUP, RUN, SIDE, largest_kernel, quantize_block16_kernel
from mxjax.kernels.quantize.launches import Pair, Tile, block16_tile, conversion
from mxjax.kernels.quantize.quantizer import elements_of, placed_scalars, scalars_of
from mxjax.numerics.blocks import magnitude_bits
from mxjax.numerics.formats import UE5M3, get_format
from mxjax.numerics.hadamard import fixed_signs
from mxjax.numerics.operand import FourOverSix
from mxjax.numerics.philox import key_words
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target, current_target


@dataclasses.dataclass(frozen=True)
class Side:
    """The constants of one use for the kernel.

    Attributes:
      rotation, factor, signs: Hadamard size or 1, its factor, and its signs as `_signs_of` has them.
      square: whether blocks are 16x16.
      stochastic: whether elements are rounded stochastically.
      target: magnitude to which a block's largest is scaled.
      tensor_divisor: units of the tensor scale in its largest magnitude; 0 without a tensor scale.
      scale_least, scale_most: smallest normal and largest block scale.
      scale_never_zero: whether a scale that would be zero is one.
      run: elements that share what is otherwise the tensor scale, or 0.
      four_over_six: the error by which scales are chosen, or "".
      eden: number of elements that share a correction, or 0.
    """

    rotation: int
    factor: float
    signs: int
    square: bool
    stochastic: bool
    target: float
    tensor_divisor: float
    scale_least: float
    scale_most: float
    scale_never_zero: bool
    run: int
    four_over_six: FourOverSix | str
    eden: int


def side_of(use: OperandUse) -> Side:
    """Returns the kernel's constants for a use."""
    o = use.operand
    f = get_format(o.format)
    scale = f.scale_element
    assert f.element is not None
    assert scale is not None
    largest, target = _largest_scale(use), o.scale_target or f.element.max
    return Side(
        use.rotation_size,
        float(np.float32(use.rotation_size**-0.5)),
        _signs_of(use),
        o.block_shape == (16, 16),
        o.rounding == "stochastic",
        float(np.float32(target)),
        float(np.float32(target * largest)) if largest else 0.0,
        2.0**scale.emin,
        scale.max,
        scale is UE5M3,
        f.outer_block,
        o.four_over_six or "",
        o.eden or 0,
    )


def _signs_of(use: OperandUse) -> int:
    """Returns the signs of a group of 32 as bits, if a rotation has the same in every group and call.

    0 without signs, and -1 where kernels read them. Signs that they know cost them no instructions.
    """
    rotation = use.rotation
    if rotation is None or not use.has_signs:
        return 0
    if rotation.signs == "redrawn" or rotation.size > GROUP.value:
        return -1
    signs = rotation.values or fixed_signs(rotation.seed, rotation.size)
    return sum(1 << i for i in range(GROUP.value) if signs[i % rotation.size] < 0)


def _run_of(use: OperandUse | None) -> int:
    """Returns how many elements share a float32 scale, or 0 where the tensor has one or none."""
    return get_format(use.operand.format).outer_block if use else 0


def _largest_scale(use: OperandUse) -> float | None:
    """Returns the block scale of the largest block of the tensor or run; None without such a scale."""
    f = get_format(use.operand.format)
    assert f.scale_element is not None
    return use.operand.scale_max or (f.scale_element.max if f.tensor_scale else None)


def quantize_block16(
    x: Float[Array, "*b r c"],
    uses: Sequence[OperandUse],
    factor: Float32[Array, ""] | None = None,
    mean: Float32[Array, "*b 1 c"] | None = None,
    run_factors: Float32[Array, "*b runs r"] | None = None,
) -> list[KernelOperand]:
    """Returns x, times its factor or those of runs, or without its mean, quantized for each use.

    There is at most one for each axis. x is read once for the largest magnitudes that tensor scales need,
    unless XLA finds them where it computes x, and once to quantize it, but for each use apart where one
    launch has too few registers for both. The bits are
    those that `mxjax.rotate` and `mxjax.quantize` define, on the CPU: XLA's divisions on GPUs are not rounded
    correctly.

    Args:
      uses: their operands are `Operand.is_block16`, without a split, and rotations H128 at most.
      run_factors: a factor for each 128 columns of a row.
    """
    *batch, r, c = x.shape
    by_axis = {use.axis: use for use in uses}
    both = by_axis.get(-1), by_axis.get(-2)
    rows, columns = (use and use.options for use in both)
    x = x if x.dtype.name in TYPES else x.astype(jnp.float32)  # float64, as the definition does
    flat, before, more = (1, math.prod(batch)), "", []
    if run_factors is not None:
        before, more = "factors", [run_factors.reshape(*flat, -1, r)]
    elif mean is not None:
        before, more = "mean", [mean.reshape(*flat, c)]
    elif factor is not None:
        before = "factor"
    run = quantizer_of((rows, columns), before, current_target())
    bits = lax.bitcast_convert_type(jnp.float32(1) if factor is None else factor, jnp.uint32)
    scalars = jnp.concatenate([*(_words(use) for use in both), bits[None]])
    results = run(x.reshape(*flat, r, c), scalars[None], *more)
    made = {}
    for use, other in ((rows, r), (columns, c)):
        if use is None:
            continue
        elements, unit = elements_of(results.pop(0), "bf16").reshape(*batch, other, -1), results.pop(0)
        q = KernelOperand(elements, None)
        if _run_of(use):
            q = dataclasses.replace(q, run_scales=unit.reshape(*batch, -1, other))
        elif _largest_scale(use):
            q = dataclasses.replace(q, tensor_scale=unit[0])
        made[use.axis] = q
    return [made[use.axis] for use in uses]


def _words(use: OperandUse | None) -> UInt32[Array, "8"]:
    """Returns the words of a use's key, of its fold for a second draw, and of its signs."""
    if use is None:
        return jnp.zeros(SIDE.value, jnp.uint32)
    words, o = scalars_of(use), use.operand
    second = jnp.zeros(2, jnp.uint32)
    if o.eden or (o.four_over_six and o.rounding == "stochastic"):
        assert use.key is not None
        second = key_words(use.key, 1 if o.eden else 2)
    return jnp.concatenate([words[:2], second, words[2:]])


class _Start(NamedTuple):
    """The step before the quantization, as the kernel's BEFORE, and the target."""

    before: str
    target: Target | None


@functools.cache
def quantizer_of(pair: Pair, before: str, target: Target | None):
    """Returns a function of x [v, b, r, c], scalars [v or 1, 2 * SIDE + 1], and factors or mean.

    vmap grows v. It returns words and scales of each wanted side, scales [v] or of runs [v, b, runs, other].
    """

    def run(x, scalars, *more):
        places = [jnp.arange(n, dtype=jnp.uint32) for n in x.shape[1:]]
        start = _Start(before, target)
        if largest_by_xla(pair, before, x.dtype):
            x, maxima = _maxima_by_xla(pair, x)
        else:
            maxima = _maxima(pair, start, x, scalars, [*places, *more])
        return _on_mesh(pair, start, x.shape, scalars.shape[0])(x, maxima, scalars, *places, *more)

    return batched_by_vmap(run, shared=1)


def _scaled(pair: Pair) -> list[OperandUse | None]:
    """Returns the uses that need the tensor's largest magnitude."""
    return [use if use and _largest_scale(use) and not _run_of(use) else None for use in pair]


def largest_by_xla(pair: Pair, before: str, dtype: DTypeLike) -> bool:
    """Whether XLA finds the largest magnitude, where it can in the pass that computes x.

    It does where no use rotates x, which then is the only tensor of which the magnitude is needed.
    """
    scaled = [use for use in _scaled(pair) if use]
    return dtype == jnp.bfloat16 and not before and bool(scaled) and not any(use.rotation for use in scaled)


def _maxima_by_xla(pair: Pair, x) -> tuple[jax.Array, Int32[Array, "v 2"]]:
    """Returns x, which others are to read, and what `_maxima` does: the same bits, but of NaN, by XLA.

    Rows come first and with x behind a barrier: see `mxjax.kernels.quantize.fp8`.
    """
    of_rows = jnp.max(magnitude_bits(x.astype(jnp.float32)), axis=-1, initial=0)
    x, of_rows = lax.optimization_barrier((x, of_rows))
    largest = jnp.max(of_rows, axis=(1, 2), initial=0)
    return x, jnp.stack([largest if use else jnp.zeros_like(largest) for use in _scaled(pair)], 1)


def _maxima(pair: Pair, start: _Start, x, scalars, places) -> Int32[Array, "v 2"]:
    """Returns the bits of x's largest magnitude as each use rotates it; 0 where no tensor scale needs it."""
    scaled = _scaled(pair)
    rotated = [use for use in scaled if use and use.rotation]
    plain = any(use and not use.rotation for use in scaled)
    found = {}
    for i, use in enumerate(rotated or [None] * plain):
        tiles = _largest_on_mesh(use, plain and i == 0, start, x.shape, scalars.shape[0])
        of_plain, of_rotated = tiles(x, scalars, *places)
        found[use and use.axis] = of_rotated
        found.setdefault(0, of_plain)
    largest = [found[use.axis if use.rotation else 0] if use else None for use in scaled]
    zero = jnp.zeros(x.shape[0], jnp.int32)
    return jnp.stack([zero if t is None else jnp.max(t, axis=(1, 2, 3), initial=0) for t in largest], 1)


def _largest_on_mesh(use: OperandUse | None, plain: bool, start: _Start, shape, scalars: int):
    """Returns the call of `largest_kernel` that a mesh may shard between tiles."""
    *_, r, c = shape
    # It rounds nothing, so that four over six halves no tile.
    use = use and use._replace(operand=dataclasses.replace(use.operand, four_over_six=None))
    tile = block16_tile((use, None) if use is None or use.axis == -1 else (None, use), start.target, shape)
    axes = RuleAxes("scalars")
    r_axis = axes.compound("r", r, tile.rows)
    c_axis = axes.compound("c", c, max(tile.columns, RUN.value * (start.before == "factors")))
    arguments = _arguments(r_axis, c_axis, scalars, "", start, axes)
    result = f"v b {axes.along('r', 'tiles', tile.rows)} {axes.along('c', 'tiles', tile.columns)}"
    rule = arguments + f" -> {result}, {result}"

    def run(x, scalars, *places):
        v, b, r, c = x.shape
        out = [jax.ShapeDtypeStruct((v, b, ceil_div(r, tile.rows), ceil_div(c, tile.columns)), jnp.int32)] * 2
        constants = _constants(tile, start, x.shape)
        constants |= {
            "PLAIN": plain,
            "COLUMNS": use is not None and use.axis == -2,
            "ROTATION": use.rotation_size if use else 1,
            "FACTOR": float(np.float32(use.rotation_size**-0.5)) if use else 1.0,
            "SIGNS": _signs_of(use) if use else 0,
        }
        grid = (*out[0].shape[:1:-1], v * b)
        scalars, stride = placed_scalars(_reads([use], start), x, scalars, places[:3])
        return triton_call(
            largest_kernel,
            x,
            scalars,
            _before(start, x, places),
            out=out,
            grid=grid,
            num_warps=tile.warps,
            **constants,
            **stride,
        )

    return partitioned(run, rule, axes.sizes, axes.whole)


def _arguments(r_axis: str, c_axis: str, scalars: int, more: str, start: _Start, axes: RuleAxes) -> str:
    """Returns the arguments of a rule: x, more, scalars, places, and what the step before reads."""
    of_scalars = f"{'v' if scalars > 1 else 'one'} scalars"
    rule = f"v b {r_axis} {c_axis}, {more}{of_scalars}, b, {r_axis}, {c_axis}"
    if start.before == "mean":
        return f"{rule}, v b {c_axis}"
    if start.before != "factors":
        return rule
    return f"{rule}, v b {axes.along('c', 'factors', RUN.value)} {r_axis}"


def _on_mesh(pair: Pair, start: _Start, shape, scalars: int):
    """Returns the call that a mesh may shard along all axes of x, but not within blocks or rotations."""
    *_, r, c = shape
    rows, columns = pair
    seen = RUN.value if start.before == "factors" else 1
    axes = RuleAxes("scalars", "sides")
    r_axis = axes.compound("r", r, _unit(columns, rows))
    c_axis = axes.compound("c", c, max(_unit(rows, columns), seen))
    arguments = _arguments(r_axis, c_axis, scalars, "v sides, ", start, axes)
    results = []
    for use, other, name in ((rows, r_axis, "c"), (columns, c_axis, "r")):
        if use is None:
            continue
        results.append(f"v b {other} {axes.along(name, 'words', 2)}")
        results.append(f"v b {axes.along(name, 'runs', RUN.value)} {other}" if _run_of(use) else "v")
    rule = f"{arguments} -> {', '.join(results)}"
    return partitioned(functools.partial(_call, pair, start, (r, c)), rule, axes.sizes, axes.whole)


def _unit(blocked: OperandUse | None, other: OperandUse | None) -> int:
    """Returns the size that divides every shard of an axis; `blocked` is the use with blocks along it."""
    unit = max(blocked.padded(1), blocked.operand.eden or 1, _run_of(blocked)) if blocked else 1
    return max(unit, 16) if other and other.operand.block_shape == (16, 16) else unit


def _call(pair: Pair, start: _Start, whole: tuple[int, int], x, maxima, scalars, *places) -> list[jax.Array]:
    """Runs the kernel on x, which lies at `places` in a tensor of `whole` rows and columns."""
    results = []
    for part in launched_pairs(pair, start.target):
        written = _launch(part, start, whole, x, maxima, scalars, places)
        results += [y for i, use in enumerate(part) if use for y in written[2 * i : 2 * i + 2]]
    return results


def launched_pairs(pair: Pair, target: Target | None) -> list[Pair]:
    """Returns the uses of each launch: both in one, but on CUDA apart if that needs too many registers."""
    rows, columns = pair
    if target is None or target.backend != "cuda" or rows is None or columns is None:
        return [pair]
    costly = [use.operand.needs_key or use.operand.four_over_six is not None for use in (rows, columns)]
    if all(costly) or max(rows.rotation_size, columns.rotation_size) > 32:
        return [(rows, None), (None, columns)]
    return [pair]


def _launch(pair: Pair, start: _Start, whole, x, maxima, scalars, places) -> list[jax.Array]:
    v, b, r, c = x.shape
    tile = block16_tile(pair, start.target, x.shape)
    out, constants = [], _constants(tile, start, x.shape)
    for name, use, length, other in zip(("ROW", "COLUMN"), pair, (c, r), (r, c), strict=True):
        length = use.padded(length) if use else 0
        out.append(jax.ShapeDtypeStruct((v, b, other, length // 2) if use else (1,), jnp.int32))
        units = (v, b, ceil_div(length, RUN.value), other) if _run_of(use) else (v if use else 1,)
        out.append(jax.ShapeDtypeStruct(units, jnp.float32))
        constants |= {name: side_of(use) if use else None, f"{name}_LENGTH": length}
    drawn = any(use and use.operand.needs_key for use in pair)
    constants["R_ALL"], constants["C_ALL"] = whole if drawn else (0, 0)
    scalars, stride = placed_scalars(_reads(pair, start), x, scalars, places[:3])
    return triton_call(
        quantize_block16_kernel,
        x,
        maxima,
        scalars,
        _before(start, x, places),
        out=out,
        grid=(ceil_div(c, tile.columns), ceil_div(r, tile.rows), v * b),
        num_warps=tile.warps,
        **constants,
        **stride,
    )


def _constants(tile: Tile, start: _Start, shape) -> dict[str, Any]:
    _, b, r, c = shape
    return {
        "BATCH": b,
        "R": r,
        "C": c,
        "BLOCK_R": tile.rows,
        "BLOCK_C": tile.columns,
        "CONVERT": conversion(start.target),
        "BEFORE": start.before,
        "EXACT": r % tile.rows == 0 and c % tile.columns == 0,
    }


def _reads(uses: Sequence[OperandUse | None], start: _Start) -> bool:
    """Whether the kernels read scalars."""
    return start.before == "factor" or any(
        use and (use.operand.needs_key or _signs_of(use) < 0) for use in uses
    )


def _before(start: _Start, x, places) -> jax.Array:
    """Returns the factors or the mean, which follow the places of x. x stands in where there are none."""
    return places[3] if start.before in ("factors", "mean") else x
