"""`Product`: the result of a GEMM as the matrix units leave it, and the contractions that make one."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from mxjax.numerics.scales import power_of_two
from mxjax.runtime.devices import current_target, on_gpu, platform


class Product(NamedTuple):
    """A product of two operands whose factors are not yet applied. Its value is raw * row * column factor.

    FP8 carriers leave a power of two for each row of either operand, FP8 tensors their scales. These factors
    are applied after the GEMM has stored its result, where XLA fuses them into its readers.

    Attributes:
      raw: [*batch, m, n], the GEMM's result.
      factors: factors of the rows and of the columns. From FP8 carriers without a prescale they are powers of
        two with exponents from -63 to 63. None means ones.
    """

    raw: Float[Array, "*batch m n"]
    factors: tuple[Float32[Array, "*#batch #m"], Float32[Array, "*#batch #n"]] | None = None

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

    def product(lhs, rhs):
        batch = tuple(range(lhs.ndim - 2))
        dims = (((lhs.ndim + lhs_axis,), (rhs.ndim + rhs_axis,)), (batch, batch))
        return lax.dot_general(lhs, rhs, dims, precision=precision, preferred_element_type=dtype)

    on_cpu = platform() == "cpu" and current_target() is None
    if on_cpu and lhs.dtype != dtype:
        return _without_folding(product, lhs_axis, rhs_axis)(lhs, rhs)
    return product(lhs, rhs)


Contraction = Callable[[jax.Array, jax.Array], jax.Array]


def _without_folding(product: Contraction, lhs_axis: int, rhs_axis: int) -> Contraction:
    """Returns a contraction into which XLA folds no transpose of the result, nor of what `jax.vmap` maps.

    XLA for CPUs cannot run the product of such a fold in bfloat16.
    """

    @jax.custom_batching.custom_vmap
    def contraction(lhs, rhs):
        return lax.optimization_barrier(product(lhs, rhs))

    @contraction.def_vmap
    def _(size, mapped, lhs, rhs):
        of_lhs, of_rhs = mapped
        again = _without_folding(product, lhs_axis, rhs_axis)
        if of_lhs and of_rhs:  # an axis of the batch
            return again(*lax.optimization_barrier((lhs, rhs))), True
        if of_lhs:
            y = again(_join_first(lhs, -3 - lhs_axis), rhs)
            return jnp.moveaxis(y.reshape(*y.shape[:-2], size, -1, y.shape[-1]), -3, 0), True
        y = again(lhs, _join_first(rhs, -3 - rhs_axis))
        return jnp.moveaxis(y.reshape(*y.shape[:-1], size, -1), -2, 0), True

    return contraction


def _join_first(x: Float[Array, "size ..."], axis: int) -> Float[Array, "..."]:
    """Returns x with its first axis joined to another, counted from the end."""
    shape = list(x.shape[1:])
    shape[axis] *= x.shape[0]
    return lax.optimization_barrier(jnp.moveaxis(x, 0, axis - 1).reshape(shape))


def contract_fp8(lhs: Float[Array, "..."], rhs: Float[Array, "..."], dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns lhs @ rhs.T of FP8 operands. Precision HIGHEST makes the GEMM accumulate in full float32."""
    return contract(lhs, -1, rhs, -1, lax.Precision.HIGHEST, dtype)


def contract_float32(
    lhs: Float32[Array, "..."], lhs_axis: int, rhs: Float32[Array, "..."], rhs_axis: int
) -> Float32[Array, "..."]:
    """Contracts two axes of float32 operands: on GPUs by matrix units, elsewhere in float32."""
    if on_gpu():
        return contract_by_halves(lhs, lhs_axis, rhs, rhs_axis)
    return contract(lhs, lhs_axis, rhs, rhs_axis, lax.Precision.HIGHEST)


def contract_often_short(
    compute: Callable[..., Float32[Array, "..."]],
    arrays: tuple[jax.Array, ...],
    lhs_axis: int,
    rhs: Float32[Array, "..."],
    rhs_axis: int,
) -> Float32[Array, "..."]:
    """Returns `contract_float32` of compute(*arrays), whose elements often have no more than 11 bits.

    Then the second of its two float16 tensors is zero. So on GPUs the product by that is a loop's, which runs
    once or not at all. `compute` is cheap: it runs wherever its result is read, and no float32 is written.
    """
    if not on_gpu():
        return contract_float32(compute(*arrays), lhs_axis, rhs, rhs_axis)
    left, left_rest, rows = _halves(compute(*arrays), lhs_axis)
    right, right_rest, columns = _halves(rhs, rhs_axis)
    left = lax.concatenate([left, left], left.ndim + lhs_axis)
    right = lax.concatenate([right, right_rest], right.ndim + rhs_axis)
    y = contract(left, lhs_axis, right, rhs_axis, lax.Precision.DEFAULT)

    def add_rest(state):
        times, y = state
        # Without the barrier XLA would multiply before the loop, whatever that does.
        times, again, *arrays_again = lax.optimization_barrier((times, rhs, *arrays))
        right, left_rest = _halves(again, rhs_axis)[0], _halves(compute(*arrays_again), lhs_axis)[1]
        return times - 1, y + contract(left_rest, lhs_axis, right, rhs_axis, lax.Precision.DEFAULT)

    times = jnp.any(left_rest != 0).astype(jnp.int32)
    _, y = lax.while_loop(lambda state: state[0] > 0, add_rest, (times, y))
    return _times_power_of_two(y, rows[..., :, None] + columns[..., None, :])


def contract_by_halves(
    lhs: Float32[Array, "..."], lhs_axis: int, rhs: Float32[Array, "..."], rhs_axis: int
) -> Float32[Array, "..."]:
    """Contracts two axes of float32 operands by one product of float16 operands three times as long.

    Each operand is the sum of two float16 tensors, times a power of two for each row that puts its largest
    magnitude in [2**14, 2**15); below 2**-112 it stays smaller. An element loses at most 2**-23 of itself or
    2**-39 of its row's largest magnitude. Of the four products the smallest is left out, at most 2**-22 of
    each term. Sums are the matrix units', whose error grows with the length as bfloat16's does.
    Infinities become NaN.
    Source: arXiv 2203.03341, section 3, which scales the second tensor where this scales rows.

    Args:
      lhs_axis: axis to contract, -1 or -2, as is `rhs_axis`; those before the last two are batch axes.
    """
    (left, left_rest, rows), (right, right_rest, columns) = _halves(lhs, lhs_axis), _halves(rhs, rhs_axis)
    left = lax.concatenate([left, left, left_rest], lhs.ndim + lhs_axis)
    right = lax.concatenate([right, right_rest, right], rhs.ndim + rhs_axis)
    y = contract(left, lhs_axis, right, rhs_axis, lax.Precision.DEFAULT)
    return _times_power_of_two(y, rows[..., :, None] + columns[..., None, :])


def _halves(x: Float32[Array, "..."], axis: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns two float16 tensors, and exponents for the rows: x is the sum times two to their power."""
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0.0)
    exponent = jnp.maximum((lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127 - 14, -126)
    scaled = _times_power_of_two(x, -exponent)
    # On GPUs XLA drops a conversion there and back, and with it the second tensor.
    high = lax.reduce_precision(scaled, exponent_bits=5, mantissa_bits=10)
    return high.astype(jnp.float16), (scaled - high).astype(jnp.float16), jnp.squeeze(exponent, axis)


def _times_power_of_two(x: Float32[Array, "*s"], exponent: Int32[Array, "*#s"]) -> Float32[Array, "*s"]:
    """Returns x * 2**exponent for exponents from -252 to 254, in two steps between x and the result."""
    return x * power_of_two(exponent // 2) * power_of_two(exponent - exponent // 2)
