"""Lost rows of an FP8 product that are left as they are, as what they lack does not show, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from mxjax.devices import current_target
from mxjax.kmajor import KMajor, decode

pytestmark = pytest.mark.usefixtures("kernels_run")

ROWS, COLUMNS = 70, 300


def operands(blocks: int, below: int) -> tuple[KMajor, KMajor]:
    """Returns operands without negative elements; every other row of the first lost its last block.

    That block is 2**below under the others.
    """
    rng = np.random.default_rng(0)
    elements = [rng.integers(0, 256, (1, n, 16 * blocks), np.uint8) & 0x77 for n in (ROWS, COLUMNS)]
    scales = [rng.integers(125, 129, (1, n, blocks), np.uint8) for n in (ROWS, COLUMNS)]
    scales[0][:, ::2, blocks - 1] -= below
    return tuple(KMajor(*map(jnp.asarray, q)) for q in zip(elements, scales, strict=True))


def corrected(lhs: KMajor, rhs: KMajor, dtype):
    """Returns the product of what FP8 holds, what `correct` makes of it, and the exact one before factors."""
    from mxjax.kernels.matmul.carry import carry_operand
    from mxjax.kernels.matmul.correct import correct

    left = carry_operand(*lhs.packed, "e5m2", current_target(), grouped=True)
    right = carry_operand(*rhs.packed, "e4m3", current_target())
    values = [np.asarray(q.elements, np.float64) for q in (left, right)]
    y = jnp.asarray(values[0] @ values[1].swapaxes(1, 2), dtype)
    got, rows, columns = correct(y, (*lhs.packed, *rhs.packed), left, right, current_target())
    exact = [np.asarray(decode(q, jnp.float32), np.float64) for q in (lhs, rhs)]
    factors = np.asarray(rows, np.float64)[:, :, None] * np.asarray(columns, np.float64)[:, None, :]
    return y, got, exact[0] @ exact[1].swapaxes(1, 2) / factors


@pytest.mark.parametrize("blocks", [2, 6, 65])  # of which a word has the flags of 32, 32 and 2 rows
@pytest.mark.parametrize(("dtype", "below", "bits"), [("bfloat16", 60, 8), ("float32", 90, 24)])
def test_rows_are_left_where_the_lost_part_is_below_rounding(blocks, dtype, below, bits):
    lhs, rhs = operands(blocks, below)
    y, got, exact = corrected(lhs, rhs, dtype)
    np.testing.assert_array_equal(got, y)
    assert np.all(abs(np.asarray(got, np.float64) - exact) <= 1.25 * 2.0**-bits * abs(exact))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_with_an_element_of_little_but_the_lost_part_is_recomputed(dtype):
    """The last column meets zeros, but for lost elements; each of its lost rows is recomputed as a whole."""
    lhs, rhs = operands(6, 60 if dtype == "bfloat16" else 90)
    rhs = KMajor(rhs.elements.at[:, -1, : 16 * 5].set(0), rhs.scales)
    y, got, exact = corrected(lhs, rhs, dtype)
    assert not np.any(np.asarray(y)[:, ::2, -1])
    np.testing.assert_array_equal(got[:, 1::2], y[:, 1::2])
    bound = 2.0 ** -(7 if dtype == "bfloat16" else 18) * abs(exact)
    assert np.all(abs(np.asarray(got, np.float64) - exact)[:, :, -1] <= bound[:, :, -1])
    assert np.all(np.asarray(got)[:, ::2, -1])


def test_which_rows_are_kept_depends_on_the_dtype():
    """Parts lost at 2**-40 are below what bfloat16 shows, and above what float32 does."""
    from mxjax.kernels.matmul.carry import carry_operand, rows_and_parts
    from mxjax.kernels.matmul.sift import sift

    lhs, rhs = operands(6, 40)
    left = carry_operand(*lhs.packed, "e5m2", current_target(), grouped=True)
    right = carry_operand(*rhs.packed, "e4m3", current_target())
    y = jnp.full((1, ROWS, COLUMNS), 2.0**12)
    y = y.at[0, 4, 7].set(-(2.0**-20)).at[0, 6, 9].set(jnp.nan).at[0, 8, 1].set(-jnp.inf)

    def kept(y):
        bits = np.asarray(sift(y, left, right, rows_and_parts(6)[0]).lost)[..., None] >> np.arange(32) & 1
        return list(np.flatnonzero(bits))

    assert kept(y.astype(jnp.bfloat16)) == [4, 6]
    assert kept(y) == list(range(0, ROWS, 2))
