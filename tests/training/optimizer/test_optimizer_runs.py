"""Runs of train.py by other optimizers and states than the default: on meshes, and resumed."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from support.marks import parametrize
from support.programs import on_devices
from support.runs import lines, resume, run, untimed, weights

from analysis.evaluate import EvalConfig
from analysis.restore import RunArguments, restore
from eval import evaluate
from training.huggingface.exporting import export_checkpoint

BFLOAT16 = "--optimizer muon --moments bfloat16 --master bfloat16"
FOUR = ["--policy", "bf16", "--steps", "4", "--checkpoint-every", "2", "--eval-every", "2"]
MUON = f"{BFLOAT16} --adam-lr 1e-3 --ema 0.6 --z-loss 1e-3"


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """Returns the folder of a run with these flags."""

    @functools.cache
    def train(flags):
        run(text, out := tmp_path_factory.mktemp("runs") / "whole", *FOUR, *flags.split())
        return out

    return train


# The same bits round sums that differ in their last bits; others would round half of them otherwise.
@parametrize(
    ("model", "flags", "largest", "differ"),
    slow=[("dense", BFLOAT16, 2**-6, 0.05)],
    exhaustive=[("experts", BFLOAT16, 2**-6, 0.05), ("experts", "--optimizer muon", 1e-4, 1)],
)
def test_updates_on_a_mesh_are_those_of_one_device(model, flags, largest, differ):
    [found] = on_devices(8, "support.optimizer_meshes", f"{model} {flags}")
    assert found["largest"] < largest
    assert found["differ"] < differ * found["elements"]


@pytest.mark.slow
@parametrize("flags", MUON, exhaustive=["--optimizer sgd --lr 0.05"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(text, whole, tmp_path, flags):
    run(text, tmp_path / "resumed", *FOUR, *flags.split(), "--stop-after", "2")
    resume(tmp_path / "resumed")
    jax.tree.map(np.testing.assert_array_equal, weights(tmp_path / "resumed"), weights(whole(flags)))
    last = lines(tmp_path / "resumed")[-1]
    if "--ema" in flags:
        averaged = evaluate(EvalConfig(tmp_path / "resumed", weights="ema"))
        assert averaged["eval_loss"] == last["ema_eval_loss"] != last["eval_loss"]
        assert averaged["weights"] == "ema"
    steps = [r for r in lines(whole(flags)) if "loss" in r]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert untimed(tmp_path / "resumed")[-2:] == untimed(whole(flags))[-2:]


@pytest.mark.slow
def test_the_best_step_is_that_of_the_weights_that_are_used(whole, tmp_path):
    out = shutil.copytree(whole(MUON), tmp_path / "run")
    metrics = out / "metrics.jsonl"
    records = [
        record
        | ({"eval_loss": record["step"], "ema_eval_loss": -record["step"]} if "eval_loss" in record else {})
        for record in lines(out)
    ]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    for chosen, step, loss in ((None, 2, "2.0000"), ("ema", 4, "-4.0000")):
        assert restore(RunArguments(out, step="best", weights=chosen)).step == step
        target = tmp_path / f"export-{step}"
        export_checkpoint(out, target, step="best", weights=chosen)
        card = (target / "README.md").read_text()
        assert f"| Validation loss before export | {loss} at step {step} |" in card
    without = [{k: v for k, v in record.items() if k != "ema_eval_loss"} for record in records]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in without))
    for use in (
        lambda: restore(RunArguments(out, step="best", weights="ema")),
        lambda: export_checkpoint(out, tmp_path / "none", step="best", weights="ema"),
    ):
        with pytest.raises(ValueError, match=r"evaluation of --weights ema; name a --step, of \[2, 4\]"):
            use()
