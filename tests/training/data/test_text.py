"""Corpora and batches: what is read, how it is split, and that batches depend on seed and step alone."""

import dataclasses
import functools
import os
import pathlib

import numpy as np
import pytest

from training.config import DataConfig
from training.data.load import load_data, load_held_out
from training.data.text import END_OF_DOCUMENT, VOCAB_SIZE, TextCorpus, evaluation_batches, load_text

CONFIG = DataConfig(batch_size=4, seq_len=8)
TOKENS = np.arange(200, dtype=np.uint16)
batches = functools.partial(TextCorpus(TOKENS, TOKENS, "a test").batches, steps=0)


def take(stream, n):
    return [next(stream) for _ in range(n)]


def test_the_default_is_the_standard_library():
    corpus = load_text(None)
    assert len(corpus.train) > 2_000_000
    assert len(corpus.validation) > 100_000
    assert corpus.train.max() == END_OF_DOCUMENT == VOCAB_SIZE - 1
    assert b"import" in corpus.validation[corpus.validation < 256].astype(np.uint8).tobytes()
    assert load_text(None).facts == corpus.facts


def test_a_file_is_split_near_its_end(tmp_path):
    text = bytes(range(1, 256)) * 4
    (tmp_path / "a.txt").write_bytes(text)
    corpus = load_text(tmp_path / "a.txt")
    joined = np.concatenate([corpus.train, corpus.validation])
    np.testing.assert_array_equal(joined, [*text, END_OF_DOCUMENT])
    assert 0 < len(corpus.validation) < len(corpus.train)


def test_a_short_text_keeps_one_sequence_to_evaluate_on(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 101)))
    config = DataConfig((str(tmp_path / "a.txt"),), seq_len=16)
    corpus = load_data(config, 257)
    np.testing.assert_array_equal(corpus.train, range(1, 85))
    np.testing.assert_array_equal(corpus.validation, [*range(85, 101), END_OF_DOCUMENT])
    assert corpus.source.endswith("a.txt (5 % of it are too few, so its last 17 tokens are evaluated)")
    np.testing.assert_array_equal(load_held_out(config.data[0], 257, False, 16), corpus.validation)
    unchanged = load_data(dataclasses.replace(config, seq_len=4), 257)
    assert len(unchanged.validation) == 5
    assert unchanged.source == str(tmp_path / "a.txt")


def test_a_folder_is_split_by_file_and_adding_files_moves_none(tmp_path):
    def split():
        corpus = load_text(tmp_path)
        parts = (corpus.train, corpus.validation)
        return [set(bytes(p[p != END_OF_DOCUMENT].astype(np.uint8)).split()) for p in parts]

    for i in range(60):
        (tmp_path / f"{i}.txt").write_text(f"document{i} ")
    (tmp_path / ".hidden").write_text("hidden ")
    train, validation = split()
    assert validation
    assert len(train) + len(validation) == 60
    for i in range(60, 90):
        (tmp_path / f"{i}.txt").write_text(f"document{i} ")
    more_train, more_validation = split()
    assert train <= more_train
    assert validation <= more_validation


def test_what_is_no_text_is_refused(tmp_path):
    (tmp_path / "lone.bin").write_bytes(b"some text, whatever its name")
    load_text(tmp_path / "lone.bin")
    for name, content, said in (
        (
            "nano.bin",
            np.arange(9000, dtype=np.uint16).tobytes(),
            "nano.bin holds NUL .*has no .idx: tokenize",
        ),
        ("a.jsonl.zst", b"0123", "a.jsonl.zst is compressed, not text; tokenize it first: "),
        ("u16.txt", "some text".encode("utf-16"), "u16.txt is in UTF-16; convert it: iconv"),
    ):
        (tmp_path / name).write_bytes(content)
        for path in (tmp_path / name, tmp_path):
            with pytest.raises(ValueError, match=said):
                load_text(path)
        (tmp_path / name).unlink()
    for suffix in (".bin", ".idx"):
        (tmp_path / f"a.data{suffix}").write_bytes(b"0123")
    for path in (tmp_path / "a.data.bin", tmp_path / "a.data.idx", tmp_path):
        with pytest.raises(ValueError, match=r"holds tokens.*give --data .*/a.data$"):
            load_text(path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c4-train.0.json.gz").write_bytes(b"0123")
    said = r"c4-train.0.json.gz is compressed.*tokenize --input \S+/b/c4-train"
    with pytest.raises(ValueError, match=said):
        load_text(tmp_path / "b")
    (tmp_path / "d" / "c").mkdir(parents=True)
    (tmp_path / "d" / "c" / "settings.json").write_text('{\n "text": 1}')
    (tmp_path / "d" / "c" / "list.json").write_text("[1, 2]")
    (tmp_path / "d" / "c" / "source.py").write_text("# longer than the example beside it\n" * 9)
    (tmp_path / "d" / "c" / "example.json").write_text('{"text": "an example"}')
    load_text(tmp_path / "d" / "c")
    for name in ("c4-train.0.json", "documents.jsonl"):
        path = tmp_path / "d" / "c" / name
        path.write_text('{"text": "a document"}\n{"text": "another"}\n' * 99)
        said = f"{name} holds documents .*training.tokenize --input \\S+{name} "
        with pytest.raises(ValueError, match=said):
            load_text(path)
        with pytest.raises(ValueError, match=r"holds documents .*tokenize it as --data is"):
            load_text(path, "--eval-data")
    with pytest.raises(ValueError, match=r"holds documents .*training.tokenize --input \S+/d --recursive "):
        load_text(tmp_path / "d")


def test_a_folder_of_one_file_is_split_as_the_file_is(tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(1, 101)))
    folder, file = load_text(tmp_path), load_text(tmp_path / "a")
    np.testing.assert_array_equal(folder.train, file.train)
    np.testing.assert_array_equal(folder.validation, file.validation)
    assert len(file.validation) == 5


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_read_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=f"--data .*{name}: no"):
        load_text(tmp_path / name)


def test_targets_are_inputs_shifted_by_one():
    batch = next(batches(CONFIG, seed=0))
    assert batch.shape == (4, 9)
    assert batch.dtype == np.int32
    np.testing.assert_array_equal(np.diff(batch, axis=1), 1)


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order():
    rows = np.concatenate(take(batches(CONFIG, seed=0), 12))[:, 0]
    n_windows = (len(TOKENS) - 1) // CONFIG.seq_len
    first, second = rows[:n_windows], rows[n_windows : 2 * n_windows]
    np.testing.assert_array_equal(np.sort(first), CONFIG.seq_len * np.arange(n_windows))
    np.testing.assert_array_equal(np.sort(first), np.sort(second))
    assert first.tolist() != second.tolist()


def test_batches_are_a_function_of_seed_and_step():
    whole = take(batches(CONFIG, seed=3), 12)
    resumed = take(batches(CONFIG, seed=3, start=7), 5)
    np.testing.assert_array_equal(whole[7:], resumed)
    assert not np.array_equal(whole, take(batches(CONFIG, seed=4), 12))


def test_batches_of_one_are_the_rows_of_larger_ones():
    rows = take(batches(DataConfig(batch_size=1, seq_len=8), seed=3), 12)
    np.testing.assert_array_equal(np.concatenate(rows), np.concatenate(take(batches(CONFIG, seed=3), 3)))


def test_evaluation_reads_in_order_and_to_the_end():
    found = list(evaluation_batches(TOKENS, CONFIG, 100))
    assert [len(b) for b in found] == [4] * 6
    np.testing.assert_array_equal(np.concatenate(found)[:, 0], CONFIG.seq_len * np.arange(24))
    assert [len(b) for b in evaluation_batches(TOKENS[:60], CONFIG, 100)] == [4, 3]
    assert len(list(evaluation_batches(TOKENS, CONFIG, 2))) == 2


@pytest.mark.parametrize(
    "read", [lambda c: batches(c, seed=0), lambda c: list(evaluation_batches(TOKENS, c, 1))]
)
def test_a_sequence_longer_than_the_data_is_an_error(read):
    said = r"needs --seq-len \+ 1 = 201 tokens and the (training|validation) data has 200"
    with pytest.raises(ValueError, match=said):
        read(DataConfig(seq_len=200))


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/mem").exists(), reason="needs a file that opens and does not read"
)
def test_an_error_while_reading_names_the_file():
    with pytest.raises(OSError, match="error") as caught:
        load_text(pathlib.Path("/proc/self/mem"))
    assert caught.value.filename == "/proc/self/mem"


def test_a_pipe_is_refused_by_the_flag_that_names_it(tmp_path):
    """As from a shell's <(command)."""
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 256)))
    pipe, data = tmp_path / "pipe", (str(tmp_path / "a.txt"),)
    os.mkfifo(pipe)
    reads = [
        ("--data", lambda: load_held_out(str(pipe), 257, False, 16)),
        ("--eval-data", lambda: load_held_out(str(pipe), 257, True, 16)),
        ("--eval-data", lambda: load_data(DataConfig(data, eval_data=(str(pipe),)), 257)),
    ]
    for flag, read in reads:
        with pytest.raises(ValueError, match=f"^{flag} .*pipe is a pipe: write what it gives into a file"):
            read()
    with pytest.raises(ValueError, match=r"^--eval-data .*nothing: no such file, folder, or dataset"):
        load_held_out(str(tmp_path / "nothing"), 257, True, 16)
