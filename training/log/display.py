"""Progress on the terminal: a bar, or plain lines where the output is not a terminal; text tables."""

import contextlib
import datetime
import io
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from training.log import throughput
from training.process.start import program_name


class Display:
    """Shows the progress of a run. A context manager."""

    def __init__(self, steps: int, start: int, every: int, quiet: bool = False):
        """Shows steps start + 1 to `steps`; plain lines appear at the first and every `every`-th step."""
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet, file=cast(TextIO, _Stdout()))
        self._first, self._last, self._every = start + 1, steps, every
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=self._console,
            disable=not (sys.stdout and sys.stdout.isatty()),
            transient=True,  # the last message stays below everything else
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def step(self, step: int, m: Mapping[str, float]) -> None:
        """Shows the metrics of a step, and the time left without evaluations if `mean_step_s` is known."""
        text = f"loss {m['loss']:.4f}  {throughput.in_words(m)}"
        if "mean_step_s" in m:
            left = datetime.timedelta(seconds=round((self._last - step) * m["mean_step_s"]))
            text += f"  {left} left"
        self._bar.update(self._task, completed=step, description=text)
        if step % self._every == 0 or step == self._first:
            self.line(f"step {step:6d}  {text}  grad norm {m['grad_norm']:.3f}  lr {m['lr']:.2e}")

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False)


class _Stdout(io.TextIOBase):
    """Standard output that may fail: a warning says so once, and the program goes on without it."""

    encoding = "utf-8"

    def __init__(self):
        self._file = sys.stdout  # None if it was closed before the start
        self.encoding = getattr(self._file, "encoding", None) or self.encoding

    def isatty(self) -> bool:
        return self._file is not None and self._file.isatty()

    def fileno(self) -> int:
        return (self._file or io.StringIO()).fileno()

    def write(self, text: str) -> int:
        known = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
        self._try(lambda file: file.write(known))
        return len(text)

    def flush(self) -> None:
        self._try(lambda file: file.flush())

    def close(self) -> None:
        """Does nothing: standard output stays open when this object is gone."""

    def _try(self, action: Callable[[TextIO], object]) -> None:
        if self._file is None:
            return
        try:
            action(self._file)
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            with contextlib.suppress(OSError, ValueError):  # or Python fails at its end, when it flushes
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
            self._file = None
            cause = getattr(error, "strerror", None) or error
            with contextlib.suppress(OSError, ValueError):
                text = f"standard output cannot be written ({cause}): going on without it"
                print(f"{program_name()}: warning: {text}", file=sys.stderr)


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as plain text: columns aligned to the right, two spaces apart."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    Console(file=text, width=10**4, color_system=None, highlight=False, markup=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
