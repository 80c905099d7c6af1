"""The carrier kernel against `mxjax.carriers`, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxjax.carriers import carry
from mxjax.packed import Packed

pytestmark = pytest.mark.usefixtures("kernels_run")


def random_operand(seed: int, n: int, blocks: int, span: int) -> Packed:
    """Returns an operand with scales of `span` binades, some of them NaN or 0, and some blocks all zero."""
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 256, (n, blocks, 16), np.uint8)
    elements[rng.random((n, blocks)) < 0.3] = 0
    scales = (120 - rng.integers(0, span, (n, blocks))).astype(np.uint8)
    scales[rng.random((n, blocks)) < 0.05] = rng.choice([255, 0])
    return Packed(jnp.asarray(elements.reshape(n, -1)), jnp.asarray(scales))


def by_definition(q: Packed, carrier):
    """Returns what `carry` gives without kernels, as XLA computes it on the CPU."""
    from mxjax import carriers

    with pytest.MonkeyPatch.context() as patch, jax.default_device(jax.devices("cpu")[0]):
        patch.setattr(carriers, "kernel_target", lambda: None)
        return carry(q, carrier)


def assert_same(got, wanted):
    assert int(got.exponent) == int(wanted.exponent)
    assert bool(got.fits) == bool(wanted.fits)
    got, wanted = (np.asarray(c.elements) for c in (got, wanted))
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(np.uint8)[~nan], wanted.view(np.uint8)[~nan])


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
    assert_same(carry(q, carrier), by_definition(q, carrier))


def test_maps_over_operands():
    operands = [random_operand(seed, 5, 3, 4 + 10 * seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *t: jnp.stack(t), *operands)
    got = jax.vmap(lambda q: carry(q, "e5m2"))(stacked)
    for i, q in enumerate(operands):
        assert_same(jax.tree.map(lambda t, i=i: t[i], got), by_definition(q, "e5m2"))
