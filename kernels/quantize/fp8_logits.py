"""The gradient of the cross-entropy by its logits in FP8, cast in the kernel that computes it.

It is the largest tensor of a training step: for each token as many elements as the vocabulary has. The kernel
reads the logits once and writes a byte an element along rows and along columns.
"""

import functools

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float32, Int

from mxjax.kernels.device.loads import column_groups, load_inside
from mxjax.kernels.launch import triton_call
from mxjax.kernels.mesh import batched_by_vmap
from mxjax.kernels.quantize.fp8 import TILE, cast_tile, constants_of, grid_of, in_fp8, takes
from mxjax.numerics.formats import get_format
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import Target


def cast_gradient(
    logits: Float32[Array, "n vocabulary"],
    normalizer: Float32[Array, " n"],
    targets: Int[Array, " n"],
    weight: float,
    uses: tuple[OperandUse, OperandUse],
    target: Target,
) -> list[KernelOperand] | None:
    """Returns weight * (exp(logits - normalizer) - onehot(targets)) in FP8; `weight` is the largest element.

    None where the kernel does not take these uses, of axis -1 and of axis -2, or this shape. On a mesh it
    runs under `jax.shard_map`.

    Args:
      normalizer: logsumexp of the logits; infinity makes a row's exponentials zero.
      targets: of each row, or -1 for none.
    Special values: NaN in a row makes all of it NaN.
    """
    if not takes(uses, target, logits.shape):
        return None
    formats = [get_format(use.operand.format) for use in uses]
    rows, columns = (jnp.dtype(f.dtype).name for f in formats)
    largest = [f.element.max for f in formats if f.element is not None]
    factors = (jnp.full(1, value, jnp.float32) for value in largest)
    made = _caster((rows, columns))(logits[None], normalizer[None], targets[None].astype(jnp.int32), *factors)
    scales = (jnp.float32(weight / value) for value in largest)
    return [KernelOperand(t[0], None, None, scale) for t, scale in zip(made, scales, strict=True)]


@functools.cache
def _caster(sides: tuple[str, str]):
    """Returns a function of logits [v, n, vocabulary], normalizers, targets and two factors [v]."""
    return batched_by_vmap(functools.partial(launch_gradient, sides))


def launch_gradient(sides: tuple[str, str], logits: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Runs the kernel on logits [v, n, vocabulary], normalizers, targets and two factors."""
    v, r, c = logits.shape
    rows, columns, _ = triton_call(
        cast_gradient_kernel,
        logits,
        *arrays,
        out=[
            jax.ShapeDtypeStruct((v, r, c // 4), jnp.int32),
            jax.ShapeDtypeStruct((v, c, r // 4), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        grid=grid_of(v, r, c),
        num_warps=TILE.warps,
        **constants_of(sides, r, c),
    )
    return [in_fp8(rows, sides[0]), in_fp8(columns, sides[1])]


@triton.jit
def cast_gradient_kernel(
    logits, normalizers, targets, row_factor, column_factor, row_words, column_words, maxima, R,
    C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, GROUP: tl.constexpr, EXACT: tl.constexpr,
    ROW_E5M2: tl.constexpr, COLUMN_E5M2: tl.constexpr, MAXIMA: tl.constexpr,
):  # fmt: skip
    """Casts exp(logits - normalizers) - onehot(targets), of logits [V, R, C] and the others [V, R].

    Results and the other arguments are as in `mxjax.kernels.quantize.fp8.cast_kernel`.
    """
    GROUPS: tl.constexpr = BLOCK_R // GROUP
    r0, c0 = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_R, tl.program_id(0) * BLOCK_C
    v = tl.program_id(2).to(tl.int64)
    first = v * R + r0
    loaded = column_groups(logits + first * C + c0, R - r0, C - c0, C, GROUP, GROUPS, BLOCK_C, EXACT)
    row, column = tl.arange(0, GROUPS)[:, None] * GROUP, c0 + tl.arange(0, BLOCK_C)[None, :]
    xs = ()
    for i in tl.static_range(GROUP):
        inside = row + i < R - r0
        normalizer = load_inside(normalizers + first + i + row, inside, EXACT)
        target = load_inside(targets + first + i + row, inside, EXACT)
        softmax = tl.exp(loaded[i] - normalizer)
        xs = xs + (tl.where(column == target, softmax - 1.0, softmax),)
    factors, out, place = (row_factor, column_factor), (row_words, column_words, maxima), (v, r0, c0)
    cast_tile(xs, factors, out, place, R, C, C, BLOCK_R, BLOCK_C, GROUP, EXACT, ROW_E5M2, COLUMN_E5M2, MAXIMA)
