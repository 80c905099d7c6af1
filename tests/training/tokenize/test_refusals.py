"""Tokenizing over files that are there is refused, and nothing is lost."""

import pytest

from training.tokenize.plan import TokenizeConfig
from training.tokenize.tokenize import tokenize

pytest.importorskip("tokenizers")


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
