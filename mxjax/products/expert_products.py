"""Products of experts: by kernels in one launch a GEMM, for any sizes of the experts, or by XLA.

Rows are quantized in runs (`mxjax.products.expert_rows`). The zeros that fill up runs change no result, so
kernels and XLA multiply the same values. On a mesh each device puts its rows in runs and multiplies them; in
between, all are quantized as one array.
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

from mxjax.numerics.array import MXArray, dequantize
from mxjax.numerics.blocks import pad
from mxjax.operands.carriers import Carrier
from mxjax.operands.kernel_operand import KernelOperand, decode, values_of_runs
from mxjax.operands.use import OperandUse
from mxjax.products.draws import PolicyUses, uses_of_policy
from mxjax.products.expert_rows import Grid, Groups, Runs, multiply_ragged, runs_number, runs_of
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


class Experts(NamedTuple):
    """The static arguments of the products of experts; hashable.

    Attributes:
      options: those of a dense product, without a layout.
      unit: number of rows that divides a run.
      by_kernels: whether kernels quantize and multiply. Otherwise XLA does, of x with whole units of rows of
        each expert.
      grid: the mesh axes that shard x and w, or None.
    """

    options: Options
    unit: int
    by_kernels: bool
    grid: Grid | None = None

    @property
    def run(self) -> int:
        """The number of rows of a run."""
        if not self.by_kernels:
            return self.unit
        return math.lcm(self.unit, RUN_FP4 if {"triton", "aiter"} & set(self.options.gemms) else RUN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul_experts(experts: Experts, x, w, groups: Groups, key) -> jax.Array:
    """Returns the Fprop of x [m, k], sorted by expert, and w [g, k, n]; its gradients are Dgrad and Wgrad.

    Args:
      groups: int32 numbers of rows of the experts; on a grid of each device, with the places of rows in units
        of `experts.run`.
    """
    return _forward(experts, x, w, groups, key, keep=False)[0]


def _matmul_fwd(experts: Experts, x, w, groups: Groups, key):
    y, packed = _forward(experts, x, w, groups, key, keep=True)
    # What is packed is kept in place of the tensor.
    tensors = tuple(t if q is None else None for t, q in zip((x, w), packed, strict=True))
    return y, (tensors, packed, groups, key)


def _matmul_bwd(experts: Experts, residuals, dy):
    return (*_backward(experts, *residuals, dy), None, None)


matmul_experts.defvjp(_matmul_fwd, _matmul_bwd)


Kind = Literal["rows", "columns", "experts"]
"""What the mesh shards: a matrix's rows or columns, or experts, of which each has a matrix."""


class _Devices(NamedTuple):
    """The devices that multiply, each with runs of its own rows; without a grid there is one.

    Attributes:
      rows: rows of each device.
      sizes: rows of each expert, on a grid of each device's.
    """

    experts: Experts
    rows: int
    sizes: jax.Array

    @property
    def length(self) -> int:
        """The number of rows of each device's runs."""
        return self.experts.run * runs_number(self.rows, self.experts.run, self.sizes.shape[-1] + 1)

    def each(self, function: Callable[..., Any], arrays: Any, specs: Any, result: Any) -> Any:
        """Returns `function(runs, arrays)` of each device's shards."""
        _, _, by_kernels, grid = self.experts

        def of_device(sizes: jax.Array, arrays: Any) -> Any:
            return function(runs_of(sizes, self.rows, self.experts.run, rest=by_kernels), arrays)

        if grid is None:
            return of_device(self.sizes, arrays)
        mapped: Any = jax.shard_map(
            lambda sizes, arrays: of_device(sizes[0], arrays),
            in_specs=(PartitionSpec(grid.rows), specs),
            out_specs=result,
            # XLA's products may be sharded by the others, too.
            axis_names=set() if by_kernels else set(grid.rows),
            check_vma=False,
        )
        return mapped(self.sizes, arrays)

    def spec(self, kind: Kind) -> PartitionSpec:
        """Returns the sharding of a matrix by its rows or columns, or of experts' matrices by the expert."""
        grid = self.experts.grid
        if grid is None:
            return PartitionSpec()
        axes = cast(Any, grid.experts if kind == "experts" else grid.rows)
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
        """Returns the rows of x in each device's runs, in which XLA gets them."""
        if not self.experts.by_kernels:
            return x
        rows = self.spec("rows")
        y: jax.Array = self.each(lambda runs, x: runs.filled(x), x, rows, rows)
        return y

    def uses(self, places: jax.Array | None, key: jax.Array | None) -> PolicyUses:
        """Returns the uses of the policy's operands; random bits are those of the places of rows."""
        policy, gemms, *_ = self.experts.options
        in_runs = None if places is None or key is None else self.filled(places[:, None])[:, 0]
        return Groups(self.sizes, in_runs).of(uses_of_policy(policy, gemms, key))


def _devices(experts: Experts, rows: int, groups: Groups) -> _Devices:
    shards = 1 if experts.grid is None else groups.sizes.shape[0]
    return _Devices(experts, rows // shards, groups.sizes)


@functools.partial(jax.jit, static_argnums=0, static_argnames="keep")
def _forward(experts: Experts, x, w, groups, key, *, keep: bool):
    """Returns y, and x and w as the backward GEMMs multiply them, where those take packed operands."""
    x, w = first_order_only(x), first_order_only(w)
    devices = _devices(experts, x.shape[0], groups)
    fprop, dgrad, wgrad = devices.uses(groups.places, key)
    x_uses = [fprop.lhs, wgrad.lhs] if keep and wgrad.lhs.is_small else [fprop.lhs]
    w_uses = [fprop.rhs, dgrad.rhs] if keep and dgrad.rhs.is_small else [fprop.rhs]
    lhs, *x_packed = _prepare(x, x_uses, devices)
    rhs, *w_packed = prepare(w, w_uses)
    y = _multiply(devices, "fprop", experts.options.dtypes[0], lhs, rhs)
    return y, (x_packed[0] if x_packed else None, w_packed[0] if w_packed else None)


@functools.partial(jax.jit, static_argnums=0)
def _backward(experts: Experts, tensors, packed, groups, key, dy):
    """Returns the gradients dx and dw."""
    dtypes, dy = experts.options.dtypes, first_order_only(dy)
    x, w = (None if t is None else first_order_only(t) for t in tensors)
    x_columns, w_rows = packed
    devices = _devices(experts, dy.shape[0], groups)
    _, dgrad, wgrad = devices.uses(groups.places, key)
    dy_rows, dy_columns = _prepare(dy, [dgrad.lhs, wgrad.rhs], devices)
    if w is not None:
        [w_rows] = prepare(w, [dgrad.rhs])
    if x is not None:
        [x_columns] = _prepare(x, [wgrad.lhs], devices)
    assert w_rows is not None
    assert x_columns is not None
    dx = _multiply(devices, "dgrad", dtypes[1], dy_rows, w_rows)
    return dx, _multiply(devices, "wgrad", dtypes[2], x_columns, dy_columns)


def _prepare(x: Float[Array, "m k"], uses: list[OperandUse], devices: _Devices) -> Sequence[Prepared]:
    """Returns the rows of x in runs, as each GEMM multiplies them."""
    if devices.experts.by_kernels and current_target() is not None:
        from mxjax.kernels.quantize.filled import quantize_filled, takes_filled

        if takes_filled(x, uses, devices.experts.run, devices.length):
            specs = [devices.spec("rows"), devices.spec("columns")]

            def fill(runs: Runs, x: jax.Array) -> list[KernelOperand]:
                return quantize_filled(x, uses, _places(runs))

            filled: list[KernelOperand] = devices.each(fill, x, devices.spec("rows"), specs)
            return filled
    return prepare(devices.filled(x), uses)


def _multiply(
    devices: _Devices, name: str, dtype: DTypeLike, lhs: Prepared, rhs: Prepared
) -> Float[Array, "..."]:
    """Returns a GEMM's product in dtype.

    It is [m, n] of rows with their experts' rhs, in the order of x, or of each expert [g, m, n] where both
    operands have the rows along the contracted axis. Devices with the same experts add theirs in float32.
    """
    options, _, by_kernels, grid = devices.experts
    of_rows = name != "wgrad"
    factors = [jnp.asarray(q.factor, jnp.float32) for q in (lhs, rhs) if q.factor is not None]
    summed = () if grid is None or of_rows else tuple(a for a in grid.rows if a != grid.experts)
    in_kernel = dtype if dtype in (jnp.bfloat16, jnp.float32) and not summed else jnp.float32

    def multiply(runs: Runs, arrays: tuple[list[jax.Array], list[jax.Array], list[jax.Array]]) -> jax.Array:
        lhs, rhs = (jax.tree.unflatten(t, leaves) for t, leaves in zip(trees, arrays[:2], strict=True))
        factors, y = arrays[2], None
        if by_kernels and current_target() is not None:
            y = _by_kernel(options, name, in_kernel, lhs, rhs, factors, runs)
        if y is None:
            y = _by_xla(devices.experts, lhs, rhs, factors, runs)
            y = runs.by_row(y) if of_rows and by_kernels else y
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


def _by_xla(experts: Experts, lhs: Prepared, rhs: Prepared, factors: list, runs: Runs) -> Float[Array, "..."]:
    """Returns the product in float32 without kernels, with rows in runs."""
    precision = experts.options.precision
    match lhs, rhs:
        case KernelOperand(run_scales=jax.Array()), KernelOperand(run_scales=jax.Array()):
            left, right, precision = values_of_runs(lhs), values_of_runs(rhs), lax.Precision.HIGHEST
        case KernelOperand(), KernelOperand():
            left, right = (q.elements if q.scales is None else decode(q) for q in (lhs, rhs))
        case MXArray(), MXArray() if "reference" in experts.options.gemms:
            left, right, precision, factors = dequantize(lhs), dequantize(rhs), lax.Precision.HIGHEST, []
        case MXArray(), MXArray():
            left, right, precision = xla_operands(lhs, rhs, precision)
        case _:
            raise _unlike(lhs, rhs)
    lhs_axis, rhs_axis = (getattr(q, "axis", -1) % t.ndim for q, t in ((lhs, left), (rhs, right)))
    if experts.by_kernels:  # K-major, as their operands are
        left, right = _k_major(left, lhs_axis), _k_major(right, rhs_axis)
        lhs_axis, rhs_axis = 1, right.ndim - 1
    of_rows = right.ndim == 3
    contracted = ((lhs_axis,), (rhs_axis,)), ((), ())
    numbers = lax.RaggedDotDimensionNumbers(contracted, [0 if of_rows else lhs_axis], [0] if of_rows else [])
    y = multiply_ragged(left, right, -(-runs.sizes // runs.run) * runs.run, numbers, precision)
    for factor in factors:
        y = y * factor
    return y
