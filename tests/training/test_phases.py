"""Schedules of policies: their notation, and that a change of policy changes nothing else."""

import contextlib
import functools
import io
import json
import os
import signal

import jax
import numpy as np
import pytest
from support import runs
from support.runs import LAYERS, untimed, weights

import eval as evaluation_program
import mxjax
import train as training_program
from models import decoder
from models.configs import get_config
from mxjax.recipes.whole_runs import RECIPES
from training import trainer as loop
from training.command_line import parse
from training.config import Config, PrecisionConfig
from training.flags import policy_source
from training.log.mlperf import TOKEN
from training.log.report import idle_policies
from training.phases import parse_schedule, phases_of

SWITCHING = "wgrad_sr; fp8 from 3"


def run(text, out, policy, *flags):
    runs.run(text, out, "--policy", policy, "--layers", *LAYERS, "--eval-every", "2", *flags)


@pytest.fixture(scope="module")
def switched(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "switched"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(text, out, SWITCHING, "--checkpoint-every", "2", "--keep-checkpoints", "3", "--mllog")
    (out.parent / "printed.txt").write_text(printed.getvalue())
    return out


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("fp8", ((1, "fp8"),)),
        ("wgrad_hadamard; fp8 from 0.82", ((1, "wgrad_hadamard"), (247, "fp8"))),
        ("wgrad;fp8  from 2 ; bf16 from .5", ((1, "wgrad"), (2, "fp8"), (151, "bf16"))),
        ("wgrad; fp8 from 300", ((1, "wgrad"), (300, "fp8"))),
        (RECIPES["heal"].policy, ((1, "full_hadamard"), (247, "fp8"))),
    ],
)
def test_a_schedule_names_first_steps(schedule, expected):
    found = parse_schedule(schedule, 300)
    assert tuple((part.first_step, part.name) for part in found) == expected
    assert all(part.policy == mxjax.get_policy(part.name) for part in found)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("wgrad; fp9 from 4", "unknown policy 'fp9'; did you mean 'fp8'"),
        ("wgrad; fp8", "'fp8' is no later policy; write 'POLICY; POLICY from WHEN'"),
        ("wgrad; ", "'' is no later policy"),
        ("qqqqqq", "unknown policy 'qqqqqq'; `python -m mxjax.recipes` lists all"),
        ("wgrad from 3", "the first policy begins at step 1; write 'wgrad' without 'from'"),
        ("heel", "did you mean 'heal'"),
        ("fp8; primus_deosc from 3", "primus_deosc is a recipe of a whole run: give it alone to train.py"),
        ("wgrad; fp8 from 0", "'from 0' must be a step, 1 or more, or a share of the run between 0 and 1"),
        ("wgrad; fp8 from 1.5", "'from 1.5' must be a step"),
        ("wgrad; fp8 from 0.0", "'from 0.0' must be a step"),
        ("wgrad; fp8 from soon", "'from soon' must be a step"),
        ("wgrad; fp8 from 1", "fp8 begins at step 1; with --steps 300 it must begin at one from 2 to 300"),
        ("wgrad; fp8 from 301", "fp8 begins at step 301; with --steps 300 it must"),
        ("wgrad; fp8 from 0.999", "fp8 begins at step 301"),
        ("wgrad; fp8 from 9; bf16 from 9", "bf16 begins at step 9; .* from 10 to 300"),
    ],
)
def test_other_schedules_are_errors_that_say_what_to_do(schedule, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(schedule, 300)


def test_exceptions_by_layer_and_the_scale_rule_hold_in_every_phase():
    layer_policies = functools.partial(decoder.layer_policies, get_config("tiny"))
    precision = PrecisionConfig("wgrad; fp8 from 2", "even", ("blocks[:1].*=bf16", "head=wgrad"))
    first, second = phases_of(precision, 4, layer_policies)
    rules = precision.rules()
    assert first.layers == layer_policies(mxjax.get_policy("wgrad"), rules).with_scale_rule("even")
    assert second.layers == layer_policies(mxjax.get_policy("fp8"), rules).with_scale_rule("even")
    plain = phases_of(PrecisionConfig("wgrad; fp8 from 2", "even"), 4, layer_policies)
    assert plain[1].layers == layer_policies(mxjax.get_policy("fp8"))
    with pytest.raises(ValueError, match="no operand of any layer is in mxfp4"):
        phases_of(PrecisionConfig("fp8; bf16 from 2", "even"), 4, layer_policies)


def test_a_policy_that_layers_leave_nothing_is_named():
    layer_policies = functools.partial(decoder.layer_policies, get_config("tiny"))
    for layers, names in ((("blocks.*=bf16",), ["wgrad"]), (("blocks[0].*=bf16",), [])):
        phases = phases_of(PrecisionConfig("wgrad; bf16 from 3", layers=layers), 6, layer_policies)
        said = idle_policies(phases)
        assert [line.split()[1] for line in said] == names, said


@pytest.mark.slow
def test_a_run_that_switches_equals_one_stopped_and_resumed_in_the_other_policy(
    text, switched, tmp_path, monkeypatch
):
    out = tmp_path / "run"
    run(text, out, "wgrad_sr", "--stop-after", "2")
    with monkeypatch.context() as patch:
        patch.setattr(training_program, "take_steps", lambda *_: {})
        run(text, tmp_path / "other", "fp8")
    description, other = (json.loads((r / "config.json").read_text()) for r in (out, tmp_path / "other"))
    description["config"]["precision"]["policy"] = "fp8"
    description |= {name: other[name] for name in ("phases", "policies")}
    (out / "config.json").write_text(json.dumps(description))
    run(text, out, "fp8", "--resume")
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(switched))
    assert untimed(out) == [r for r in untimed(switched) if "policy" not in r]


@pytest.mark.slow
def test_an_evaluation_owed_by_a_phase_is_repeated_in_its_policy(text, switched, tmp_path, monkeypatch):
    out, original = tmp_path / "run", loop.evaluate

    def signal_and_evaluate(eval_step, params, batches):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(eval_step, params, batches)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", signal_and_evaluate)
        with pytest.raises(SystemExit, match="interrupted after step 2"):
            run(text, out, SWITCHING)
    run(text, out, SWITCHING, "--resume")
    assert untimed(out) == untimed(switched)


OWN = """
from mxjax import Operand, Policy, Gemm
operand = Operand(rounding="stochastic", scale_rule="even")
own = Policy(wgrad=Gemm(operand, operand))
"""
FROM_FILES = ["--set", "wgrad.lhs.scale_rule=floor", "--set", "wgrad.rhs.scale_rule=floor"]


@pytest.mark.slow
def test_a_run_keeps_its_policies_when_their_files_and_names_are_gone(text, switched, tmp_path, monkeypatch):
    """The two files together say what SWITCHING does."""
    files, out = [tmp_path / "own.py", tmp_path / "low.json"], tmp_path / "run"
    files[0].write_text(OWN)
    files[1].write_text(mxjax.policy_to_json(mxjax.get_policy("fp8")))
    schedule = f"{files[0]}:own; {files[1]} from 3"
    run(text, out, schedule, *FROM_FILES, "--stop-after", "2")
    for file in files:
        file.unlink()
    monkeypatch.setattr(policy_source, "get_policy", lambda name: pytest.fail(f"{name} was looked up"))
    result = evaluation_program.evaluate(evaluation_program.EvalConfig(out))
    [expected] = [r["eval_loss"] for r in untimed(switched) if r["step"] == 2 and "eval_loss" in r]
    assert (result["policy"], result["eval_loss"]) == (f"{files[0]}:own", expected)
    training_program.train(parse(["--out", str(out), "--resume", "--stop-after", "3"]))
    losses = [[r["loss"] for r in untimed(folder) if "loss" in r][:3] for folder in (out, switched)]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_record_names_the_phases_and_the_switch(switched):
    description = json.loads((switched / "config.json").read_text())
    assert [(p["first_step"], p["policy"]) for p in description["phases"]] == [(1, "wgrad_sr"), (3, "fp8")]
    assert description["phases"][1]["layers"]["blocks.0.mlp.down"].startswith("fprop fp8_e4m3")
    records = untimed(switched)
    switch = records.index({"step": 3, "policy": "fp8"})
    assert [r["step"] for r in records[:switch]] == [1, 2, 2]
    assert "loss" in records[switch + 1]


@pytest.mark.slow
def test_the_start_prints_the_phases(switched):
    printed = (switched.parent / "printed.txt").read_text()
    assert "policy wgrad_sr:\n" in printed
    assert "\n  blocks.0-3.mlp.down: fprop mxfp4:floor x mxfp4:floor | " in printed
    assert "policy fp8 from step 3:\n" in printed
    assert "step      3  policy fp8 from here on" in printed


@pytest.mark.slow
def test_an_evaluation_runs_in_the_policy_of_its_step(switched):
    by_step = {r["step"]: r["eval_loss"] for r in untimed(switched) if "eval_loss" in r}

    def evaluate(**arguments):
        options = {"layers": LAYERS} | arguments
        return evaluation_program.evaluate(evaluation_program.EvalConfig(switched, **options))

    assert evaluate()["policy"] == "fp8"
    assert evaluate()["eval_loss"] == evaluate(policy="fp8")["eval_loss"] == by_step[6]
    assert evaluate(step=2)["policy"] == "wgrad_sr"
    assert evaluate(step=2)["eval_loss"] != evaluate(step=2, policy="fp8")["eval_loss"]


@pytest.mark.slow
def test_mlperf_s_log_names_the_lowest_precision_of_all_phases(switched):
    log = (switched / "mllog.txt").read_text().splitlines()
    events = {e["key"]: e["value"] for e in (json.loads(line.removeprefix(TOKEN)) for line in log)}
    assert events["lowest_numerical_precision_in_linear"] == "mxfp4"


def test_the_folder_s_name_holds_no_odd_characters():
    config = Config(policy="wgrad; fp8 from 0.82")
    assert config.folder().name.startswith("tiny-wgrad-fp8-from-0.82-")
