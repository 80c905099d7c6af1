"""The loss of a head in FP8 and its gradients, beside those by `mxjax.dot` and by float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mxjax
from models import fp8_head
from models.loss import Head, mean_loss, piece_tokens
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.use import OperandUse

FP8, CARRIERS = mxjax.get_policy("fp8"), "fp8_carriers"  # as on GPUs
D, V = 64, 128


def draw(B, S, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(B, S, D)), dtype), jnp.float32(0.2 * rng.normal(size=(D, V)))
    return x, w, jnp.asarray(rng.integers(0, V, (B, S)), jnp.int32)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_that_by_dot_and_its_gradients_are_near_float64_s(tied, monkeypatch):
    """In three pieces, of which the last is padded. Not differentiated, the loss is that by `mxjax.dot`."""
    x, w, targets = draw(2, 41)
    head = Head(FP8, CARRIERS, tied=tied)

    def loss(x, w):
        return 3 * mean_loss(head, x, w, targets, None)

    by_dot = loss(x, w)
    monkeypatch.setattr("models.loss.LOSS_TOKENS", 32)
    monkeypatch.setattr("models.loss.FP8_LOGITS", 32 * V)
    found, gradients = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w)
    np.testing.assert_allclose(found, by_dot, rtol=1e-6)
    x, w = np.float64(x), np.float64(w)
    logits = x @ w
    softmax = np.exp(logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True)))
    d_logits = 3 * (softmax - np.eye(V)[targets]) / targets.size
    for got, wanted in zip(gradients, (d_logits @ w.T, np.einsum("bsd,bsv->dv", x, d_logits)), strict=True):
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert 0.01 < error < 0.06  # two mantissa bits of the gradient


def test_a_piece_of_a_small_vocabulary_has_more_tokens(monkeypatch):
    monkeypatch.setattr("models.loss.LOSS_TOKENS", 8)
    monkeypatch.setattr("models.loss.FP8_LOGITS", 32 * V)
    x, w, targets = draw(2, 41)
    loss = functools.partial(mean_loss, Head(FP8, CARRIERS))
    program = jax.make_jaxpr(jax.grad(lambda x: loss(x, w, targets, None)))(x)
    assert f"f32[{2 * 14},{V}]" in str(program)
    assert piece_tokens(FP8, CARRIERS, V) == 32


def test_it_is_for_plain_fp8_with_current_scales():
    delayed = mxjax.get_policy("fp8_delayed")
    rotated = dataclasses.replace(FP8, wgrad=dataclasses.replace(FP8.wgrad, rotation=mxjax.Rotation(16)))
    policies = FP8, delayed, rotated, mxjax.get_policy("bf16")
    taken = [fp8_head.fp8_uses(policy, CARRIERS) is not None for policy in policies]
    assert taken == [True, False, False, False]
    assert fp8_head.fp8_uses(FP8, "reference") is None
    _, w, _ = draw(1, 1)
    assert Head(FP8, CARRIERS, vocab_size=V).fp8_uses(w) is not None
    assert Head(FP8, CARRIERS, vocab_size=V - 1).fp8_uses(w) is None
    assert Head(FP8, CARRIERS, z_loss=1e-4).fp8_uses(w) is None


def gradient(x: KernelOperand) -> np.ndarray:
    return np.asarray(x.elements, np.float64) * float(x.tensor_scale)


@pytest.mark.parametrize("formats", [("fp8_e5m2", "fp8_e5m2"), ("fp8_e4m3", "fp8_e5m2")])
def test_the_definition_rounds_softmax_minus_onehot(formats):
    rng = np.random.default_rng(0)
    logits, targets = jnp.float32(3 * rng.normal(size=(32, V))), jnp.asarray(rng.integers(0, V, 32))
    normalizer = jax.nn.logsumexp(logits, axis=-1).at[5].set(jnp.inf)
    targets = targets.at[5].set(-1)
    uses = tuple(OperandUse(-1 - i, mxjax.Operand(f), form="fp8") for i, f in enumerate(formats))
    rows, columns = fp8_head.cast_by_definition(logits, normalizer, targets, 0.25, uses)
    exact = np.float64(jax.nn.softmax(logits)) - np.eye(V)[targets] * (np.arange(32) != 5)[:, None]
    exact[5] = 0
    for found, mantissa in ((gradient(rows), 3 if "e4m3" in formats[0] else 2), (gradient(columns).T, 2)):
        np.testing.assert_allclose(4 * found, exact, rtol=2.0 ** -(mantissa + 1), atol=2.0**-10 / 448 + 1e-8)
        assert not found[5].any()
