"""The kernels for E2M1 with E4M3 or UE5M3 scales: the largest magnitudes, then the values in bfloat16.

An element times its scale has six significant bits, so that bfloat16 represents it. The scale of the tensor
depends on its largest magnitude, after the rotation, so a tensor is read twice.

Tiles are those of `kernel`, in groups of 32: a thread has two blocks of 16 along the blocked axis. Operands
are written K-major.
"""

import triton
import triton.language as tl

from mxjax.kernels.device.eden import eden_scales, is_nvidia, sum_of_16
from mxjax.kernels.device.elements import INFINITY, MAGNITUDE, largest, round_element, widen
from mxjax.kernels.device.hadamard import rotate_groups
from mxjax.kernels.device.loads import column_groups, row_groups
from mxjax.kernels.device.pairs import join_pair, scale_pair, sign_pair, split_pair
from mxjax.kernels.device.philox import random_halves
from mxjax.kernels.device.quotients import divide_by_scale, divide_twice
from mxjax.kernels.device.stochastic_ptx import draw_pairs
from mxjax.kernels.quantize.kernel import SIGN, group_signs, join_words, place_of

GROUP = tl.constexpr(32)
RUN = tl.constexpr(128)  # elements that share a scale in the format nvfp4_1x128
SIDE = tl.constexpr(8)
"""uint32 of each side: two words of the key, two of its fold for a second draw, four of signs."""
FACTOR_AT = tl.constexpr(2 * SIDE)
"""Place of x's factor among the scalars: after those of both sides, before the three offsets of x."""
SMALLEST = tl.constexpr(2.0**-100)  # mxjax.numerics.float_scales.SMALLEST_TENSOR_MAX


@triton.jit
def largest_kernel(
    x, scalars, before, plain, rotated, R, C, BATCH: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, SCALARS_STRIDE: tl.constexpr, CONVERT: tl.constexpr, EXACT: tl.constexpr,
    BEFORE: tl.constexpr, PLAIN: tl.constexpr, COLUMNS: tl.constexpr,
    ROTATION: tl.constexpr, FACTOR: tl.constexpr, SIGNS: tl.constexpr,
):  # fmt: skip
    """Writes the bits of each tile's largest magnitude, not rotated and rotated.

    Both are int32 [V, BATCH, tiles along R, tiles along C]. The grid is (tiles along C, tiles along R,
    V * BATCH). What is not wanted is not written.

    Args:
      x: [V, BATCH, R, C] in any float dtype.
      scalars, before, BEFORE: see `quantize_block16_kernel`.
      PLAIN: whether `plain` is wanted. `rotated` is if ROTATION is more than 1.
      COLUMNS: whether the rotation is along R, else along C; FACTOR and SIGNS are its, as in `block16.Side`.
    """
    r0, c0 = tl.program_id(1) * BLOCK_R, tl.program_id(0) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    x += matrix * R * C + r0.to(tl.int64) * C + c0
    tile = (matrix * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    GROUPS: tl.constexpr = (BLOCK_R if COLUMNS else BLOCK_C) // GROUP
    OTHER: tl.constexpr = BLOCK_C if COLUMNS else BLOCK_R
    if COLUMNS:
        xs = column_groups(x, R - r0, C - c0, C, GROUP, GROUPS, OTHER, EXACT)
    else:
        xs = row_groups(x, R - r0, C - c0, C, GROUP, GROUPS, OTHER, EXACT)
    scalars += matrix // BATCH * SCALARS_STRIDE
    before += _place_before(matrix, r0, c0, R, C, BEFORE)
    ys = _values(xs, scalars, before, R - r0, C - c0, R, GROUPS, OTHER, COLUMNS, BEFORE)
    if PLAIN:
        tl.store(plain + tile, tl.max(largest(ys, GROUP)))
    if ROTATION > 1:
        signs = scalars + (SIDE + 4 if COLUMNS else 4)
        ys = _rotated(ys, signs, GROUPS, OTHER, CONVERT, ROTATION, 1.0, SIGNS)
        # The factor is positive, so that the largest product is the product of the largest.
        amax = tl.max(largest(ys, GROUP)).to(tl.float32, bitcast=True) * FACTOR
        tl.store(rotated + tile, amax.to(tl.int32, bitcast=True))


@triton.jit
def quantize_block16_kernel(
    x, maxima, scalars, before, row_words, row_units, column_words, column_units, R, C, R_ALL, C_ALL,
    ROW_LENGTH, COLUMN_LENGTH, BATCH: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    SCALARS_STRIDE: tl.constexpr, CONVERT: tl.constexpr, EXACT: tl.constexpr, BEFORE: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Quantizes x [V, BATCH, R, C] (any float dtype) into bfloat16 operands of one or two GEMMs.

    Each is written as words [V, BATCH, other, length / 2] int32; the tensor scale as units [V] float32, those
    of runs as [V, BATCH, runs, other]. The grid is (tiles along C, tiles along R, V * BATCH).

    x may be a part of a larger tensor; see `quantize_kernel`.

    Args:
      maxima: int32 [V, 2], the bits of the largest magnitudes for rows and for columns, rotated.
      scalars: uint32 [V or 1, 2 * SIDE + 4]: rows' words, columns' words, x's factor and its three offsets.
      BEFORE: the step before: "", "factor" (x times its factor), "factors" (x times those in `before`,
        float32 [V, BATCH, C / 128, R], each for 128 columns), or "mean" (less those there, [V, BATCH, C]).
      ROW, COLUMN: None if not wanted, or `block16.Side`.
    """
    r0, c0 = tl.program_id(1) * BLOCK_R, tl.program_id(0) * BLOCK_C
    matrix = tl.program_id(2).to(tl.int64)
    v, b = matrix // BATCH, matrix % BATCH
    x += matrix * R * C + r0.to(tl.int64) * C + c0
    scalars += v * SCALARS_STRIDE
    drawn: tl.constexpr = _draws(ROW) or _draws(COLUMN)
    batch, r_all, c_all = place_of(scalars + (FACTOR_AT - 11), b, drawn)
    before += _place_before(matrix, r0, c0, R, C, BEFORE)
    first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (b == 0)
    if ROW is not None:
        row_xs = row_groups(x, R - r0, C - c0, C, GROUP, BLOCK_C // GROUP, BLOCK_R, EXACT)
    if COLUMN is not None:
        xs = column_groups(x, R - r0, C - c0, C, GROUP, BLOCK_R // GROUP, BLOCK_C, EXACT)
        _quantize_side(
            _values(xs, scalars, before, R - r0, C - c0, R, BLOCK_R // GROUP, BLOCK_C, True, BEFORE),
            maxima + 2 * v + 1, column_units + _units_at(v, matrix, COLUMN_LENGTH, C, COLUMN), first,
            scalars + SIDE, column_words + matrix * C * (COLUMN_LENGTH // 2), r0, c0, r_all,
            batch * C_ALL + c_all, C, COLUMN_LENGTH, BLOCK_R // GROUP, BLOCK_C, CONVERT, COLUMN,
        )  # fmt: skip
    if ROW is not None:
        _quantize_side(
            _values(row_xs, scalars, before, R - r0, C - c0, R, BLOCK_C // GROUP, BLOCK_R, False, BEFORE),
            maxima + 2 * v, row_units + _units_at(v, matrix, ROW_LENGTH, R, ROW), first, scalars,
            row_words + matrix * R * (ROW_LENGTH // 2), c0, r0, c_all, batch * R_ALL + r_all, R, ROW_LENGTH,
            BLOCK_C // GROUP, BLOCK_R, CONVERT, ROW,
        )  # fmt: skip


@triton.jit
def _place_before(matrix, r0, c0, R, C, BEFORE: tl.constexpr):
    """Returns the place in `before` at which a tile begins; its columns are whole runs or lie in one."""
    if BEFORE == "factors":
        return (matrix * tl.cdiv(C, RUN) + c0 // RUN) * R + r0
    return matrix * C + c0


@triton.jit
def _units_at(v, matrix, LENGTH, N, SIDE_OF: tl.constexpr):
    """Returns the place of a tensor's scale, or of the first of its matrix's runs."""
    return matrix * tl.cdiv(LENGTH, RUN) * N if SIDE_OF.run > 0 else v


@triton.constexpr_function
def _draws(side):
    return side is not None and (side.stochastic or side.eden > 0)


@triton.jit
def _values(
    xs, scalars, before, rows, columns, R, GROUPS: tl.constexpr, OTHER: tl.constexpr, COLUMNS: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """Returns the groups in float32 after the step before; see `quantize_block16_kernel`."""
    group, other = tl.arange(0, GROUPS)[:, None] * GROUP, tl.arange(0, OTHER)[None, :]
    if BEFORE == "factors" and not COLUMNS:
        inside = (other < rows) & (group < columns)
        factor = tl.load(before + (group // RUN * R + other), inside, 0.0)
    ys = ()
    for i in tl.static_range(GROUP):
        y = widen(xs[i])
        if BEFORE == "factor":
            y = y * tl.load(scalars + FACTOR_AT).to(tl.float32, bitcast=True)
        elif BEFORE == "factors":
            if COLUMNS:
                tl.static_assert(OTHER <= RUN)
                factor = tl.load(before + group + i, group + i < rows, 0.0)
            y = y * factor
        elif BEFORE == "mean":
            column = other if COLUMNS else group + i
            y = y - tl.load(before + column, column < columns, 0.0)
            y = tl.where((group + i if COLUMNS else other) < rows, y, 0.0)
        ys = ys + (y,)
    return ys


@triton.jit
def _rotated(xs, signs, GROUPS: tl.constexpr, OTHER: tl.constexpr, CONVERT: tl.constexpr,
             ROTATION: tl.constexpr, FACTOR: tl.constexpr, SIGNS: tl.constexpr):  # fmt: skip
    """Returns the groups times their signs, if any, and rotated."""
    if SIGNS != 0:
        group = tl.arange(0, GROUPS)[:, None]
        if SIGNS < 0:
            negative = group_signs(signs, group, GROUP, ROTATION, CONVERT)
        ys = ()
        for i in tl.static_range(GROUP):
            sign = negative << i & SIGN if SIGNS < 0 else SIGN if SIGNS >> i & 1 else 0
            bits = xs[i].to(tl.uint32, bitcast=True) ^ sign
            ys = ys + (bits.to(tl.float32, bitcast=True),)
        xs = ys
    return rotate_groups(xs, ROTATION, GROUP, GROUPS, OTHER, FACTOR)


@triton.jit
def _quantize_side(
    ys, maximum, units, first, scalars, words, start, other0, start_all, row0, N,
    LENGTH, GROUPS: tl.constexpr, OTHER: tl.constexpr, CONVERT: tl.constexpr, SIDE_OF: tl.constexpr,
):  # fmt: skip
    """Quantizes 32 tensors [GROUPS, OTHER] and stores them at [other, group].

    The tile begins at element `start` of the blocked axis and at `other0` of the other axis. In the whole
    tensor x begins at element `start_all` and row `row0`.
    """
    if SIDE_OF.rotation > 1:
        ys = _rotated(
            ys, scalars + 4, GROUPS, OTHER, CONVERT, SIDE_OF.rotation, SIDE_OF.factor, SIDE_OF.signs
        )
    if SIDE_OF.run > 0:
        unit, inverse = _run_scales(
            ys, units, start, other0, N, LENGTH, GROUPS, OTHER, SIDE_OF.tensor_divisor
        )
    else:
        unit, inverse = _tensor_scale(maximum, SIDE_OF.tensor_divisor)
        tl.store(units, unit, first)
    group, other = tl.arange(0, GROUPS)[:, None], tl.arange(0, OTHER)[None, :]
    counter = (start_all + start) // 8 + group * 4
    row = row0 + other0 + other
    low = _round_block(ys, 0, unit, inverse, scalars, counter, row, GROUPS, OTHER, CONVERT, SIDE_OF)
    high = _round_block(ys, 16, unit, inverse, scalars, counter + 2, row, GROUPS, OTHER, CONVERT, SIDE_OF)
    scales, pairs = (low[1], high[1]), low[3] + high[3]
    if SIDE_OF.eden > 0:
        block = (start_all + start) // 16 + group * 2
        scales = eden_scales(low, high, scalars, block, row, GROUPS, OTHER, CONVERT, SIDE_OF)
    ws = ()
    for i in tl.static_range(16):
        ws = ws + (scale_pair(pairs[i], scales[i // 8], _in_pairs(CONVERT)),)
    words += other0.to(tl.int64) * (LENGTH // 2) + start // 2
    at = tl.arange(0, GROUPS * 16)[:, None]
    mask = (at < (LENGTH - start) // 2) & (other < N - other0)
    tl.store(words + (other * (LENGTH // 2) + at), join_words(ws, 16, GROUPS, OTHER), mask)


@triton.jit
def _run_scales(
    ys, units, start, other0, N, LENGTH, GROUPS: tl.constexpr, OTHER: tl.constexpr, DIVISOR: tl.constexpr
):
    """Stores the scale of each run of 128 elements, and returns it and its inverse for each group."""
    RUNS: tl.constexpr = GROUPS * GROUP // RUN
    bits = tl.max(tl.reshape(largest(ys, GROUP), [RUNS, RUN // GROUP, OTHER]), 1)
    amax = bits.to(tl.float32, bitcast=True)
    amax = tl.maximum(amax, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    unit = tl.div_rn(amax, tl.full(amax.shape, DIVISOR, tl.float32))
    run, other = tl.arange(0, RUNS)[:, None] + start // RUN, tl.arange(0, OTHER)[None, :] + other0
    tl.store(units + (run.to(tl.int64) * N + other), unit, (run < tl.cdiv(LENGTH, RUN)) & (other < N))
    wide = tl.broadcast_to(unit[:, None, :], [RUNS, RUN // GROUP, OTHER])
    unit = tl.reshape(wide, [GROUPS, OTHER])
    return unit, tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), unit)


@triton.jit
def _tensor_scale(maximum, DIVISOR: tl.constexpr):
    """Returns the tensor scale and its inverse: the largest magnitude is DIVISOR units, or they are 1."""
    if DIVISOR > 0:
        amax = tl.load(maximum).to(tl.float32, bitcast=True)
        amax = tl.maximum(amax, SMALLEST, propagate_nan=tl.PropagateNan.ALL)
        unit = tl.div_rn(amax, tl.full((), DIVISOR, tl.float32))
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), unit)
    else:
        unit, inverse = tl.full((), 1.0, tl.float32), tl.full((), 1.0, tl.float32)
    return unit, inverse


@triton.jit
def _round_block(
    ys, FIRST: tl.constexpr, unit, inverse, scalars, counter, row, GROUPS: tl.constexpr,
    OTHER: tl.constexpr, CONVERT: tl.constexpr, SIDE_OF: tl.constexpr,
):  # fmt: skip
    """Rounds the elements FIRST to FIRST + 15 of each group.

    Returns the magnitudes of the 16 elements, their scale, with EDEN the magnitudes of the values that were
    rounded, and the elements as 8 words of two bfloat16.
    """
    xs = ()
    for i in tl.static_range(16):
        xs = xs + (ys[FIRST + i],)
    bits = largest(xs, 16)
    if SIDE_OF.square:
        bits = tl.max(tl.reshape(bits, [GROUPS, OTHER // 16, 16]), 2, keep_dims=True)
        bits = tl.reshape(tl.broadcast_to(bits, [GROUPS, OTHER // 16, 16]), [GROUPS, OTHER])
    amax = bits.to(tl.float32, bitcast=True)
    exact = divide_twice(amax, SIDE_OF.target, unit, inverse, _in_pairs(CONVERT))
    # A dependence on `bits`, which are never negative, gives random bits their layout: no conversion.
    counter = tl.where(bits >= 0, counter, 0).to(tl.uint32)
    row = tl.where(bits >= 0, row, 0).to(tl.uint32)
    scale = _scale(exact, SIDE_OF)
    elements, scaled, pairs = _elements(xs, scale, inverse, scalars, counter, row, True, CONVERT, SIDE_OF)
    if SIDE_OF.four_over_six != "":
        # To scale the largest magnitude to 4 instead of 6, scales are half as large again.
        second = _scale(exact * 1.5, SIDE_OF)
        others, others_scaled, other_pairs = _elements(
            xs, second, inverse, scalars + 2, counter, row, _second_clips(SIDE_OF), CONVERT, SIDE_OF
        )
        errors = _errors(xs, elements, scale, inverse, GROUPS, OTHER, SIDE_OF)
        chosen = _errors(xs, others, second, inverse, GROUPS, OTHER, SIDE_OF) < errors
        scale, pairs = tl.where(chosen, second, scale), _choose(chosen, other_pairs, pairs, 8)
        if SIDE_OF.eden > 0:
            elements = _choose(chosen, others, elements, 16)
            scaled = _choose(chosen, others_scaled, scaled, 16)
    signed = ()
    for i in tl.static_range(8):
        signed = signed + (sign_pair(pairs[i], xs[2 * i], xs[2 * i + 1], _in_pairs(CONVERT)),)
    return elements, scale, scaled, signed


@triton.jit
def _choose(chosen, others, xs, COUNT: tl.constexpr):
    ys = ()
    for i in tl.static_range(COUNT):
        ys = ys + (tl.where(chosen, others[i], xs[i]),)
    return ys


@triton.constexpr_function
def _second_clips(side):
    """Whether the second scale of four over six may leave a magnitude that would round to 8.

    That is 7 or more, or at random any above 6. A scale that is not the largest is at least 2/3 of what it
    was rounded from, or it is zero. So a block's largest magnitude, 2/3 of the target before that rounding,
    is the target at most.
    """
    rounds_to_8 = side.target > (6 if side.stochastic else 6.5)
    return rounds_to_8 or not 0 < side.tensor_divisor <= side.target * side.scale_most


@triton.constexpr_function
def _in_pairs(convert):
    """Whether the target multiplies two bfloat16 in one instruction, sm_90 and later."""
    return convert == "sm_90" or convert == "sm_100"


@triton.jit
def _scale(exact, SIDE_OF: tl.constexpr):
    """Returns scales rounded to nearest; NaN where `exact` is not finite."""
    a = tl.minimum(exact, SIDE_OF.scale_most)
    binade = (a.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True)
    # The last place of the sum with `base` is worth the distance between neighbours.
    base = tl.maximum(binade, SIDE_OF.scale_least) * 1572864.0
    scale = (a + base) - base
    if SIDE_OF.scale_never_zero:
        scale = tl.where(scale == 0, 1.0, scale)
    return tl.where((exact.to(tl.int32, bitcast=True) & MAGNITUDE) < INFINITY, scale, float("nan"))


@triton.jit
def _elements(
    xs, scale, inverse, scalars, counter, row, CLIPS: tl.constexpr, CONVERT: tl.constexpr,
    SIDE_OF: tl.constexpr,
):  # fmt: skip
    """Returns the magnitudes of 16 tensors rounded by a scale, of what was rounded, and the former's pairs.

    Args:
      CLIPS: whether a magnitude may round to 8: 7 or more, at random any above 6.
    """
    PAIRS: tl.constexpr = _in_pairs(CONVERT)
    per_scale = divide_by_scale(tl.zeros_like(scale) + inverse, scale, PAIRS)
    elements, all_scaled, pairs = (), (), ()
    for half in tl.static_range(2):
        random = (counter, counter, counter, counter, counter, counter, counter, counter)
        if SIDE_OF.stochastic and PAIRS:
            key0, key1 = tl.load(scalars), tl.load(scalars + 1)
            drawn = draw_pairs(xs, 8 * half, per_scale, counter + half, row, key0, key1, CLIPS)
            for i in tl.static_range(4):
                pairs, elements = pairs + (drawn[i],), elements + split_pair(drawn[i])
        elif SIDE_OF.stochastic:
            random = random_halves(
                counter + half, row, tl.load(scalars), tl.load(scalars + 1), is_nvidia(CONVERT)
            )
        for i in tl.static_range(0 if SIDE_OF.stochastic and PAIRS else 8):
            scaled = tl.abs(xs[8 * half + i]) * per_scale
            _, element = round_element(scaled, random[i], SIDE_OF.stochastic, CLIPS)
            elements, all_scaled = elements + (element,), all_scaled + (scaled,)
    if len(pairs) == 0:
        for i in tl.static_range(8):
            pairs = pairs + (join_pair(elements[2 * i], elements[2 * i + 1], PAIRS),)
    return elements, all_scaled, pairs


@triton.jit
def _errors(xs, elements, scale, inverse, GROUPS: tl.constexpr, OTHER: tl.constexpr, SIDE_OF: tl.constexpr):
    """Returns the error of each block's rounding; see `mxjax.numerics.float_scales.block_errors`."""
    terms = ()
    for i in tl.static_range(16):
        # The product is exact, so that the subtraction may be fused with it.
        difference = tl.fma(elements[i], scale, -(tl.abs(xs[i]) * inverse))
        terms = terms + (tl.abs(difference) if SIDE_OF.four_over_six == "mae" else difference * difference,)
    error = sum_of_16(terms)
    if SIDE_OF.square:
        error = tl.reshape(error, [GROUPS, OTHER // 16, 16])
        for stage in tl.static_range(4):
            error = tl.sum(tl.reshape(error, [GROUPS, OTHER // 16, 2, 8 >> stage]), 2)
        error = tl.reshape(error, [GROUPS, OTHER // 16, 1])
        error = tl.reshape(tl.broadcast_to(error, [GROUPS, OTHER // 16, 16]), [GROUPS, OTHER])
    return error
