"""Runs with outlier channels: train.py, --resume and eval.py."""

import json

import jax
import numpy as np
import pytest
from support.runs import error_of, lines, resume, run, weights

import eval as eval_program
from training.sampling import SampleConfig, sample

FLAGS = ("--policy", "bf16", "--layers", "blocks.*.mlp.down=tetrajet_v2", "--outlier-channels", "0.1:1:1")


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_is_evaluated_with_its_channels(text, tmp_path, capsys):
    more = (*FLAGS, "--steps", "3", "--checkpoint-every", "2")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    found = run(text, whole, *more)
    run(text, parts, *more, "--stop-after", "2")
    resume(parts)
    (_, expected), (_, saved) = weights(whole), weights(parts)
    jax.tree.map(np.testing.assert_array_equal, saved, expected)
    norms = saved["rest"]["opt_state"]["norms"]
    assert norms["mlp.down"].shape == (4, 384)
    assert np.all(norms["mlp.down"] > 0)
    assert {"step": 3, "policy": "bf16 with outlier channels"} in lines(whole)
    capsys.readouterr()
    result = eval_program.main(eval_program.EvalConfig(whole))
    assert result["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-6)
    plain = eval_program.main(eval_program.EvalConfig(whole, policy="bf16"))
    assert plain["eval_loss"] != result["eval_loss"]
    assert sample(SampleConfig(whole, prompt="line", tokens=2, temperature=0.0))["tokens"] <= 2
    refused = error_of("diagnose", whole, program=eval_program.run_command)
    assert "name one with --policy" in refused
    assert json.loads((whole / "config.json").read_text())["phases"][1]["first_step"] == 3


def test_statistics_of_layers_with_two_policies_are_refused(text, tmp_path):
    said = error_of("--data", text, "--out", tmp_path / "run", *FLAGS, "--stats-every", "1")
    assert "--stats-every measures one policy a layer" in said
