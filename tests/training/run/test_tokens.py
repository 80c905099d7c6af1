"""The tokenizer of a run: known by a checksum, wherever its dataset lies and whatever lies there now."""

import json

import pytest

from training.config import Config, DataConfig
from training.run.record import to_json, write_run_config
from training.run.tokens import check_tokenizer_of, checksum_of_data, find_tokenizer, tokens_checksum

MODEL = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}


def write(prefix, **model):
    (prefix.parent / f"{prefix.name}.idx").touch()
    path = prefix.parent / f"{prefix.name}.tokenizer.json"
    path.write_text(json.dumps({"model": MODEL | model}))
    return path


@pytest.fixture
def run(tmp_path):
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


def test_another_tokenizer_in_its_place_is_refused(run, tmp_path):
    data = [str(tmp_path / "data")]
    found, paths = find_tokenizer(run, data)
    assert found == paths[0] == tmp_path / "data.tokenizer.json"
    (tmp_path / "data.idx").unlink()  # the record says that they were tokens
    assert find_tokenizer(run, data)[0] == found
    write(tmp_path / "data", vocab={"a": 0})
    with pytest.raises(ValueError, match=r"has other tokens than those that .* was trained on; put its own"):
        find_tokenizer(run, data)
    found.unlink()
    assert find_tokenizer(run, data) == (None, paths)


def test_data_of_other_tokens_is_refused_even_where_the_run_s_are_gone(run, tmp_path):
    (tmp_path / "data.tokenizer.json").unlink()
    write(tmp_path / "same", merges=["a b"])
    check_tokenizer_of(run, "--data", str(tmp_path / "same"))
    other = write(tmp_path / "other", merges=[])
    with pytest.raises(ValueError, match=f"--data {tmp_path}/other was tokenized by {other}, and .* was"):
        check_tokenizer_of(run, "--data", str(tmp_path / "other"))
