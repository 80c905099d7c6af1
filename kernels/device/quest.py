"""The scale rule `quest` inside kernels; see `mxjax.numerics.scales.quest_scale` and `block_std`."""

import triton
import triton.language as tl

from mxjax.kernels.device.elements import INFINITY, MAGNITUDE, largest

QUEST = tl.constexpr(-1)
"""In place of the other rules' `mxjax.numerics.scales.rule_carry`."""
_PER_STD = tl.constexpr(2.92247856 / 6)  # mxjax.numerics.scales.QUEST_CLIP over E2M1's largest
_LARGE = tl.constexpr((127 + 48) << 23)  # past this, sums of squares would overflow


@triton.jit
def quest_bytes(xs, GROUP: tl.constexpr, GROUPS: tl.constexpr, OTHER: tl.constexpr):
    """Returns the scale bytes of the blocks [GROUPS * GROUP / 32, OTHER] in GROUP float32 tensors.

    Products and sums must not be fused.
    """
    BLOCKS: tl.constexpr = GROUPS * GROUP // 32
    large = largest(xs, GROUP)
    if GROUP < 32:
        large = tl.max(tl.reshape(large, [BLOCKS, 32 // GROUP, OTHER]), 1)
    large = large >= _LARGE
    down = tl.where(large, 2.0**-80, 1.0)
    if GROUP < 32:
        down = tl.reshape(tl.broadcast_to(down[:, None, :], [BLOCKS, 32 // GROUP, OTHER]), [GROUPS, OTHER])
    ys, squares = (), ()
    for i in tl.static_range(GROUP):
        y = xs[i] * down
        ys = ys + (y,)
        squares = squares + (y * y,)
    mean = _sum_of_block(ys, GROUP, GROUPS, OTHER) * 0.03125
    variance = _sum_of_block(squares, GROUP, GROUPS, OTHER) * 0.03125 - mean * mean
    std = tl.sqrt_rn(tl.where(variance < 0, 0.0, variance))
    scale = tl.where(large, std * 2.0**80, std) * _PER_STD + 1e-8
    bits = scale.to(tl.int32, bitcast=True) & MAGNITUDE
    return tl.where(bits >= INFINITY, 255, bits >> 23)


@triton.jit
def saturating(xs, byte, GROUP: tl.constexpr):
    """Returns the elements within 128 scales, far past E2M1's range: this rule's scales do not bound them."""
    most = (tl.minimum(byte + 7, 255) << 23).to(tl.float32, bitcast=True)
    ys = ()
    for i in tl.static_range(GROUP):
        ys = ys + (tl.minimum(tl.maximum(xs[i], -most), most),)
    return ys


@triton.jit
def _sum_of_block(xs, GROUP: tl.constexpr, GROUPS: tl.constexpr, OTHER: tl.constexpr):
    """Returns the sum of each block in pairs of halves, the first half plus the second."""
    if GROUP < 32:
        sums = ()
        for i in tl.static_range(GROUP):
            total = tl.reshape(xs[i], [GROUPS * GROUP // 32, 2, 16 // GROUP, OTHER])
            total = tl.sum(total, 1)
            if GROUP == 8:
                total = tl.sum(total, 1, keep_dims=True)
            sums = sums + (tl.reshape(total, [GROUPS * GROUP // 32, OTHER]),)
        xs = sums
    for stage in tl.static_range(5):
        if GROUP >> stage > 1:
            sums = ()
            for i in tl.static_range(GROUP >> (stage + 1)):
                sums = sums + (xs[i] + xs[i + (GROUP >> (stage + 1))],)
            xs = sums
    return xs[0]
