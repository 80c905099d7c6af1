"""`ragged_dot`: the products of a mixture of experts, whose tokens are sorted by expert.

Each group of tokens is filled up with zeros to whole blocks and rotations, so that no block and no rotation
of Wgrad's operands spans two experts. Zeros change no result.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, Shaped

from mxjax.numerics.array import MXArray, dequantize
from mxjax.numerics.blocks import resolve_block_shape
from mxjax.numerics.formats import get_format
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import PER_COUNTER
from mxjax.operands.use import quantize_use
from mxjax.policy.policy import Policy
from mxjax.products.dot import check_floating, check_key, result_dtype
from mxjax.products.draws import uses_of_policy
from mxjax.products.expert_groups import Grid, Groups, multiply_groups
from mxjax.products.expert_products import matmul_experts, run_rows
from mxjax.products.expert_runs import runs_of
from mxjax.products.gradients import gradients_read_tensors
from mxjax.products.implementations import GemmImplementation, Implementation, implementations_of
from mxjax.products.linear import Options
from mxjax.products.multiply import xla_operands
from mxjax.products.prepare import as_read
from mxjax.recipes import as_policy
from mxjax.runtime.arguments import check_arrays
from mxjax.runtime.devices import current_target
from mxjax.runtime.mesh import on_auto_axes, varying_as
from mxjax.runtime.primitives import first_order_only, without_forward_mode

BY_KERNELS = ("fp8_carriers", "triton")
"""Implementations that multiply by grouped GEMMs of `mxjax.kernels`."""


def ragged_dot(
    x: Shaped[Array | np.ndarray, "m k"],
    w: Shaped[Array | np.ndarray, "g k n"],
    group_sizes: Integer[Array | np.ndarray, " g"],
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "m n"]:
    """Returns `jax.lax.ragged_dot(x, w, group_sizes)`, each of its three GEMMs in the policy's precision.

    The first `group_sizes[0]` rows of x are multiplied by `w[0]`, the next `group_sizes[1]` by `w[1]`, and so
    on. Each expert's products are those of `dot` on its rows. Formats with a scale for the whole tensor have
    one for all experts. Random bits are drawn for the padded tensor of all of them, whose layout differs
    between implementations.

    Args:
      x: activations, sorted by group. Rows past the sum of the sizes give zeros.
      w: weights of the experts. Pass float32 master weights, as in `dot`.
      group_sizes: numbers of rows, which may be zero. A numpy array is static, and checked; in a JAX array
        sizes that are negative or exceed x's rows are not noticed.
      implementation: "reference" and "xla" multiply by `jax.lax.ragged_dot_general`, which GPUs run as a
        product of all rows with all experts, on CPUs by a loop that multiplies each row once, and quantize
        without kernels. "fp8_carriers" and "triton" multiply as in `dot`, by one launch for all experts,
        whose rows are filled up to a multiple of 128 and of 256. None: on CUDA those of `dot` by kernels,
        whatever the policy; elsewhere "xla".
      Others: see `dot` and `jax.lax.ragged_dot`.
    Special values: rows of no expert are zero, whatever x has there. A NaN in the weights of one expert makes
      its rows NaN; on GPUs by "reference" and "xla" every row, as in `jax.lax.ragged_dot`.
    Raises:
      ValueError: static sizes that are negative or exceed x's rows.
      NotImplementedError: another implementation, or one that does not take the policy's formats. Others as
        in `dot`.
    """
    _check_arguments(x, w, group_sizes, implementation)
    policy = as_policy(policy)
    _check_policy(policy)
    check_floating(x, w, preferred_element_type)
    check_key(policy, key)
    x, w, sizes = jnp.asarray(x), jnp.asarray(w), jnp.asarray(group_sizes, jnp.int32)
    by_kernels, chosen = _choice(implementation)
    options = _options(x, w, policy, chosen, precision, preferred_element_type)
    dtype = options.dtypes[0]
    if not x.shape[0] or not w.shape[0]:
        return varying_as(jnp.zeros((x.shape[0], w.shape[2]), dtype), x, w, sizes, key)
    unit = row_unit(policy)
    x, w = without_forward_mode(x), without_forward_mode(w)

    def product(x, w, sizes, key):
        x, w = varying_as(x, w, sizes, key), varying_as(w, x, sizes, key)
        if by_kernels:
            result: jax.Array = matmul_experts(options, unit, None, x, w, Groups(sizes), key)
            return result
        runs = runs_of(sizes, x.shape[0], unit, rest=False)
        groups = Groups(-(-runs.sizes // unit) * unit)
        y: jax.Array = _matmul(options, None, runs.filled(x), w, groups, key)
        return runs.by_row(y)

    key = key if policy.needs_key else None
    return on_auto_axes(product, x, w, kept=((0,), (2,)))(x, w, sizes, key)


def ragged_dot_on_mesh(
    x: Float[Array, "m k"],
    w: Float[Array, "g k n"],
    groups: Callable[[int], Groups],
    grid: Grid,
    *,
    policy: Policy,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    preferred_element_type: DTypeLike,
) -> Float[Array, "m n"]:
    """Returns `ragged_dot` of rows and experts that the axes of `grid` shard, with the same values and bits.

    Args:
      x: rows as `groups` says, whose sizes are multiples of `row_unit` and of 8; others are zero.
      groups: a function of the unit in which random bits count the places of rows.
      Others: see `ragged_dot`. Kernels do not quantize rows for which random bits are drawn.
    Raises:
      NotImplementedError: a Wgrad that rounds stochastically in other runs of rows than whole ones of 8; see
        also `ragged_dot`.
    """
    _check_policy(policy)
    check_key(policy, key)
    check_on_mesh(policy)
    by_kernels, chosen = _choice(implementation)
    options = _options(x, w, policy, chosen, None, preferred_element_type)
    x, w = without_forward_mode(x), without_forward_mode(w)
    key, unit = key if policy.needs_key else None, row_unit(policy)
    if by_kernels:
        y: jax.Array = matmul_experts(options, unit, grid, x, w, groups(run_rows(options, unit)), key)
    else:
        y = _matmul(options, grid, x, w, groups(unit), key)
    return y


def _choice(implementation: Implementation | None) -> tuple[bool, Implementation | None]:
    """Returns whether kernels multiply, and the implementation of a policy's GEMMs."""
    by_kernels = implementation in BY_KERNELS or (implementation is None and _has_kernels())
    return by_kernels, implementation if by_kernels else implementation or "xla"


def check_on_mesh(policy: Policy) -> None:
    """Raises the errors of `ragged_dot_on_mesh` that `ragged_dot` does not raise."""
    draws_scales = any(o.eden for o in (policy.wgrad.lhs, policy.wgrad.rhs))
    if policy.wgrad.needs_key and (row_unit(policy) % PER_COUNTER or draws_scales):
        raise NotImplementedError(
            "experts on several devices need a Wgrad that draws random bits for blocks of whole "
            f"{PER_COUNTER} rows and not for scales, not {policy}; use another policy"
        )


def _options(x, w, policy, implementation, precision, dtype) -> Options:
    dtype = result_dtype(x, w) if dtype is None else jnp.dtype(dtype)
    gemms = implementations_of(policy, implementation)
    return Options(policy, gemms, (dtype, x.dtype, w.dtype), precision)


def _has_kernels() -> bool:
    """Whether grouped products by kernels are the default here; on HIP nobody has run them."""
    target = current_target()
    return target is not None and target.backend != "hip"


def _check_arguments(x: Any, w: Any, group_sizes: Any, implementation: object) -> None:
    """Raises the errors of arguments that no policy could multiply."""
    check_arrays("ragged_dot", x=x, w=w, group_sizes=group_sizes)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1] or group_sizes.shape != w.shape[:1]:
        shapes = f"{x.shape}, {w.shape} and {group_sizes.shape}"
        raise ValueError(f"ragged_dot needs x [m, k], w [g, k, n] and group_sizes [g], got {shapes}")
    if implementation not in (None, "reference", "xla", *BY_KERNELS):
        raise NotImplementedError(
            "ragged_dot runs by implementation 'reference', 'xla', 'fp8_carriers' or 'triton', "
            f"not {implementation!r}; use None"
        )
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"ragged_dot needs integer group_sizes, got {group_sizes.dtype}")
    sizes = group_sizes.tolist() if isinstance(group_sizes, np.ndarray) else []
    if sum(sizes) > len(x) or min(sizes, default=0) < 0:
        raise ValueError(
            "ragged_dot needs group_sizes of 0 or more that add up to at most the rows of x, "
            f"{len(x)}, got {sizes}, {sum(sizes)} in all"
        )


def _check_policy(policy: Policy) -> None:
    """Raises NotImplementedError if a product of the policy is more than that of its two operands."""
    if policy.delayed:
        raise NotImplementedError(
            f"ragged_dot takes no scales of earlier steps, as {', '.join(policy.delayed)} would have; "
            "use current scales, as 'fp8' does"
        )
    refused = []
    for name, gemm in policy.gemms.items():
        for side, operand in (("lhs", gemm.lhs), ("rhs", gemm.rhs)):
            if operand.split != "none":
                refused.append(f"{name}.{side}.split={operand.split!r}")
            if get_format(operand.format).is_vector:
                refused.append(f"{name}.{side}.format={operand.format!r}")
        if gemm.rotation and gemm.rotation.order != "given":
            refused.append(f"{name}.rotation.order={gemm.rotation.order!r}")
    if any(gradients_read_tensors(policy)):
        refused.append("gradients through the Fprop's quantization or rotation (gradient=, source=)")
    if refused:
        raise NotImplementedError(
            f"ragged_dot does not take the policy's {', '.join(refused)}; use mxjax.dot for each expert"
        )


def row_unit(policy: Policy) -> int:
    """Returns the number of rows that divides every group: whole blocks and rotations along the tokens."""

    def shape(operand: Operand) -> tuple[int, int]:
        return resolve_block_shape(get_format(operand.format), operand.block_shape, ndim=2, axis=-1)

    operands = policy.wgrad.lhs, policy.wgrad.rhs
    along = [shape(operand)[1] for operand in operands]
    along += [size for o in operands for size in (get_format(o.format).outer_block, o.eden or 0)]
    across = [shape(gemm.lhs)[0] for gemm in (policy.fprop, policy.dgrad)]
    rotation = policy.wgrad.rotation.size if policy.wgrad.rotation else 1
    return math.lcm(rotation, *(size or 1 for size in along + across))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(options: Options, grid: Grid | None, x, w, groups, key) -> jax.Array:
    """Returns the Fprop of x [m, k], whose groups have whole blocks, and w [g, k, n]."""
    return _forward(options, grid, x, w, groups, key)


def _matmul_fwd(options: Options, grid: Grid | None, x, w, groups, key):
    return _forward(options, grid, x, w, groups, key), (x, w, groups, key)


def _matmul_bwd(options: Options, grid: Grid | None, residuals, dy):
    return (*_backward(options, grid, *residuals, dy), None, None)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(options: Options, grid: Grid | None, x, w, groups, key) -> jax.Array:
    x, w = first_order_only(x), first_order_only(w)
    policy, gemms, dtypes, precision, *_ = options
    uses = groups.of(uses_of_policy(policy, gemms, key))
    lhs, rhs = quantize_use(x, uses.fprop.lhs), quantize_use(w, uses.fprop.rhs)
    return _multiply(gemms.fprop, precision, lhs, rhs, groups, grid).astype(dtypes[0])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(options: Options, grid: Grid | None, x, w, groups, key, dy) -> tuple[jax.Array, jax.Array]:
    policy, gemms, dtypes, precision, *_ = options
    x, w, dy = (first_order_only(t) for t in (x, w, dy))
    _, dgrad, wgrad = groups.of(uses_of_policy(policy, gemms, key))
    dy_rows, w_rows = quantize_use(dy, dgrad.lhs), quantize_use(as_read(w, dgrad.rhs), dgrad.rhs)
    x_columns, dy_columns = quantize_use(as_read(x, wgrad.lhs), wgrad.lhs), quantize_use(dy, wgrad.rhs)
    dx = _multiply(gemms.dgrad, precision, dy_rows, w_rows, groups, grid)
    dw = _multiply(gemms.wgrad, precision, x_columns, dy_columns, groups, grid)
    return dx.astype(dtypes[1]), dw.astype(dtypes[2])


def _multiply(
    implementation: GemmImplementation,
    precision: lax.PrecisionLike,
    lhs: MXArray,
    rhs: MXArray,
    groups: Groups,
    grid: Grid | None,
) -> jax.Array:
    """Returns the products of the groups: [m, n] if rhs has an axis of groups, else their sums [g, m, n]."""
    if implementation == "reference":
        left, right, precision = dequantize(lhs), dequantize(rhs), lax.Precision.HIGHEST
        factors = ()
    else:
        left, right, precision = xla_operands(lhs, rhs, precision)
        factors = lhs.factor, rhs.factor
    lhs_axis, rhs_axis = lhs.axis % left.ndim, rhs.axis % right.ndim
    grouped = right.ndim == 3
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((lhs_axis,), (rhs_axis,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0] if grouped else [],
    )
    y: jax.Array = multiply_groups(left, right, groups, grid, dims, precision)
    for factor in factors:
        y = y if factor is None else y * factor
    return y
