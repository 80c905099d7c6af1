"""Where a run's numbers go: metrics.jsonl for programs, a progress bar or plain lines for people."""

import contextlib
import datetime
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from training import rates
from training.step import StepMetrics

if TYPE_CHECKING:
    from training.anomalies import Watch

_RECENT_STEPS = 10  # over which the speed is averaged


class NonFiniteError(RuntimeError):
    """The loss or the gradient of `step` is NaN or infinite, and `amax` that of its layers; or the loss of
    the evaluation after it is, and `amax` is None."""

    def __init__(self, message: str, step: int, amax: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.step, self.amax = step, amax


class MetricsLog:
    """Appends one JSON object a line to a file, NaN and infinity as strings. A context manager."""

    def __init__(self, path: pathlib.Path | None, keep_steps: int = 0):
        """Opens the file, keeping of a resumed run's lines those of steps up to keep_steps; None: no file."""
        self._file = None
        if path is None:
            return
        kept = [line for line in _json_lines(path) if json.loads(line)["step"] <= keep_steps]
        whole = path.with_suffix(".tmp")
        whole.write_text("".join(line + "\n" for line in kept))
        whole.replace(path)
        self._file = path.open("a")

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def write(self, **values: Any) -> None:
        """Writes one line."""
        if self._file is None:
            return
        self._file.write(json_line(values) + "\n")
        self._file.flush()


class Display:
    """Shows progress: a bar on a terminal, plain lines elsewhere. A context manager."""

    def __init__(self, steps: int, start: int, every: int, quiet: bool = False):
        """Shows steps start + 1 to steps; plain lines at the first and at every `every`-th step."""
        self._console = Console(highlight=False, soft_wrap=True, quiet=quiet)
        self._first, self._last, self._every = start + 1, steps, every
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            console=self._console,
            disable=not sys.stdout.isatty(),
            transient=True,  # what is said last stands below all else
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def step(self, step: int, m: Mapping[str, float]) -> None:
        """Shows the metrics of a step, and how long the steps that remain take, without evaluations."""
        left = datetime.timedelta(seconds=round((self._last - step) * m["mean_step_s"]))
        text = f"loss {m['loss']:.4f}  {rates.in_words(m)}  {left} left"
        self._bar.update(self._task, completed=step, description=text)
        if self._bar.disable and (step % self._every == 0 or step == self._first):
            self.line(f"step {step:6d}  {text}  grad norm {m['grad_norm']:.3f}  lr {m['lr']:.2e}")

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False)


class StepReporter:
    """Fetches the metrics of a step when the next one has been dispatched, so that the device never waits."""

    def __init__(
        self,
        log: MetricsLog,
        display: Display,
        watch: "Watch",
        tokens_a_step: int,
        flops_a_step: float,
        learning_rate: Callable[[int], Any],
    ):
        """Reports to `log`, `display` and `watch`, with speeds of steps that take so many tokens and model
        FLOPs on all devices; `learning_rate` is a function of the updates before."""
        self._log, self._display, self._watch = log, display, watch
        self._tokens_a_step, self._flops_a_step = tokens_a_step, flops_a_step
        self._learning_rate = learning_rate
        self._pending: tuple[int, StepMetrics] | None = None
        self._clock = time.monotonic()
        self.step_times: list[float] = []

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Takes the metrics of a step just dispatched, reports those of the one before.

        Raises:
          NonFiniteError: that one's loss or gradient was not finite; see `Watch.see`.
        """
        self.flush()
        self._pending = (step, metrics)

    def flush(self) -> None:
        """Waits for the last step taken, and reports it."""
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        values = {
            "loss": float(metrics.loss),
            "grad_norm": float(metrics.grad_norm),
            "lr": float(self._learning_rate(step - 1 - int(metrics.skipped))),
        }
        self.step_times.append(time.monotonic() - self._clock)
        self._clock = time.monotonic()
        recent = self.step_times[1:][-_RECENT_STEPS:] or self.step_times  # the first one compiles
        mean = sum(recent) / len(recent)
        values |= rates.speed(self._tokens_a_step, self._flops_a_step, mean, jax.devices())
        values |= {"step_s": self.step_times[-1]} | rates.memory_use(jax.local_devices()[0])
        skipped = {"skipped": True} if self._watch.skips and not metrics.finite else {}
        self._log.write(step=step, tokens=step * self._tokens_a_step, **values, **skipped)
        self._display.step(step, values | {"mean_step_s": mean})
        self._watch.see(step, values["loss"], values["grad_norm"], metrics)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Reports the last step taken, and leaves what is done inside out of the next one's time."""
        self.flush()
        yield
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves the time since the last report out of the next step's."""
        self._clock = time.monotonic()


def evaluations(folder: pathlib.Path) -> dict[int, float]:
    """Returns the loss of every evaluation of a run, by step."""
    lines = map(json.loads, _json_lines(folder / "metrics.jsonl"))
    return {line["step"]: float(line["eval_loss"]) for line in lines if "eval_loss" in line}


def in_words(evaluation: Mapping[str, float]) -> str:
    """Returns an evaluation for people."""
    return f"eval loss {evaluation['eval_loss']:.4f}  perplexity {evaluation['eval_perplexity']:.3f}"


def json_line(values: Mapping[str, Any]) -> str:
    """Returns the values as one line of JSON, with NaN and infinity, which JSON lacks, as strings."""

    def jsonable(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: jsonable(part) for name, part in value.items()}
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(jsonable(values))


def _json_lines(path: pathlib.Path) -> list[str]:
    """Returns the file's lines, without a last one that was cut off."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
