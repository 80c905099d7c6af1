"""TensorBoard event files with the contents of metrics.jsonl, in the same folder."""

import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from training.extras import check_extra, require
from training.metrics import MetricsLog


class TensorBoardLog(MetricsLog):
    """A MetricsLog that also writes events. A context manager.

    Numbers become scalars under their names, or under LAYER/GEMM/NAME for a layer; other values become text.
    """

    def __init__(self, path: pathlib.Path, keep_steps: int = 0):
        """Opens both; TensorBoard hides a resumed run's events after step `keep_steps`.

        Raises:
          MissingExtraError: tensorboardX is not installed.
        """
        writer = require("tensorboard", "--tensorboard", "tensorboardX").SummaryWriter
        self._writer = writer(str(path.parent), purge_step=keep_steps + 1, filename_suffix=f".{keep_steps}")
        # A metric may be NaN or infinite, such as the SQNR of an exact product, and is recorded as it is.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        super().__init__(path, keep_steps)

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._writer.close()

    def write(self, **values: Any) -> None:
        """Writes one line, and an event for each of its values except the step."""
        super().write(**values)
        step = values.pop("step")
        for name, value in _flat(values):
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            else:
                self._writer.add_text(name, str(value), step)


def check_installed() -> None:
    """Raises MissingExtraError unless event files can be written."""
    check_extra("tensorboard", "--tensorboard", "tensorboardX")


def _flat(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) for every leaf; names join the keys on the path except the outermost."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        else:
            yield "/".join((*path[1:], name)), value
