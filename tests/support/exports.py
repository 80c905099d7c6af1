"""A small model that rounds its weights, and the record of its policy, for tests of exports."""

import dataclasses
import json
import shutil

import mxjax
from models.configs import DecoderConfig
from support.llamas import layer_policies
from training.phases import Phase, to_record

CONFIG = DecoderConfig(300, 64, 2, 4, 2, 32, 96, rope_theta=10_000.0, init_std=0.2)
WEIGHT_ONLY = mxjax.get_policy("weight_only")


def set_policy(run, policy):
    """Records a policy, as a run has it that rounds by it except in the last block's MLP."""
    path = run / "config.json"
    policies = layer_policies(CONFIG, policy, [("blocks[-1].mlp.*", "bf16")])
    record = json.loads(path.read_text()) | to_record([Phase(1, "weight_only", policies)])
    path.write_text(json.dumps(record))


def copied(run, folder, **rhs):
    """Returns a copy of a run that rounds weights as this operand says."""
    set_policy(shutil.copytree(run, folder / "run"), weight_only(**rhs))
    return folder / "run"


def weight_only(**rhs):
    """Returns a policy that rounds weights alone, as this operand says."""
    fprop = dataclasses.replace(WEIGHT_ONLY.fprop, rhs=mxjax.Operand(**rhs))
    return dataclasses.replace(WEIGHT_ONLY, fprop=fprop)
