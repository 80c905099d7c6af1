"""The butterfly of `mxjax.numerics.hadamard` on groups of elements, with a separate tensor for each position.

`xs` is a tuple of GROUP tensors [groups, other]: element GROUP * g + i of the rotated axis is xs[i][g].
Strides below GROUP add and subtract whole tensors in registers. Larger strides exchange groups, which is a
lane shuffle if neighbouring groups lie in neighbouring lanes.
"""

import triton
import triton.language as tl


@triton.jit
def rotate_groups(
    xs, SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, OTHER: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Returns xs (float32) with each run of SIZE elements times Sylvester's matrix, then times FACTOR."""
    for stage in tl.static_range(8):
        if 2 << stage <= SIZE:
            ys = ()
            for i in tl.static_range(GROUP):
                if 1 << stage < GROUP:
                    if i & (1 << stage):
                        ys = ys + (xs[i ^ (1 << stage)] - xs[i],)
                    else:
                        ys = ys + (xs[i] + xs[i ^ (1 << stage)],)
                else:
                    ys = ys + (_butterfly(xs[i], (1 << stage) // GROUP, GROUPS, OTHER),)
            xs = ys
    if FACTOR != 1:
        ys = ()
        for i in tl.static_range(GROUP):
            ys = ys + (xs[i] * FACTOR,)
        xs = ys
    return xs


@triton.jit
def _butterfly(x, STRIDE: tl.constexpr, GROUPS: tl.constexpr, OTHER: tl.constexpr):
    """Returns sums and differences of groups that are STRIDE apart."""
    pairs = tl.reshape(x, [GROUPS // (2 * STRIDE), 2, STRIDE, OTHER])
    bits = pairs.to(tl.int32, bitcast=True)
    partner = (bits ^ tl.xor_sum(bits, 1, keep_dims=True)).to(tl.float32, bitcast=True)
    sign = tl.where(tl.arange(0, 2) == 0, 1.0, -1.0)[None, :, None, None]
    return tl.reshape(tl.fma(pairs, tl.broadcast_to(sign, pairs.shape), partner), [GROUPS, OTHER])
