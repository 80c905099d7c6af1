"""Trains by train.py itself the cells that need more of it than its step; see `is_whole_run`.

Weights, batches and evaluations are those of `studies.ladder.programs.Programs`.
"""

import contextlib
import json
import os
import pathlib
import tempfile
from typing import Any

import jax

from models import decoder
from mxjax.products.implementations import Implementation
from mxjax.recipes.whole_runs import RunRecipe
from studies.ladder.cells import Cell, model_of, policy_of, protocol_of, recipe_of
from train import train
from training.config import Config, DataConfig, OptimizerConfig, PrecisionConfig, parse_rules
from training.log.health import NonFiniteError
from training.log.metrics import METRICS
from training.optimizer.delayed import is_delayed
from training.process.interruption import RunInterrupted


def is_whole_run(cell: Cell) -> bool:
    """Whether the cell's recipe has a schedule of policies, or scales of earlier steps."""
    recipe = recipe_of(cell)
    if recipe is not None and ";" in recipe.policy:
        return True
    rules = parse_rules(recipe.layers) if recipe else ()
    return is_delayed(decoder.layer_policies(model_of(cell), policy_of(cell), rules))


def check_protocol(cell: Cell) -> None:
    """Raises ValueError if train.py has no such protocol."""
    p = protocol_of(cell)
    reasons = {
        "its cosine ends with the run": p.horizon is None,
        "it begins without outliers": not p.outlier_channels,
        f"evaluations must divide the {p.steps} steps": p.steps % p.evaluations == 0,
        "it has its own optimizer and keys": (p.eps, p.bits, p.bfloat16_gradients) == (1e-5, "fresh", False),
        "a recipe has its own scale rules": not cell.rules,
    }
    if wrong := [reason for reason, is_so in reasons.items() if not is_so]:
        raise ValueError(f"{cell.name} is trained by train.py itself: {', '.join(wrong)}")


class WholeRuns:
    """The runs of one cell; every run compiles anew."""

    compilations_a_run = 2
    compile_seconds = None
    step_bytes = None

    def __init__(self, cell: Cell, data: DataConfig, implementation: Implementation, held_out: int):
        """Prepares the runs of a cell.

        Args:
          data: the datasets and the vocabulary.
          held_out: number of sequences of an evaluation.

        Raises:
          ValueError: there are several devices, on which train.py would share a run.
        """
        check_protocol(cell)
        self.protocol = p = protocol_of(cell)
        if jax.device_count() > 1:
            raise ValueError(
                f"{cell.name} trains on one device, and there are {jax.device_count()}: give --workers "
                "as many, or set CUDA_VISIBLE_DEVICES to one"
            )
        recipe = recipe_of(cell) or RunRecipe(cell.policy)
        self.policy = recipe.policy
        self.flags: dict[str, Any] = {
            "precision": PrecisionConfig(
                policy=recipe.policy,
                implementation=implementation,
                layers=recipe.layers,
                deoscillate=recipe.deoscillate,
            ),
            "data": DataConfig(
                data.data, data.eval_data, data.vocab_size, p.batch, p.seq, document_mask="off"
            ),
            "optimizer": OptimizerConfig(
                lr=p.lr, warmup_steps=p.warmup, optimizer=p.optimizer, moments=p.moments, master=p.master
            ),
            **({"model_config": cell.model_config} if cell.model_config else {"model": cell.model}),
            "steps": p.steps,
            "checkpoint_every": p.steps,
            "eval_every": p.steps // p.evaluations,
            "eval_sequences": held_out,
        }

    def train(self, seed: int) -> dict[str, Any]:
        """Trains one run; returns its evaluations, its losses, and the time of its steps.

        Raises:
          SystemExit: SIGINT or SIGTERM ended the run, of which nothing is kept.
        """
        finite = True
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "run"
            with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
                try:
                    train(Config(**self.flags, seed=seed, out=out))
                except NonFiniteError:
                    finite = False
                except RunInterrupted as error:
                    raise SystemExit("interrupted; the same command continues with this run") from error
            lines = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
        steps = [line for line in lines if "step_s" in line]
        seconds = [line["step_s"] for line in steps[1:] or steps]  # the first one compiles
        evaluations = [line for line in lines if "eval_loss" in line]
        return {
            "evaluations": [[line["tokens"], round(float(line["eval_loss"]), 6)] for line in evaluations],
            "losses": [float(line["loss"]) for line in steps],
            "finite": finite,
            "seconds": sum(seconds) / len(seconds) * len(steps),
        }
