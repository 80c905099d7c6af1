"""`ragged_dot`: the products of a mixture of experts, whose tokens are sorted by expert.

Each group of tokens is filled up with zeros to whole blocks and rotations, so that no block and no rotation
of Wgrad's operands spans two experts. Zeros change no result.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, Shaped

from mxjax.numerics.blocks import resolve_block_shape
from mxjax.numerics.formats import get_format
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import PER_COUNTER
from mxjax.policy.policy import Policy
from mxjax.products.dot import check_floating, check_key, result_dtype
from mxjax.products.expert_products import Experts, matmul_experts
from mxjax.products.expert_rows import Grid, Groups, runs_of
from mxjax.products.gradients import gradients_read_tensors
from mxjax.products.implementations import (
    GemmImplementation,
    GemmImplementations,
    Implementation,
    implementations_of,
)
from mxjax.products.linear import Options
from mxjax.recipes import as_policy
from mxjax.runtime.arguments import check_arrays
from mxjax.runtime.devices import current_target
from mxjax.runtime.mesh import on_auto_axes, varying_as
from mxjax.runtime.primitives import without_forward_mode

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
    experts = _experts(x, w, policy, implementation, precision, preferred_element_type)
    if not x.shape[0] or not w.shape[0]:
        zeros = jnp.zeros((x.shape[0], w.shape[2]), experts.options.dtypes[0])
        return varying_as(zeros, x, w, sizes, key)
    x, w = without_forward_mode(x), without_forward_mode(w)

    def product(x, w, sizes, key):
        x, w = varying_as(x, w, sizes, key), varying_as(w, x, sizes, key)
        if experts.by_kernels:
            y: jax.Array = matmul_experts(experts, x, w, Groups(sizes), key)
            return y
        runs = runs_of(sizes, x.shape[0], experts.unit, rest=False)
        groups = Groups(-(-runs.sizes // runs.run) * runs.run)
        return runs.by_row(matmul_experts(experts, runs.filled(x), w, groups, key))

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
    experts = _experts(x, w, policy, implementation, None, preferred_element_type, grid)
    x, w = without_forward_mode(x), without_forward_mode(w)
    return matmul_experts(experts, x, w, groups(experts.run), key if policy.needs_key else None)


def check_on_mesh(policy: Policy) -> None:
    """Raises the errors of `ragged_dot_on_mesh` that `ragged_dot` does not raise."""
    draws_scales = any(o.eden for o in (policy.wgrad.lhs, policy.wgrad.rhs))
    if policy.wgrad.needs_key and (row_unit(policy) % PER_COUNTER or draws_scales):
        raise NotImplementedError(
            "experts on several devices need a Wgrad that draws random bits for blocks of whole "
            f"{PER_COUNTER} rows and not for scales, not {policy}; use another policy"
        )


def _experts(
    x, w, policy: Policy, implementation: Implementation | None, precision, dtype, grid: Grid | None = None
) -> Experts:
    dtype = result_dtype(x, w) if dtype is None else jnp.dtype(dtype)
    by_kernels = implementation in BY_KERNELS or (implementation is None and _has_kernels())
    gemm: GemmImplementation = implementation or "xla"
    gemms = GemmImplementations(gemm, gemm, gemm)
    if by_kernels:
        gemms = implementations_of(policy, implementation)
    options = Options(policy, gemms, (dtype, x.dtype, w.dtype), precision)
    return Experts(options, row_unit(policy), by_kernels, grid)


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
    rows = x.shape[0]  # an int, or a symbol under jax.export
    if min(sizes, default=0) < 0 or (isinstance(rows, int) and sum(sizes) > rows):
        raise ValueError(
            "ragged_dot needs group_sizes of 0 or more that add up to at most the rows of x, "
            f"{rows}, got {sizes}, {sum(sizes)} in all"
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
