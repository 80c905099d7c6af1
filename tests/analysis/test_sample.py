"""`eval.py sample`: tokenizers, seeds, policies, and what it prints."""

import dataclasses
import functools
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import eval as evaluation_program
import train as training_program
from analysis import sample as sampling
from analysis.restore import restore
from analysis.sample import Codec, SampleConfig, codec_of
from models import decoder
from models.attention.documents import Documents
from training.command_line import parse
from training.files import HUGGINGFACE


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on text whose model has one layer."""
    folder = tmp_path_factory.mktemp("runs")
    sizes = {"vocab_size": 1, "d_model": 32, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16}
    (folder / "shape.json").write_text(json.dumps(sizes | {"d_ff": 32, "init_std": 0.5}))
    flags = f"--steps 1 --batch-size 1 --seq-len 8 --eval-batches 1 --policy wgrad_rht --data {__file__}"
    flags += f" --model-config {folder}/shape.json --out {folder}/run"
    training_program.train(parse(flags.split()))
    return folder / "run"


@pytest.mark.slow
def test_greedy_tokens_equal_those_without_a_cache(run, monkeypatch, capsys):
    codec = Codec(lambda text: list(text.encode()), lambda ids: " ".join(map(str, ids)), end=None)
    monkeypatch.setattr(sampling, "codec_of", lambda *_: codec)
    arguments = ["--prompt", "def ", "--tokens", "5", "--temperature", "0", str(run)]
    evaluation_program.main(["sample", *arguments])
    printed = capsys.readouterr().out
    evaluation_program.main(["sample", "--json", *arguments])
    result = json.loads(capsys.readouterr().out)
    assert printed == "def " + result["text"] + "\n"
    assert (result["policy"], result["step"], result["tokens"]) == ("wgrad_rht", 1, 5)
    _, model, params, _, phase, *_ = restore(SampleConfig(run))
    tokens = jnp.array([[*b"def ", *map(int, result["text"].split())]])
    apply = jax.jit(functools.partial(decoder.apply, model, policies=phase.layers))
    following = jnp.argmax(apply(params, tokens, key=jax.random.key(0)), axis=-1)[0]
    np.testing.assert_array_equal(following[3:-1], tokens[0, 4:])


@pytest.mark.slow
def test_the_seed_and_the_policy_decide(run):
    texts = [evaluation_program.sample(SampleConfig(run, tokens=8, seed=seed))["text"] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    changes = ("wgrad.*.scale_rule=even",)
    result = evaluation_program.sample(SampleConfig(run, policy="wgrad", set=changes, tokens=2))
    assert (result["policy"], result["set"]) == ("wgrad", changes)


def test_a_text_beyond_the_training_s_length_is_told(run, capsys):
    """Of 8 tokens, prompt included."""
    evaluation_program.sample(SampleConfig(run, prompt="abcd", tokens=4, temperature=0.0))
    assert "warning" not in capsys.readouterr().err
    evaluation_program.sample(SampleConfig(run, prompt="abcdefgh", tokens=1, temperature=0.0))
    assert "the text has 9 tokens with its prompt, and the run has --seq-len 8" in capsys.readouterr().err


@pytest.mark.parametrize(("documents", "end"), [(None, 0), (Documents(3), 3)])
def test_the_tokenizer_is_the_data_s(run, tmp_path, documents, end):
    """And a document ends with the run's own token, or else by a usual name."""
    words = {"<eos>": 0, "the": 1, "square": 2, "is": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "data.tokenizer.json"))
    (tmp_path / "data.idx").touch()
    restored = restore(SampleConfig(run))
    restored = restored._replace(config=parse(["--data", str(tmp_path / "data")]), documents=documents)
    codec = codec_of(run, restored)
    assert (codec.encode("the square"), codec.decode([1, 3]), codec.end) == ([1, 2], "the is", end)
    pathlib.Path(tmp_path / "data.tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer; one of .*data.tokenizer.json, .* must exist"):
        codec_of(run, restored)


def test_data_that_is_gone_leaves_no_tokenizer(run, tmp_path):
    """Unless the vocabulary says that it was text."""
    restored = restore(SampleConfig(run))
    gone = restored._replace(config=parse(["--data", str(tmp_path / "gone")]))
    assert codec_of(run, gone).encode("hi") == [104, 105]
    larger = gone._replace(model=dataclasses.replace(restored.model, vocab_size=512))
    with pytest.raises(ValueError, match=r"gone, which .* was trained on, is gone, so that its tokenizer is"):
        codec_of(run, larger)


def test_a_run_on_text_reads_bytes_whatever_it_began_from(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / HUGGINGFACE).mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0})).save(
        str(copy / HUGGINGFACE / "tokenizer.json")
    )
    restored = restore(SampleConfig(copy))
    assert codec_of(copy, restored).encode("hi") == [104, 105]
    description = json.loads((copy / "config.json").read_text())
    del description["data"]  # as of an imported checkpoint, which has not begun
    (copy / "config.json").write_text(json.dumps(description))
    assert codec_of(copy, restored).encode("a") == [0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tokens": 0}, "--tokens must be at least 1"),
        ({"temperature": -1.0}, "--temperature must be 0 or a positive float32"),
        ({"temperature": 1e39}, "--temperature must be 0 or a positive float32"),
        ({"top_p": 0.0}, "--top-p must be greater than 0"),
        ({"top_p": 0.5, "temperature": 0.0}, "--top-p 0.5 draws nothing with --temperature 0, .*; leave one"),
        ({"seed": -1}, "--seed must be from 0"),
        ({"prompt": os.fsdecode("a\xe4".encode() + b"\xff")}, "--prompt is not UTF-8: its byte 4 is 0xff; "),
    ],
)
def test_flags_are_checked(flags, message):
    with pytest.raises(ValueError, match=message):
        SampleConfig(pathlib.Path("run"), **flags)


def test_more_tokens_than_memory_holds_are_refused(run, monkeypatch):
    monkeypatch.setattr(sampling, "memory_there_is", lambda: 2**30)
    with pytest.raises(ValueError, match="keys and values of 2,147,483,648 tokens take 128 GiB and the dev"):
        evaluation_program.sample(SampleConfig(run, tokens=2**31 - 1))
