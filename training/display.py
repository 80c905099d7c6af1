"""Progress on the terminal: a bar, or plain lines where the output is not a terminal; text tables."""

import datetime
import io
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from training import throughput


class Display:
    """Shows the progress of a run. A context manager."""

    def __init__(self, steps: int, start: int, every: int, quiet: bool = False):
        """Shows steps start + 1 to `steps`; plain lines appear at the first and every `every`-th step."""
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._first, self._last, self._every = start + 1, steps, every
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=self._console,
            disable=not sys.stdout.isatty(),
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
        if self._bar.disable and (step % self._every == 0 or step == self._first):
            self.line(f"step {step:6d}  {text}  grad norm {m['grad_norm']:.3f}  lr {m['lr']:.2e}")

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False)


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
