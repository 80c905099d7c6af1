"""Progress of a run, by its configuration and metrics.jsonl: the target, the end, a missing evaluation."""

import math
import pathlib

from training.config import Config
from training.metrics import evaluations


def owes_evaluation(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the evaluation after a step is missing because the run was interrupted in it."""
    regular = step % config.eval_every == 0 or step == config.steps
    return step > 0 and regular and step not in evaluations(folder)


def is_done(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the run ends with a step: the schedule's last, or one that reached the target."""
    if owes_evaluation(config, folder, step):
        return False
    return step >= config.steps or (config.target_loss is not None and is_on_target(config, folder, step))


def is_on_target(config: Config, folder: pathlib.Path, step: int) -> bool:
    """Returns whether the evaluation after a step reached the target; True if the run has no target."""
    loss = evaluations(folder).get(step, math.inf)
    return config.target_loss is None or reaches_target(config, loss)


def reaches_target(config: Config, loss: float) -> bool:
    """Returns whether an evaluation's loss is at most the target; False if the run has no target."""
    return config.target_loss is not None and loss <= config.target_loss
