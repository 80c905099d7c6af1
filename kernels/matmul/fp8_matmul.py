"""Products of packed MXFP4 operands on FP8 matrix units: exact in FP8 carriers, else recomputed by a kernel.

Whether FP8 represents the operands exactly is known only at run time. XLA's FP8 GEMM always runs.
`sift_kernel` then finds the rows in which what was lost is below rounding, and `correct_kernel` multiplies
the others that lost elements alone, so that the cost is in proportion to their number. The XLA program
needs no branch, which would copy its inputs and outputs.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, UInt8

from mxjax.kernels.matmul.carry import carry_operands
from mxjax.kernels.matmul.correct import correct
from mxjax.kernels.matmul.fp4_gemm import (
    batched,
    check_operands,
    multiply_flat,
)
from mxjax.operands.carriers import Carrier
from mxjax.operands.product import Product, contract_fp8
from mxjax.runtime.devices import Target, current_target


def matmul(
    lhs: UInt8[Array, "*batch m _"],
    lhs_scales: UInt8[Array, "*batch m _"],
    rhs: UInt8[Array, "*batch n _"],
    rhs_scales: UInt8[Array, "*batch n _"],
    dtype: DTypeLike,
    carriers: tuple[Carrier, Carrier],
) -> Product:
    """Returns lhs @ rhs.T of packed MXFP4 operands, as `fp4_gemm.matmul` does, on FP8 matrix units.

    Of lhs in E5M2, with K up to 8,192, a row that lost elements is recomputed only if a result may lack
    more than 2**-10 of itself for it in bfloat16, 2**-13 in float16 or 2**-26 in float32; where K is
    sharded, a shard's result, in float32. A recomputed result may become zero if it is below 2**-126 times
    the factors of its row and column. A row's factor is 2**-6 (E4M3) or 2**-13 (E5M2) of its largest scale,
    but from 2**-63 to 2**63.

    Args:
      dtype: dtype of the product before its factors are applied.
      carriers: carriers of lhs and of rhs.

    Raises:
      ValueError: shapes that do not match.
    """
    check_operands(lhs, lhs_scales, rhs, rhs_scales)
    if 0 in (*lhs.shape, *rhs.shape):
        return Product(jnp.zeros((*lhs.shape[:-1], rhs.shape[-2]), dtype))
    run = _matmul(jnp.dtype(dtype), carriers, current_target())
    y, rows, columns = multiply_flat(run, lhs, lhs_scales, rhs, rhs_scales)
    return Product(y, (rows, columns))


@functools.cache
def _matmul(dtype, carriers: tuple[Carrier, Carrier], target: Target | None) -> Callable:
    """Returns the product as a function. JAX caches its trace, hence a separate function for each target."""
    part = functools.partial(_part, dtype=dtype, carriers=carriers, target=target)
    return batched(part, "b m n, b m, b n")


def _part(lhs, lhs_scales, rhs, rhs_scales, *, dtype, carriers, target, summed_over):
    """Returns the product of operands [batch, rows, …] and the factors of its rows and columns.

    Where k is sharded the factors are ones, because each shard has its own and applies them before the sum.
    """
    # Of training's operands Dgrad's gradient, which is lhs in E5M2, loses rows; Wgrad's was once seen to.
    grouped = carriers[0] == "e5m2"
    left, right = carry_operands((lhs, lhs_scales), (rhs, rhs_scales), carriers, target, grouped)
    y = _contract(left.elements, right.elements, jnp.dtype(jnp.float32) if summed_over else dtype)
    y, rows, columns = correct(y, (lhs, lhs_scales, rhs, rhs_scales), left, right, target)
    if not summed_over:
        return [y, rows, columns]
    y = lax.psum(Product(y, (rows, columns)).value(jnp.float32), summed_over).astype(dtype)
    return [y, jnp.ones_like(rows), jnp.ones_like(columns)]


def _contract(left, right, dtype):
    """Returns left @ right.T, batched."""
    if left.shape[0] == 1:  # without a batch axis XLA recognizes the FP8 GEMM
        return contract_fp8(left[0], right[0], dtype)[None]
    return contract_fp8(left, right, dtype)
