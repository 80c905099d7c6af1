"""A Weights & Biases run with the contents of metrics.jsonl; its failures never end or alter the training.

A run has one id, kept in its folder, so that a resumed run goes on in the same one. W&B takes each step once;
the steps that a resumed run repeats are the same ones bit for bit. WANDB_MODE, WANDB_PROJECT and the other
variables of W&B apply.
"""

import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any

from training.extras import check_extra, require
from training.files import write_atomically

ID_FILE = "wandb_id.txt"
_PATIENCE = 60  # seconds to wait for a login and the server at the start, and at the end for uploads


class WandbRun:
    """Logs to W&B. A sink of `MetricsLog`."""

    name = "--wandb"

    def __init__(self, folder: pathlib.Path, configuration: Mapping[str, Any]):
        """Begins or continues the run; if W&B cannot be reached, its data stays in the folder.

        Args:
          folder: the training run's folder.
          configuration: the values to show with the run.
        Raises:
          MissingExtraError: wandb is not installed.
        """
        wandb = require("wandb", "--wandb", "wandb")
        self._run: Any = None
        path = folder / ID_FILE
        if not path.exists():
            write_atomically(path, secrets.token_hex(4) + "\n")

        def begin(mode: str | None = None) -> Any:
            return wandb.init(
                dir=str(folder),
                id=path.read_text().strip(),
                name=folder.name,
                project=os.environ.get("WANDB_PROJECT", "mxjax"),
                config=dict(configuration),
                resume="allow",
                mode=mode,
                settings=wandb.Settings(
                    console="off",
                    login_timeout=_PATIENCE,
                    init_timeout=_PATIENCE,
                    finish_timeout=_PATIENCE,
                ),
            )

        kept = f"its data goes to {folder / 'wandb'}; upload it with wandb sync"
        self._run = _attempt(begin, kept) or _attempt(lambda: begin("offline"), "training goes on without it")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Logs the values of a step."""
        if self._run is not None and not _attempt(lambda: (self._run.log(dict(values), step=step),)):
            self._run = None

    def close(self, failed: bool) -> None:
        """Ends the run, as failed or not, once its data is uploaded or a minute has passed."""
        if self._run is not None:
            _attempt(lambda: self._run.finish(exit_code=int(failed)), "its last data may be missing")


def _attempt(action: Callable[[], Any], otherwise: str = "training goes on without it") -> Any:
    """Returns the action's result; prints a warning and returns None if the action fails."""
    try:
        return action()
    except Exception as error:  # whatever it is, training matters more
        text = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"train.py: warning: W&B failed ({text:.200}); {otherwise}", file=sys.stderr)
        return None


def check_installed() -> None:
    """Raises MissingExtraError unless wandb is installed."""
    check_extra("wandb", "--wandb", "wandb")
