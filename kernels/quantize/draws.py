"""The words of `mxjax.products.draws`, as `jax.random` draws them: one program for each GEMM of a dot."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float32, UInt32

from mxjax.kernels.launch import triton_call
from mxjax.numerics.hadamard import random_signs
from mxjax.runtime.keys import fold_each

GEMMS = 3
LARGEST_ROTATION = 128
"""The kernels' largest: four words have its signs."""


def draw(key: UInt32[Array, "2"], signs: tuple[int, ...]) -> UInt32[Array, "3 2 6"]:
    """Returns two words of each operand's key and its GEMM's signs as four words, for lhs and rhs.

    Args:
      key: data of the dot's Threefry key.
      signs: number of signs that each GEMM draws; only LARGEST_ROTATION at most are drawn.
    """
    return _drawing(signs)(key)


@functools.cache
def _drawing(signs: tuple[int, ...]):
    @jax.custom_batching.custom_vmap
    def run(key):
        return launch(key, signs)

    @run.def_vmap
    def _(size, batched, key):
        del size, batched
        return jax.vmap(functools.partial(draw_by_definition, signs=signs))(key), True

    return run


def launch(key: UInt32[Array, "2"], signs: Sequence[int]) -> UInt32[Array, "3 2 6"]:
    """Draws the words of `draw` by the kernel."""
    out = jax.ShapeDtypeStruct((GEMMS, 2, 6), jnp.uint32)
    constants = {f"SIGNS{i}": min(n, LARGEST_ROTATION) for i, n in enumerate(signs)}
    return triton_call(draw_kernel, key, out=[out], grid=(GEMMS,), num_warps=1, **constants)[0]


def draw_by_definition(key: UInt32[Array, "2"], signs: Sequence[int]) -> UInt32[Array, "3 2 6"]:
    """Draws the words of `draw` by `jax.random` instead of the kernel."""
    gemms = []
    for n, of_gemm in zip(signs, fold_each(jax.random.wrap_key_data(key), 0, GEMMS), strict=True):
        *operands, of_signs = fold_each(of_gemm, 0, 3)
        negative = sign_words(random_signs(of_signs, min(n, LARGEST_ROTATION)))
        gemms.append([jnp.append(jax.random.bits(o, (2,), jnp.uint32), negative) for o in operands])
    return jnp.array(gemms)


def sign_words(signs: Float32[Array, " size"]) -> UInt32[Array, "4"]:
    """Returns a rotation's signs, repeated, as 128 bits: 1 is negative, the highest is the first."""
    negative = jnp.tile(signs < 0, LARGEST_ROTATION // signs.size)
    place = 31 - jnp.arange(LARGEST_ROTATION, dtype=jnp.uint32) % 32
    return jnp.sum((negative.astype(jnp.uint32) << place).reshape(4, 32), axis=1, dtype=jnp.uint32)


@triton.jit
def draw_kernel(key, words, SIGNS0: tl.constexpr, SIGNS1: tl.constexpr, SIGNS2: tl.constexpr):
    """Writes words [3, 2, 6] uint32 from a key [2] uint32; SIGNS of a GEMM is the number of its signs."""
    gemm = tl.program_id(0).to(tl.uint32)
    size = tl.where(gemm == 0, SIGNS0, tl.where(gemm == 1, SIGNS1, SIGNS2))
    place, word, of_signs = tl.arange(0, 128), tl.arange(0, 2), tl.arange(0, 4)
    key0, key1 = _fold(tl.load(key), tl.load(key + 1), gemm)
    signs0, signs1 = _fold(key0, key1, 2)
    negative = _bits(signs0, signs1, (place % size).to(tl.uint32)) >> 31
    signs = tl.sum(tl.reshape(negative << (31 - place % 32).to(tl.uint32), [4, 32]), axis=1)
    for operand in tl.static_range(2):
        of_operand = words + gemm * 12 + operand * 6
        operand0, operand1 = _fold(key0, key1, operand)
        tl.store(of_operand + word, _bits(operand0, operand1, word.to(tl.uint32)))
        tl.store(of_operand + 2 + of_signs, signs)


@triton.jit
def _fold(key0, key1, index):
    """Returns `jax.random.fold_in(key, index)`."""
    zero = tl.zeros_like(key0)
    return _threefry(key0, key1, zero, zero + index)


@triton.jit
def _bits(key0, key1, place):
    """Returns `jax.random.bits` at some places."""
    high, low = _threefry(key0, key1, tl.zeros_like(place), place)
    return high ^ low


@triton.jit
def _threefry(key0, key1, x0, x1):
    """Returns Threefry-2x32 with 20 rounds of the counter (x0, x1), elementwise, uint32.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    key2 = key0 ^ key1 ^ 0x1BD11BDA
    x0, x1 = x0 + key0, x1 + key1
    for i in tl.static_range(5):
        x0, x1 = _mix(x0, x1, 17 if i % 2 else 13)
        x0, x1 = _mix(x0, x1, 29 if i % 2 else 15)
        x0, x1 = _mix(x0, x1, 16 if i % 2 else 26)
        x0, x1 = _mix(x0, x1, 24 if i % 2 else 6)
        key0, key1, key2 = key1, key2, key0
        x0, x1 = x0 + key0, x1 + key1 + (i + 1)
    return x0, x1


@triton.jit
def _mix(x0, x1, LEFT: tl.constexpr):
    x0 += x1
    return x0, ((x1 << LEFT) | (x1 >> (32 - LEFT))) ^ x0
