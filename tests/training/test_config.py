"""The configuration: flags, `--help`, round trips through JSON, and what a resumed run may change."""

import dataclasses
import math
import pathlib

import pytest

from analysis.compare.compare import CompareConfig
from analysis.diagnose.diagnose import DiagnoseConfig
from analysis.evaluate import EvalConfig
from mxjax import Gemm, Policy, Rotation
from training.command_line import flags_of, parse
from training.config import Config, DataConfig, PrecisionConfig
from training.run.record import from_json, to_json
from training.run.resume import check_resumable
from training.tokenize.plan import TokenizeConfig

FLAGS = "--policy wgrad --scale-rule even --lr 1e-3 --batch-size=4 --layers head=fp8 blocks.0.*=bf16 --out a"


def test_flags_are_flat_and_reach_their_concern():
    config = parse([*FLAGS.split(), "--resume"])
    assert config.precision == PrecisionConfig("wgrad", "even", ("head=fp8", "blocks.0.*=bf16"))
    assert (config.optimizer.lr, config.data.batch_size, config.out) == (1e-3, 4, pathlib.Path.cwd() / "a")
    assert config.resume


def test_json_round_trips():
    config = parse([*FLAGS.split(), "--data", "0.3", "/a", "0.7", "/b", "--eval-data", "/c"])
    assert from_json(to_json(config)) == config
    assert from_json(to_json(Config())) == Config()


def test_every_path_of_a_flag_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = parse(["--data", "0.5", "~/a", "0.5", "../b", "--eval-data=~/c", "--out=~/run", "--init", "i"])
    home, up = f"{tmp_path}/home", tmp_path.parent
    assert config.data.data == ("0.5", f"{home}/a", "0.5", f"{up}/b")
    found = (config.data.eval_data, str(config.out), config.init)
    assert found == ((f"{home}/c",), f"{home}/run", tmp_path / "i")
    assert Config(data=DataConfig(("1",)), model_config="m.json").data.data == (f"{tmp_path}/1",)
    diagnosis = flags_of(DiagnoseConfig, ["r", "--data=~/a", "--out", "o"])
    assert (diagnosis.run, diagnosis.data, diagnosis.out) == (tmp_path / "r", f"{home}/a", tmp_path / "o")
    assert flags_of(CompareConfig, ["r", "~/r"]).runs == (tmp_path / "r", tmp_path / "home" / "r")
    tokens = TokenizeConfig(("a", "./a", "~/*.txt"), "out", tokenizer=pathlib.Path("t"))
    assert tokens.input == (f"{tmp_path}/a", f"{tmp_path}/a", f"{home}/*.txt")
    assert (tokens.output, tokens.tokenizer) == (f"{tmp_path}/out", tmp_path / "t")


@pytest.mark.parametrize("output", ["", ".", "..", "data/", "data/."])
def test_an_output_without_a_name_is_refused(output):
    with pytest.raises(ValueError, match=r"--output names files, as PREFIX\.bin, and .* is a folder: add"):
        TokenizeConfig(("a",), output)


def test_numbers_at_the_ends_of_their_ranges_are_taken():
    optimizer = parse(["--clip", "inf", "--b1", "0", "--eps", "0", "--weight-decay", "0"]).optimizer
    assert (optimizer.clip, optimizer.b1, optimizer.eps, optimizer.weight_decay) == (math.inf, 0, 0, 0)
    optimizer = parse(["--min-lr-ratio", "1", "--warmup-steps", "0"]).optimizer
    assert (optimizer.min_lr_ratio, optimizer.warmup_steps) == (1, 0)
    config = parse(["--steps", "2147483647", "--seed", "4294967295", "--spike-factor", "inf"])
    assert (config.steps, config.seed) == (2**31 - 1, 2**32 - 1)
    assert config.spike_factor == math.inf


def test_a_resumed_run_may_change_how_often_but_not_what():
    saved = Config(out=pathlib.Path("a"))
    check_resumable(dataclasses.replace(saved, eval_every=7, resume=True), saved, pathlib.Path("a"))
    asked = parse(["--layers", "head=fp8", "blocks[0].*=bf16", "--ema", "0.9"])
    said = (
        r"--layers: the run has the default, .* line head=fp8 'blocks\[0\].\*=bf16'\n .*default, .* line 0.9"
    )
    with pytest.raises(ValueError, match=said):
        check_resumable(asked, saved, pathlib.Path("a"))


def test_policies_whose_texts_are_alike_are_told_apart():
    seeded = [Policy(wgrad=Gemm(rotation=Rotation(16, "fixed", seed=seed))) for seed in (3, 4)]
    assert str(seeded[0]) == str(seeded[1])
    saved, asked = (Config(policy=policy) for policy in seeded)
    with pytest.raises(ValueError, match=r"the run has .*seed=3.*, the command line .*seed=4"):
        check_resumable(asked, saved, pathlib.Path("a"))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (Config, "A missing axis is 1. Default: fsdp over all devices. (default: None)"),
        (Config, "Or a schedule, where each later policy begins at a step"),  # a field of a concern
        (EvalConfig, "Default: the policies that the run had at the step of the checkpoint"),  # inherited
    ],
)
def test_help_breaks_no_line_where_the_source_does(config, text, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as end:
        flags_of(config, ["--help"])
    assert end.value.code == 0
    assert text in capsys.readouterr().out
