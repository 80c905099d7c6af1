"""Shapes from JSON files: Hugging Face's own, our fields, and errors that name the field."""

import json
import pathlib

import numpy as np
import pytest

from models.config_file import load_config
from models.configs import CONFIGS, get_config, to_dict
from models.huggingface.config import write_config
from training.command_line import parse
from training.data.indexed_dataset import IndexedWriter
from training.files import HUGGINGFACE
from training.log.report import long_sequences
from training.run.setup import open_folder, set_up

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "huggingface"
SMALL = {"vocab_size": 64, "d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
SMALL |= {"d_ff": 64, "rope_scaling": {"factor": 4}}
YARN = {"factor": 2.0, "original_context": 16}


def write(path, raw):
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_both_kinds_of_fields_give_back_every_model(tmp_path, name):
    config = get_config(name)
    assert load_config(write(tmp_path / "ours.json", to_dict(config))) == config
    assert load_config(write(tmp_path / "config.json", write_config(config, 2048))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 3}, "unknown field 'n_layer'; did you mean 'n_layers'"),
        ({"d_ff": "64"}, "d_ff must be a positive integer below 2..31, got '64'"),
        ({"n_heads": 0}, "n_heads must be a positive integer"),
        ({"tied": 1}, "tied must be true or false, got 1"),
        ({"n_kv_heads": 3}, "n_heads 2 must be a multiple of n_kv_heads 3"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"rope_scaling": {"factr": 1}}, "did you mean 'factor'"),
        ({"rope_scaling": 3}, "rope_scaling must be an object or null"),
        ({"rope_scaling": {"low_freq_factor": 4}}, "low_freq_factor must be less than high_freq_factor 4.0"),
        ({"yarn": YARN | {"beta_fast": 0.5}}, "beta_slow must be at most beta_fast 0.5"),
        ({"experts": {"n": 4, "active": 2, "shared": 0}}, "shared must be a positive integer .* or null"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
    ],
)
def test_errors_name_file_and_field(tmp_path, change, message):
    with pytest.raises(ValueError, match=f"shape.json: .*{message}"):
        load_config(write(tmp_path / "shape.json", SMALL | change))


def test_missing_files_and_fields(tmp_path):
    with pytest.raises(ValueError, match=r"the fields d_model, n_layers, .* are missing"):
        load_config(write(tmp_path / "shape.json", {"vocab_size": 3}))
    with pytest.raises(ValueError, match=f"records a run: --init {tmp_path} begins with its model"):
        load_config(write(tmp_path / "config.json", {"config": {}, "model": SMALL, "data": {}}))
    with pytest.raises(ValueError, match="no such file"):
        load_config(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"is a folder; name a file in it, such as .*config\.json"):
        load_config(tmp_path)


@pytest.mark.parametrize("raw", [SMALL, write_config(get_config("tiny"), 2048)], ids=["ours", "theirs"])
def test_the_vocabulary_comes_from_the_data(tmp_path, raw):
    """Text has its own; token ids without a tokenizer need --vocab-size."""
    raw = {name: value for name, value in raw.items() if name != "vocab_size"}
    path = write(tmp_path / "shape.json", raw)
    flags = ["--model-config", str(path), "--seq-len", "8", "--eval-batches", "1", "--batch-size", "1"]
    assert set_up(parse([*flags, "--data", __file__]), tmp_path / "run").model.vocab_size == 257
    dataset = str(tmp_path / "ids")
    with IndexedWriter(dataset, np.uint16) as writer:
        for _ in range(40):
            writer.add(np.arange(40, dtype=np.uint16))
    with pytest.raises(ValueError, match="--vocab-size"):
        set_up(parse([*flags, "--data", dataset]), tmp_path / "run")


@pytest.mark.parametrize(("length", "is_longer"), [(512, False), (513, True)])
def test_sequences_longer_than_the_file_names_are_warned_of(tmp_path, length, is_longer):
    path = write(tmp_path / "config.json", write_config(get_config("tiny"), 512))
    config = parse(["--model-config", str(path), "--seq-len", str(length)])
    said = f"warning: --seq-len {length} is longer than the max_position_embeddings of 512 in {path}, "
    assert [line.startswith(said) for line in long_sequences(config)] == [True] * is_longer
    (tmp_path / HUGGINGFACE).mkdir()
    imported = path.rename(tmp_path / HUGGINGFACE / "config.json")
    config_of_init = parse(["--init", str(tmp_path), "--seq-len", str(length)])
    found = long_sequences(config_of_init)
    assert [f"of 512 in {imported}, " in line for line in found] == [True] * is_longer
    write(path, SMALL | {"max_seq_len": 3})
    assert long_sequences(config) == []  # our fields have none
    path.unlink()
    assert long_sequences(config) == []  # of a run that is resumed


def test_a_run_keeps_its_shape_when_the_file_is_gone(tmp_path):
    path, out = write(tmp_path / "shape.json", SMALL), tmp_path / "run"
    flags = ["--model-config", str(path), "--data", __file__, "--seq-len", "8", "--eval-batches", "1"]
    assert parse(flags).folder().name.startswith("shape-")
    run = set_up(parse([*flags, "--out", str(out), "--batch-size", "1"]), out)
    assert (run.model.d_model, run.model.vocab_size, run.model.rope_scaling.factor) == (32, 257, 4.0)
    open_folder(run, out)
    path.unlink()
    assert set_up(parse(["--out", str(out), "--resume"]), out).model == run.model
