"""Documents of one sequence against the same documents as separate sequences."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.llamas import SMALL, layer_policies
from support.marks import parametrize

import mxjax
from models import decoder
from models.attention import causal as attention
from models.attention.documents import Documents, document_starts, first_keys

END = 299
DOCUMENTS = [[*range(1, 14), END], [END], [*range(20, 29), END], [*range(40, 47)]]
PACKED = jnp.array([[*itertools.chain(*DOCUMENTS)]], jnp.int32)
STARTS = [0, 14, 15, 25]
SINKS = dataclasses.replace(SMALL, sinks=True, windows=(5, 0))
UNFUSED = [("*.attention.scores", dataclasses.replace(mxjax.get_policy("fp32"), wgrad=mxjax.Gemm()))]


def test_a_document_starts_after_the_end_of_another():
    expected = [start for start, tokens in zip(STARTS, DOCUMENTS, strict=True) for _ in tokens]
    assert document_starts(PACKED, END)[0].tolist() == expected
    later = document_starts(PACKED[:, 9:], END, jnp.array([3]), 9)  # tokens before have been read
    assert later[0].tolist() == [3] * 5 + expected[14:]
    assert first_keys(document_starts(PACKED, END), 5)[0, 8:17].tolist() == [4, 5, 6, 7, 8, 9, 14, 15, 15]


@pytest.mark.slow
@parametrize(
    ("config", "rules", "longest", "restart"),
    (SMALL, [], 64, False),
    (SINKS, [], 8, True),
    (SINKS, UNFUSED, 64, True),
    exhaustive=[(SMALL, [], 8, False)],
    ids=["whole", "windows and sinks in pieces", "by dot_general", "in pieces"],
)
def test_documents_equal_separate_sequences(monkeypatch, config, rules, longest, restart):
    """Losses, gradients and logits in float32, within the order of sums."""
    monkeypatch.setattr(attention, "LONGEST_WHOLE", longest)
    monkeypatch.setattr(attention, "PIECE", 4)
    policies = layer_policies(config, "fp32", [("*", "fp32"), *rules])
    params = decoder.init(dataclasses.replace(config, init_std=0.2), jax.random.key(0))
    targets = jnp.concatenate([PACKED[0, 1:], jnp.array([7])])

    def losses(params, tokens, targets, documents=None):
        options = {"policies": policies, "dtype": jnp.float32, "documents": documents}
        logits = decoder.apply(config, params, tokens, **options)[0]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)[:, 0]

    def packed(params):
        found = losses(params, PACKED, targets, Documents(END, restart))
        return jnp.mean(found), found

    def apart(params):
        ends = [*STARTS[1:], len(targets)]
        parts = [losses(params, PACKED[:, a:b], targets[a:b]) for a, b in zip(STARTS, ends, strict=True)]
        return jnp.mean(found := jnp.concatenate(parts)), found

    (_, ours), gradients = jax.jit(jax.value_and_grad(packed, has_aux=True))(params)
    (_, wanted), expected = jax.jit(jax.value_and_grad(apart, has_aux=True))(params)
    np.testing.assert_allclose(ours, wanted, rtol=2e-5, atol=2e-5)
    if not rules:  # those of UNFUSED are in bfloat16
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), gradients, expected)


@parametrize("longest", slow=[8, 64])
def test_gradients_across_documents_are_exactly_zero(monkeypatch, longest):
    """In bfloat16, as in training: the embeddings of one document's tokens against the losses of the next."""
    monkeypatch.setattr(attention, "LONGEST_WHOLE", longest)
    monkeypatch.setattr(attention, "PIECE", 4)
    params, policies = decoder.init(SMALL, jax.random.key(0)), layer_policies(SMALL, "bf16")

    @jax.jit
    @jax.grad
    def gradient(params):
        losses = decoder.losses(SMALL, params, PACKED, policies=policies, documents=Documents(END))
        return jnp.sum(losses[0, 15:24])  # of the third document

    rows = np.asarray(gradient(params)["embedding"])
    assert rows[20:29].any(axis=1).all()
    assert not np.delete(rows, [*range(20, 29)], axis=0).any()


def test_positions_restart_with_documents():
    position = jnp.concatenate([jnp.arange(len(document)) for document in DOCUMENTS])[None]
    rope, _ = decoder._positions(SMALL, PACKED, Documents(END, restart_positions=True), False)
    np.testing.assert_array_equal(rope.angles, attention.rope_angles(position, SMALL))
