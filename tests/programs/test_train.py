"""train.py from end to end: training, errors, and what it prints."""

import json
import pathlib
import types

import jax
import numpy as np
import pytest
from support.runs import LAYERS, lines, resume, run, weights

import train as training_program
from training import trainer as loop
from training import trainer as programs
from training.log import report
from training.log import reporter as step_reporter
from training.log.health import NonFiniteError


@pytest.mark.slow
def test_the_loss_falls(text, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(programs, "on_gpu", lambda: True)
    with jax.log_compiles():
        flags = "--policy", "wgrad_hadamard", "--layers", *LAYERS, "--steps", "40", "--lr", "1e-2"
        run(text, tmp_path / "run", *flags)
    # Logged by the main thread: it lowers the step once, and another compiles it.
    assert len([m for m in caplog.messages if m.startswith("Compiling jit(step)")]) == 1
    assert not [m for m in caplog.messages if m.startswith("Finished XLA compilation of jit(step)")]
    losses = [r["loss"] for r in lines(tmp_path / "run") if "loss" in r]
    assert losses[0] > 5.0
    assert np.mean(losses[-5:]) < 2.5


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_decay_beyond_all_parameters_is_named_as_the_cause(text, tmp_path):
    with pytest.raises(NonFiniteError, match="lower --weight-decay"):
        run(text, tmp_path / "run", "--policy", "bf16", "--weight-decay", "3e38")


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
    monkeypatch.setattr(training_program, "take_steps", lambda *_: {})
    run(text, tmp_path / "run", "--remat", "full")
    printed = capsys.readouterr().out
    assert "memory a device, estimated with --remat full: 0.0" in printed
    assert ("% of" in printed) == (limit is not None)
    assert ("warning: that is more than there is: lower --batch-size" in printed) == warns


def without_memory(monkeypatch, step):
    """Makes a step of training need more memory than there is."""
    original = programs.make_programs

    def make_programs(*arguments):
        train_step, *others = original(*arguments)

        def fails(state, *rest):
            if int(state.step) + 1 == step:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
            return train_step(state, *rest)

        return programs.Programs(fails, *others)

    monkeypatch.setattr(programs, "make_programs", make_programs)


RECORDS = ["--policy", "bf16", "--mllog", "--tensorboard"]


@pytest.mark.parametrize("had_folder", [False, True])
def test_a_first_step_without_memory_leaves_nothing_new(text, tmp_path, monkeypatch, had_folder):
    out = tmp_path / "run"
    if had_folder:
        out.mkdir()
    with monkeypatch.context() as patch:
        without_memory(patch, step=1)
        with pytest.raises(SystemExit, match=r"RESOURCE_EXHAUSTED.*smaller --batch-size"):
            run(text, out, *RECORDS)
    assert out.exists() == had_folder
    assert not had_folder or not list(out.iterdir())


@pytest.mark.slow
def test_a_later_step_without_memory_leaves_what_was_trained(text, tmp_path, monkeypatch):
    whole, failed = tmp_path / "whole", tmp_path / "failed"
    run(text, whole, *RECORDS, "--stop-after", "2")
    without_memory(monkeypatch, step=3)  # the second step's metrics are still on their way
    for out, flags in ((whole, ["--resume"]), (failed, RECORDS)):
        with pytest.raises(SystemExit, match="RESOURCE_EXHAUSTED"):
            run(text, out, *flags)
        assert (out / "config.json").exists()
        assert lines(out)[0]["step"] == 1
    assert weights(whole)[0] == 2


def test_a_run_killed_before_its_description_begins_anew(text, tmp_path):
    out = tmp_path / "run"
    (out / "huggingface").mkdir(parents=True)
    (out / "config.json.tmp").write_text('{"half')
    run(text, out, "--policy", "bf16", "--stop-after", "1")
    assert json.loads((out / "config.json").read_text())["config"]["precision"]["policy"] == "bf16"
    with pytest.raises(SystemExit, match="is not empty; add --resume"):
        run(text, out, "--policy", "bf16")


@pytest.mark.slow
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
    said = "first step after 9.0 s, then 0.500 s a step (200 tokens/s); all steps took 9.5 s"
    assert report.times_in_words([9.0, 0.5], 100) == said
    assert report.times_in_words([9.0], 100) == "first step after 9.0 s"


@pytest.mark.slow
def test_the_end_of_a_run_that_overfitted_names_its_best_checkpoint(text, tmp_path, monkeypatch, capsys):
    losses = iter([4.0, 3.0, 3.5])
    found = {"eval_perplexity": 1.0, "eval_tokens": 1}
    monkeypatch.setattr(loop, "evaluate", lambda *_: found | {"eval_loss": next(losses)})
    out = tmp_path / "run"
    flags = "--policy bf16 --eval-every 2 --checkpoint-every 2 --keep-checkpoints 1"
    run(text, out, *flags.split())
    last = capsys.readouterr().out.splitlines()[-1]
    command = f"python eval.py {out} --step best"
    assert last == f"the lowest eval loss was 3.0000, after step 4; evaluate that checkpoint with: {command}"
    assert (out / "checkpoints" / "4").exists()


@pytest.mark.parametrize(
    ("losses", "best", "said"),
    [
        ({10: 3.0, 20: 2.9}, 20, []),
        ({10: 3.0, 20: 3.01}, 20, []),
        ({10: 3.0, 20: 3.1}, 20, ["no checkpoint better than the last one was kept"]),
        ({10: 3.0, 20: 3.1}, None, ["no checkpoint better than the last one was kept"]),
        (
            {10: 3.0, 20: 3.05, 30: 3.1},
            20,
            ["the best checkpoint is of step 20, with 3.0500: python eval.py 'a run' --step best"],
        ),
    ],
)
def test_overfitting_is_an_end_clearly_above_the_lowest_evaluation(losses, best, said):
    lines = report.overfitting(pathlib.Path("a run"), losses, max(losses), best)
    assert lines == [f"the lowest eval loss was 3.0000, after step 10; {rest}" for rest in said]


@pytest.mark.slow
def test_measuring_layers_and_tracing_are_not_in_a_step_s_time(text, tmp_path, monkeypatch):
    """On a clock that steps move by a second, everything else by a thousand."""
    now = [0.0]
    monkeypatch.setattr(step_reporter, "time", types.SimpleNamespace(monotonic=lambda: now[0]))

    def lasting(seconds, function):
        def lasts(*arguments, **options):
            now[0] += seconds
            return function(*arguments, **options)

        return lasts

    original = programs.make_programs

    def make_programs(*arguments):
        step, *others = original(*arguments)
        return programs.Programs(lasting(1, step), *(lasting(1000, other) for other in others))

    monkeypatch.setattr(programs, "make_programs", make_programs)
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lasting(1000, lambda *_: None))
    flags = ["--policy", "bf16", "--stats-every", "5", "--profile", "2:3", "--eval-every", "4"]
    run(text, tmp_path / "run", *flags)
    times = [r["step_s"] for r in lines(tmp_path / "run") if "step_s" in r]
    # Reported once the next is under way, at 1 s each; in between 0 s are left.
    assert len(times) == 6
    assert sum(times) == 6
    assert max(times) <= 2


def test_an_evaluation_that_is_not_finite_stops_the_run(text, tmp_path, monkeypatch):
    found = {"eval_loss": float("nan"), "eval_perplexity": float("nan"), "eval_tokens": 1}
    monkeypatch.setattr(loop, "evaluate", lambda *_: found)
    said = r"eval loss nan at step 3, policy bf16\. The state that was eval.* in"
    with pytest.raises(NonFiniteError, match=said) as caught:
        run(text, tmp_path / "run", "--policy", "bf16", "--eval-every", "3")
    assert "batch" not in str(caught.value)
    assert "skip" not in str(caught.value)  # which leaves out steps, not evaluations
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    [evidence] = (tmp_path / "run").glob("nonfinite-*")
    assert {path.name for path in evidence.iterdir()} == {"error.txt", "checkpoints"}
    assert "eval loss nan at step 3" in (evidence / "error.txt").read_text()
    assert weights(evidence)[0] == 3
