"""What eval.py evaluates: the mask of documents, and what a record says of flags that change a policy."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from support.llamas import SMALL, imported

import eval as evaluation_program
from analysis.evaluate import EvalConfig
from analysis.restore import Restored, RunArguments, describe, in_words, left_out
from models import decoder
from models.configs import get_config
from training.command_line import parse
from training.phases import phases_of


def test_an_imported_checkpoint_is_evaluated_with_the_mask_of_a_run_if_asked(tmp_path):
    """A run has the mask that its config.json names; an imported checkpoint has none."""
    params = jax.tree.map(np.asarray, decoder.init(SMALL, jax.random.key(0)))
    out = params["blocks"]["attention"]["out"]
    params["blocks"]["attention"]["out"] = 50 * out  # attention matters
    imported(tmp_path, SMALL, params)
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text(f"line {i}: the square is {i * i}\n")

    def loss(mask):
        given = {"data": str(tmp_path / "text"), "batches": 1, "batch_size": 2, "json": True}
        found = evaluation_program.evaluate(EvalConfig(tmp_path / "run", document_mask=mask, **given))
        assert found.get("document_mask") == mask
        return found["eval_loss"]

    without, off, on = loss(None), loss("off"), loss("on")
    path = tmp_path / "run" / "config.json"
    documents = {"end": 256, "restart_positions": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"documents": documents}))
    assert (loss(None), loss("off")) == (on, off)
    assert without == off
    assert abs(on - off) > 1e-3


RUN = pathlib.Path("/runs/a")
CHANGE = "wgrad.*.rounding=stochastic"
OWN = ("--policy", "wgrad", "--set", CHANGE, "--scale-rule", "even", "--layers", "head=fp8")
OWN_IN_WORDS = f"--set '{CHANGE}', --scale-rule even, --layers head=fp8"


def restored(*flags):
    config, model = parse([*flags]), get_config("tiny")
    phase, *_ = phases_of(config.precision, config.steps, functools.partial(decoder.layer_policies, model))
    return Restored(config, model, {}, 3, phase, None)


def test_a_record_without_another_policy_has_the_changes_of_the_run_and_of_the_arguments():
    own = describe(RunArguments(RUN), restored(*OWN))
    changes = {"set": (CHANGE,), "scale_rule": "even", "layers": ("head=fp8",)}
    assert own == {"run": "/runs/a", "step": 3, "policy": "wgrad"} | changes
    assert in_words(own) == "wgrad " + OWN_IN_WORDS.replace(",", "")
    more = RunArguments(RUN, scale_rule="rceil", layers=("blocks.*.mlp.down=bf16",))
    found = describe(more, restored(*OWN))
    assert (found["scale_rule"], found["layers"]) == ("rceil", ("head=fp8", "blocks.*.mlp.down=bf16"))
    assert describe(RunArguments(RUN), restored()).keys() == {"run", "step", "policy"}


def test_a_record_with_another_policy_has_the_changes_of_the_arguments_alone():
    found = describe(RunArguments(RUN, policy="wgrad", layers=("head=bf16",)), restored(*OWN))
    assert found.keys() == {"run", "step", "policy", "layers"}
    assert found["layers"] == ("head=bf16",)


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ({}, None),
        ({"policy": "wgrad"}, OWN_IN_WORDS),
        ({"policy": "wgrad", "scale_rule": "floor", "set": (CHANGE,)}, "--layers head=fp8"),
        ({"policy": "wgrad", "scale_rule": "floor", "set": (CHANGE,), "layers": ("head=bf16",)}, None),
    ],
)
def test_another_policy_names_the_changes_of_the_run_that_it_does_without(arguments, missing):
    said = left_out(RunArguments(RUN, **arguments), restored(*OWN).config)
    assert said == (missing and f"without the run's {missing}; repeat them to keep them")
    assert left_out(RunArguments(RUN, policy="wgrad"), restored().config) is None
