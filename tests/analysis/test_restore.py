"""What a record says of the flags that change a policy: the run's own, and those of eval.py."""

import functools
import pathlib

import pytest

from analysis.restore import Restored, RunArguments, describe, in_words, left_out
from models import decoder
from models.configs import get_config
from training.command_line import parse
from training.phases import phases_of

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
    assert own == {
        "run": "/runs/a",
        "step": 3,
        "policy": "wgrad",
        "set": (CHANGE,),
        "scale_rule": "even",
        "layers": ("head=fp8",),
    }
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
