"""TensorBoard event files with the contents of metrics.jsonl, in the same folder.

Written by tensorboardX without its thread: that dies on a full disk, and its queue then blocks the training.
"""

import logging
import pathlib
import socket
import time
from collections.abc import Mapping
from typing import Any

from training.extras import check_extra, require

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


def check_installed() -> None:
    """Raises MissingExtraError unless event files can be written."""
    check_extra("tensorboard", "--tensorboard", "tensorboardX")
