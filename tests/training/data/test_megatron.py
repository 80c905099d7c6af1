"""Tokenized data in training: batches by step alone, sharded, checked, from start to resumed run."""

import json

import absl.flags
import grain
import numpy as np
import pytest
from support.runs import SMALL, untimed

import eval as evaluation_program
import train as training_program
from models.attention.documents import Documents
from training.command_line import parse
from training.config import DataConfig
from training.data.indexed_dataset import IndexedDataset, IndexedWriter
from training.data.load import documents_of, load_data, load_held_out
from training.data.megatron import Rows, is_indexed, load_megatron, load_validation, parse_blend
from training.data.tokenizer import tokenizer_vocab_size
from training.run.record import write_run_config
from training.run.setup import set_up

VOCABULARY = 300


def write(prefix, n_documents=200, top=VOCABULARY, seed=0, longest=50, end=()):
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.uint16) as writer:
        for n in rng.integers(1, longest, n_documents):
            writer.add(np.array([*rng.integers(0, top, n), *end]))
    return str(prefix)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "train")


def config(*data, **options):
    return DataConfig(data=data, **{"batch_size": 4, "seq_len": 16, "vocab_size": VOCABULARY} | options)


def take(stream, n):
    return [next(stream) for _ in range(n)]


def test_batches_are_the_samples_in_order(prefix):
    settings = config(prefix)
    corpus = load_data(settings, 257)
    batches = take(corpus.batches(settings, 3, steps=20), 20)
    samples = corpus.samples(16, 3, 80)
    assert batches[0].shape == (4, 17)
    assert batches[0].dtype == np.int32
    np.testing.assert_array_equal(np.concatenate(batches), [samples[i] for i in range(80)])


def test_a_stream_ends_with_its_run_and_starts_anywhere(prefix):
    settings = config(prefix)
    corpus = load_data(settings, 257)
    whole = list(corpus.batches(settings, 0, steps=30))
    assert len(whole) == 30
    resumed = corpus.batches(settings, 0, steps=30, start=17)
    assert resumed.get_state() == {"next_index": 17}
    np.testing.assert_array_equal(list(resumed), whole[17:])
    again = corpus.batches(settings, 0, steps=30)
    again.set_state({"next_index": 29})
    np.testing.assert_array_equal(next(again), whole[29])


@pytest.mark.parametrize("data", ["packed", "text"])
def test_processes_read_equal_parts_of_each_batch(prefix, tmp_path, data):
    (tmp_path / "text.txt").write_bytes(bytes(range(1, 256)) * 9)
    settings = config(prefix if data == "packed" else str(tmp_path / "text.txt"))
    corpus = load_data(settings, 257)
    whole = take(corpus.batches(settings, 0, 6), 6)
    parts = [take(corpus.batches(settings, 0, 6, shard=(i, 2)), 6) for i in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    with pytest.raises(ValueError, match="--batch-size 4 must be a multiple of the 3 processes"):
        corpus.batches(settings, 0, 6, shard=(0, 3))


@pytest.mark.slow
def test_grains_worker_processes_read_the_same(prefix):
    settings = config("0.5", prefix, "0.5", prefix, eval_data=(prefix,))
    corpus = load_data(settings, 257)
    absl.flags.FLAGS.mark_as_parsed()  # grain asks its own, which only absl's programs parse
    rows = Rows(corpus.samples(16, 0, 40), 10, 4, 0, 1)
    dataset = grain.MapDataset.source(rows).batch(4).to_iter_dataset()
    apart = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))
    np.testing.assert_array_equal(list(apart), list(corpus.batches(settings, 0, 10)))


def test_without_evaluation_data_the_last_documents_are_held_out(prefix):
    corpus = load_megatron(config(prefix), 257)
    data = IndexedDataset(prefix)
    assert corpus.documents == (range(190),)
    assert corpus.validation.tolist() == [t for i in range(190, 200) for t in data[i].tolist()]
    assert corpus.train_tokens + len(corpus.validation) == len(data.tokens)
    np.testing.assert_array_equal(load_held_out(prefix, VOCABULARY, False, 16), corpus.validation)


def test_evaluation_data_is_read_whole_and_then_all_is_trained_on(prefix, tmp_path):
    other = write(tmp_path / "other", 20, seed=1)
    corpus = load_megatron(config(prefix, eval_data=(other,)), 257)
    assert corpus.documents == (range(200),)
    np.testing.assert_array_equal(corpus.validation, IndexedDataset(other).tokens)
    np.testing.assert_array_equal(load_held_out(other, VOCABULARY, True, 16), corpus.validation)


def test_text_takes_evaluation_data_too(tmp_path):
    for name, text in (("a", "some text " * 100), ("b", "other")):
        (tmp_path / name).write_text(text)
    corpus = load_data(DataConfig((str(tmp_path / "a"),), eval_data=(str(tmp_path / "b"),)), 257)
    assert bytes(corpus.validation[:-1].astype(np.uint8)) == b"other"
    assert len(corpus.train) == 1001
    np.testing.assert_array_equal(load_held_out(str(tmp_path / "b"), 257, True, 16), corpus.validation)


def write_documents(prefix, *documents):
    with IndexedWriter(prefix, np.uint16) as writer:
        for tokens in documents:
            writer.add(np.array(tokens))
    return str(prefix)


def test_the_end_of_a_document_is_a_token_that_ends_all_and_nothing_else(tmp_path):
    ends = {
        9: [[1, 2, 9], [9], [], [3, 9]],
        8: [[1, 8], [2, 8]],
        None: [[1, 9, 2, 9], [3, 9]],  # as a line does
    }
    names = {end: write_documents(tmp_path / str(end), *documents) for end, documents in ends.items()}
    for end, name in names.items():
        assert IndexedDataset(name).document_end() == end
    assert IndexedDataset(write_documents(tmp_path / "one", [1, 2])).document_end() is None
    blend = load_megatron(config(names[9], names[8], eval_data=(names[9],)), 257)
    assert documents_of(config(), blend) is None
    marked = load_megatron(config(names[9], eval_data=(names[None],)), 257)
    assert documents_of(config(restart_positions=True), marked) == Documents(9, restart_positions=True)
    assert documents_of(config(document_mask="off"), marked) is None
    for asked in ({"document_mask": "on"}, {"restart_positions": True}):
        with pytest.raises(ValueError, match=r"^--\S+( on)?: no token ends every document .*--append-eod"):
            documents_of(config(**asked), blend)
    with pytest.raises(ValueError, match="leave out --document-mask off"):
        config(document_mask="off", restart_positions=True)


def test_facts_tell_data_apart(prefix, tmp_path):
    same = load_megatron(config(prefix), 257).facts
    assert load_megatron(config(prefix), 257).facts == same
    edited = write(tmp_path / "train", seed=5)
    assert load_megatron(config(edited), 257).facts["crc32"] != same["crc32"]


def tokenizer_json(prefix, size, added=()):
    raw = {"model": {"vocab": {str(i): i for i in range(size)}}, "added_tokens": [{"id": i} for i in added]}
    with open(f"{prefix}.tokenizer.json", "w") as file:
        json.dump(raw, file)


def test_the_vocabulary_is_the_tokenizers_padded(tmp_path):
    prefix = write(tmp_path / "d", top=200)
    settings = config(prefix, vocab_size=None)
    assert load_data(settings, 257).vocab_size == 257
    tokenizer_json(prefix, 250)
    assert load_data(settings, 257).vocab_size == 256
    tokenizer_json(prefix, 250, added=(250, 256))
    assert load_data(settings, 257).vocab_size == 384
    assert load_data(config(prefix, vocab_size=300), 257).vocab_size == 300


def test_a_unigram_s_vocabulary_is_a_list(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"model": {"vocab": [["a", 0.1], ["b", 0.2]]}, "added_tokens": []}')
    assert tokenizer_vocab_size(path) == 2


def test_datasets_of_different_tokenizers_are_refused(tmp_path):
    a, b = (write(tmp_path / name) for name in "ab")
    tokenizer_json(a, 300)
    tokenizer_json(b, 301)
    with pytest.raises(ValueError, match=r"different tokenizers: .*a.tokenizer.json, .*b.tokenizer.json"):
        load_data(config(a, eval_data=(b,), vocab_size=None), 257)


def test_ids_past_the_vocabulary_are_an_error_at_start(prefix):
    with pytest.raises(ValueError, match=r"train.bin, from token 0 on, holds the token id 299, and the voc"):
        load_data(config(prefix, vocab_size=None), 257)
    with pytest.raises(ValueError, match="holds the token id 299"):
        load_held_out(prefix, 257, True, 16)


def test_ids_that_the_start_passed_over_are_an_error_when_read(prefix, monkeypatch):
    monkeypatch.setattr(IndexedDataset, "check_ids", lambda *_: None)
    settings = config(prefix, vocab_size=100)
    with pytest.raises(ValueError, match=r"sample \d+ of .*train holds the token id"):
        list(load_data(settings, 257).batches(settings, 0, 9))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (["A"], (["A"], None)),
        (["A", "B", "C"], (["A", "B", "C"], None)),
        (["30", "A", "70", "B"], (["A", "B"], [30.0, 70.0])),
        (["1", "A"], (["A"], [1.0])),
    ],
)
def test_blends_are_written_as_megatrons(data, expected):
    assert parse_blend(data) == expected


WRONG = "0.5 A B, 0.5 A 0.5, A 0.5 B 0.5, 0 A 1 B, -1 A 2 B, 1 2, nan A 1 B, inf A 1 B, 1e308 A 1e308 B"


@pytest.mark.parametrize("data", WRONG.split(", "))
def test_a_blend_with_a_wrong_weight_is_an_error(data):
    with pytest.raises(ValueError, match=r"takes PREFIX... or WEIGHT PREFIX WEIGHT PREFIX..."):
        parse_blend(data.split())


def test_data_is_text_or_tokenized_and_not_both(prefix, tmp_path):
    (tmp_path / "text.txt").write_text("text " * 100)
    assert is_indexed([prefix])
    assert not is_indexed([str(tmp_path / "text.txt")])
    assert not is_indexed([])
    with pytest.raises(ValueError, match="is tokenized and --data is text"):
        load_data(config(str(tmp_path / "text.txt"), eval_data=(prefix,)), 257)
    said = r"--eval-data .*text\.txt is text and --data is tokenized; tokenize both"
    with pytest.raises(ValueError, match=said):
        load_data(config(prefix, eval_data=(str(tmp_path / "text.txt"),)), 257)
    with pytest.raises(ValueError, match=r"no such file, folder, or dataset /missing.idx"):
        load_data(config("/missing"), 257)
    with pytest.raises(ValueError, match=r"257 ids, .* the model has 100; raise --vocab-size"):
        load_data(config(str(tmp_path / "text.txt"), vocab_size=100), 257)


def test_several_datasets_need_one_to_evaluate_on(prefix):
    with pytest.raises(ValueError, match="name one to evaluate on, as --eval-data PREFIX"):
        load_data(config("0.5", prefix, "0.5", prefix), 257)


def test_a_blend_by_size_is_one_epoch(prefix):
    settings = config(prefix, prefix, eval_data=(prefix,))
    with pytest.raises(ValueError, match=r"one epoch of the datasets has .* to read more, give weights"):
        load_data(settings, 257).batches(settings, 0, 10_000)


def run(out, *flags):
    return training_program.train(parse([*SMALL, "--policy", "bf16", "--out", str(out), *flags]))


@pytest.mark.slow
def test_training_resumes_and_evaluates_on_tokenized_data(tmp_path):
    prefix = write(tmp_path / "train", top=256, end=[256])
    other = write(tmp_path / "other", 40, top=256, seed=1, end=[256])
    flags = ["--data", "3", prefix, "1", other, "--eval-data", other, "--restart-positions"]
    run(tmp_path / "whole", *flags)
    run(tmp_path / "resumed", *flags, "--stop-after", "2")
    position = next((tmp_path / "resumed" / "checkpoints" / "2" / "data").rglob("metadata"))
    assert json.loads(position.read_text()) == {"next_index": 2}
    evaluation = run(tmp_path / "resumed", *flags, "--resume")
    parts = untimed(tmp_path / "resumed"), untimed(tmp_path / "whole")
    steps = [[record for record in part if "loss" in record] for part in parts]
    assert steps[0] == steps[1]
    description = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert description["model"]["vocab_size"] == 257
    assert description["data"]["source"] == f"3 x {prefix}, 1 x {other}"
    assert description.pop("documents") == {"end": 256, "restart_positions": True}

    evaluate = evaluation_program.evaluate
    again = evaluate(evaluation_program.EvalConfig(tmp_path / "resumed"))
    named = evaluate(evaluation_program.EvalConfig(tmp_path / "resumed", eval_data=(other,)))
    part = evaluate(evaluation_program.EvalConfig(tmp_path / "resumed", data=prefix))
    assert again["eval_loss"] == named["eval_loss"] == evaluation["eval_loss"] != part["eval_loss"]
    with pytest.raises(ValueError, match="give one of them"):
        evaluate(evaluation_program.EvalConfig(tmp_path / "resumed", data=prefix, eval_data=(other,)))

    write_run_config(tmp_path / "whole", description)  # as of a run before there were masks
    assert set_up(parse(["--resume", "--out", str(tmp_path / "whole")]), tmp_path / "whole").documents is None
    assert evaluate(evaluation_program.EvalConfig(tmp_path / "whole"))["eval_loss"] != again["eval_loss"]


@pytest.mark.parametrize("count", [1, 10])
def test_too_few_documents_to_keep_one_for_evaluation_are_an_error_that_says_so(tmp_path, count):
    """A .txt file is one document, however long; of eleven one is kept."""
    write_documents(tmp_path / "d", *[range(1000)] * count)
    eleven = write_documents(tmp_path / "eleven", *[range(1000)] * 11)
    assert len(load_validation(eleven, 1000, whole=False)) == 1000
    message = rf"d has {count} documents?, too few to keep the last 5 % .* with --eval-data, or tokenize"
    with pytest.raises(ValueError, match=message):
        load_megatron(DataConfig(data=(str(tmp_path / "d"),)), 1000)
    with pytest.raises(ValueError, match=message):
        load_validation(str(tmp_path / "d"), 1000, whole=False)
    assert len(load_validation(str(tmp_path / "d"), 1000, whole=True)) == 1000 * count
