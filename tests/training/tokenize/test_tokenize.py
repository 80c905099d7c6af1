"""Tokenizing: the library's own ids in order, with any number of processes, through any interruption."""

import errno
import gzip
import json
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.marks import parametrize
from support.tokenizing import config, write_files

from training.data.indexed_dataset import IndexedDataset
from training.data.tokenizer import end_of_document, load_tokenizer, tokenizer_vocab_size
from training.tokenize import workers
from training.tokenize.plan import TokenizeConfig
from training.tokenize.tokenize import advice, main, summary, tokenize, train_tokenizer

tokenizers = pytest.importorskip("tokenizers")
ROOT = pathlib.Path(__file__).parents[3]


def test_ids_are_the_librarys_in_order(here, corpus, tokenizer, tmp_path):
    folder, texts = corpus
    record = tokenize(config(folder, tmp_path / "new" / "d", tokenizer))
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    data = IndexedDataset(tmp_path / "new" / "d")
    assert [data[i].tolist() for i in range(len(data))] == [library.encode(text).ids for text in texts]
    assert data.dtype == np.uint16
    assert (record["documents"], record["tokens"]) == (len(texts), len(data.tokens))
    assert record["left_out"] == {}
    assert (tmp_path / "new" / "d.tokenizer.json").read_bytes() == tokenizer.read_bytes()
    names = ["d.bin", "d.idx", "d.json", "d.tokenizer.json"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == names


def test_each_document_can_end_with_a_token(here, corpus, tokenizer, tmp_path):
    folder, texts = corpus
    record = tokenize(config(folder, tmp_path / "d", tokenizer, append_eod=True))
    data = IndexedDataset(tmp_path / "d")
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    assert record["eod"] == "<|endoftext|>"
    assert data[5].tolist() == [*library.encode(texts[5]).ids, record["eod_id"]]


def test_what_is_left_out_is_counted_and_listed(here, tokenizer, tmp_path, capsys):
    good = json.dumps({"text": "word1 word2"}) + "\n"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(good + "{broken\n" + '{"text": ""}\n' + good)
    content = gzip.compress((good * 5000).encode())
    (tmp_path / "in" / "b.json.gz").write_bytes(content[:-20])
    record = tokenize(config(tmp_path / "in", tmp_path / "d", tokenizer))
    assert record["left_out"] == {"empty document": 1, "malformed line": 1, "truncated gzip": 1}
    listed = (tmp_path / "d.problems.txt").read_text().splitlines()
    starts = [f"{tmp_path}/in/a.jsonl:2: malformed line: ", f"{tmp_path}/in/a.jsonl:3: empty document: "]
    starts.append(f"{tmp_path}/in/b.json.gz:{record['documents'] - 2 + 1}: truncated gzip: ")
    assert all(line.startswith(start) for line, start in zip(listed, starts, strict=True))
    printed = capsys.readouterr().out.splitlines()
    assert set(listed) <= set(printed)


def test_a_text_without_tokens_is_listed_too(here, tmp_path):
    path = tmp_path / "words.json"
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(path))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "a a"}\n{"text": " "}\n')
    assert tokenize(config(tmp_path / "in", tmp_path / "d", path))["left_out"] == {"empty document": 1}


@pytest.mark.parametrize("special_tokens", ["escape", "allow"])
def test_a_text_cannot_forge_a_special_token_unless_allowed(here, tokenizer, tmp_path, special_tokens):
    text = "word1<|endoftext|>word2"
    (tmp_path / "in").mkdir()
    lines = "".join(json.dumps({"text": t}) + "\n" for t in (text, "word3", f"{text} {text}"))
    (tmp_path / "in" / "a.jsonl").write_text(lines)
    flags = {"append_eod": True, "special_tokens": special_tokens}
    record = tokenize(config(tmp_path / "in", tmp_path / "d", tokenizer, **flags))
    data, library = IndexedDataset(tmp_path / "d"), tokenizers.Tokenizer.from_file(str(tokenizer))
    ends = [data[i].tolist().count(record["eod_id"]) for i in range(3)]
    assert ends == ([1, 1, 1] if special_tokens == "escape" else [2, 1, 3])
    assert library.decode(data[0].tolist(), skip_special_tokens=False) == text + "<|endoftext|>"
    assert record["spelled"] == {"<|endoftext|>": 2}
    assert "<|endoftext|> in 2 texts" in summary("d", record)


@pytest.mark.parametrize("spelling", ["</s>", "\uff1c/s\uff1e"])
def test_a_special_token_that_is_a_word_of_the_model_is_not_forged_either(here, tmp_path, spelling):
    """Unigram and word-level models hold special tokens as pieces, which escaping does not hide.

    A normalizer makes them of other texts, too, of which the end of a document is looked for.
    """
    path = tmp_path / "words.json"
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}))
    library.normalizer = tokenizers.normalizers.NFKC()
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["</s>"])
    library.save(str(path))
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{{"text": "a {spelling} a"}}\n')
    record = tokenize(
        TokenizeConfig((str(tmp_path / "a.jsonl"),), str(tmp_path / "d"), path, append_eod=True)
    )
    assert IndexedDataset(tmp_path / "d").tokens.tolist() == [0, 1]
    assert (record["left_out"], record["spelled"]) == ({"special token": 1}, {})


def test_a_text_that_the_tokenizer_cannot_encode_is_named(here, tmp_path):
    path = tmp_path / "words.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(str(path))  # without a token for others
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    said = r"a\.jsonl: the tokenizer cannot encode a text between line 1 and 2: WordLevel error"
    with pytest.raises(ValueError, match=said):
        tokenize(TokenizeConfig((str(tmp_path / "a.jsonl"),), str(tmp_path / "d"), path))


def test_a_tokenizer_that_truncates_or_adds_tokens_does_neither(here, corpus, tokenizer, tmp_path):
    library = tokenizers.Tokenizer.from_file(str(tokenizer))
    library.enable_truncation(3)
    library.enable_padding(length=5)
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    library.save(str(tmp_path / "t.json"))
    for name, path in (("plain", tokenizer), ("other", tmp_path / "t.json")):
        tokenize(config(corpus[0], tmp_path / name, path))
    assert (tmp_path / "plain.bin").read_bytes() == (tmp_path / "other.bin").read_bytes()


def test_training_a_tokenizer_gives_the_same_bytes_every_time(corpus, tmp_path):
    files = sorted(map(str, corpus[0].iterdir()))
    first = train_tokenizer(files, "text", 320, 10**6)
    assert train_tokenizer(files, "text", 320, 10**6) == first
    assert train_tokenizer(files, "text", 320, 300) != first
    path = tmp_path / "t.json"
    path.write_text(first)
    assert tokenizer_vocab_size(path) == 320
    library = load_tokenizer(path)
    text = "any text, 大 and \x00 too"
    assert library.decode(library.encode(text).ids) == text
    assert end_of_document(library, None) == ("<|endoftext|>", 0)


def test_a_dataset_beside_its_text_is_not_read_as_text(here, tokenizer, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n{}\n')  # the problem makes a .txt
    given = TokenizeConfig((str(tmp_path), str(tmp_path / "a.jsonl")), str(tmp_path / "d"), tokenizer)
    first = tokenize(given)
    assert first["documents"] == 1
    assert tokenize(given) == first
    assert "nothing to do" in capsys.readouterr().out


def test_a_tokenizer_is_trained_with_the_data(here, corpus, tmp_path, capsys):
    options = {"train_tokenizer": True, "vocab_size": 5000}
    record = tokenize(config(corpus[0], tmp_path / "d", tmp_path / "copy.json", **options))
    assert "fewer than the 5,000 asked for" in capsys.readouterr().out
    assert 257 < record["vocab_size"] < 5000
    assert (tmp_path / "copy.json").read_bytes() == (tmp_path / "d.tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --tokenizer FILE, or train one"),
        ({"tokenizer": "missing.json"}, "missing.json: no such file; train one with"),
        ({"tokenizer": "broken.json"}, "broken.json is not a tokenizer.json"),
        ({"tokenizer": "t.json", "vocab_size": 300}, "or train one with --train-tokenizer"),
        ({"tokenizer": "t.json", "eod": "<eos>"}, "give both"),
        ({"tokenizer": "t.json", "train_characters": 99}, "--train-characters is for --train-tokenizer"),
        ({"tokenizer": "t.json", "append_eod": True, "eod": "<end>"}, "--eod '<end>': the tokenizer has no"),
        ({"tokenizer": "t.json", "append_eod": True}, "the tokenizer has none of <|endoftext|>"),
        ({"train_tokenizer": True, "append_eod": True, "eod": "a"}, "leave --eod out"),
        ({"train_tokenizer": True, "vocab_size": 256}, "at least 257 tokens"),
        ({"tokenizer": "t.json", "field": "body"}, "no file holds a document"),
    ],
)
def test_bad_input_ends_with_what_to_do_and_is_not_in_the_way(
    here, corpus, tokenizer, tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save("t.json")
    pathlib.Path("broken.json").write_text('{"a": 1}')
    if "tokenizer" in options:
        options = options | {"tokenizer": pathlib.Path(options["tokenizer"])}
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared as it is
        tokenize(config(corpus[0], tmp_path / "d", **options))
    assert message in str(caught.value)
    left = ["broken.json", *(["d.partial"] if "field" in options else []), "t.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    pathlib.Path("t.json").write_bytes(tokenizer.read_bytes())
    good = {"tokenizer": pathlib.Path("t.json"), "append_eod": True}
    assert tokenize(config(corpus[0], tmp_path / "d", **good))["eod"] == "<|endoftext|>"
    assert not (tmp_path / "d.partial").exists()


def test_a_column_that_is_not_there_is_named_before_anything_is_written(here, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["one"]}), tmp_path / "b.parquet")
    (tmp_path / "a.parquet").write_bytes(b"damaged, which is listed among the problems")
    flags = ["--input", str(tmp_path / "*"), "--output", str(tmp_path / "out" / "d"), "--train-tokenizer"]
    with pytest.raises(SystemExit, match=r"b\.parquet has no column 'text'; name one of body with"):
        main([*flags, "--vocab-size", "257"])
    assert not (tmp_path / "out").exists()
    main([*flags, "--vocab-size", "258", "--column", "body"])
    assert len(IndexedDataset(tmp_path / "out" / "d")) == 1


def test_a_field_of_texts_is_refused(here, tokenizer, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one")
    said = r"--field body: .*a\.txt is a document without fields; leave it out"
    with pytest.raises(ValueError, match=said):
        tokenize(config(tmp_path / "in", tmp_path / "d", tokenizer=tokenizer, field="body"))
    assert list(tmp_path.glob("d*")) == []


def test_text_alone_trains_a_tokenizer(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"hold no text to train on, for example .*a\.jsonl:1: "):
        train_tokenizer([str(tmp_path / "a.jsonl")], "text", 300, 1000)


def command(folder, prefix, *flags):
    pattern = str(folder / "c4-train.*.json.gz")
    return [sys.executable, "-m", "training.tokenize", "--input", pattern, "--output", str(prefix), *flags]


@pytest.mark.parametrize(
    ("documents", "tokens", "said"), [(1, 1, "1 document, 1 token"), (0, 2000, "0 documents, 2,000 tokens")]
)
def test_the_summary_counts_in_words(documents, tokens, said):
    counts = {"documents": documents, "tokens": tokens, "left_out": {}, "spelled": {}}
    assert summary("p", counts) == f"p: {said}"


@pytest.mark.slow
def test_the_command_line_gives_the_same_with_any_number_of_processes(corpus, tmp_path):
    folder, texts = corpus
    flags = ["--train-tokenizer", "--vocab-size", "300", "--append-eod"]
    for name, count in (("one", "1"), ("threads", "6")):
        full = command(folder, tmp_path / name, *flags, "--workers", count)
        done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
        assert f"{len(texts)} documents" in done.stdout
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        files = {(tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "threads")}
        assert len(files) == 1


@parametrize("number", slow=[signal.SIGKILL], exhaustive=[signal.SIGINT])
def test_a_killed_command_goes_on_and_its_processes_end(here, tokenizer, tmp_path, number):
    folder = tmp_path / "in"
    write_files(folder, 12, 2000, words=40)
    full = command(folder, tmp_path / "d", "--tokenizer", str(tokenizer), "--workers", "2")
    parts = tmp_path / "d.partial"
    # A shell starts background jobs with SIGINT ignored, and their processes inherit that.
    heed = "import os, signal as s, sys; s.signal(s.SIGINT, s.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    heeding = [sys.executable, "-c", heed, *full]
    process = subprocess.Popen(heeding, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 100
    while len(list(parts.glob("0*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    if number == signal.SIGINT:
        said = "python -m training.tokenize: interrupted; the same command continues where it ended\n"
        assert (process.returncode, errors) == (128 + signal.SIGINT, said)
    time.sleep(1.5)
    done = sorted(parts.glob("0*.json"))
    state = {path: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert 2 <= len(done) < 12
    assert not (tmp_path / "d.idx").exists()
    time.sleep(1)
    assert {path: path.stat().st_mtime_ns for path in parts.iterdir()} == state, "a process still writes"
    again = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, check=True, timeout=200)
    assert f"{len(done)} of 12 files were done before" in again.stdout
    tokenize(config(folder, tmp_path / "whole", tokenizer))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"d{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


@pytest.mark.slow
def test_a_process_that_ends_without_a_word_ends_the_run(corpus, tmp_path):
    files = sorted(map(str, corpus[0].iterdir()))
    job = workers.Job(tmp_path, tmp_path / "missing.json", "text", None, True, "uint16", 1)
    with pytest.raises(ValueError, match="a worker process ended unexpectedly"):
        list(workers.make(job, files, [0], 1, lambda *_: None))


def test_the_command_that_trains_survives_a_shell():
    train = "train on it with: python train.py --data 'data/my corpus; rm'"
    assert advice("data/my corpus; rm") == train


def test_a_tokenizer_at_which_the_package_panics_is_an_error(tmp_path):
    """A merge whose second token lacks the prefix that the file declares."""
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    model = {
        "type": "BPE",
        "vocab": vocabulary,
        "merges": [["a", "b"]],
        "continuing_subword_prefix": "##" * 9,
    }
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json")


@pytest.mark.parametrize(
    "flags", [{"workers": 0}, {"workers": 10**9}, {"vocab_size": 10**12}, {"train_characters": 0}], ids=str
)
def test_numbers_that_cannot_be_are_refused(tmp_path, flags):
    [name] = flags
    config = TokenizeConfig(("a.txt",), str(tmp_path / "d"), train_tokenizer=True, **flags)
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be at least 1 and at most "):
        tokenize(config)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_names_the_output(tmp_path, monkeypatch):
    """Writes to open files name no path."""

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(main.__globals__, "tokenize", full)
    with pytest.raises(SystemExit, match=f"writing to {tmp_path}/d, where .* are free"):
        main(["--input", "/nothing", "--output", str(tmp_path / "d"), "--train-tokenizer"])
