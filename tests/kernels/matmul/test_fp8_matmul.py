"""Products by FP8 matrix units, put right where FP8 does not hold the operands, against float64."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import parametrize

from mxjax.kernels.matmul import fp8_matmul
from mxjax.kernels.matmul.carry import carry_operand
from mxjax.operands.carriers import group_of
from mxjax.operands.kernel_operand import KernelOperand, decode
from mxjax.runtime.devices import current_target

pytestmark = pytest.mark.usefixtures("kernels_run")

CARRIERS = ("e4m3", "e5m2")
TURNED = CARRIERS[::-1]


def operand(seed: int, shape: tuple[int, ...], span: int, middle: int = 127) -> KernelOperand:
    """Returns a packed operand of [*batch, n, blocks], whose scales span so many binades in each row."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, (*shape, 16), np.uint8)
    scales = rng.integers(middle - span // 2, middle - span // 2 + span, shape).astype(np.uint8)
    return KernelOperand(jnp.asarray(elements.reshape(*shape[:-1], -1)), jnp.asarray(scales))


def product(lhs: KernelOperand, rhs: KernelOperand, dtype=jnp.float32, carriers=CARRIERS):
    return fp8_matmul.matmul(lhs.elements, lhs.scales, rhs.elements, rhs.scales, dtype, carriers).value(dtype)


@jax.jit
def decoded(q: KernelOperand):
    return decode(q, jnp.float32)


def exact(lhs: KernelOperand, rhs: KernelOperand):
    """Returns the product in float64, and what bounds the error of sums in float32, or in Hopper's FP8 units.

    Those align 32 products at a time, and keep 13 bits. An element that FP8 does not hold is off by more.
    """
    left, right = (np.asarray(decoded(q)).astype(np.float64) for q in (lhs, rhs))
    right = right.swapaxes(-1, -2)
    target = current_target()
    native = target is not None and target.backend != "interpreter"
    relative = 2.0**-11 if native else left.shape[-1] * 2.0**-24
    return left @ right, relative * (abs(left) @ abs(right))


def assert_right(got, lhs, rhs):
    wanted, bound = exact(lhs, rhs)
    if got.dtype == jnp.bfloat16:
        bound = bound + 2.0**-8 * abs(wanted)
    got = np.asarray(got, np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    known = ~np.isnan(wanted)
    assert np.all(abs(got - wanted)[known] <= bound[known])


def without(q: KernelOperand, block: int) -> KernelOperand:
    """Returns an operand with zeros in a block of each row: what meets it does not count."""
    elements = np.array(q.elements)
    elements[..., 16 * block : 16 * block + 16] = 0
    return KernelOperand(jnp.asarray(elements), q.scales)


def raised(q: KernelOperand, *places_and_binades) -> KernelOperand:
    """Returns an operand with blocks so many binades higher, by numpy, which compiles nothing."""
    scales = np.array(q.scales)
    for place, binades in places_and_binades:
        scales[place] += np.uint8(binades)
    return KernelOperand(q.elements, jnp.asarray(scales))


@parametrize(
    ("far", "side", "carriers"),
    *((10, 0, CARRIERS), (10, 1, TURNED), (100, 1, CARRIERS), (100, 0, TURNED)),
    slow=[(0, 1, CARRIERS), (40, 0, CARRIERS), (40, 1, TURNED)],
)
def test_elements_that_fp8_does_not_hold_are_multiplied_right(far, side, carriers):
    """The block that is far above the others of its row meets zeros, so that the others are all there is."""
    operands = [operand(0, (150, 4), 4), operand(1, (140, 4), 4)]
    above, other = operands[side], operands[1 - side]
    operands[side] = raised(above, (np.s_[:, 0], far))
    operands[1 - side] = without(other, 0)
    assert_right(product(*operands, carriers=carriers), *operands)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("middles", [(20, 20), (90, 20), (240, 20), (20, 240), (180, 185)], ids=str)
def test_every_exponent_of_rows_is_given_back(middles, lost):
    lhs, rhs = (operand(i, (9, 2), 8, middle) for i, middle in enumerate(middles))
    if lost:
        scales = np.array(lhs.scales)
        scales[4] = middles[0] + 10, middles[0] - 15
        lhs, rhs = KernelOperand(lhs.elements, jnp.asarray(scales)), without(rhs, 0)
    wanted, bound = exact(lhs, rhs)
    got = np.asarray(product(lhs, rhs), np.float64)
    normal = abs(wanted) < 2.0**127
    assert np.all(abs(got - wanted)[normal] <= bound[normal] + 2.0**-126)  # CPUs flush what is below to zero
    assert np.all(np.isinf(got[abs(wanted) > 2.0**128]))


def wild(rng: np.random.Generator, shape: tuple[int, ...]) -> KernelOperand:
    """Returns an operand of [*batch, n, blocks] of any scales: fitting rows, heads, jumps, zeros and NaN."""
    elements = rng.integers(0, 256, (*shape, 16), np.uint8)
    elements[rng.random(shape) < 0.2] = 0
    middle, span = rng.integers(40, 210), rng.choice([1, 4, 16, 30, 41, 100])
    scales = middle + rng.integers(0, span, shape)
    heads = rng.integers(0, rng.choice([1, 40, 100]), (*shape[:-1], -(-shape[-1] // 2)))
    scales -= np.repeat(heads, 2, axis=-1)[..., : shape[-1]]
    jumps = (rng.random((*shape[:-1], 1)) < rng.choice([0, 0.05, 0.5, 1])) & (rng.random(shape) < 0.5)
    scales = np.clip(scales + jumps * rng.choice([-40, 16, 30, 40]), 3, 251)
    scales[rng.random(shape) < rng.choice([0, 0.02])] = 255
    return KernelOperand(jnp.asarray(elements.reshape(*shape[:-1], -1)), jnp.asarray(scales.astype(np.uint8)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(12))
def test_any_scales_are_multiplied_right(seed):
    """Only results that are subnormal before the factors may become zero, and only sums overflow."""
    rng = np.random.default_rng(seed)
    batch = [(), (2,), (2, 3)][seed % 3]
    m, n = rng.integers(1, 40 if batch else 150, 2)
    blocks = rng.choice([1, 2, 3, 8, 33, 34])
    lhs, rhs = (wild(rng, (*batch, length, blocks)) for length in (m, n))
    carriers = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")][rng.integers(3)]
    got = fp8_matmul.matmul(*lhs.packed, *rhs.packed, jnp.float32, carriers)
    rows, columns = (np.asarray(t, np.float64) for t in got.factors)
    wanted, bound = exact(lhs, rhs)
    left, right = (abs(np.asarray(decode(q), np.float64)) for q in (lhs, rhs))
    known = left @ right.swapaxes(-1, -2) < 2.0**127  # neither NaN nor a sum that overflows
    smallest = 32 * blocks * 2.0**-126 * np.maximum(rows[..., :, None] * columns[..., None, :], 1)
    error = abs(np.asarray(got.value(jnp.float32), np.float64) - wanted)
    assert np.all(error[known] <= bound[known] + smallest[known])
    assert np.all(np.isnan(np.asarray(got.raw, np.float32))[np.isnan(wanted)])


def test_rows_of_other_magnitudes_are_held():
    """A tensor may span what FP8 does not, as long as each of its rows does not."""
    lhs, rhs = operand(2, (64, 3), 4), operand(3, (64, 3), 4)
    lhs = raised(lhs, (..., np.arange(64)[:, None]))
    assert not np.any(carry_operand(lhs.elements[None], lhs.scales[None], "e4m3", current_target()).lost)
    assert_right(product(lhs, rhs), lhs, rhs)


@pytest.mark.parametrize("span", [6, 40])
@pytest.mark.parametrize(
    ("dtype", "carriers"),
    [(jnp.float32, CARRIERS), (jnp.bfloat16, CARRIERS), (jnp.bfloat16, ("e5m2", "e4m3"))],
    ids=["float32", "bfloat16", "two"],
)
def test_nan_and_zero_blocks_whether_held_or_not(span, dtype, carriers):
    lhs, rhs = operand(4, (20, 5), span), operand(5, (30, 5), 6)
    elements = np.array(lhs.elements).reshape(20, 5, 16)
    scales = np.array(lhs.scales)
    elements[3], scales[3] = 0, 0  # a row
    elements[4, 1], scales[4, 1] = 0, 0  # a block
    scales[5, 2] = scales[6] = 255
    lhs = KernelOperand(jnp.asarray(elements.reshape(20, 80)), jnp.asarray(scales))
    rhs = KernelOperand(rhs.elements, rhs.scales.at[7, 0].set(255))
    got = product(lhs, rhs, dtype, carriers)
    assert got.dtype == dtype
    nan = np.zeros((20, 30), bool)
    nan[5] = nan[6] = nan[:, 7] = True
    np.testing.assert_array_equal(np.isnan(got), nan)
    assert not np.any(np.asarray(got, np.float32)[3, np.arange(30) != 7])
    assert_right(got, lhs, rhs)


LOST = [  # m, n, blocks; (batch, row) of lhs and of rhs that are lost
    ((300, 140, 3), [(0, 130)], []),
    ((300, 140, 3), [(0, 0), (0, 299)], []),
    ((140, 300, 3), [], [(0, 127), (0, 256)]),
    ((300, 290, 3), [(0, 200)], [(0, 20)]),
    ((256, 140, 2), [(0, 128)], []),
    ((260, 140, 3), [(0, 259), (2, 5)], [(2, 139)]),
    ((130, 5, 257), [(0, 129)], []),  # rows that several programs carry
    ((700, 300, 64), [(0, row) for row in range(3, 700, 17)], [(0, 5), (0, 290)]),  # several tiles of them
]


def correct_poison(left, right, lhs: KernelOperand, rhs: KernelOperand):
    """Returns where `correct` overwrites [batch, m, n], and what it writes there, times the factors."""
    poison = jnp.full((*lhs.scales.shape[:2], rhs.scales.shape[1]), 1e-30)
    packed = (lhs.elements, lhs.scales, rhs.elements, rhs.scales)
    y, rows, columns = fp8_matmul.correct(poison, packed, left, right, current_target())
    rows, columns = (np.asarray(t, np.float64) for t in (rows, columns))
    return np.asarray(y != poison), np.asarray(y, np.float64) * rows[:, :, None] * columns[:, None, :]


def places(rows, batch: int, length: int):
    """Returns which of [batch, length] these rows are."""
    found = np.zeros((batch, length), bool)
    for b, row in rows:
        found[b, row] = True
    return found


@pytest.mark.parametrize(
    ("size", "lhs_lost", "rhs_lost"),
    [
        case if i in (0, 3) else pytest.param(*case, marks=pytest.mark.exhaustive)
        for i, case in enumerate(LOST)
    ],
    ids=[f"{size}-{len(rows)}-{len(columns)}" for size, rows, columns in LOST],
)
def test_only_lost_rows_are_put_right(size, lhs_lost, rhs_lost):
    """In a lost row a block is far above the others; it meets zeros, so that the others are all there is."""
    (m, n, blocks), batch = size, 1 + max(b for b, _ in lhs_lost + rhs_lost)
    far = [np.zeros((batch, length, blocks), np.uint8) for length in (m, n)]
    for b, row in lhs_lost:
        far[0][b, row, 0] = 40
    for b, row in rhs_lost:
        far[1][b, row, 1] = 40
    lhs, rhs = (operand(i, (batch, length, blocks), 4) for i, length in enumerate((m, n)))
    lhs, rhs = (
        raised(lhs, (..., far[0])),
        raised(rhs, (..., far[1])),
    )
    lhs, rhs = without(lhs, 1) if rhs_lost else lhs, without(rhs, 0) if lhs_lost else rhs
    left, right = (carry_operand(q.elements, q.scales, "e4m3", current_target()) for q in (lhs, rhs))
    overwritten, got = correct_poison(left, right, lhs, rhs)
    in_rows, in_columns = places(lhs_lost, batch, m), places(rhs_lost, batch, n)
    np.testing.assert_array_equal(overwritten, in_rows[:, :, None] | in_columns[:, None, :])
    wanted, bound = exact(lhs, rhs)
    assert np.all(abs(got - wanted)[overwritten] <= bound[overwritten])


def spread(seed: int, shape: tuple[int, ...], group: int, spans: tuple[int, int]) -> KernelOperand:
    """Returns an operand whose groups span so many binades in a row, and the blocks of a group so many more.

    Each row has one group at the top, and zeros there in two rows of three, so that what is below counts.
    """
    rng = np.random.default_rng(seed)
    *outer, blocks = shape
    groups = -rng.integers(0, spans[0], (*outer, blocks // group))
    np.put_along_axis(groups, top := rng.integers(0, blocks // group, (*outer, 1)), 0, axis=-1)
    scales = np.repeat(groups, group, axis=-1) - rng.integers(0, spans[1], shape) + 127 + spans[0] // 2
    elements = rng.integers(0, 256, (*shape, 16), np.uint8)
    above = np.repeat(np.arange(blocks // group) == top, group, axis=-1)
    above[..., ::3, :] = False
    elements[above] = 0
    return KernelOperand(jnp.asarray(elements.reshape(*outer, -1)), jnp.asarray(scales.astype(np.uint8)))


@parametrize(
    ("blocks", "span"),
    (3, 40),
    exhaustive=[(3, 100), *((blocks, span) for blocks in (2, 16, 25, 34, 256) for span in (40, 100))],
)
def test_groups_hold_rows_of_any_binades(blocks, span):
    """Such rows are multiplied in FP8 alone: what the packed operands say does not matter."""
    group = group_of(blocks)
    lhs = spread(0, (2, 150, blocks), group, (span, 25 if group == 2 else 1))
    rhs = operand(1, (2, 9, blocks), 4)
    left = carry_operand(lhs.elements, lhs.scales, "e5m2", current_target(), grouped=True)
    right = carry_operand(rhs.elements, rhs.scales, "e4m3", current_target())
    assert not np.any(left.far)
    packed = jax.tree.map(jnp.zeros_like, (lhs, rhs))
    overwritten, got = correct_poison(left, right, *packed)
    wanted, bound = exact(lhs, rhs)
    assert np.any(overwritten) == (blocks > 2)
    assert np.all(abs(got - wanted)[overwritten] <= bound[overwritten])


def test_rows_near_and_far_and_columns_are_put_right_together():
    """In a lost row blocks are far above the others; they meet zeros, so that the others are all there is.

    Where a column is lost too, near rows are multiplied in FP8, whatever is packed, but for that column.
    """
    lhs, rhs = operand(0, (2, 300, 4), 4), without(without(operand(1, (2, 140, 4), 4), 0), 1)
    near = places([(b, row) for b in range(2) for row in range(b, 300, 3)], 2, 300)
    far = places([(1, 0), (1, 299)], 2, 300)
    columns = places([(1, 5), (1, 130), (0, 139)], 2, 140)
    lhs = raised(lhs, (np.s_[..., 0], 40 * near + 100 * far), (np.s_[..., 1], 40 * near))
    rhs = raised(rhs, (np.s_[..., 2], 40 * columns))
    left = carry_operand(lhs.elements, lhs.scales, "e5m2", current_target(), grouped=True)
    right = carry_operand(rhs.elements, rhs.scales, "e4m3", current_target())
    wanted, bound = exact(lhs, rhs)
    in_columns = np.broadcast_to(columns[:, None, :], wanted.shape)
    overwritten, got = correct_poison(left, right, lhs, rhs)
    np.testing.assert_array_equal(overwritten, (near | far)[:, :, None] | in_columns)
    assert np.all(abs(got - wanted)[overwritten] <= bound[overwritten])
    only_fp8 = KernelOperand(jnp.where(near[..., None], 0, lhs.elements), lhs.scales)
    right_without = ~(in_columns & near[:, :, None]) & overwritten
    _, got = correct_poison(left, right, only_fp8, rhs)
    assert np.all(abs(got - wanted)[right_without] <= bound[right_without])
    assert not np.any(got[in_columns & near[:, :, None]])


def test_groups_keep_nan_and_zeros():
    """A NaN block makes its row NaN, and no other; a group of zeros, and a row of them, count nothing."""
    lhs = spread(0, (60, 6), 2, (60, 4))
    elements, scales = np.array(lhs.elements).reshape(60, 3, 32), np.array(lhs.scales)
    elements[5, 1] = elements[7] = elements[-1, :2] = 0
    scales[5, 2:4], scales[7] = 254, [200, 3] * 3
    scales[[0, 9, 59], [5, 1, 2]] = 255
    lhs, rhs = (
        KernelOperand(jnp.asarray(elements.reshape(60, -1)), jnp.asarray(scales)),
        operand(1, (20, 6), 4),
    )
    rhs = KernelOperand(rhs.elements, rhs.scales.at[3, 0].set(255))
    got = product(lhs, rhs, jnp.float32, ("e5m2", "e4m3"))
    assert_right(got, lhs, rhs)
    nan = np.zeros((60, 20), bool)
    nan[[0, 9, 59]] = nan[:, 3] = True
    np.testing.assert_array_equal(np.isnan(got), nan)
    assert not np.any(np.asarray(got)[7, np.arange(20) != 3])


def test_groups_below_the_least_factor_are_not_dropped():
    """Groups up to 2**180 below the top of their row, which meets zeros in some columns.

    Those that a factor of 2**-126 does not reach are far: results may be zero only where they are that small.
    """
    low = np.arange(45, 85)
    scales = np.stack([0 * low + 230, 0 * low + 230, low, low + 1], axis=1).astype(np.uint8)
    lhs = KernelOperand(operand(0, (40, 4), 1).elements, jnp.asarray(scales))
    rhs = without(without(operand(1, (20, 4), 4), 0), 1)
    rhs = jax.tree.map(lambda *t: jnp.concatenate(t), rhs, operand(2, (20, 4), 4))
    got = np.asarray(product(lhs, rhs, jnp.float32, ("e5m2", "e4m3")), np.float64)
    wanted, bound = exact(lhs, rhs)
    factors = np.exp2(190 - 127 + np.max(np.asarray(rhs.scales, float), axis=1) - 127 - 6)
    assert np.all(abs(got - wanted) <= bound + 2.0**-126 * factors)
    assert np.all((got == 0)[20:, :20] == (wanted == 0)[20:, :20])


def batch_of_lost_rows():
    lhs = jax.tree.map(lambda *t: jnp.asarray(np.stack(t)), *(operand(i, (17, 3), 4) for i in range(3)))
    rhs = jax.tree.map(lambda *t: jnp.asarray(np.stack(t)), *(operand(9 + i, (19, 3), 3) for i in range(3)))
    elements = np.array(rhs.elements)
    elements[1, :, :16] = 0
    return raised(lhs, (np.s_[1, :, 0], 40)), KernelOperand(jnp.asarray(elements), rhs.scales), CARRIERS


def batch_of_groups():
    return spread(0, (3, 40, 8), 2, (90, 4)), operand(1, (3, 19, 8), 4), ("e5m2", "e4m3")


@parametrize("draw", batch_of_lost_rows, slow=[batch_of_groups])
def test_each_of_a_batch_is_put_right_by_itself(draw):
    lhs, rhs, carriers = draw()
    multiply = functools.partial(product, carriers=carriers)
    assert_right(multiply(lhs, rhs), lhs, rhs)
    assert_right(jax.vmap(multiply)(lhs, rhs), lhs, rhs)
    one = jax.tree.map(lambda t: t[0], rhs)
    shared = jax.jit(jax.vmap(multiply, (0, None)))(lhs, one)
    for i in range(3):
        assert_right(shared[i], jax.tree.map(operator.itemgetter(i), lhs), one)


def test_no_rows_give_no_results():
    rhs = operand(0, (7, 2), 3)
    empty = KernelOperand(rhs.elements[:0], rhs.scales[:0])
    assert product(empty, rhs).shape == (0, 7)
    nothing = KernelOperand(rhs.elements[:, :0], rhs.scales[:, :0])
    np.testing.assert_array_equal(product(nothing, nothing), np.zeros((7, 7)))
