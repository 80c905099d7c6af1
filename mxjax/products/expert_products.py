"""Products of experts by kernels: one launch a GEMM, for any sizes of the experts.

Rows are quantized in runs (`mxjax.products.expert_runs`). The zeros that fill up runs change no result: each
expert's values are those that `mxjax.products.ragged` multiplies by "xla". Without kernels, XLA multiplies.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mxjax.numerics.array import MXArray
from mxjax.numerics.blocks import pad
from mxjax.operands.kernel_operand import KernelOperand, decode, values_of_runs
from mxjax.operands.use import OperandUse
from mxjax.products.draws import uses_of_policy
from mxjax.products.expert_groups import multiply_ragged
from mxjax.products.expert_runs import Runs, runs_of
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def matmul_experts(options: Options, unit: int, x, w, sizes, key) -> jax.Array:
    """Returns the Fprop of x [m, k], sorted by expert, and w [g, k, n]; its gradients are Dgrad and Wgrad.

    Args:
      unit: number of rows that divides a run.
      sizes: [g] int32, numbers of rows of the experts.
    """
    return _forward(options, unit, x, w, sizes, key, keep=False)[0]


def _matmul_fwd(options: Options, unit: int, x, w, sizes, key):
    y, packed = _forward(options, unit, x, w, sizes, key, keep=True)
    # What is packed is kept in place of the tensor.
    tensors = tuple(t if q is None else None for t, q in zip((x, w), packed, strict=True))
    return y, (tensors, packed, sizes, key)


def _matmul_bwd(options: Options, unit: int, residuals, dy):
    return (*_backward(options, unit, *residuals, dy), None, None)


matmul_experts.defvjp(_matmul_fwd, _matmul_bwd)


def _runs(options: Options, rows: int, unit: int, sizes: jax.Array) -> Runs:
    run = RUN_FP4 if {"triton", "aiter"} & set(options.gemms[:3]) else RUN
    return runs_of(sizes, rows, math.lcm(unit, run), rest=True)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="keep")
def _forward(options: Options, unit: int, x, w, sizes, key, *, keep: bool):
    """Returns y, and x and w as the backward GEMMs multiply them, where those take packed operands."""
    policy, gemms, dtypes, *_ = options
    x, w = first_order_only(x), first_order_only(w)
    runs = _runs(options, x.shape[0], unit, sizes)
    fprop, dgrad, wgrad = uses_of_policy(policy, gemms, key)
    x_uses = [fprop.lhs, wgrad.lhs] if keep and gemms.wgrad in KEPT else [fprop.lhs]
    w_uses = [fprop.rhs, dgrad.rhs] if keep and gemms.dgrad in KEPT else [fprop.rhs]
    lhs, *x_packed = _prepare(x, x_uses, runs)
    rhs, *w_packed = prepare(w, w_uses)
    y = _multiply(options, "fprop", dtypes[0], lhs, rhs, runs)
    return y, (x_packed[0] if x_packed else None, w_packed[0] if w_packed else None)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(options: Options, unit: int, tensors, packed, sizes, key, dy):
    """Returns the gradients dx and dw."""
    policy, gemms, dtypes, *_ = options
    dy = first_order_only(dy)
    x, w = (None if t is None else first_order_only(t) for t in tensors)
    x_columns, w_rows = packed
    runs = _runs(options, dy.shape[0], unit, sizes)
    _, dgrad, wgrad = uses_of_policy(policy, gemms, key)
    dy_rows, dy_columns = _prepare(dy, [dgrad.lhs, wgrad.rhs], runs)
    if w is not None:
        [w_rows] = prepare(w, [dgrad.rhs])
    if x is not None:
        [x_columns] = _prepare(x, [wgrad.lhs], runs)
    assert w_rows is not None
    assert x_columns is not None
    dx = _multiply(options, "dgrad", dtypes[1], dy_rows, w_rows, runs)
    return dx, _multiply(options, "wgrad", dtypes[2], x_columns, dy_columns, runs)


def _prepare(x: Float[Array, "m k"], uses: list[OperandUse], runs: Runs) -> Sequence[Prepared]:
    """Returns the rows of x in runs, as each GEMM multiplies them."""
    if current_target() is not None:
        from mxjax.kernels.quantize.filled import quantize_filled, takes_filled

        if takes_filled(x, uses, _places(runs)):
            return quantize_filled(x, uses, _places(runs))
    return prepare(runs.filled(x), uses)


def _multiply(
    options: Options, name: str, dtype: DTypeLike, lhs: Prepared, rhs: Prepared, runs: Runs
) -> Float[Array, "..."]:
    """Returns a GEMM's product in dtype.

    It is [m, n] of rows with their experts' rhs, in the order of x, or of each expert [g, m, n] where both
    operands have the rows along the contracted axis.
    """
    factors = [q.factor for q in (lhs, rhs) if q.factor is not None]
    in_kernel = dtype if dtype in (jnp.bfloat16, jnp.float32) else jnp.float32
    y = None if current_target() is None else _by_kernel(options, name, in_kernel, lhs, rhs, factors, runs)
    return (_by_xla(lhs, rhs, factors, runs, options.precision) if y is None else y).astype(dtype)


def _by_kernel(
    options: Options, name: str, dtype: DTypeLike, lhs: Prepared, rhs: Prepared, factors: list, runs: Runs
) -> Float[Array, "..."] | None:
    """Returns the product, or None if no kernel multiplies these operands here."""
    from mxjax.kernels.matmul.grouped import multiply_packed, multiply_values

    target, places, k_first = current_target(), _places(runs), False
    match lhs, rhs:
        case KernelOperand(scales=jax.Array()), KernelOperand(scales=jax.Array()):
            carriers = CARRIERS[name] if getattr(options.gemms, name) == "fp8_carriers" else None
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
