"""The lines of metrics.jsonl as TensorBoard event files, in the same folder."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from training.metrics import MetricsLog

INSTALL = "--tensorboard needs tensorboardX: pip install 'mxjax[tensorboard]'"


class TensorBoardLog(MetricsLog):
    """A MetricsLog that also writes events. A context manager.

    Numbers become scalars under their names, a layer's under LAYER/GEMM/NAME; other values become text.
    """

    def __init__(self, path: pathlib.Path, keep_steps: int = 0):
        """Opens both; of a resumed run's events, TensorBoard shows those of steps up to keep_steps.

        Raises:
          ValueError: tensorboardX is not installed.
        """
        self._writer = _summary_writer()(
            str(path.parent), purge_step=keep_steps + 1, filename_suffix=f".{keep_steps}"
        )
        super().__init__(path, keep_steps)

    def __exit__(self, *exception) -> None:
        super().__exit__(*exception)
        self._writer.close()

    def write(self, **values: Any) -> None:
        """Writes one line, and an event for each of its values but the step."""
        super().write(**values)
        step = values.pop("step")
        for name, value in _flat(values):
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            else:
                self._writer.add_text(name, str(value), step)


def check_installed() -> None:
    """Raises ValueError unless event files can be written."""
    _summary_writer()


def _summary_writer():
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise ValueError(INSTALL) from None
    return SummaryWriter


def _flat(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yields (name, value), of what is nested with the names on the way there but for the outermost."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        else:
            yield "/".join((*path[1:], name)), value
