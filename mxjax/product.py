"""`Product`: the result of a GEMM as the matrix units leave it, and the contractions that make one."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


class Product(NamedTuple):
    """A product of two operands whose factors are not yet applied. Its value is raw * row * column factor.

    FP8 carriers leave a power of two for each row of either operand. These factors are applied after the GEMM
    has stored its result, where XLA fuses them into its readers.

    Attributes:
      raw: [*batch, m, n], the GEMM's result.
      factors: factors of the rows and of the columns, powers of two with exponents from -63 to 63. None
        means ones.
    """

    raw: Float[Array, "*batch m n"]
    factors: tuple[Float32[Array, "*batch m"], Float32[Array, "*batch n"]] | None = None

    def value(self, dtype: DTypeLike) -> Float[Array, "*batch m n"]:
        """Returns the product in dtype."""
        if self.factors is None:
            return self.raw.astype(dtype)
        rows, columns = self.factors
        return (self.raw.astype(jnp.float32) * (rows[..., :, None] * columns[..., None, :])).astype(dtype)


def contract(
    lhs: Float[Array, "..."],
    lhs_axis: int,
    rhs: Float[Array, "..."],
    rhs_axis: int,
    precision: lax.PrecisionLike,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "..."]:
    """Contracts two axes, counted from the end; axes before the last two are batch axes."""
    batch = tuple(range(lhs.ndim - 2))
    dims = (((lhs.ndim + lhs_axis,), (rhs.ndim + rhs_axis,)), (batch, batch))
    return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)


def contract_fp8(lhs: Float[Array, "..."], rhs: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns lhs @ rhs.T of FP8 operands. Precision HIGHEST makes the GEMM accumulate in full float32."""
    return contract(lhs, -1, rhs, -1, lax.Precision.HIGHEST, dtype)
