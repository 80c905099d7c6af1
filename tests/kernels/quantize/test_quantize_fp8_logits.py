"""The kernel that casts the gradient of the logits, beside its definition and with NaN and filler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from models.fp8_head import cast_by_definition
from mxjax.kernels.quantize.fp8_logits import cast_gradient
from mxjax.operands.use import OperandUse
from mxjax.runtime.devices import current_target

USES = tuple(
    OperandUse(-1 - i, mxjax.Operand(name), form="fp8") for i, name in enumerate(("fp8_e4m3", "fp8_e5m2"))
)


def draw(n, vocabulary):
    rng = np.random.default_rng(0)
    logits = jnp.float32(rng.standard_normal((n, vocabulary)) * 2.0 ** rng.integers(-3, 4, (n, 1)))
    return logits, jax.nn.logsumexp(logits, axis=-1), jnp.asarray(rng.integers(0, vocabulary, n), jnp.int32)


def cast(logits, normalizer, targets):
    made = cast_gradient(logits, normalizer, targets, 0.1, USES, current_target())
    assert made is not None
    return made


# Edges of tiles on both axes, and whole tiles.
@pytest.mark.parametrize("shape", [(48, 80), (256, 128)])
def test_it_casts_the_values_of_the_definition(on_hopper, shape):
    """Nearly all elements are the definition's; the others are its neighbours, by another exponential."""
    given = draw(*shape)
    for got, wanted in zip(jax.jit(cast)(*given), cast_by_definition(*given, 0.1, USES), strict=True):
        assert got.tensor_scale == wanted.tensor_scale
        assert got.elements.dtype == wanted.elements.dtype
        found, expected = (np.asarray(q.elements).view(np.uint8).astype(np.int32) for q in (got, wanted))
        assert np.max(np.abs(found - expected)) <= 1
        assert np.mean(found == expected) > 0.998


def test_nan_fills_its_row_and_filler_has_no_gradient(on_hopper):
    logits, normalizer, targets = draw(16, 32)
    logits, normalizer = logits.at[3, 7].set(jnp.nan), normalizer.at[3].set(jnp.nan).at[4].set(jnp.inf)
    rows, columns = (
        np.asarray(q.elements, np.float32) for q in cast(logits, normalizer, targets.at[4].set(-1))
    )
    for found in (rows, columns.T):
        assert np.all(np.isnan(found[3]))
        assert not found[4].any()
        assert np.all(np.isfinite(np.delete(found, 3, axis=0)))


def test_each_mapped_call_is_that_of_its_own(on_hopper):
    each = [draw(16, 32), tuple(t[::-1] for t in draw(16, 32))]
    mapped = jax.vmap(cast)(*(jnp.stack(t) for t in zip(*each, strict=True)))
    for i, given in enumerate(each):
        for q, alone in zip(mapped, cast(*given), strict=True):
            np.testing.assert_array_equal(
                np.asarray(q.elements[i], np.float32), np.asarray(alone.elements, np.float32)
            )


def test_a_vocabulary_that_no_fp8_gemm_takes_is_left_to_the_definition(on_hopper):
    assert cast_gradient(*draw(16, 40), 0.1, USES, current_target()) is None
