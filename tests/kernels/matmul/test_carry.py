"""The carrier kernel against `mxjax.operands.carriers`, bit for bit."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import parametrize

from mxjax.kernels.matmul.carry import carry_operand, carry_operands, rows_and_parts
from mxjax.operands.carriers import carry
from mxjax.operands.kernel_operand import KernelOperand, decode
from mxjax.runtime.devices import current_target

pytestmark = pytest.mark.usefixtures("kernels_run")
by_definition = jax.jit(carry, static_argnums=1)  # operation by operation, each of 60 would be compiled


def random_operand(seed: int, n: int, blocks: int, span: int) -> KernelOperand:
    """Returns an operand with scales of `span` binades, some of them NaN or 0, and some blocks all zero."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, (n, blocks, 16), np.uint8)
    elements[rng.random((n, blocks)) < 0.3] = 0
    scales = (120 - rng.integers(0, span, (n, blocks))).astype(np.uint8)
    scales[rng.random((n, blocks)) < 0.05] = rng.choice([255, 0])
    return KernelOperand(jnp.asarray(elements.reshape(n, -1)), jnp.asarray(scales))


def by_kernel(elements, scales, carrier):
    """Returns what the kernel makes of operands [batch, n, _], the flags as [batch, n]."""
    carry_grouped = jax.jit(functools.partial(carry_operand, grouped=True), static_argnums=(2, 3))
    return with_flags_by_row(carry_grouped(elements, scales, carrier, current_target()), scales)


def with_flags_by_row(carried, scales):
    """Returns an operand carried from scales [batch, n, blocks] as numpy arrays, its flags as [batch, n]."""
    batch, n, blocks = scales.shape
    rows, parts = rows_and_parts(blocks)
    carried = jax.tree.map(np.asarray, carried)

    def by_row(flags):
        words = np.bitwise_or.reduce(flags.reshape(batch, -1, parts), axis=2)
        bits = words[..., None] >> np.arange(rows, dtype=np.uint32) & 1
        return bits.reshape(batch, -1)[:, :n]

    far = None if carried.far is None else by_row(carried.far)
    return carried._replace(lost=by_row(carried.lost), far=far)


def assert_same(got, q, carrier):
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = jax.tree.map(np.asarray, by_definition(q, carrier))
    np.testing.assert_array_equal(got.unit, wanted.unit)
    np.testing.assert_array_equal(got.lost, wanted.lost)
    assert_same_elements(got.elements, wanted.elements)
    if got.grouped is not None:
        np.testing.assert_array_equal(got.far, wanted.far)
        lost = got.lost.astype(bool)
        np.testing.assert_array_equal(got.group_scales[lost], wanted.group_scales[lost])
        np.testing.assert_allclose(got.lost_sum[lost], wanted.lost_sum[lost], rtol=1e-5)
        assert_same_elements(got.grouped[lost], wanted.grouped[lost])


def assert_same_elements(got, wanted):
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(np.uint8)[~nan], wanted.view(np.uint8)[~nan])


@pytest.mark.slow
@settings(max_examples=6)  # a shape takes a second to compile
@given(
    seed=st.integers(0, 100),
    n=st.integers(1, 40),
    blocks=st.integers(1, 12),
    span=st.integers(1, 120),
    carrier=st.sampled_from(["e4m3", "e5m2"]),
)
def test_carries_what_the_definition_does(seed, n, blocks, span, carrier):
    q = random_operand(seed, n, blocks, span)
    got = by_kernel(q.elements[None], q.scales[None], carrier)
    assert_same(jax.tree.map(operator.itemgetter(0), got), q, carrier)


ROWS = [  # the scales of a row of E5M2, 253 of a block of zeros; whether it lost elements and is far
    ([127, 99, 127, 99], False, False),
    ([127, 98, 127, 99], True, True),
    ([127, 99, 98, 70], True, False),
    ([127, 127, 40, 12], True, False),
    ([127, 127, 40, 11], True, True),
    ([10, 10, 220, 220], True, True),  # a factor of 2**-210
    ([69, 69, 195, 195], True, False),  # the smallest factor, 2**-126
    ([56, 69, 195, 195], True, False),
    ([68, 68, 195, 195], True, False),
    ([40, 68, 195, 195], True, True),  # relative to 2**-126 it is 2**-16
    ([254, 254, 190, 190], True, False),  # factors above 1
    ([253, 190, 190, 190], False, False),
    ([253, 190, 190, 150], True, True),
    ([3, 1, 30, 20], True, False),
    ([0, 0, 60, 0], True, True),
    ([255, 99, 98, 71], False, False),
    ([127, 255, 98, 70], True, False),
    ([127, 127, 255, 255], False, False),
]


def test_rows_are_far_where_a_group_does_not_fit():
    scales = np.asarray([row for row, *_ in ROWS], np.uint8)
    elements = np.repeat(np.where(scales == 253, 0, 0x97).astype(np.uint8), 16, axis=1)  # 6 and -0.5
    q = KernelOperand(jnp.asarray(elements), jnp.asarray(scales))
    got = jax.tree.map(operator.itemgetter(0), by_kernel(q.elements[None], q.scales[None], "e5m2"))
    np.testing.assert_array_equal(got.lost, [lost for _, lost, _ in ROWS])
    np.testing.assert_array_equal(got.far, [far for *_, far in ROWS])
    assert_same(got, q, "e5m2")
    near = (got.lost == 1) & (got.far == 0)
    units = got.unit[:, None].astype(float) + got.group_scales - 2 * 127
    value = got.grouped.astype(np.float64) * np.exp2(np.repeat(units, 64, axis=1))
    np.testing.assert_array_equal(value[near], decode_exactly(q)[near])


def decode_exactly(q: KernelOperand):
    """Returns an operand in float64, which holds what float32 makes infinite or flushes to zero."""
    ones = jnp.where(q.scales == 255, q.scales, 127)
    factors = np.exp2(np.asarray(q.scales, np.float64) - 127)
    return np.asarray(decode(KernelOperand(q.elements, ones)), np.float64) * np.repeat(factors, 32, axis=-1)


@pytest.mark.parametrize("blocks", [5, 6])
def test_a_lost_row_may_be_the_first_or_the_last(blocks):
    """Of several programs' rows; the last program has fewer. Five blocks are a group each."""
    n = 70
    scales = np.full((n, blocks), 127, np.uint8)
    scales[0, -1] -= 60
    scales[n - 1, -2:] -= 60
    q = KernelOperand(jnp.full((n, 16 * blocks), 0x35, jnp.uint8), jnp.asarray(scales))
    got = jax.tree.map(operator.itemgetter(0), by_kernel(q.elements[None], q.scales[None], "e5m2"))
    assert list(np.flatnonzero(got.lost)) == [0, n - 1]
    assert list(np.flatnonzero(got.far)) == ([] if blocks % 2 else [0])
    assert_same(got, q, "e5m2")


@parametrize(
    ("blocks", "carriers"),
    (6, ("e4m3", "e5m2")),
    (6, ("e5m2", "e4m3")),
    (6, ("e4m3", "e4m3")),
    exhaustive=[(257, ("e5m2", "e4m3"))],
)
def test_both_operands_of_a_product_are_carried_by_one_launch(blocks, carriers):
    rows = [[random_operand(seed + 2 * n, n, blocks, 40) for seed in range(2)] for n in (21, 40)]
    stacked = [jax.tree.map(lambda *t: jnp.stack(t), *pair) for pair in rows]
    grouped = carriers[0] == "e5m2"
    both = carry_operands(*(q.packed for q in stacked), carriers, current_target(), grouped)
    assert [got.grouped is not None for got in both] == [grouped and blocks == 6, False]
    for got, pair, q, carrier in zip(both, rows, stacked, carriers, strict=True):
        got = with_flags_by_row(got, q.scales)
        for i, one in enumerate(pair):
            assert_same(jax.tree.map(operator.itemgetter(i), got), one, carrier)


@pytest.mark.parametrize("blocks", [256, 257, 1100])
def test_long_rows_are_carried_by_several_programs(blocks):
    operands = [random_operand(seed, 3, blocks, 12 + 18 * seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *t: jnp.stack(t), *operands)
    got = by_kernel(stacked.elements, stacked.scales, "e5m2")
    for i, q in enumerate(operands):
        assert_same(jax.tree.map(operator.itemgetter(i), got), q, "e5m2")
