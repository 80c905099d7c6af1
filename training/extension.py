"""Extension of a run, `--resume --steps N`: allowed where the steps taken so far would have been the same.

The learning rate, the order of the data and the switches between policies may depend on a run's length.
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from training.checkpoint.damaged import saved_steps
from training.config import Config
from training.data.megatron import MegatronCorpus
from training.data.text import TextCorpus
from training.optimizer import learning_rate
from training.policy_schedule import Phase, first_steps


def last_checkpoint(folder: pathlib.Path) -> int:
    """Returns the step of the newest checkpoint of the run in a folder; 0 if there is none."""
    return max(saved_steps(folder / "checkpoints"), default=0)


def check_extension(config: Config, saved: Config, taken: int) -> None:
    """Checks that a run of `saved.steps` may go on to `config.steps`, as far as flags decide it.

    Args:
      config: the configuration asked for.
      saved: the run's own.
      taken: steps taken so far.
    Raises:
      ValueError: it may not; the message says why.
    """
    why = f"--steps {config.steps}: the run has --steps {saved.steps}"
    if config.mlperf.mllog:
        raise ValueError(f"{why}, which its MLPerf log names; begin a new run")
    rates = [learning_rate(c.optimizer, c.steps, np)(np.arange(taken)) for c in (config, saved)]
    ours, theirs = map(np.asarray, rates)
    if (different := np.flatnonzero(ours != theirs)).size:
        step = different[0]
        raise ValueError(
            f"{why}, towards which its learning rate falls: at step {step + 1} it was {theirs[step]:.9g} and "
            f"would have been {ours[step]:.9g}; begin a run with --init, or use --min-lr-ratio 1 from the "
            "start for a constant rate"
        )


def check_order(corpus: TextCorpus | MegatronCorpus, config: Config, saved: Config) -> None:
    """Raises ValueError if a run of `config.steps` would have read the data in another order so far."""
    orders = [corpus.order(c.data, c.seed, c.steps) for c in (config, saved)]
    if orders[0] != orders[1]:
        raise ValueError(
            f"--steps {config.steps}: with --steps {saved.steps} the data is in the order for {orders[1]}, "
            f"and would be in that for {orders[0]}; begin a run with --init"
        )


def extend_phases(phases: Sequence[Phase], config: Config, taken: int) -> tuple[Phase, ...]:
    """Returns the phases of an extended run: those on record, with their first steps in the longer run.

    Raises:
      ValueError: a step that has been taken would be in another phase, or phases would change their order.
    """
    steps = first_steps(config.precision.policy, config.steps)
    moved = tuple(phase._replace(first_step=step) for phase, step in zip(phases, steps, strict=True))
    if any(a >= b for a, b in zip(steps, (*steps[1:], config.steps + 1), strict=True)):
        raise ValueError(
            f"--steps {config.steps}: the policies would begin at steps {', '.join(map(str, steps))}, out of "
            "order or beyond the run; begin a run with --init"
        )
    for old, new in zip(phases, moved, strict=True):
        if old.first_step != new.first_step and min(old.first_step, new.first_step) <= taken:
            raise ValueError(
                f"--steps {config.steps}: {old.policy} would begin at step {new.first_step}, and the run, "
                f"now at step {taken}, has it from step {old.first_step} on; begin a run with --init, or "
                "name steps instead of shares in --policy from the start"
            )
    return moved
