"""Products of experts by FP8 carriers: FP8 GEMMs of one expert's rows each, in chunks of static shapes.

XLA has no fast ragged product in FP8. So rows are quantized in tiles (`mxjax.products.expert_chunks`), and
loops run a GEMM for each chunk of tiles. The zeros that fill up tiles change no result: each expert's values
are those that `mxjax.products.ragged` multiplies by "xla". An expert of more rows than a chunk holds has its
Wgrad summed in float32 over chunks.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.product import Product
from mxjax.products.draws import uses_of_policy
from mxjax.products.expert_chunks import Chunks, Index, chunks_of
from mxjax.products.linear import CARRIERS, Options
from mxjax.products.multiply import multiply
from mxjax.products.prepare import Prepared, prepare
from mxjax.runtime.mesh import varying_as
from mxjax.runtime.primitives import first_order_only

Sizes = tuple[int, ...] | None
"""Numbers of rows of the experts, if they are static."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def matmul_experts(options: Options, unit: int, static: Sizes, x, w, sizes, key) -> jax.Array:
    """Returns the Fprop of x [m, k], sorted by expert, and w [g, k, n]; its gradients are Dgrad and Wgrad.

    Args:
      unit: number of rows that divides a tile.
      sizes: [g] int32, numbers of rows of the experts.
    """
    return _forward(options, unit, static, x, w, sizes, key)


def _matmul_fwd(options: Options, unit: int, static: Sizes, x, w, sizes, key):
    return _forward(options, unit, static, x, w, sizes, key), (x, w, sizes, key)


def _matmul_bwd(options: Options, unit: int, static: Sizes, residuals, dy):
    return (*_backward(options, unit, static, *residuals, dy), None, None)


matmul_experts.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(options: Options, unit: int, static: Sizes, x, w, sizes, key) -> jax.Array:
    policy, gemms, dtypes, *_ = options
    x, w = first_order_only(x), first_order_only(w)
    chunks = chunks_of(sizes if static is None else np.array(static, np.int32), x.shape[0], unit)
    uses = uses_of_policy(policy, gemms, key)
    [lhs] = prepare(chunks.filled(x), [uses.fprop.lhs])
    [rhs] = prepare(w, [uses.fprop.rhs])
    return _by_row(chunks, _gemm(options, "fprop", dtypes[0]), dtypes[0], lhs, rhs, w.shape[2])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _backward(options: Options, unit: int, static: Sizes, x, w, sizes, key, dy):
    """Returns the gradients dx and dw."""
    policy, gemms, dtypes, *_ = options
    x, w, dy = (first_order_only(t) for t in (x, w, dy))
    chunks = chunks_of(sizes if static is None else np.array(static, np.int32), x.shape[0], unit)
    _, dgrad, wgrad = uses_of_policy(policy, gemms, key)
    x, dy = chunks.filled(x), chunks.filled(dy)
    dy_rows, dy_columns = prepare(dy, [dgrad.lhs, wgrad.rhs])
    [w_rows] = prepare(w, [dgrad.rhs])
    [x_columns] = prepare(x, [wgrad.lhs])
    dx = _by_row(chunks, _gemm(options, "dgrad", dtypes[1]), dtypes[1], dy_rows, w_rows, w.shape[1])
    dw = _by_expert(chunks, _gemm(options, "wgrad", jnp.float32), x_columns, dy_columns, w.shape)
    return dx, dw.astype(dtypes[2])


def _gemm(options: Options, name: str, dtype: DTypeLike) -> Callable[..., Product]:
    """Returns the function that multiplies a GEMM's two operands; its product is read in dtype."""
    return functools.partial(
        multiply,
        implementation=getattr(options.gemms, name),
        dtype=dtype,
        precision=options.precision,
        carriers=CARRIERS[name],
    )


def _by_row(
    chunks: Chunks, multiply: Callable[..., Product], dtype: DTypeLike, lhs: Prepared, rhs: Prepared, n: int
) -> Float[Array, "m n"]:
    """Returns the products of rows lhs [p, k] with their experts' rhs [g, ...], in the order of x."""

    def run(length: int, expert: Index, first: Index, y: jax.Array) -> jax.Array:
        product = multiply(lhs=_tiles(lhs, 0, first, length, chunks), rhs=_expert(rhs, expert))
        return lax.dynamic_update_slice_in_dim(y, product.value(dtype), first * chunks.tile, axis=0)

    y = _empty((chunks.tiles * chunks.tile, n), dtype, lhs, rhs)
    return chunks.by_row(chunks.each_full(run, chunks.each_last(run, y)))


def _by_expert(
    chunks: Chunks, multiply: Callable[..., Product], lhs: Prepared, rhs: Prepared, shape: tuple[int, ...]
) -> Float[Array, "g k n"]:
    """Returns each expert's product of lhs [p, k] and rhs [p, n], which contracts its rows, in float32."""
    axis = 1 if isinstance(lhs, KernelOperand) else 0

    def product(length: int, first: Index) -> jax.Array:
        left, right = (_tiles(q, axis, first, length, chunks) for q in (lhs, rhs))
        return multiply(lhs=left, rhs=right).value(jnp.float32)

    def store(length: int, expert: Index, first: Index, dw: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(dw, product(length, first), expert, axis=0)

    def add(length: int, expert: Index, first: Index, dw: jax.Array) -> jax.Array:
        more = lax.dynamic_index_in_dim(dw, expert, keepdims=False) + product(length, first)
        return lax.dynamic_update_index_in_dim(dw, more, expert, axis=0)

    def clear(expert: Index, dw: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(dw, jnp.zeros_like(dw, shape=shape[1:]), expert, axis=0)

    dw = _empty(shape, jnp.float32, lhs, rhs)
    return chunks.each_full(add, chunks.each_last(store, chunks.each_empty(clear, dw)))


def _empty(shape: tuple[int, ...], dtype: DTypeLike, lhs: Prepared, rhs: Prepared) -> jax.Array:
    """Returns memory for products of the operands, not initialized."""
    return varying_as(lax.empty(shape, dtype), lhs.elements, rhs.elements)


def _tiles(q: Prepared, axis: int, first: Index, length: int, chunks: Chunks) -> Prepared:
    """Returns `length` tiles of an operand whose rows are along an axis."""

    def part(t: jax.Array) -> jax.Array:
        each = t.shape[axis] // chunks.tiles  # of a tile's elements or scales
        return lax.dynamic_slice_in_dim(t, first * each, length * each, axis)

    return _replaced(q, part)


def _expert(q: Prepared, expert: Index) -> Prepared:
    """Returns an operand of one expert; a scale for the whole tensor is that of all experts."""
    return _replaced(q, lambda t: lax.dynamic_index_in_dim(t, expert, keepdims=False))


def _replaced(q: Prepared, part: Callable[[jax.Array], jax.Array]) -> Prepared:
    """Returns an operand of a part of its elements and scales."""
    scales = None if q.scales is None else part(q.scales)
    return dataclasses.replace(q, elements=part(q.elements), scales=scales)
