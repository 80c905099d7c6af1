"""How far a run is, by its configuration and metrics.jsonl: whether it owes an evaluation, or is done; and
how it goes on."""

import math
import pathlib
import shlex

from training.config import Config
from training.metrics import evaluations


def command_to_continue(folder: pathlib.Path) -> str:
    """Returns the command that continues the run in a folder."""
    return f"python train.py --out {shlex.quote(str(folder))} --resume"


def owes_evaluation(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the evaluation after a step is still to be made: the run was interrupted in it."""
    regular = step % config.eval_every == 0 or step == config.steps
    return step > 0 and regular and step not in evaluations(folder)


def is_done(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether nothing follows a step: it is the schedule's last, or the target is reached."""
    if owes_evaluation(config, folder, step):
        return False
    return step >= config.steps or (config.target_loss is not None and is_on_target(config, folder, step))


def is_on_target(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the evaluation after a step reached the run's target; without a target it need not."""
    loss = evaluations(folder).get(step, math.inf)
    return config.target_loss is None or reaches_target(config, loss)


def reaches_target(config: Config, loss: float) -> bool:
    """Returns whether an evaluation's loss is the run's target or less; never without a target."""
    return config.target_loss is not None and loss <= config.target_loss
