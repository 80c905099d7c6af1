"""Sinks beside metrics.jsonl: TensorBoard's event files and Weights & Biases.

tensorboardX writes without its thread: that dies on a full disk, and its queue then blocks the training.

Failures of W&B never end or alter the training. A run has one id, kept in its folder, so that a resumed run
goes on in the same one. W&B takes each step once; the steps that a resumed run repeats are the same ones bit
for bit. W&B's variables apply, such as WANDB_MODE, but for WANDB_DIR.
"""

import logging
import os
import pathlib
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from models.received import read_text
from training.files import write_atomically
from training.process.start import require

PREFIX = "events.out.tfevents."
"""How the names of the files begin."""
_FLUSH_EVERY = 120.0  # seconds


class EventFiles:
    """Writes events: numbers become scalars, other values text. A sink of `MetricsLog`."""

    name = "--tensorboard"

    def __init__(self, folder: pathlib.Path, keep_steps: int = 0):
        """Opens a file; TensorBoard hides a resumed run's events after step `keep_steps`.

        Raises:
          MissingExtraError: tensorboardX is not installed.
        """
        self._summary: Any = require("tensorboard", "--tensorboard", "tensorboardX.summary")
        self._event: Any = require("tensorboard", "--tensorboard", "tensorboardX.proto.event_pb2")
        records: Any = require("tensorboard", "--tensorboard", "tensorboardX.record_writer")
        name = f"{PREFIX}{int(time.time())}.{socket.gethostname()}.{keep_steps}"
        self._file, self._flushed = records.RecordWriter(str(folder / name)), 0.0
        self._add(keep_steps + 1, file_version="brain.Event:2")
        self._add(keep_steps + 1, session_log={"status": self._event.SessionLog.START})
        # A metric may be NaN or infinite, such as the SQNR of an exact product, and is recorded as it is.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes an event for each value."""
        for name, value in values.items():
            number = isinstance(value, int | float)
            make = self._summary.scalar if number else self._summary.text
            self._add(step, summary=make(name, value if number else str(value)))
        if time.monotonic() - self._flushed > _FLUSH_EVERY:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self, failed: bool) -> None:
        """Closes the file."""
        self._file.close()

    def _add(self, step: int, **content: Any) -> None:
        event = self._event.Event(step=step, wall_time=time.time(), **content)
        self._file.write(event.SerializeToString())


ID_FILE = "wandb_id.txt"
_PATIENCE = 60  # seconds to wait for a login and the server at the start, and at the end for uploads


class WandbRun:
    """Logs to W&B. A sink of `MetricsLog`."""

    name = "--wandb"

    def __init__(self, folder: pathlib.Path, configuration: Mapping[str, Any]):
        """Begins or continues the run; if W&B cannot be reached, its data stays in the folder.

        Args:
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
                id=read_text(path).strip(),
                name=folder.name,
                project=os.environ.get("WANDB_PROJECT", "mxjax"),
                config=dict(configuration),
                resume="allow",
                mode=mode,
                settings=wandb.Settings(
                    console="off", login_timeout=_PATIENCE, init_timeout=_PATIENCE, finish_timeout=_PATIENCE
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
