"""Products of experts by kernels: one launch a GEMM, for any sizes of the experts.

Rows are quantized in runs (`mxjax.products.expert_runs`). The zeros that fill up runs change no result: each
expert's values are those that `mxjax.products.ragged` multiplies by "xla". Without kernels, XLA multiplies.
On a mesh each device puts its rows in runs and multiplies them; in between, all are quantized as one array.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mxjax.numerics.array import MXArray
from mxjax.numerics.blocks import pad
from mxjax.operands.carriers import Carrier
from mxjax.operands.kernel_operand import KernelOperand, decode, values_of_runs
from mxjax.operands.use import OperandUse
from mxjax.products.draws import PolicyUses, uses_of_policy
from mxjax.products.expert_groups import Grid, Groups, multiply_ragged
from mxjax.products.expert_runs import Runs, runs_number, runs_of
from mxjax.products.implementations import KEPT
from mxjax.products.linear import CARRIERS, Options
from mxjax.products.multiply import xla_operands
from mxjax.products.prepare import Prepared, prepare
from mxjax.runtime.devices import current_target
from mxjax.runtime.primitives import first_order_only

RUN, RUN_FP4 = 128, 256
"""Rows of a run: whole tiles of the kernels in FP8, and of those in FP4."""
ALIGNED = 16
"""Divides the contracted axis of the kernels' operands in FP8 and bfloat16."""
EXPERT_CARRIERS: Mapping[str, tuple[Carrier, Carrier]] = {**CARRIERS, "wgrad": ("e5m2", "e5m2")}
"""The FP8 carriers of lhs and rhs. The Wgrad's are both E5M2, which cuBLAS does not multiply.

An expert's last block has few tokens, maybe one. Next to full blocks it is far more often out of E4M3's reach
than any block of a dense layer.
"""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def matmul_experts(options: Options, unit: int, grid: Grid | None, x, w, groups: Groups, key) -> jax.Array:
    """Returns the Fprop of x [m, k], sorted by expert, and w [g, k, n]; its gradients are Dgrad and Wgrad.

    Args:
      unit: number of rows that divides a run.
      grid: the mesh axes that shard x and w, or None.
      groups: int32 numbers of rows of the experts; on a grid of each device, with the places of rows in units
        of `run_rows`.
    """
    return _forward(options, unit, grid, x, w, groups, key, keep=False)[0]


def _matmul_fwd(options: Options, unit: int, grid: Grid | None, x, w, groups, key):
    y, packed = _forward(options, unit, grid, x, w, groups, key, keep=True)
    # What is packed is kept in place of the tensor.
    tensors = tuple(t if q is None else None for t, q in zip((x, w), packed, strict=True))
    return y, (tensors, packed, groups, key)


def _matmul_bwd(options: Options, unit: int, grid: Grid | None, residuals, dy):
    return (*_backward(options, unit, grid, *residuals, dy), None, None)


matmul_experts.defvjp(_matmul_fwd, _matmul_bwd)


def run_rows(options: Options, unit: int) -> int:
    """Returns the number of rows of a run."""
    return math.lcm(unit, RUN_FP4 if {"triton", "aiter"} & set(options.gemms[:3]) else RUN)


Kind = Literal["rows", "columns", "experts"]
"""What the mesh shards: a matrix's rows or columns, or experts, of which each has a matrix."""


class _Devices(NamedTuple):
    """The devices that multiply, each with runs of its own rows; without a grid there is one.

    Attributes:
      rows: rows of each device.
      run: rows of a run.
      sizes: rows of each expert, on a grid of each device's.
    """

    grid: Grid | None
    rows: int
    run: int
    sizes: jax.Array

    @property
    def length(self) -> int:
        """The number of rows of each device's runs."""
        return self.run * runs_number(self.rows, self.run, self.sizes.shape[-1] + 1)

    def each(self, function: Callable[..., Any], arrays: Any, specs: Any, result: Any) -> Any:
        """Returns `function(runs, arrays)` of each device's shards."""
        if self.grid is None:
            return function(runs_of(self.sizes, self.rows, self.run, rest=True), arrays)

        def of_device(sizes: jax.Array, arrays: Any) -> Any:
            return function(runs_of(sizes[0], self.rows, self.run, rest=True), arrays)

        by_row = PartitionSpec(self.grid.rows)
        mapped: Any = jax.shard_map(of_device, in_specs=(by_row, specs), out_specs=result, check_vma=False)
        return mapped(self.sizes, arrays)

    def spec(self, kind: Kind) -> PartitionSpec:
        """Returns the sharding of a matrix by its rows or columns, or of experts' matrices by the expert."""
        if self.grid is None:
            return PartitionSpec()
        axes = cast(Any, self.grid.experts if kind == "experts" else self.grid.rows)
        return PartitionSpec(None, axes) if kind == "columns" else PartitionSpec(axes)

    def specs(self, q: Prepared, kind: Kind) -> list[PartitionSpec]:
        """Returns the shardings of an operand's leaves, of whose elements `kind` is. One scale has none."""
        if isinstance(q, MXArray) and kind == "columns":  # as stored, not K-major
            kind = "rows"
        runs = getattr(q, "run_scales", None)  # whose axes are the elements' in the other order
        across: Kind = kind if kind == "experts" else "rows" if kind == "columns" else "columns"

        def spec(leaf: jax.Array) -> PartitionSpec:
            of_leaf = across if leaf is runs else kind
            is_one = leaf.ndim < 2 or leaf.shape[-1 if of_leaf == "columns" else 0] == 1
            return PartitionSpec() if is_one else self.spec(of_leaf)

        return [spec(leaf) for leaf in jax.tree.leaves(q)]

    def filled(self, x: jax.Array) -> jax.Array:
        """Returns the rows of x in each device's runs."""
        rows = self.spec("rows")
        y: jax.Array = self.each(lambda runs, x: runs.filled(x), x, rows, rows)
        return y

    def uses(self, options: Options, places: jax.Array | None, key: jax.Array | None) -> PolicyUses:
        """Returns the uses of the policy's operands; random bits are those of the places of rows."""
        in_runs = None if places is None or key is None else self.filled(places[:, None])[:, 0]
        return Groups(self.sizes, in_runs).of(uses_of_policy(options.policy, options.gemms, key))


def _devices(options: Options, unit: int, grid: Grid | None, rows: int, groups: Groups) -> _Devices:
    shards = 1 if grid is None else groups.sizes.shape[0]
    return _Devices(grid, rows // shards, run_rows(options, unit), groups.sizes)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="keep")
def _forward(options: Options, unit: int, grid: Grid | None, x, w, groups, key, *, keep: bool):
    """Returns y, and x and w as the backward GEMMs multiply them, where those take packed operands."""
    gemms, dtypes = options.gemms, options.dtypes
    x, w = first_order_only(x), first_order_only(w)
    devices = _devices(options, unit, grid, x.shape[0], groups)
    fprop, dgrad, wgrad = devices.uses(options, groups.places, key)
    x_uses = [fprop.lhs, wgrad.lhs] if keep and gemms.wgrad in KEPT else [fprop.lhs]
    w_uses = [fprop.rhs, dgrad.rhs] if keep and gemms.dgrad in KEPT else [fprop.rhs]
    lhs, *x_packed = _prepare(x, x_uses, devices)
    rhs, *w_packed = prepare(w, w_uses)
    y = _multiply(options, "fprop", dtypes[0], lhs, rhs, devices)
    return y, (x_packed[0] if x_packed else None, w_packed[0] if w_packed else None)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _backward(options: Options, unit: int, grid: Grid | None, tensors, packed, groups, key, dy):
    """Returns the gradients dx and dw."""
    dtypes, dy = options.dtypes, first_order_only(dy)
    x, w = (None if t is None else first_order_only(t) for t in tensors)
    x_columns, w_rows = packed
    devices = _devices(options, unit, grid, dy.shape[0], groups)
    _, dgrad, wgrad = devices.uses(options, groups.places, key)
    dy_rows, dy_columns = _prepare(dy, [dgrad.lhs, wgrad.rhs], devices)
    if w is not None:
        [w_rows] = prepare(w, [dgrad.rhs])
    if x is not None:
        [x_columns] = _prepare(x, [wgrad.lhs], devices)
    assert w_rows is not None
    assert x_columns is not None
    dx = _multiply(options, "dgrad", dtypes[1], dy_rows, w_rows, devices)
    return dx, _multiply(options, "wgrad", dtypes[2], x_columns, dy_columns, devices)


def _prepare(x: Float[Array, "m k"], uses: list[OperandUse], devices: _Devices) -> Sequence[Prepared]:
    """Returns the rows of x in runs, as each GEMM multiplies them."""
    if current_target() is not None:
        from mxjax.kernels.quantize.filled import quantize_filled, takes_filled

        if takes_filled(x, uses, devices.run, devices.length):
            specs = [devices.spec("rows"), devices.spec("columns")]

            def fill(runs: Runs, x: jax.Array) -> list[KernelOperand]:
                return quantize_filled(x, uses, _places(runs))

            filled: list[KernelOperand] = devices.each(fill, x, devices.spec("rows"), specs)
            return filled
    return prepare(devices.filled(x), uses)


def _multiply(
    options: Options, name: str, dtype: DTypeLike, lhs: Prepared, rhs: Prepared, devices: _Devices
) -> Float[Array, "..."]:
    """Returns a GEMM's product in dtype.

    It is [m, n] of rows with their experts' rhs, in the order of x, or of each expert [g, m, n] where both
    operands have the rows along the contracted axis. Devices with the same experts add theirs in float32.
    """
    grid, of_rows = devices.grid, name != "wgrad"
    factors = [jnp.asarray(q.factor, jnp.float32) for q in (lhs, rhs) if q.factor is not None]
    summed = () if grid is None or of_rows else tuple(a for a in grid.rows if a != grid.experts)
    in_kernel = dtype if dtype in (jnp.bfloat16, jnp.float32) and not summed else jnp.float32

    def multiply(runs: Runs, arrays: tuple[list[jax.Array], list[jax.Array], list[jax.Array]]) -> jax.Array:
        lhs, rhs = (jax.tree.unflatten(t, leaves) for t, leaves in zip(trees, arrays[:2], strict=True))
        factors, y = arrays[2], None
        if current_target() is not None:
            y = _by_kernel(options, name, in_kernel, lhs, rhs, factors, runs)
        y = _by_xla(lhs, rhs, factors, runs, options.precision) if y is None else y
        return (lax.psum(y, summed) if summed else y).astype(dtype)

    trees = [jax.tree.structure(q) for q in (lhs, rhs)]
    kinds: tuple[Kind, Kind] = ("rows", "experts") if of_rows else ("columns", "columns")
    specs = (*(devices.specs(q, kind) for q, kind in zip((lhs, rhs), kinds, strict=True)), PartitionSpec())
    arrays = jax.tree.leaves(lhs), jax.tree.leaves(rhs), factors
    y: jax.Array = devices.each(multiply, arrays, specs, devices.spec("rows" if of_rows else "experts"))
    return y


def _by_kernel(
    options: Options, name: str, dtype: DTypeLike, lhs: Prepared, rhs: Prepared, factors: list, runs: Runs
) -> Float[Array, "..."] | None:
    """Returns the product, or None if no kernel multiplies these operands here."""
    from mxjax.kernels.matmul.grouped import multiply_packed, multiply_values

    target, places, k_first = current_target(), _places(runs), False
    match lhs, rhs:
        case KernelOperand(scales=jax.Array()), KernelOperand(scales=jax.Array()):
            carriers = EXPERT_CARRIERS[name] if getattr(options.gemms, name) == "fp8_carriers" else None
            if carriers and (target is None or not target.has_fp8):
                return None
            y = multiply_packed(lhs.packed, rhs.packed, places, jnp.float32 if factors else dtype, carriers)
            for factor in factors:
                y = y * factor
            return y
        case KernelOperand(run_scales=jax.Array()), KernelOperand(run_scales=jax.Array()):
            return None
        case KernelOperand(), KernelOperand():
            left, right = lhs.elements, rhs.elements
        case MXArray(), MXArray():
            left, right, _ = xla_operands(lhs, rhs, options.precision)
            if left.dtype == jnp.float32:
                return None
            # Sums take the rows along the contracted axis as they are, not transposed.
            k_first = right.ndim == 2 and not any(t.shape[1] % ALIGNED for t in (left, right))
            if not k_first:
                left, right = _k_major(left, lhs.axis), _k_major(right, rhs.axis)
        case _:
            raise _unlike(lhs, rhs)
    if not k_first:
        left, right = (pad(t, t.ndim - 1, ALIGNED) for t in (left, right))
    return multiply_values(left, right, places, dtype, factors, k_first=k_first)


def _unlike(lhs: Prepared, rhs: Prepared) -> TypeError:
    return TypeError(f"two KernelOperand or two MXArray are needed, got {type(lhs)} and {type(rhs)}")


def _k_major(x: jax.Array, axis: int) -> jax.Array:
    return x if axis % x.ndim == x.ndim - 1 else x.swapaxes(-1, -2)


def _places(runs: Runs) -> Any:
    from mxjax.kernels.matmul.grouped import Places

    return Places(runs.experts, runs.starts, runs.ends, runs.run, runs.rows)


def _by_xla(
    lhs: Prepared, rhs: Prepared, factors: list, runs: Runs, precision: lax.PrecisionLike
) -> Float[Array, "..."]:
    """Returns the product in float32 without kernels."""
    match lhs, rhs:
        case KernelOperand(run_scales=jax.Array()), KernelOperand(run_scales=jax.Array()):
            left, right, precision = values_of_runs(lhs), values_of_runs(rhs), lax.Precision.HIGHEST
        case KernelOperand(), KernelOperand():
            left, right = (q.elements if q.scales is None else decode(q) for q in (lhs, rhs))
        case MXArray(), MXArray():
            left, right, precision = xla_operands(lhs, rhs, precision)
            left, right = _k_major(left, lhs.axis), _k_major(right, rhs.axis)
        case _:
            raise _unlike(lhs, rhs)
    of_rows = right.ndim == 3
    if of_rows:
        numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    else:
        numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [1], [])
    sizes = -(-runs.sizes // runs.run) * runs.run
    y = multiply_ragged(left, right, sizes, numbers, precision)
    for factor in factors:
        y = y * factor
    return runs.by_row(y) if of_rows else y
