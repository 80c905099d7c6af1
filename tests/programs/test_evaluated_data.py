"""The data of an evaluation: what has changed since the run began, and text beside a tokenizer's tokens."""

import json

import jax
import numpy as np
import pytest
from support.runs import SMALL, error_of, resume, run, weights
from support.tokenizing import config, write_files

import eval as evaluation_program
from training.tokenize.tokenize import tokenize


@pytest.mark.slow
def test_changed_data_is_told_by_an_evaluation_and_refused_by_a_resumed_run(tmp_path, capsys):
    data, out = tmp_path / "text.txt", tmp_path / "run"
    data.write_text("one two three four\n" * 300)
    run(data, out, "--policy", "bf16", "--stop-after", "3")
    capsys.readouterr()
    evaluation_program.main([str(out), "--json"])
    assert capsys.readouterr().err == ""
    with data.open("a") as file:
        file.write("five\n" * 100)
    evaluation_program.main([str(out), "--json"])
    said = capsys.readouterr()
    assert f": warning: the data of {out} is now {data} with " in said.err
    assert "put that data back, or name other data with --eval-data" in said.err
    assert json.loads(said.out)["step"] == 3
    evaluation_program.main([str(out), "--json", "--eval-data", str(data)])
    assert capsys.readouterr().err == ""
    said = r"the data is .* tokens, crc32 \w+, but the run began with .*; put that"
    with pytest.raises(SystemExit, match=said):
        resume(out)


@pytest.mark.slow
def test_text_is_not_read_as_bytes_for_a_run_on_tokens(tmp_path, text):
    write_files(tmp_path / "texts", 1, 300)
    prefix, out = tmp_path / "tokens", tmp_path / "run"
    options = {"train_tokenizer": True, "vocab_size": 290, "append_eod": True, "workers": 1}
    tokenize(config(tmp_path / "texts", prefix, **options))
    run(prefix, out, "--policy", "bf16")
    advice = f"python -m training.tokenize --input {text} --tokenizer {prefix}.tokenizer.json --output PREFIX"
    for flag in ("--data", "--eval-data"):
        said = error_of(out, flag, text, program=evaluation_program.main)
        assert f"{flag} {text} is text, which is read as bytes, and {out} was trained on tokens of" in said
        assert advice in said
    said = error_of(*SMALL, "--init", out, "--data", text, "--out", tmp_path / "next")
    assert advice in said
    said = error_of(*SMALL, "--data", prefix, "--eval-data", text, "--out", tmp_path / "next")
    assert "is text and --data is tokenized; tokenize both or neither" in said
    assert not (tmp_path / "next").exists()
    evaluation_program.main([str(out), "--eval-data", str(prefix), "--json"])
    other = tmp_path / "other"
    tokenize(config(tmp_path / "texts", other, **options | {"vocab_size": 280}))
    said = error_of(out, "--eval-data", other, program=evaluation_program.main)
    assert f"--eval-data {other} was tokenized by {other}.tokenizer.json, and {out} was trained on" in said
    assert f"tokenize the text again with --tokenizer {prefix}.tokenizer.json" in said
    evaluation_program.main(["sample", str(out), "--tokens", "2"])
    for suffix in (".idx", ".bin"):
        (tmp_path / f"tokens{suffix}").unlink()
    said = error_of(out, "--eval-data", text, program=evaluation_program.main)
    assert (
        f"{prefix}, which {out} was trained on, is gone, so that its tokens are unknown; put it back" in said
    )


@pytest.mark.slow
def test_a_run_whose_data_moved_goes_on_with_it(tmp_path):
    data, moved = tmp_path / "text.txt", tmp_path / "moved.txt"
    data.write_text("".join(f"line {i} of {i * i}\n" for i in range(500)))
    run(data, tmp_path / "whole", "--policy", "bf16")
    run(data, tmp_path / "run", "--policy", "bf16", "--stop-after", "3")
    data.rename(moved)
    resume(tmp_path / "run", "--data", str(moved))
    jax.tree.map(np.testing.assert_array_equal, weights(tmp_path / "run"), weights(tmp_path / "whole"))
    other = tmp_path / "other.txt"
    other.write_text(moved.read_text()[1:])
    with pytest.raises(SystemExit, match=r"is .*other\.txt with .*, but the run began with .*moved\.txt"):
        resume(tmp_path / "run", "--data", str(other))
