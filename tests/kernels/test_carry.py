"""The carrier kernel against `mxjax.fp8_carriers`, bit for bit."""

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
    """Returns what the kernel makes of operands [batch, n, _], and which rows lost elements, [batch, n]."""
    from mxjax.devices import current_target
    from mxjax.kernels.matmul.carry import carry_operand, rows_and_parts

    carried = carry_operand(elements, scales, carrier, current_target())
    batch, n, blocks = scales.shape
    rows, parts = rows_and_parts(blocks)
    words = np.bitwise_or.reduce(np.asarray(carried.lost).reshape(batch, -1, parts), axis=2)
    bits = words[..., None] >> np.arange(rows, dtype=np.uint32) & 1
    return carried.elements, carried.unit, bits.reshape(batch, -1)[:, :n]


def assert_same(got, q, carrier):
    with jax.default_device(jax.devices("cpu")[0]):
        wanted = carry(q, carrier)
    elements, unit, lost = got
    np.testing.assert_array_equal(unit, wanted.unit)
    np.testing.assert_array_equal(lost, wanted.lost)
    elements, wanted = (np.asarray(t) for t in (elements, wanted.elements))
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(elements.astype(np.float32)), nan)
    np.testing.assert_array_equal(elements.view(np.uint8)[~nan], wanted.view(np.uint8)[~nan])


@pytest.mark.slow
@settings(max_examples=12)  # a shape takes a second to compile
@given(
    seed=st.integers(0, 100),
    n=st.integers(1, 40),
    blocks=st.integers(1, 12),
    span=st.integers(1, 34),
    carrier=st.sampled_from(["e4m3", "e5m2"]),
)
def test_carries_what_the_definition_does(seed, n, blocks, span, carrier):
    q = random_operand(seed, n, blocks, span)
    got = by_kernel(q.elements[None], q.scales[None], carrier)
    assert_same([t[0] for t in got], q, carrier)


@pytest.mark.parametrize("carrier", ["e4m3", "e5m2"])
def test_scales_over_thirty_binades(carrier):
    q = random_operand(1, 5, 3, 30)
    got = by_kernel(q.elements[None], q.scales[None], carrier)
    assert_same([t[0] for t in got], q, carrier)


@pytest.mark.parametrize("blocks", [256, 257, 1100])
def test_long_rows_are_carried_by_several_programs(blocks):
    operands = [random_operand(seed, 3, blocks, 12 + 18 * seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *t: jnp.stack(t), *operands)
    got = by_kernel(stacked.elements, stacked.scales, "e5m2")
    for i, q in enumerate(operands):
        assert_same([t[i] for t in got], q, "e5m2")
