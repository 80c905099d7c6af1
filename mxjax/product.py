"""`Product`: the result of a GEMM as the matrix units leave it, and the contractions that make one."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


class Product(NamedTuple):
    """A product of two operands, before its factors are applied. Its value is raw * row * column factor.

    FP8 carriers leave a power of two for each row of either operand. They are applied after the result is
    stored, where XLA fuses them into whatever reads it.

    Attributes:
      raw: [*batch, m, n].
      factors: the factors of the rows and of the columns: powers of two with exponents from -63 to 63; None
        for ones.
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
    """Returns the product over the two axes (negative), batched over axes before the last two."""
    batch = tuple(range(lhs.ndim - 2))
    dims = (((lhs.ndim + lhs_axis,), (rhs.ndim + rhs_axis,)), (batch, batch))
    return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)


def contract_fp8(lhs: Float[Array, "..."], rhs: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns lhs @ rhs.T of FP8 operands. HIGHEST accumulates in no fewer bits than float32 has."""
    return contract(lhs, -1, rhs, -1, lax.Precision.HIGHEST, dtype)
