"""Grouped GEMMs: one launch for all experts, whose sizes are known at run time only.

Operands are K-major, as in `mxjax.kernels.matmul.fp4_gemm`. Tokens are sorted by expert, each expert's in
runs that are filled up with zeros (`mxjax.products.expert_rows`). Packed MXFP4 operands are multiplied in
FP4, or on FP8 matrix units: exact in FP8 carriers, else recomputed, as in `mxjax.kernels.matmul.fp8_matmul`.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, Shaped, UInt8

from mxjax.kernels.launch import ceil_div, triton_call
from mxjax.kernels.matmul.carry import carry_operand
from mxjax.kernels.matmul.fp4_gemm import constants_of, grid_of, shuffle_scales
from mxjax.kernels.matmul.fp8_matmul import PROGRAMS
from mxjax.kernels.matmul.grouped_correct import correct_experts, sift_rows
from mxjax.kernels.matmul.grouped_kernel import (
    grouped_rows_kernel,
    grouped_sums_kernel,
    value_rows_kernel,
    value_sums_kernel,
)
from mxjax.kernels.matmul.tiles import Tiles, choose_tiles, options_of
from mxjax.kernels.mesh import partitioned
from mxjax.operands.carriers import Carried, Carrier
from mxjax.runtime.devices import Target, current_target

RUN = 256
"""Divides the rows of a run: every tile's rows, and its columns along the contracted axis, divide it."""

VALUES = {1: Tiles(128, 128, 128, warps=4, stages=3), 2: Tiles(128, 128, 64, warps=4, stages=3)}
"""Tiles of arrays in FP8 and bfloat16, by the bytes of an element, in the shared memory of every GPU.

On H100 a GEMM of Mixtral 8x7B's experts takes 3.7 to 4.3 ms in FP8, and as long with tiles of 256x128 and 8
warps, which take longer for many small experts. By pointers in place of descriptors it takes 4.2 to 4.4 ms.
"""
WIDE = Tiles(128, 256, 64, warps=8, stages=3)
"""Tiles in bfloat16 where shared memory suffices: on H100 5.3 to 5.5 ms, and 6.7 to 7.2 by the others."""


class Places(NamedTuple):
    """Where the rows of experts are; see `mxjax.products.expert_rows.Runs`.

    Attributes:
      run: rows of a run, a multiple of RUN.
      rows: rows of the result, those of no expert included.
    """

    experts: Int32[Array, " runs"]
    starts: Int32[Array, " g_1"]
    ends: Int32[Array, " g_2"]
    run: int
    rows: int


Packed = tuple[UInt8[Array, "*g n _"], UInt8[Array, "*g n _"]]
"""Two E2M1 elements a byte along k, and an E8M0 byte for each 32."""
Product = Callable[..., jax.Array]


def multiply_packed(
    lhs: Packed, rhs: Packed, places: Places, dtype: DTypeLike, carriers: tuple[Carrier, Carrier] | None
) -> Float[Array, "..."]:
    """Returns the products of packed operands expert by expert, accumulated in float32 and rounded to dtype.

    Args:
      lhs, rhs: [m, k] and [g, n, k] for [rows, n], each row times its expert's rhs.T, zero for no expert's;
        or [m, k] and [n, k] for [g, m, n], of each expert lhs @ rhs.T over its runs of k, zeros for none.
      dtype: bfloat16 or float32.
      carriers: FP8 carriers of lhs and rhs, or None to multiply in FP4. See `fp4_gemm.matmul` and
        `fp8_matmul.matmul`.
    """
    rule = "m w, m k, g n w, g n k" if rhs[0].ndim == 3 else "m w, m k, n w, n k"
    job = _Job(_carried if carriers else _in_fp4, carriers, rule, jnp.dtype(dtype), current_target())
    return _run(job, (*lhs, *rhs), places)


def multiply_values(
    lhs: Shaped[Array, "_ _"],
    rhs: Shaped[Array, "*g _ _"],
    places: Places,
    dtype: DTypeLike,
    factors: Sequence[Float[Array, ""]] = (),
    *,
    k_first: bool = False,
) -> Float[Array, "..."]:
    """Returns the products of arrays in FP8 or bfloat16; see `multiply_packed`.

    Args:
      lhs, rhs: their last axes are multiples of 16 bytes.
      factors: up to two, by which the products are multiplied before they are rounded.
      k_first: whether the operands of sums are [k, m] and [k, n], in bfloat16.
    """
    ones = (jnp.ones((), jnp.float32) for _ in range(2 - len(factors)))
    left, right = (jnp.asarray(f, jnp.float32).reshape(1) for f in (*factors, *ones))
    rule = "m w, l, g n w, q" if rhs.ndim == 3 else "w m, l, w n, q" if k_first else "m w, l, n w, q"
    job = _Job(launch_values, k_first, rule, jnp.dtype(dtype), current_target())
    return _run(job, (lhs, left, rhs, right), places)


class _Job(NamedTuple):
    """A product of four arrays; hashable, so that JAX caches its trace.

    Attributes:
      product: a function of the arrays, the places, `option`, the dtype and the target.
      option: carriers of packed operands, or whether values are `k_first`.
      rule: the arrays' axes, as in `mxjax.kernels.mesh`: rows m and n, g of experts; others stay whole.
    """

    product: Product
    option: tuple[Carrier, Carrier] | bool | None
    rule: str
    dtype: jnp.dtype
    target: Target | None


def _run(job: _Job, arrays: tuple[jax.Array, ...], places: Places) -> jax.Array:
    return _on_mesh(job, places[3:])(*arrays, *places[:3])


@functools.cache
def _on_mesh(job: _Job, sizes: tuple[int, int]) -> Product:
    """Returns a product as a function. Meshes shard n of its arrays, and m of sums."""

    def call(*arguments):
        places = Places(*arguments[4:], *sizes)
        return [job.product(*arguments[:4], places, job.option, job.dtype, job.target)]

    of_rows = "g" in job.rule
    rule = f"{job.rule}, t, s, e" + (" -> r n" if of_rows else " -> h m n")
    sharded = "n" if of_rows else "mn"
    whole = dict.fromkeys(factor for factor in re.findall(r"\w", rule) if factor not in sharded)
    on_mesh = partitioned(call, rule, {}, list(whole))
    return jax.custom_batching.sequential_vmap(lambda *arguments: on_mesh(*arguments)[0])


def _in_fp4(lhs, lhs_scales, rhs, rhs_scales, places: Places, option, dtype, target) -> jax.Array:
    """Returns the product in FP4 by one launch."""
    del option
    (m, width), n, of_rows, groups = lhs.shape, rhs.shape[-2], rhs.ndim == 3, places.starts.size - 1
    tiles = choose_tiles(m, n, 2 * width, 1 if of_rows else groups, target)
    left, right = (
        (elements, shuffle_scales(scales.reshape(-1, *scales.shape[-2:]), target))
        for elements, scales in ((lhs, lhs_scales), (rhs, rhs_scales))
    )
    constants = constants_of(m, n, 2 * width, tiles, target) | {"RUN": places.run}
    if of_rows:
        arrays, shape = (*left, *right, *places[:3]), (places.rows, n)
        return _launch(
            grouped_rows_kernel,
            arrays,
            shape,
            grid_of(m, n, 1, tiles)[:1],
            dtype,
            tiles,
            constants | {"GROUPS": groups},
            options_of(tiles, target),
        )
    grid = grid_of(m, n, groups, tiles)
    arrays, options = (*left, *right, places.starts), options_of(tiles, target)
    return _launch(grouped_sums_kernel, arrays, (groups, m, n), grid, dtype, tiles, constants, options)


def launch_values(
    lhs: jax.Array,
    left: jax.Array,
    rhs: jax.Array,
    right: jax.Array,
    places: Places,
    k_first: bool,
    dtype: DTypeLike,
    target: Target | None,
) -> Float[Array, "..."]:
    """Returns the product of arrays and their factors by one launch.

    Args:
      left, right: the unit bytes of the rows of lhs and rhs, or one factor [1]; see `value_rows_kernel`.
      k_first: see `multiply_values`.
    """
    (m, k), n = lhs.shape[:: -1 if k_first else 1], rhs.shape[-1 if k_first else -2]
    groups, tiles = places.starts.size - 1, VALUES[min(lhs.dtype.itemsize, 2)]
    if lhs.dtype == jnp.bfloat16 and target is not None and target.arch.startswith(("sm_9", "sm_10")):
        tiles = WIDE
    constants = {"M": m, "N": n, "K": k, "GROUPS": groups, "RUN": places.run, "GROUP_M": 8}
    constants |= {"BLOCK_M": tiles.m, "BLOCK_N": tiles.n, "BLOCK_K": tiles.k}
    constants["UNITS"] = left.dtype == jnp.uint8
    if rhs.ndim == 3:
        kernel, arrays, shape = value_rows_kernel, places[:3], (places.rows, n)
    else:
        kernel, arrays, shape = value_sums_kernel, (places.starts,), (groups, m, n)
        constants["K_FIRST"] = k_first
    programs = ceil_div(m, tiles.m) * ceil_div(n, tiles.n) * (1 if rhs.ndim == 3 else groups)
    grid = (min(programs, PROGRAMS),)
    return _launch(kernel, (lhs, left, rhs, right, *arrays), shape, grid, dtype, tiles, constants, {})


def _carried(lhs, lhs_scales, rhs, rhs_scales, places: Places, carriers, dtype, target) -> jax.Array:
    """Returns the product on FP8 carriers, recomputed where elements were lost."""
    of_rows = rhs.ndim == 3
    grouped = of_rows and carriers[0] == "e5m2"  # for Dgrad's gradient, as in `fp8_matmul`
    left = carry_operand(lhs[None], lhs_scales[None], carriers[0], target, grouped)
    batched = (rhs, rhs_scales) if of_rows else (rhs[None], rhs_scales[None])
    right = carry_operand(*batched, carriers[1], target)
    values = (right.elements, right.unit) if of_rows else _first(right)
    y = launch_values(*_first(left), *values, places, False, dtype, target)
    if left.grouped is not None:
        left = sift_rows(y, left, right, places[:3], places.run)
    operands = (lhs, lhs_scales, rhs, rhs_scales)
    return correct_experts(y, operands, left, right, places[1:3], places.run, target)


def _first(q: Carried) -> tuple[jax.Array, jax.Array]:
    return q.elements[0], q.unit[0]


def _launch(kernel, arrays, shape, grid, dtype, tiles: Tiles, constants, options) -> jax.Array:
    [out] = triton_call(
        kernel,
        *arrays,
        out=[jax.ShapeDtypeStruct(shape, dtype)],
        multiplies=True,
        grid=grid,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        options=options,
        **constants,
    )
    return out
