"""train.py and eval.py from end to end: files, resuming, errors, and what they print."""

import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import eval as evaluation_program
import train as training_program
from training import loop, programs, report, step_reporter
from training.checkpoint.checkpoints import Checkpoints
from training.command_line import parse
from training.interruption import RunInterrupted
from training.nonfinite import NonFiniteError

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--batch-size", "4", "--seq-len", "32", "--eval-batches", "2", "--warmup-steps", "2", "--steps", "6"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i}: the square is {i * i}\n" for i in range(2000)))
    return path


def run(text, out, *flags):
    return training_program.train(parse([*SMALL, "--data", str(text), "--out", str(out), *flags]))


def resume(out, *flags):
    return training_program.train(parse(["--resume", "--out", str(out), *flags]))


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out):
    """Every array of the last checkpoint, as orbax wrote it."""
    with Checkpoints(out / "checkpoints") as checkpoints:
        step = checkpoints.latest
        restored = checkpoints._manager.restore(step)
    return step, jax.tree.map(np.asarray, dict(restored))


def without_time(records):
    times = {"tokens_per_s", "tflops_per_device", "step_s"}
    return [{k: v for k, v in record.items() if k not in times} for record in records]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "whole"
    run(text, out, "--policy", "full_sr", "--eval-every", "3")
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
    assert found["data"]["train_tokens"] > 0


def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(text, tmp_path, finished):
    """With random bits in every GEMM, so that their replay is tested too."""
    out = tmp_path / "resumed"
    run(text, out, "--policy", "full_sr", "--eval-every", "3", "--stop-after", "3")
    assert lines(out)[-1]["step"] == 3
    resume(out)
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(finished))
    assert without_time(lines(out)) == without_time(lines(finished))


def test_the_loss_falls(text, tmp_path):
    run(text, tmp_path / "run", "--policy", "wgrad_hadamard", "--steps", "40", "--lr", "1e-2")
    losses = [r["loss"] for r in lines(tmp_path / "run") if "loss" in r]
    assert losses[0] > 5.0
    assert np.mean(losses[-5:]) < 2.5


@pytest.mark.slow
def test_every_policy_sees_the_same_first_batch(text, tmp_path):
    first = []
    for policy in ("bf16", "fp8"):
        run(text, tmp_path / policy, "--policy", policy, "--stop-after", "1")
        first.append(lines(tmp_path / policy)[0]["loss"])
    assert abs(first[0] - first[1]) < 0.05


def test_rules_and_scale_rule_reach_the_layers(text, tmp_path):
    flags = ["--policy", "wgrad", "--scale-rule", "even", "--layers", "blocks.0.*=bf16", "head=fp8"]
    run(text, tmp_path / "run", *flags, "--stop-after", "1")
    [phase] = json.loads((tmp_path / "run" / "config.json").read_text())["phases"]
    policies = phase["layers"]
    assert policies["blocks.0.mlp.down"].startswith("fprop bf16")
    assert policies["blocks.1.mlp.down"].startswith("fprop mxfp4:even")
    assert policies["head"].startswith("fprop fp8_e4m3")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_evidence(text, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=r"at step \d+, policy wgrad.*lower --lr") as caught:
        run(text, out, "--policy", "wgrad", "--lr", "1e30", "--clip", "1e30")
    step = caught.value.step
    evidence = out / f"nonfinite-step-{step}"
    tokens = np.frombuffer(text.read_bytes(), np.uint8)
    with np.load(evidence / "batch.npz") as saved:
        windows = json.loads((evidence / "batch.json").read_text())["windows"]
        expected = [tokens[32 * i : 32 * i + 33] for i in windows]
        np.testing.assert_array_equal(saved["batch"], expected)
    largest = json.loads((evidence / "largest.json").read_text())
    assert largest["gradients"].keys() == largest["parameters"].keys() >= {"blocks.3.mlp.down", "head"}
    assert "nan" in largest["gradients"].values()
    assert all(isinstance(value, float) for value in largest["parameters"].values())
    before, state = weights(evidence)
    assert before == step - 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state["params"]))
    assert lines(out)[-1]["step"] == step
    assert not any("eval_loss" in r for r in lines(out))


def test_eval_reproduces_the_evaluation_of_training(finished):
    result = evaluation_program.main(evaluation_program.EvalConfig(finished))
    assert result["eval_loss"] == lines(finished)[-1]["eval_loss"]


def test_eval_takes_another_policy_and_step_count(finished):
    own = evaluation_program.main(evaluation_program.EvalConfig(finished))
    other = evaluation_program.main(evaluation_program.EvalConfig(finished, policy="bf16"))
    assert other["policy"] == "bf16"
    assert 0 < abs(own["eval_loss"] - other["eval_loss"]) < 0.1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "wgrad_hadamar"], "did you mean 'wgrad_hadamard'"),
        (["--model", "huge"], "the models are tiny"),
        (["--layers", "blocks"], "PATTERN=POLICY"),
        (["--layers", "embedding=fp8"], "matches none of"),
        (["--scale-rule", "even", "--policy", "bf16"], "no operand of any layer is in mxfp4"),
        (["--seq-len", "1000000"], "shorten --seq-len"),
        (["--resume"], "holds no run"),
        (["--implementation", "triton"], "needs a GPU and Triton"),
        (["--remat", "fp4", "--implementation", "xla"], "keeps packed MXFP4 operands, but no GEMM"),
    ],
)
def test_bad_input_ends_with_what_to_do(text, tmp_path, flags, message):
    with pytest.raises(SystemExit, match=message):
        run(text, tmp_path / "run", *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("limit", "warns"), [(None, False), (2**30, False), (2**20, True)])
def test_the_start_says_what_a_step_takes(text, tmp_path, monkeypatch, capsys, limit, warns):
    monkeypatch.setattr(report, "memory_limit", lambda device: limit)
    monkeypatch.setattr(training_program.Loop, "train", lambda _: {})
    run(text, tmp_path / "run", "--remat", "full")
    printed = capsys.readouterr().out
    assert "memory a device, estimated with --remat full: 0.0" in printed
    assert ("% of" in printed) == (limit is not None)
    assert ("warning: that is more than there is: lower --batch-size" in printed) == warns


def test_a_folder_in_use_is_not_overwritten(text, finished):
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="add --resume"):
        run(text, finished)
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "bf16"], "--policy: the run has full_sr, the command line bf16"),
        (["--model", "20m"], "--model: the run has tiny, the command line 20m"),
        (["--seed", "1"], "--seed: the run has 0, the command line 1"),
    ],
)
def test_resuming_another_run_names_the_difference(text, finished, flags, message):
    with pytest.raises(SystemExit, match=message):
        resume(finished, *flags)


def test_resuming_with_other_data_is_an_error(text, finished, tmp_path):
    edited = tmp_path / "text.txt"
    edited.write_text("other text " * 1000)
    description = json.loads((finished / "config.json").read_text())
    description["config"]["data"]["data"] = [str(edited)]
    copy = tmp_path / "copy"
    copy.mkdir()
    del description["crc32"]  # edited on purpose
    (copy / "config.json").write_text(json.dumps(description))
    with pytest.raises(SystemExit, match="the data is"):
        run(edited, copy, "--policy", "full_sr", "--resume")


def test_a_run_stopped_before_its_first_checkpoint_resumes_from_the_start(text, finished, tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_bytes((finished / "config.json").read_bytes())
    run(text, out, "--policy", "full_sr", "--eval-every", "3", "--resume")
    assert f"no checkpoint in {out}/checkpoints: beginning at step 1\n" in capsys.readouterr().out
    assert without_time(lines(out)) == without_time(lines(finished))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_checkpoints_and_resuming_loses_nothing(text, finished, tmp_path, monkeypatch, number):
    out = tmp_path / "run"
    original = step_reporter.StepReporter.step

    def step_and_signal(self, step, metrics):
        original(self, step, metrics)
        if step == 4:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(step_reporter.StepReporter, "step", step_and_signal)
        with pytest.raises(RunInterrupted, match=r"interrupted after step \d; continue with: python"):
            run(text, out, "--policy", "full_sr", "--eval-every", "3")
    resume(out)
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(finished))


def test_an_interrupted_program_ends_with_success(text, tmp_path, monkeypatch):
    step = step_reporter.StepReporter.step

    def step_and_signal(self, number, measured):
        step(self, number, measured)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(step_reporter.StepReporter, "step", step_and_signal)
    flags = [*SMALL, "--data", str(text), "--out", str(tmp_path / "run"), "--policy", "bf16"]
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    runpy.run_path(str(ROOT / "train.py"), run_name="__main__")  # ends as a program would, if by an error
    assert not (tmp_path / "run" / "checkpoints" / "6").exists()
    assert list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def test_a_run_killed_before_its_description_begins_anew(text, tmp_path):
    out = tmp_path / "run"
    (out / "huggingface").mkdir(parents=True)
    (out / "config.json.tmp").write_text('{"half')
    run(text, out, "--policy", "bf16", "--stop-after", "1")
    assert json.loads((out / "config.json").read_text())["config"]["precision"]["policy"] == "bf16"
    with pytest.raises(SystemExit, match="is not empty; add --resume"):
        run(text, out, "--policy", "bf16")


def test_the_end_says_what_was_done_and_what_remains(text, tmp_path, capsys):
    out = tmp_path / "run"

    def said():
        return [line for line in capsys.readouterr().out.splitlines() if line.strip()]

    run(text, out, "--policy", "bf16", "--stop-after", "4", "--eval-every", "3")
    printed = said()
    assert any(line.startswith("stopped after step 4 of 6: eval loss") for line in printed)
    assert f"continue with: python train.py --out {out} --resume" in printed
    resume(out, "--stop-after", "4")
    assert said()[-1] == f"nothing left to do: the run in {out} stands after step 4 already"
    resume(out)
    printed = said()
    assert any(line.startswith("final eval loss") for line in printed)
    assert not any(line.startswith("continue with") for line in printed)
    resume(out)
    assert said()[-1].endswith("has reached its last step or its target")
    owed = [line for line in (out / "metrics.jsonl").read_text().splitlines() if "eval" not in line]
    (out / "metrics.jsonl").write_text("\n".join(owed) + "\n")
    resume(out)
    printed = said()
    assert any(line.startswith("final eval loss") for line in printed)
    assert not any("nothing left" in line or "first step after" in line for line in printed)


def test_the_first_step_s_time_is_no_other_s():
    said = "first step after 9.0 s, then 0.500 s a step (200 tokens/s), 9.5 s in all"
    assert report.times_in_words([9.0, 0.5], 100) == said
    assert report.times_in_words([9.0], 100) == "first step after 9.0 s, 9.0 s in all"


def test_measuring_layers_and_tracing_are_not_in_a_step_s_time(text, tmp_path, monkeypatch):
    """On a clock that steps move by a second, everything else by a thousand."""
    now = [0.0]
    monkeypatch.setattr(step_reporter, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def lasting(seconds, function):
        def lasts(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return lasts

    original = training_program.make_programs

    def make_programs(*arguments):
        step, *others = original(*arguments)
        return programs.Programs(lasting(1, step), *(lasting(1000, other) for other in others))

    monkeypatch.setattr(training_program, "make_programs", make_programs)
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lasting(1000, lambda *_: None))
    flags = ["--policy", "bf16", "--stats-every", "5", "--profile", "2:3", "--eval-every", "4"]
    run(text, tmp_path / "run", *flags)
    times = [r["step_s"] for r in lines(tmp_path / "run") if "step_s" in r]
    # Reported once the next is under way, at 1 s each; in between 0 s are left.
    assert len(times) == 6
    assert sum(times) == 6
    assert max(times) <= 2


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
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
            run(text, out, "--policy", "full_sr", "--eval-every", "3")
    assert len(seen) == 2 * step // 3 - 1
    assert lines(out)[-1].keys() >= {"loss"}
    resume(out)
    assert without_time(lines(out)) == without_time(lines(finished))
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(finished))


def test_eval_takes_the_best_step(finished, tmp_path):
    losses = {r["step"]: r["eval_loss"] for r in lines(finished) if "eval_loss" in r}
    config = evaluation_program.EvalConfig(finished, step="best")
    assert evaluation_program.main(config)["step"] == 6  # the only one of the two that was saved
    assert losses[6] < losses[3]


def test_an_evaluation_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch):
    found = {"eval_loss": float("nan"), "eval_perplexity": float("nan"), "eval_tokens": 1}
    monkeypatch.setattr(loop, "evaluate", lambda *_: found)
    with pytest.raises(
        NonFiniteError, match=r"eval loss nan at step 3, policy bf16\. The state that was eval.* in"
    ) as caught:
        run(text, tmp_path / "run", "--policy", "bf16", "--eval-every", "3")
    assert "batch" not in str(caught.value)
    assert "skip" not in str(caught.value)  # which leaves out steps, not evaluations
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    [evidence] = (tmp_path / "run").glob("nonfinite-*")
    assert {path.name for path in evidence.iterdir()} == {"error.txt", "checkpoints"}
    assert "eval loss nan at step 3" in (evidence / "error.txt").read_text()
    assert weights(evidence)[0] == 3


@pytest.mark.slow
def test_the_programs_run_as_commands(text, tmp_path):
    def command(*arguments):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
        )
        return done.stdout.splitlines()

    out = str(tmp_path / "run")
    printed = command("train.py", "--policy=wgrad_hadamard", *SMALL, "--data", str(text), "--out", out)
    assert any("blocks.0-3.mlp.down: fprop mxfp4:floor" in line for line in printed)
    assert any(line.startswith("final eval loss") for line in printed)
    result = json.loads(command("eval.py", out)[-1])
    assert result["eval_loss"] == lines(pathlib.Path(out))[-1]["eval_loss"]
