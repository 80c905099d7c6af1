"""The carrier kernel against `mxjax.fp8_carriers`, bit for bit."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxjax.fp8_carriers import carry
from mxjax.kmajor import KMajor

pytestmark = pytest.mark.usefixtures("kernels_run")


def random_operand(seed: int, n: int, blocks: int, span: int) -> KMajor:
    """Returns an operand with scales of `span` binades, some of them NaN or 0, and some blocks all zero."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, (n, blocks, 16), np.uint8)
    elements[rng.random((n, blocks)) < 0.3] = 0
    scales = (120 - rng.integers(0, span, (n, blocks))).astype(np.uint8)
    scales[rng.random((n, blocks)) < 0.05] = rng.choice([255, 0])
    return KMajor(jnp.asarray(elements.reshape(n, -1)), jnp.asarray(scales))


def by_kernel(elements, scales, carrier):
    """Returns what the kernel makes of operands [batch, n, _], the flags as [batch, n]."""
    from mxjax.devices import current_target
    from mxjax.kernels.matmul.carry import carry_operand, rows_and_parts

    carried = carry_operand(elements, scales, carrier, current_target(), lower=True)
    batch, n, blocks = scales.shape
    rows, parts = rows_and_parts(blocks)

    def by_row(flags):
        words = np.bitwise_or.reduce(np.asarray(flags).reshape(batch, -1, parts), axis=2)
        bits = words[..., None] >> np.arange(rows, dtype=np.uint32) & 1
        return bits.reshape(batch, -1)[:, :n]

    far = None if carried.far is None else by_row(carried.far)
    return carried._replace(lost=by_row(carried.lost), far=far)


def assert_same(got, q, carrier):
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = carry(q, carrier)
    np.testing.assert_array_equal(got.unit, wanted.unit)
    np.testing.assert_array_equal(got.lost, wanted.lost)
    assert_same_elements(got.elements, wanted.elements)
    if got.lower is not None:
        np.testing.assert_array_equal(got.far, wanted.far)
        lost = np.asarray(got.lost, bool)
        assert_same_elements(np.asarray(got.lower)[lost], np.asarray(wanted.lower)[lost])


def assert_same_elements(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(np.uint8)[~nan], wanted.view(np.uint8)[~nan])


@pytest.mark.slow
@settings(max_examples=12)  # a shape takes a second to compile
@given(
    seed=st.integers(0, 100),
    n=st.integers(1, 40),
    blocks=st.integers(1, 12),
    span=st.integers(1, 70),
    carrier=st.sampled_from(["e4m3", "e5m2"]),
)
def test_carries_what_the_definition_does(seed, n, blocks, span, carrier):
    q = random_operand(seed, n, blocks, span)
    got = by_kernel(q.elements[None], q.scales[None], carrier)
    assert_same(jax.tree.map(operator.itemgetter(0), got), q, carrier)


@pytest.mark.parametrize("carrier", ["e4m3", "e5m2"])
@pytest.mark.parametrize("span", [30, 80])
def test_scales_over_thirty_binades(carrier, span):
    q = random_operand(1, 5, 3, span)
    got = by_kernel(q.elements[None], q.scales[None], carrier)
    assert_same(jax.tree.map(operator.itemgetter(0), got), q, carrier)


@pytest.mark.parametrize("blocks", [256, 257, 1100])
def test_long_rows_are_carried_by_several_programs(blocks):
    operands = [random_operand(seed, 3, blocks, 12 + 18 * seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *t: jnp.stack(t), *operands)
    got = by_kernel(stacked.elements, stacked.scales, "e5m2")
    for i, q in enumerate(operands):
        assert_same(jax.tree.map(operator.itemgetter(i), got), q, "e5m2")
