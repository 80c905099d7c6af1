"""Tokenization that was interrupted goes on, is not mixed with another, and overwrites no file."""

import json
import os
import pathlib
import re

import pytest
from support.tokenizing import config

from training.tokenize import workers
from training.tokenize.plan import TokenizeConfig
from training.tokenize.tokenize import tokenize

pytest.importorskip("tokenizers")


def test_the_same_command_again_does_nothing(here, corpus, tokenizer, tmp_path, monkeypatch):
    record = tokenize(config(corpus[0], tmp_path / "d", tokenizer))
    monkeypatch.setattr(workers, "make", None)
    assert tokenize(config(corpus[0], tmp_path / "d", tokenizer)) == json.loads(json.dumps(record))
    said = r"d\.bin, .*d\.idx, .*d\.json, .*d\.tokenizer\.json exist already; remove"
    with pytest.raises(ValueError, match=said):
        tokenize(config(corpus[0], tmp_path / "d", tokenizer, append_eod=True))


def interrupted(folder, prefix, tokenizer, monkeypatch, **options):
    """Runs until two parts are done."""
    make = workers.make

    def some(*arguments):
        for i, shard in enumerate(make(*arguments)):
            yield shard
            if i == 1:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workers, "make", some)
        with pytest.raises(KeyboardInterrupt):
            tokenize(config(folder, prefix, tokenizer, **options))


def change(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["00000.bin", "00000.lengths", "00001.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", [change, lambda path: path.write_bytes(b"")], ids=["changed", "emptied"])
def test_a_file_damaged_since_is_made_again(here, corpus, tmp_path, monkeypatch, capsys, name, damage):
    options = {"train_tokenizer": True, "vocab_size": 280}
    interrupted(corpus[0], tmp_path / "d", None, monkeypatch, **options)
    damage(tmp_path / "d.partial" / name)
    capsys.readouterr()
    tokenize(config(corpus[0], tmp_path / "d", **options))
    said = capsys.readouterr().out.splitlines()
    if name == "tokenizer.json":
        assert said[0].startswith("trained a tokenizer of 280 tokens")
        assert said[1] == "2 of 3 files were done before"
    else:
        number = int(name[:5])
        assert re.match(rf".*d\.partial/{name} (is damaged|has 0 bytes instead of \d+): .*{number}", said[0])
        assert said[0].endswith(f"c4-train.0000{number}.json.gz is tokenized again")
        assert said[1] == "1 of 3 files were done before"
    tokenize(config(corpus[0], tmp_path / "whole", **options))
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert (tmp_path / f"d{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_an_interrupted_run_is_not_mixed_with_another(here, corpus, tokenizer, tmp_path, monkeypatch):
    interrupted(corpus[0], tmp_path / "d", tokenizer, monkeypatch)
    with pytest.raises(ValueError, match=r"d.partial holds an interrupted run that differs in append_eod"):
        tokenize(config(corpus[0], tmp_path / "d", tokenizer, append_eod=True))


@pytest.mark.parametrize("after", [".bin", ".idx", ".tokenizer.json", ".json"])
def test_a_run_killed_while_it_joins_the_parts_goes_on(here, corpus, tokenizer, tmp_path, monkeypatch, after):
    """Whatever was the last file to take its name."""

    class Killed(BaseException):
        pass

    def kill_after(function):
        def wrapper(source, target):
            function(source, target)
            if str(target) == str(tmp_path / f"d{after}"):
                raise Killed

        return wrapper

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", kill_after(os.replace))
        patch.setattr(pathlib.Path, "replace", kill_after(pathlib.Path.replace))
        with pytest.raises(Killed):
            tokenize(config(corpus[0], tmp_path / "d", tokenizer))
    tokenize(config(corpus[0], tmp_path / "d", tokenizer))
    tokenize(config(corpus[0], tmp_path / "whole", tokenizer))
    for suffix in (".bin", ".idx", ".tokenizer.json"):
        assert (tmp_path / f"d{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert not (tmp_path / "d.partial").exists()


def test_two_runs_do_not_write_the_same_prefix(here, corpus, tokenizer, tmp_path, monkeypatch):
    make = workers.make

    def meanwhile(*arguments):
        with pytest.raises(ValueError, match="another process is writing it"):
            tokenize(config(corpus[0], tmp_path / "d", tokenizer))
        yield from make(*arguments)

    monkeypatch.setattr(workers, "make", meanwhile)
    tokenize(config(corpus[0], tmp_path / "d", tokenizer))


@pytest.mark.parametrize("suffix", [".json", ".tokenizer.json", ".problems.txt"])
def test_a_file_that_would_be_overwritten_is_kept(tmp_path, suffix):
    path = tmp_path / f"corpus{suffix}"
    path.write_text('{"text": "hello world"}\n')
    config = TokenizeConfig((str(path),), str(tmp_path / "corpus"), train_tokenizer=True, vocab_size=260)
    with pytest.raises(ValueError, match=f"corpus{suffix} exist already; remove them, or choose"):
        tokenize(config)
    assert path.read_text() == '{"text": "hello world"}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_in_the_way_of_an_interrupted_run_is_to_be_moved(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "hello world"}\n')
    (tmp_path / "o.partial").mkdir()
    (tmp_path / "o.tokenizer.json").mkdir()
    config = TokenizeConfig((str(tmp_path / "in.jsonl"),), str(tmp_path / "o"), train_tokenizer=True)
    with pytest.raises(ValueError, match=r"o\.tokenizer\.json is a folder: move it away, or name"):
        tokenize(config)


@pytest.mark.parametrize("content", ["{}", "[]", "x"])
def test_a_damaged_plan_of_an_interrupted_run_is_named(tmp_path, content):
    (tmp_path / "in.jsonl").write_text('{"text": "hello world"}\n')
    (tmp_path / "o.partial").mkdir()
    (tmp_path / "o.partial" / "plan.json").write_text(content)
    config = TokenizeConfig((str(tmp_path / "in.jsonl"),), str(tmp_path / "o"), train_tokenizer=True)
    with pytest.raises(ValueError, match=r"plan.json is damaged: remove .*o.partial to start over"):
        tokenize(config)
