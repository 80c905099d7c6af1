"""A finished run of train.py: its files, eval.py, and runs that stop and resume and equal it."""

import json
import os
import pathlib
import runpy
import shlex
import shutil
import signal
import sys

import jax
import numpy as np
import pytest
from support.marks import parametrize
from support.runs import LAYERS, SMALL, STOCHASTIC, lines, resume, run, untimed, weights

import eval as evaluation_program
import train as training_program
from mxjax.runtime.checkout import commit
from training import trainer as loop
from training.command_line import parse
from training.config import Config, by_flag
from training.log import reporter as step_reporter
from training.run.resume import _MAY_CHANGE, check_resumable

FLAGS = (*STOCHASTIC, "--eval-every", "3")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(text, out, *FLAGS)
    return out


def test_metrics_have_the_fields_that_tools_read(finished):
    records = lines(finished)
    steps = [r for r in records if "loss" in r]
    evaluations = [r for r in records if "eval_loss" in r]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert all(r.keys() >= {"tokens", "loss", "grad_norm", "lr", "tokens_per_s"} for r in steps)
    assert [r["step"] for r in evaluations] == [3, 6]
    assert all(r.keys() >= {"tokens", "eval_loss", "eval_perplexity"} for r in evaluations)
    assert steps[-1]["tokens"] == evaluations[-1]["tokens"] == 6 * 4 * 32


def test_the_description_holds_every_resolved_value(finished):
    found = json.loads((finished / "config.json").read_text())
    assert found["config"]["precision"]["policy"] == "full_sr"
    assert found["config"]["optimizer"]["b2"] == 0.95
    assert found["model"]["d_model"] == 128
    [phase] = found["phases"]
    assert (phase["first_step"], phase["policy"]) == (1, "full_sr")
    assert phase["layers"]["blocks.3.mlp.down"].startswith("fprop mxfp4:floor:sr x mxfp4:floor:sr |")
    assert phase["layers"]["head"].startswith("fprop bf16")
    assert found["environment"]["jax"] == jax.__version__
    assert found["environment"].get("commit") == commit()
    assert found["data"]["train_tokens"] > 0


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(text, tmp_path, finished):
    """With random bits in all three GEMMs, so that their replay is tested too."""
    out = tmp_path / "resumed"
    run(text, out, *FLAGS, "--stop-after", "3")
    assert lines(out)[-1]["step"] == 3
    description = json.loads((out / "config.json").read_text())
    description["environment"]["commit"] = "of another checkout"
    (out / "config.json").write_text(json.dumps(description))
    resume(out)
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(finished))
    assert untimed(out) == untimed(finished)


def test_eval_reproduces_the_evaluation_of_training(finished):
    result = evaluation_program.evaluate(evaluation_program.EvalConfig(finished))
    assert result["eval_loss"] == lines(finished)[-1]["eval_loss"]


def test_eval_says_what_of_the_run_another_policy_leaves_out(finished, capsys):
    def evaluate(*flags):
        evaluation_program.main([str(finished), "--batches", "1", *flags])
        words, errors = capsys.readouterr()
        evaluation_program.main([str(finished), "--batches", "1", "--json", *flags])
        record = capsys.readouterr().out
        assert words.count("\n") == record.count("\n") == 1
        return words, json.loads(record).get("layers"), errors

    words, layers, errors = evaluate()
    said = shlex.join(LAYERS)
    assert (f"policy full_sr --layers {said}  eval" in words, layers) == (True, [*LAYERS])
    assert "without" not in errors
    words, layers, errors = evaluate("--policy", "bf16")
    assert ("policy bf16  eval" in words, layers) == (True, None)
    assert errors.endswith(f": without the run's --layers {said}; repeat them to keep them\n")


def test_eval_says_how_long_its_sequences_are(finished, capsys):
    evaluation_program.main([str(finished), "--batches", "1"])
    assert capsys.readouterr().out.endswith(" over 128 tokens in sequences of 32\n")


def test_eval_takes_batches_of_another_size(finished):
    EvalConfig = evaluation_program.EvalConfig
    own, small = (
        evaluation_program.evaluate(EvalConfig(finished, policy="fp32", batch_size=size))
        for size in (None, 1)
    )
    assert small["eval_tokens"] == own["eval_tokens"]
    np.testing.assert_allclose(small["eval_loss"], own["eval_loss"], rtol=1e-4)
    restored = evaluation_program.restore(EvalConfig(finished))
    found = evaluation_program.read_sets(EvalConfig(finished, batches=3, batch_size=1), restored)[0].batches
    assert [len(batch) for batch in found] == [1, 1, 1]
    with pytest.raises(ValueError, match=r"--batch-size must be at least 1 and .*, got 0"):
        evaluation_program.read_sets(EvalConfig(finished, batches=3, batch_size=0), restored)


def test_resuming_may_observe_more():
    assert by_flag(Config()).keys() >= _MAY_CHANGE
    observed = parse(["--tensorboard", "--stats-every", "1", "--profile", "3:4"])
    check_resumable(observed, Config(), pathlib.Path("run"))


@pytest.mark.slow
def test_a_run_stopped_before_its_first_checkpoint_resumes_from_the_start(text, finished, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_bytes((finished / "config.json").read_bytes())
    run(text, out, *FLAGS, "--resume")
    assert f"no checkpoint in {out}/checkpoints: beginning at step 1\n" in capsys.readouterr().out
    assert untimed(out) == untimed(finished)


@pytest.mark.slow
def test_an_evaluation_after_the_restored_step_does_not_end_the_run(text, tmp_path):
    out = tmp_path / "run"
    run(text, out, "--policy", "bf16", "--checkpoint-every", "4", "--eval-every", "100", "--stop-after", "5")
    assert [r["step"] for r in lines(out) if "eval_loss" in r] == [5]
    shutil.rmtree(out / "checkpoints" / "5")
    resume(out, "--target-loss", "100")
    assert [r["step"] for r in lines(out) if "eval_loss" in r] == [6]


@pytest.mark.slow
@parametrize("number", signal.SIGTERM, exhaustive=[signal.SIGINT])
def test_a_signal_checkpoints_and_resuming_loses_nothing(text, finished, tmp_path, monkeypatch, number):
    """The program ends with success: as an error would, `runpy` raises SystemExit."""
    out = tmp_path / "run"
    original = step_reporter.RunLog.step

    def step_and_signal(self, step, *arguments):
        original(self, step, *arguments)
        if step == 4:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(step_reporter.RunLog, "step", step_and_signal)
        patch.setattr(sys, "argv", ["train.py", *SMALL, "--data", str(text), "--out", str(out), *FLAGS])
        runpy.run_path(training_program.__file__, run_name="__main__")
    assert weights(out)[0] < 6
    resume(out)
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(finished))


@parametrize("step", slow=[3], exhaustive=[6])
def test_a_signal_ends_an_evaluation_which_is_repeated(text, finished, tmp_path, monkeypatch, step):
    out = tmp_path / "run"
    original, seen = loop.evaluate, []

    def evaluate_and_signal(eval_step, params, batches):
        def interrupted():
            for batch in batches:
                seen.append(batch)
                if len(seen) == 2 * step // 3 - 1:  # the first of two
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        return original(eval_step, params, interrupted())

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", evaluate_and_signal)
        with pytest.raises(SystemExit, match=f"interrupted after step {step}; continue with"):
            run(text, out, *FLAGS)
    assert len(seen) == 2 * step // 3 - 1
    assert lines(out)[-1].keys() >= {"loss"}
    resume(out)
    assert untimed(out) == untimed(finished)
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(finished))
