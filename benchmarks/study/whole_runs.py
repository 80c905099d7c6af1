"""Trains the cells whose recipe changes its program during a run, by train.py itself.

A schedule of policies does, and so does the choice of outlier channels. Weights, batches and evaluations are
those of `benchmarks.study.programs.Programs`.
"""

import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any

from benchmarks.study.cells import PROTOCOLS, Cell
from train import train
from training.config import Config, DataConfig, OptimizerConfig, PrecisionConfig
from training.metrics import FILE
from training.nonfinite import NonFiniteError
from training.recipes import RECIPES


def changes_program(policy: str) -> bool:
    """Whether a policy is a recipe that needs several programs in one run."""
    recipe = RECIPES.get(policy)
    return recipe is not None and (";" in recipe.policy or recipe.outlier_channels is not None)


class WholeRuns:
    """The runs of one cell; every run compiles anew."""

    compile_seconds = None
    step_bytes = None

    def __init__(self, cell: Cell, data: DataConfig, implementation: Any, held_out: int):
        """Prepares the runs of a cell.

        Args:
          data: the datasets and the vocabulary.
          held_out: number of sequences of an evaluation.
        """
        self.protocol = p = PROTOCOLS[cell.protocol]
        assert p.horizon is None, f"{cell.name}: train.py's cosine ends with the run"
        assert not p.outlier_channels, f"{cell.name}: train.py begins without outliers"
        self.policy = RECIPES[cell.policy].policy if cell.policy in RECIPES else cell.policy
        self.flags: dict[str, Any] = {
            "precision": PrecisionConfig(policy=cell.policy, implementation=implementation),
            "data": DataConfig(data.data, data.eval_data, data.vocab_size, p.batch, p.seq),
            "optimizer": OptimizerConfig(lr=p.lr, warmup_steps=p.warmup),
            "model": cell.model,
            "steps": p.steps,
            "checkpoint_every": p.steps,
            "eval_every": p.steps // p.evaluations,
            "eval_sequences": held_out,
        }

    def train(self, seed: int) -> dict[str, Any]:
        """Trains one run; returns its evaluations, its losses, and the time of its steps."""
        finite = True
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "run"
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                try:
                    train(Config(**self.flags, seed=seed, out=out))
                except NonFiniteError:
                    finite = False
            lines = [json.loads(line) for line in (out / FILE).read_text().splitlines()]
        steps = [line for line in lines if "step_s" in line]
        later = [line["step_s"] for line in steps[1:]]  # the first one compiles
        return {
            "evaluations": [[x["tokens"], round(x["eval_loss"], 6)] for x in lines if "eval_loss" in x],
            "losses": [float(line["loss"]) for line in steps],
            "finite": finite,
            "seconds": sum(later) * len(steps) / max(len(later), 1),
        }
