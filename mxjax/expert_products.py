"""Products of experts by FP8 carriers: one FP8 GEMM an expert, of a static number of rows, its capacity.

XLA has no fast ragged product in FP8, and shapes must be static. So the program holds the GEMMs at several
capacities, and runs those of the smallest that holds the largest group. Groups are filled up with zeros,
which change no result: each expert's values are those that `mxjax.ragged` multiplies by "xla".
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from mxjax.derivatives import first_order_only
from mxjax.fp8_carriers import Carrier
from mxjax.gemm import multiply
from mxjax.implementations import How
from mxjax.kmajor import KMajor
from mxjax.matmul import Options, policy_inputs
from mxjax.prepare import Prepared, prepare
from mxjax.quantize import MXArray

MARGINS = (1.25, 2.0)
"""Capacities over the mean group; the last capacity is all rows."""
TILE = 128
"""Capacities are multiples of it, as the tiles of FP8 GEMMs are."""


def capacities(group_sizes: jax.Array | np.ndarray, rows: int, unit: int) -> tuple[int, ...]:
    """Returns the capacities of a program, in ascending order; the last holds every group.

    Args:
      group_sizes: numbers of rows. If it is a numpy array, the sizes are static, and there is one capacity.
      rows: number of rows of all groups.
      unit: number that divides every capacity.
    """

    def filled(length: int) -> int:
        multiple = math.lcm(unit, TILE)
        return max(-(-length // multiple), 1) * multiple

    if isinstance(group_sizes, np.ndarray):
        return (filled(min(int(group_sizes.max(initial=0)), rows)),)
    lengths = [math.ceil(margin * rows / group_sizes.size) for margin in MARGINS] if group_sizes.size else []
    return tuple(sorted({filled(min(length, rows)) for length in (*lengths, rows)}))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def matmul_experts(options: Options, levels: tuple[int, ...], x, w, sizes, key) -> jax.Array:
    """Returns the Fprop of x [m, k], sorted by expert, and w [g, k, n]; its gradients are Dgrad and Wgrad.

    Args:
      levels: capacities; see `capacities`.
      sizes: [g] int32, numbers of rows of the experts.
    """
    return _at_capacity(levels, sizes, functools.partial(_forward, options), x, w, sizes, key)


def _matmul_fwd(options: Options, levels, x, w, sizes, key):
    return matmul_experts(options, levels, x, w, sizes, key), (x, w, sizes, key)


def _matmul_bwd(options: Options, levels, residuals, dy):
    sizes = residuals[2]
    return (*_at_capacity(levels, sizes, functools.partial(_backward, options), *residuals, dy), None, None)


matmul_experts.defvjp(_matmul_fwd, _matmul_bwd)


def _at_capacity(levels: tuple[int, ...], sizes: Int32[Array, "g"], run: Callable, *operands):
    """Returns run(capacity, *operands) of the smallest capacity that holds every group."""
    if len(levels) == 1:
        return run(levels[0], *operands)
    smallest = jnp.searchsorted(jnp.array(levels[:-1]), jnp.max(sizes))
    return lax.switch(smallest, [functools.partial(run, capacity) for capacity in levels], *operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(options: Options, capacity: int, x, w, sizes, key) -> jax.Array:
    policy, gemms, dtypes, *_ = options
    x, w = first_order_only(x), first_order_only(w)
    (left, right), *_ = policy_inputs(policy, key)
    [lhs] = prepare(_by_expert(x, sizes, capacity), [(gemms.fprop, left)])
    [rhs] = prepare(w, [(gemms.fprop, right)])
    y = _multiply_each(options, gemms.fprop, dtypes[0], lhs, rhs, ("e4m3", "e4m3"))
    return _by_row(y, sizes, x.shape[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(options: Options, capacity: int, x, w, sizes, key, dy) -> tuple[jax.Array, jax.Array]:
    policy, gemms, dtypes, *_ = options
    x, w, dy = (first_order_only(t) for t in (x, w, dy))
    _, dgrad, wgrad, seen_w, seen_x = policy_inputs(policy, key)
    rows = x.shape[0]
    x, dy = (_by_expert(t, sizes, capacity) for t in (x, dy))
    dy_rows, dy_columns = prepare(dy, [(gemms.dgrad, dgrad[0]), (gemms.wgrad, wgrad[1])])
    [w_rows] = prepare(seen_w(w), [(gemms.dgrad, dgrad[1])])
    [x_columns] = prepare(seen_x(x), [(gemms.wgrad, wgrad[0])])
    dx = _multiply_each(options, gemms.dgrad, dtypes[1], dy_rows, w_rows, ("e5m2", "e4m3"))
    dw = _multiply_each(options, gemms.wgrad, dtypes[2], x_columns, dy_columns, ("e4m3", "e5m2"))
    return _by_row(dx, sizes, rows), dw


def _multiply_each(
    options: Options,
    how: How,
    dtype: DTypeLike,
    lhs: Prepared,
    rhs: Prepared,
    carriers: tuple[Carrier, Carrier],
) -> Float[Array, "g m n"]:
    """Returns the products of all experts, a GEMM each: XLA recognizes no FP8 GEMM with a batch axis."""
    pairs = [(_expert(lhs, i), _expert(rhs, i)) for i in range(lhs.elements.shape[0])]
    products = (multiply(how, dtype, options.precision, *pair, carriers) for pair in pairs)
    return jnp.stack([product.value(dtype) for product in products])


def _expert(q: Prepared, i: int) -> Prepared:
    """Returns an operand of one expert; a scale for the whole tensor is that of all experts."""
    scales = None if q.scales is None else q.scales[i]
    assert isinstance(q, MXArray | KMajor)
    return dataclasses.replace(q, elements=q.elements[i], scales=scales)


def _by_expert(x: Float[Array, "m k"], sizes: Int32[Array, "g"], capacity: int) -> Float[Array, "g c k"]:
    """Returns the rows of each expert, filled up with zeros."""
    place = lax.iota(jnp.int32, capacity)[None]
    first = jnp.cumsum(sizes) - sizes
    rows = jnp.where(place < sizes[:, None], first[:, None] + place, x.shape[0])
    return x.at[rows].get(mode="fill", fill_value=0)


def _by_row(y: Float[Array, "g c n"], sizes: Int32[Array, "g"], rows: int) -> Float[Array, "m n"]:
    """Returns each row's product, zero for rows of no expert."""
    groups, capacity, n = y.shape
    row = lax.iota(jnp.int32, rows)
    ends = jnp.cumsum(sizes)
    group = jnp.searchsorted(ends, row, side="right")
    known = jnp.minimum(group, groups - 1)
    place = known * capacity + row - (ends - sizes)[known]
    places = jnp.where(group < groups, place, groups * capacity)
    return y.reshape(groups * capacity, n).at[places].get(mode="fill", fill_value=0)
