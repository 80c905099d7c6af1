"""config.json: what is written comes back, what is none is refused; a run's tokenizer is known."""

import json
import os
import pathlib

import jax
import pytest
from support.llamas import SMALL, imported

from models import decoder
from training.command_line import parse
from training.config import Config, DataConfig
from training.files import HUGGINGFACE
from training.run.record import documents_of_run, from_json, read_run_config, to_json, write_run_config
from training.run.setup import set_up
from training.run.tokens import (
    check_tokens_of,
    checked_tokens,
    checksum_of_data,
    find_tokenizer,
    tokens_checksum,
)

VALUES = {"config": to_json(Config(spike_factor=float("inf"))), "model": {"n_layers": 2}, "mesh": {"data": 1}}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_run_config(folder, VALUES)
    return folder


def test_what_is_written_comes_back(run):
    assert read_run_config(run) == VALUES
    assert from_json(read_run_config(run)["config"]) == Config(spike_factor=float("inf"))


def test_every_cut_is_noticed(run):
    path, whole = run / "config.json", (run / "config.json").read_bytes()
    cuts = [whole[:at] for at in range(0, len(whole) - 2, 97)]
    crafted = [
        b'{"config": {}, "data": {}}',
        b'{"config": {}, "phases": {}}',
        b'{"config": {}, "imported": 1}',
    ]
    for content in [*cuts, b"[" * 100_000, b"\xff" * 9, b"{}", b"[]", *crafted]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"config.json is damaged: .*; put a copy of yours back"):
            read_run_config(run)
    path.unlink()
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        read_run_config(run)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "checkpoints/2/checksums.json"])
def test_a_pipe_where_a_file_should_be_is_named(run, name):
    """Reading it would never end."""
    (run / name).unlink(missing_ok=True)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(run / name)
    with pytest.raises(ValueError, match=f"{name} is not a file: remove it"):
        read_run_config(run)


@pytest.mark.parametrize(
    "change",
    [
        {"precision": 5},
        {"optimizer": {"lr": "high"}},
        {"optimizer": VALUES["config"]["optimizer"] | {"b1": "high"}},
        {"data": None},
        {"out": []},
        {"steps": None},
        {"new": 1},
    ],
)
def test_values_of_another_kind_are_refused(change):
    with pytest.raises(ValueError, match="no configuration of this version"):
        from_json(VALUES["config"] | change)


@pytest.mark.parametrize("end", [-1, 2**31, 10**400, 1.0])
def test_documents_end_with_a_token(end):
    with pytest.raises(ValueError, match="no documents of this version"):
        documents_of_run({"documents": {"end": end, "restart_positions": False}})


MODEL = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


def write(prefix, **model):
    (prefix.parent / f"{prefix.name}.idx").touch()
    path = prefix.parent / f"{prefix.name}.tokenizer.json"
    path.write_text(json.dumps({"model": MODEL | model}))
    return path


@pytest.fixture
def tokenized(tmp_path):
    """A run on tokens of `data`."""
    write(tmp_path / "data")
    data = (str(tmp_path / "data"),)
    folder = tmp_path / "run"
    folder.mkdir()
    config = to_json(Config(data=DataConfig(data)))
    facts = {"source": data[0], "train_tokens": 9, "validation_tokens": 9, "crc32": "0"}
    write_run_config(folder, {"config": config, "data": facts, "tokenizer": checksum_of_data(data)})
    return folder


def test_tokens_are_what_counts_and_not_how_a_version_writes_them(tmp_path):
    ours = tokens_checksum(write(tmp_path / "ours"))
    older = write(tmp_path / "older", merges=["a b"])
    older.write_text(json.dumps(json.loads(older.read_text()) | {"post_processor": None}, indent=1))
    assert tokens_checksum(older) == ours
    assert tokens_checksum(write(tmp_path / "other", vocab={"b": 0, "a": 1, "ab": 2})) != ours


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {}}', '{"model": []}', "[" * 100_000])
def test_what_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer.json of the package tokenizers"):
        tokens_checksum(tmp_path / "t.json")


def test_another_tokenizer_in_its_place_is_refused(tokenized, tmp_path):
    data = [str(tmp_path / "data")]
    found, paths = find_tokenizer(tokenized, data)
    assert found == paths[0] == tmp_path / "data.tokenizer.json"
    (tmp_path / "data.idx").unlink()  # the record says that they were tokens
    assert find_tokenizer(tokenized, data)[0] == found
    write(tmp_path / "data", vocab={"a": 0})
    with pytest.raises(ValueError, match=r"has other tokens than those that .* was trained on; put its own"):
        find_tokenizer(tokenized, data)
    found.unlink()
    assert find_tokenizer(tokenized, data) == (None, paths)


def test_data_of_other_tokens_is_refused_even_where_the_run_s_are_gone(tokenized, tmp_path):
    (tmp_path / "data.tokenizer.json").unlink()
    write(tmp_path / "same", merges=["a b"])
    check_tokens_of(tokenized, "--data", str(tmp_path / "same"))
    other = write(tmp_path / "other", merges=[])
    with pytest.raises(ValueError, match=f"--data {tmp_path}/other was tokenized by {other}, and .* was"):
        check_tokens_of(tokenized, "--data", str(tmp_path / "other"))


def test_weights_trained_on_tokens_do_not_go_on_with_the_bytes_of_the_default_data(tokenized):
    message = r"without --data Python's source is read as bytes, and .* was trained on tokens of .*/data"
    with pytest.raises(ValueError, match=message):
        checked_tokens(DataConfig(), {}, None, tokenized)


def test_datasets_of_two_tokenizers_are_refused(tmp_path):
    for name, merges in (("ours", ["a b"]), ("same", ["a b"]), ("other", [])):
        write(tmp_path / name, merges=merges)
    ours, same, other, text = (str(tmp_path / name) for name in ("ours", "same", "other", "text"))

    def checked(*data, eval_data=(), saved=None):
        return checked_tokens(DataConfig(data, eval_data), saved or {}, pathlib.Path("runs/a"), None)

    saved = {"data": {}, "config": to_json(Config()), "tokenizer": checksum_of_data([ours])}
    assert checked("0.5", ours, "0.5", same, eval_data=(text,), saved=saved) == saved["tokenizer"]
    with pytest.raises(ValueError, match=r"has other tokens than those that runs/a began with; tokenize"):
        checked(other, saved=saved)
    assert checked_tokens(DataConfig((text,), (other,)), {}, None, None) is None
    for data, held_out in ((("0.5", ours, "0.5", other), ()), ((ours,), (other,))):
        with pytest.raises(
            ValueError, match=f"{other}.tokenizer.json has other tokens than the rest of --data"
        ):
            checked_tokens(DataConfig(data, held_out), {}, None, None)


def test_an_import_continued_in_place_and_new_data_to_evaluate_have_its_tokens(tmp_path):
    """Checked before the data is read."""
    run = imported(tmp_path, SMALL, decoder.init(SMALL, jax.random.key(0)))
    for name, merges in (("own", ["a b"]), ("same", ["a b"]), ("other", [])):
        write(tmp_path / name, merges=merges)
    (tmp_path / "own.tokenizer.json").rename(run / HUGGINGFACE / "tokenizer.json")
    flags = ["--out", str(run), "--resume", "--lr", "1e-4", "--data"]
    for paths, said in (
        (["other"], f"--data {tmp_path}/other was tokenized by "),
        (["same", "--eval-data", "other"], "other.tokenizer.json has other tokens than the rest"),
    ):
        values = [text if text.startswith("-") else str(tmp_path / text) for text in paths]
        with pytest.raises(ValueError, match=said):
            set_up(parse([*flags, *values]), run)


def test_an_import_without_training_has_the_tokens_of_its_tokenizer(tmp_path):
    (tmp_path / "run" / HUGGINGFACE).mkdir(parents=True)
    write_run_config(tmp_path / "run", {"config": to_json(Config()), "imported": "hub"})
    write(tmp_path / "own").rename(tmp_path / "run" / HUGGINGFACE / "tokenizer.json")
    for name, merges in (("same", ["a b"]), ("other", [])):
        (tmp_path / f"{name}.idx").touch()
        write(tmp_path / name, merges=merges)
    check_tokens_of(tmp_path / "run", "--data", str(tmp_path / "same"))
    with pytest.raises(ValueError, match=r"other was tokenized by .* with --tokenizer .*run/huggingface/t"):
        check_tokens_of(tmp_path / "run", "--data", str(tmp_path / "other"))
