"""Philox 4x32-10 inside kernels: the bits of `mxjax.numerics.philox`, computed from an element's position."""

import triton
import triton.language as tl

from mxjax.kernels.device.stochastic_ptx import philox_words


@triton.jit
def random_halves(counter, row, key0, key1, PTX: tl.constexpr):
    """Returns 8 tensors of integers below 2**16, for positions 8 * counter to 8 * counter + 7 of `row`.

    Args:
      counter, row: uint32 tensors of the same shape.
      key0, key1: uint32 scalars.
      PTX: whether the target is an NVIDIA GPU.
    """
    if PTX:
        c0, c1, c2, c3 = philox_words(counter, row, key0, key1)
    else:
        c0, c1, c2, c3 = counter, row, tl.zeros_like(counter), tl.zeros_like(counter)
        for _ in tl.static_range(10):
            high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
            high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
            c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
            key0 += 0x9E3779B9
            key1 += 0xBB67AE85
    low = c0 & 0xFFFF, c1 & 0xFFFF, c2 & 0xFFFF, c3 & 0xFFFF
    return low[0], c0 >> 16, low[1], c1 >> 16, low[2], c2 >> 16, low[3], c3 >> 16
