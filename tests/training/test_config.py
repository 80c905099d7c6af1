"""The configuration: flags, round trips through JSON, and what a resumed run may change."""

import dataclasses
import pathlib

import pytest

from training.command_line import parse
from training.config import Config, PrecisionConfig
from training.resume import check_resumable
from training.run_config import from_json, to_json

FLAGS = "--policy wgrad --scale-rule even --lr 1e-3 --batch-size=4 --layers head=fp8 blocks.0.*=bf16 --out a"


def test_flags_are_flat_and_reach_their_concern():
    config = parse([*FLAGS.split(), "--resume"])
    assert config.precision == PrecisionConfig("wgrad", "even", ("head=fp8", "blocks.0.*=bf16"))
    assert (config.optimizer.lr, config.data.batch_size, config.out) == (1e-3, 4, pathlib.Path("a"))
    assert config.resume


def test_json_round_trips():
    config = parse([*FLAGS.split(), "--data", "somewhere"])
    assert from_json(to_json(config)) == config
    assert from_json(to_json(Config())) == Config()


@pytest.mark.parametrize(
    "flags", [["--stop-after", "0"], ["--stop-after", "301"], ["--lr", "0"], ["--warmup-steps=-1"]]
)
def test_numbers_out_of_range_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        parse(flags)
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--steps", "--batch-size", "--eval-every", "--checkpoint-every"])
def test_counts_must_be_positive(flag, capsys):
    with pytest.raises(SystemExit):
        parse([flag, "0"])
    assert "at least 1" in capsys.readouterr().err


def test_resuming_needs_to_know_what(capsys):
    with pytest.raises(SystemExit):
        parse(["--resume"])
    assert "--out" in capsys.readouterr().err


def test_a_resumed_run_may_change_how_often_but_not_what():
    saved = Config(out=pathlib.Path("a"))
    check_resumable(dataclasses.replace(saved, eval_every=7, resume=True), saved, pathlib.Path("a"))
    with pytest.raises(ValueError, match="steps: the run has 300, the command line 5"):
        check_resumable(dataclasses.replace(saved, steps=5), saved, pathlib.Path("a"))
