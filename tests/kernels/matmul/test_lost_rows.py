"""Lost rows of an FP8 product that are left as they are, as what they lack does not show, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import parametrize

from mxjax.kernels.matmul.carry import carry_operands, rows_and_parts
from mxjax.kernels.matmul.fp8_matmul import correct
from mxjax.kernels.matmul.lost_rows import sift
from mxjax.operands.kernel_operand import KernelOperand, decode
from mxjax.runtime.devices import current_target

pytestmark = pytest.mark.usefixtures("kernels_run")

ROWS, COLUMNS = 70, 300


def operands(blocks: int, below: int) -> tuple[KernelOperand, KernelOperand]:
    """Returns operands without negative elements; every other row of the first lost its last block.

    That block is 2**below under the others.
    """
    rng = np.random.default_rng(0)
    elements = [rng.integers(0, 256, (1, n, 16 * blocks), np.uint8) & 0x77 for n in (ROWS, COLUMNS)]
    scales = [rng.integers(125, 129, (1, n, blocks), np.uint8) for n in (ROWS, COLUMNS)]
    scales[0][:, ::2, blocks - 1] -= below
    return tuple(KernelOperand(*map(jnp.asarray, q)) for q in zip(elements, scales, strict=True))


def carried(lhs: KernelOperand, rhs: KernelOperand):
    """Returns both operands in FP8."""
    return carry_operands(lhs.packed, rhs.packed, ("e5m2", "e4m3"), current_target(), grouped=True)


def corrected(y, lhs: KernelOperand, rhs: KernelOperand, in_fp8):
    """Returns what `correct` makes of y, and the factors [batch, m, n] of its elements."""
    got, rows, columns = correct(y, (*lhs.packed, *rhs.packed), *in_fp8, current_target())
    return got, np.asarray(rows, np.float64)[:, :, None] * np.asarray(columns, np.float64)[:, None, :]


def held_product(in_fp8):
    """Returns the product of what FP8 holds, in float64."""
    values = [np.asarray(q.elements, np.float64) for q in in_fp8]
    return values[0] @ values[1].swapaxes(1, 2)


def exact_product(lhs: KernelOperand, rhs: KernelOperand):
    values = [np.asarray(decode(q, jnp.float32), np.float64) for q in (lhs, rhs)]
    return values[0] @ values[1].swapaxes(1, 2)


@parametrize(  # a word has the flags of 32, 32 and 2 rows of so many blocks
    ("blocks", "dtype", "below", "bits"),
    *((2, "bfloat16", 60, 8), (6, "float32", 90, 24)),
    exhaustive=[(65, "bfloat16", 60, 8)],
)
def test_rows_are_left_where_the_lost_part_is_below_rounding(blocks, dtype, below, bits):
    lhs, rhs = operands(blocks, below)
    in_fp8 = carried(lhs, rhs)
    held = jnp.asarray(held_product(in_fp8), dtype)
    # Twice the product would be put right in a row that is recomputed.
    got, factors = corrected(2 * held, lhs, rhs, in_fp8)
    np.testing.assert_array_equal(got, 2 * held)
    error = abs(np.asarray(held, np.float64) * factors - exact_product(lhs, rhs))
    assert np.all(error <= 1.25 * 2.0**-bits * exact_product(lhs, rhs))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_with_an_element_of_little_but_the_lost_part_is_recomputed(dtype):
    """The last column meets zeros, but for lost elements; each of its lost rows is recomputed as a whole."""
    lhs, rhs = operands(6, 60 if dtype == "bfloat16" else 90)
    rhs = KernelOperand(rhs.elements.at[:, -1, : 16 * 5].set(0), rhs.scales)
    in_fp8 = carried(lhs, rhs)
    y = jnp.asarray(held_product(in_fp8), dtype)
    got, factors = corrected(y, lhs, rhs, in_fp8)
    assert not np.any(np.asarray(y)[:, ::2, -1])
    assert np.all(np.asarray(got)[:, ::2, -1])
    np.testing.assert_array_equal(got[:, 1::2], y[:, 1::2])
    exact = exact_product(lhs, rhs)[:, :, -1]
    error = abs(np.asarray(got, np.float64) * factors - exact_product(lhs, rhs))[:, :, -1]
    assert np.all(error <= 2.0 ** -(7 if dtype == "bfloat16" else 18) * exact)


@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16", 10), ("float16", 13), ("float32", 26)])
@pytest.mark.parametrize(("times", "kept"), [(0.98, True), (1.02, False)])
def test_an_element_may_lack_a_quarter_of_what_rounding_changes(dtype, bits, times, kept):
    left, right = carried(*operands(6, 40))
    largest = float(jnp.finfo(right.elements.dtype).max)
    y = jnp.full((1, ROWS, COLUMNS), 2.0**15, dtype)
    bound = float(left.lost_sum[0, 4]) * largest * 2.0**bits
    y = y.at[0, 4, 7].set(-times * bound)
    flags = sift(y, left, right, rows_and_parts(6)[0]).lost
    bit = flags[0, 0] >> 4 & 1
    assert bool(bit) == kept


def test_which_rows_are_kept_depends_on_the_dtype():
    """Parts lost at 2**-40 are below what bfloat16 shows, and above what float32 does."""
    left, right = carried(*operands(6, 40))
    y = jnp.full((1, ROWS, COLUMNS), 2.0**12)
    y = y.at[0, 4, 7].set(-(2.0**-20)).at[0, 6, 9].set(jnp.nan).at[0, 8, 1].set(-jnp.inf)

    def kept(y):
        bits = np.asarray(sift(y, left, right, rows_and_parts(6)[0]).lost)[..., None] >> np.arange(32) & 1
        return list(np.flatnonzero(bits))

    assert kept(y.astype(jnp.bfloat16)) == [4, 6]
    assert kept(y) == list(range(0, ROWS, 2))
