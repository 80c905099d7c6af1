"""EDEN's correction of the scales of blocks of 16; see `mxjax.numerics.float_scales.eden_scales`."""

import triton
import triton.language as tl

from mxjax.kernels.device.elements import INFINITY
from mxjax.kernels.device.philox import random_halves


@triton.constexpr_function
def is_nvidia(convert):
    """Whether a kernel's CONVERT names a GPU of NVIDIA."""
    return convert.startswith("sm_")


@triton.jit
def sum_of_16(terms):
    """Returns the sum of 16 tensors in pairs of halves."""
    for stage in tl.static_range(4):
        sums = ()
        for i in tl.static_range(8 >> stage):
            sums = sums + (terms[i] + terms[i + (8 >> stage)],)
        terms = sums
    return terms[0]


@triton.jit
def eden_scales(
    low, high, scalars, block, row, GROUPS: tl.constexpr, OTHER: tl.constexpr, CONVERT: tl.constexpr,
    SIDE_OF: tl.constexpr,
):  # fmt: skip
    """Returns the corrected scales of both blocks of each group, rounded stochastically."""
    squares = _sum_of_run(low[2], low[2], high[2], high[2], GROUPS, OTHER, SIDE_OF.eden)
    products = _sum_of_run(low[2], low[0], high[2], high[0], GROUPS, OTHER, SIDE_OF.eden)
    scales = ()
    never = low[1] != low[1]
    # As for elements, a dependence that changes nothing.
    counter = tl.where(never, block, block).to(tl.uint32) // 8
    row = tl.where(never, row, row).to(tl.uint32)
    random = random_halves(counter, row, tl.load(scalars + 2), tl.load(scalars + 3), is_nvidia(CONVERT))
    for half in tl.static_range(2):
        nothing = products[half] == 0
        correction = tl.div_rn(squares[half], tl.where(nothing, 1.0, products[half]))
        exact = (high[1] if half else low[1]) * tl.where(nothing, 1.0, correction)
        drawn = random[half]
        for i in tl.static_range(1, 4):
            drawn = tl.where(block % 8 == 2 * i, random[2 * i + half], drawn)
        scales = scales + (_draw_scale(exact, drawn, SIDE_OF),)
    return scales


@triton.jit
def _sum_of_run(xs, ys, zs, ws, GROUPS: tl.constexpr, OTHER: tl.constexpr, RUN: tl.constexpr):
    """Returns, for both blocks of each group, the sum of products over their run: xs ys, and zs ws."""
    firsts, seconds = (), ()
    for i in tl.static_range(16):
        firsts = firsts + (xs[i] * ys[i],)
        seconds = seconds + (zs[i] * ws[i],)
    low, high = sum_of_16(firsts), sum_of_16(seconds)
    if RUN > 32:
        RUNS: tl.constexpr = GROUPS * 32 // RUN
        low = _sum_of_groups(low, RUNS, OTHER, RUN // 32)
        high = _sum_of_groups(high, RUNS, OTHER, RUN // 32)
    if RUN > 16:
        low = low + high
        high = low
    return low, high


@triton.jit
def _sum_of_groups(x, RUNS: tl.constexpr, OTHER: tl.constexpr, COUNT: tl.constexpr):
    """Returns the sum of each COUNT groups in pairs of halves, for each of them; COUNT is 2 or 4."""
    total = tl.sum(tl.reshape(x, [RUNS, 2, COUNT // 2, OTHER]), 1)
    if COUNT == 4:
        total = tl.sum(total, 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, [RUNS, COUNT, OTHER]), [RUNS * COUNT, OTHER])


@triton.jit
def _draw_scale(exact, random, SIDE_OF: tl.constexpr):
    """Returns scales rounded stochastically; see `mxjax.numerics.rounding.stochastic_round`."""
    a = tl.minimum(exact, SIDE_OF.scale_most)
    binade = (a.to(tl.int32, bitcast=True) & INFINITY).to(tl.float32, bitcast=True)
    step = tl.maximum(binade, SIDE_OF.scale_least) * 0.125
    steps = a * (0x7F000000 - step.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    below = tl.floor(steps)
    uniform = (random.to(tl.float32) + 0.5) * 0.0000152587890625
    scale = (below + tl.where(uniform < steps - below, 1.0, 0.0)) * step
    return tl.where(exact != exact, exact, scale)
