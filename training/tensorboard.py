"""TensorBoard event files with the contents of metrics.jsonl, in the same folder."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from training.extras import check_extra, require


class EventFiles:
    """Writes events: numbers become scalars, other values text. A sink of `MetricsLog`."""

    def __init__(self, folder: pathlib.Path, keep_steps: int = 0):
        """Opens a file; TensorBoard hides a resumed run's events after step `keep_steps`.

        Raises:
          MissingExtraError: tensorboardX is not installed.
        """
        writer = require("tensorboard", "--tensorboard", "tensorboardX").SummaryWriter
        self._writer = writer(str(folder), purge_step=keep_steps + 1, filename_suffix=f".{keep_steps}")
        # A metric may be NaN or infinite, such as the SQNR of an exact product, and is recorded as it is.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes an event for each value."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            else:
                self._writer.add_text(name, str(value), step)

    def close(self, failed: bool) -> None:
        """Closes the file."""
        self._writer.close()


def check_installed() -> None:
    """Raises MissingExtraError unless event files can be written."""
    check_extra("tensorboard", "--tensorboard", "tensorboardX")
