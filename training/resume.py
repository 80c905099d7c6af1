"""Resuming a run: whether a configuration continues the run in a folder, and the command that does."""

import dataclasses
import os
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from training.config import Config, ObserveConfig, by_flag
from training.data.megatron import parse_blend
from training.extension import check_extension, last_checkpoint
from training.run_config import COPY, FILE, from_json, read_run_config

# A resumed run may change these and stay the same run. Data may lie elsewhere; `training.run_data` checks it.
_MAY_CHANGE = {
    "eval_data",
    "out",
    "resume",
    "stop_after",
    "checkpoint_every",
    "keep_checkpoints",
    "eval_every",
    "eval_batches",
    "eval_sequences",
    "target_loss",
    "log_every",
    "mesh",
    "distributed",
    *(field.name for field in dataclasses.fields(ObserveConfig)),
    "on_nonfinite",
    "spike_factor",
}


def command_to_continue(folder: pathlib.Path) -> str:
    """Returns the command that continues the run in a folder."""
    return f"python train.py --out {shlex.quote(str(folder))} --resume"


def begun_run(folder: pathlib.Path) -> Config | None:
    """Returns the configuration of the run in a folder; None without a run, or if it has not begun.

    An imported checkpoint is a run that has not begun: it has no data yet.
    """
    saved = read_run_config(folder) if (folder / FILE).exists() else {}
    return from_json(saved["config"]) if "data" in saved else None


def check_same_run(config: Config, folder: pathlib.Path) -> None:
    """Raises ValueError unless `folder` holds a run with this configuration, or one that has not begun."""
    if not any(os.path.lexists(folder / name) for name in (FILE, COPY)):
        raise ValueError(f"--resume: {folder} holds no run; leave out --resume to start one there")
    read_run_config(folder)  # explains how to restore a missing one
    saved = begun_run(folder)
    if saved is not None:
        check_resumable(config, saved, folder)
        if config.steps > saved.steps:
            check_extension(config, saved, last_checkpoint(folder))


def _difference(begun: Any, asked: Any) -> str:
    """Returns how two values differ; a text of a policy leaves out, for example, the seed of its signs."""
    text = repr if str(begun) == str(asked) else str
    return f"the run has {text(begun)}, the command line {text(asked)}"


def check_resumable(config: Config, saved: Config, folder: pathlib.Path) -> None:
    """Raises ValueError if `config` differs from the run in `folder`; the message lists the differences.

    More steps are no difference: see `training.extension`.
    """
    asked, begun = map(by_flag, (config, saved))
    differences = [
        f"--{name.replace('_', '-')}: " + _difference(begun[name], asked[name])
        for name in begun
        if name not in _MAY_CHANGE
        and begun[name] != asked[name]
        and not (name == "data" and _same_blend(begun[name], asked[name]))
        and not (name == "steps" and asked[name] > begun[name])
    ]
    if differences:
        raise ValueError(
            f"--resume: {folder} holds another run; leave these flags out or choose another --out.\n  "
            + "\n  ".join(differences)
        )


def _same_blend(begun: Sequence[str], asked: Sequence[str]) -> bool:
    """Whether as many datasets are named with the same weights."""
    ours, theirs = map(parse_blend, (asked, begun))
    return len(ours[0]) == len(theirs[0]) and ours[1] == theirs[1]
