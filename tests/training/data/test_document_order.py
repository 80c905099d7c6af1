"""The order of samples is megatron-core's own."""

import json
import pathlib

import numpy as np
import pytest

from training.data import document_order as megatron_order
from training.data.document_order import BlendOrder, GPTOrder
from training.data.indexed_dataset import IndexedDataset
from training.data.megatron import MegatronCorpus

GOLDEN = np.load(pathlib.Path(__file__).parents[2] / "golden" / "megatron.npz")
CASES = list(enumerate(json.loads(str(GOLDEN["cases"]))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Megatron's own files."""
    folder = tmp_path_factory.mktemp("megatron")
    for name in GOLDEN.files:
        kind, _, stem = name.partition("/")
        if kind in ("bin", "idx"):
            GOLDEN[name].tofile(folder / f"{stem}.{kind}")
    return folder


def corpus(folder, case):
    datasets = tuple(IndexedDataset(folder / name) for name in case["data"])
    parts = [float(share) for share in case["split"].split(",")]
    documents = tuple(range(round(parts[0] / sum(parts) * len(d))) for d in datasets)
    weights = None if case["weights"] is None else tuple(case["weights"])
    return MegatronCorpus(datasets, documents, weights, np.zeros(0, np.int32), 70_000)


@pytest.mark.parametrize(("number", "case"), CASES)
def test_samples_are_megatrons_token_by_token(folder, number, case):
    samples = corpus(folder, case).samples(case["seq_len"], case["seed"], case["n"] or 1)  # 1: an epoch
    expected = GOLDEN[f"tokens/{number}"]
    assert len(samples) == len(expected)
    for i in range(len(expected) - 1, -1, -1):  # random access, in no order of reading
        np.testing.assert_array_equal(samples[i], expected[i])


def test_the_cases_cover_several_epochs_and_a_last_one_by_itself(folder):
    found = set()
    for _, case in CASES:
        if len(case["data"]) == 1:
            lengths = corpus(folder, case).datasets[0].lengths
            order = GPTOrder(lengths, case["seq_len"], case["seed"], case["n"])
            found.add((min(order.epochs, 3), order.separate_final_epoch))
    assert found == {(1, False), (2, False), (2, True), (3, False), (3, True)}


def test_blends_choose_as_megatrons_helper_does():
    order = BlendOrder(GOLDEN["blend/weights"].tolist(), 3000)
    np.testing.assert_array_equal([order[i] for i in range(3000)], GOLDEN["blend/order"])


def test_a_blend_goes_on_past_a_block():
    order = BlendOrder([1, 2], 200_000)
    counts = np.bincount([order[i][0] for i in range(65_500, 65_600)])
    assert counts.tolist() in ([33, 67], [34, 66])
    dataset, sample = order[199_999]
    assert abs(sample - 199_999 * (dataset + 1) / 3) <= 1


def test_a_blend_that_asks_for_too_much_names_the_dataset():
    with pytest.raises(ValueError, match="asks for 100 samples of B, which gives 99"):
        BlendOrder([1, 1], 200).check([100, 99], ["A", "B"])
    BlendOrder([1, 1], 200).check([100, 100], ["A", "B"])


@pytest.mark.parametrize("lengths", [[], [0, 0], [1]])
def test_too_few_tokens_for_any_sample_is_an_error(lengths):
    with pytest.raises(ValueError, match=r"--seq-len \+ 1 = 9 tokens and the \d documents to train on have"):
        GPTOrder(np.array(lengths, np.int32), 8, 0)


def test_places_are_the_same_over_several_chunks(monkeypatch):
    lengths = np.random.default_rng(0).integers(0, 20, 1000).astype(np.int32)
    whole = GPTOrder(lengths, 8, 0, 3000)
    monkeypatch.setattr(megatron_order, "_CHUNK", 128)
    parts = GPTOrder(lengths, 8, 0, 3000)
    np.testing.assert_array_equal(parts._marks, whole._marks)
    assert whole.epochs > 1
