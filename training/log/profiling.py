"""Traces of some steps by JAX's profiler."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax


class StepTracer:
    """Traces a range of steps into a folder. A context manager."""

    def __init__(self, steps: range, folder: pathlib.Path):
        """Takes consecutive steps; the folder is created when the first of them runs."""
        self._steps, self._folder, self._tracing = steps, folder, False

    def __enter__(self) -> "StepTracer":
        return self

    def __exit__(self, *exception) -> None:
        self._stop()

    def before(self, step: int, pause: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Starts the trace, within `pause()`, before the first traced step."""
        if step in self._steps and not self._tracing:
            with pause():
                jax.profiler.start_trace(self._folder)
                self._tracing = True

    def run(self, step: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns function(*arguments), the work of a step."""
        if not self._tracing:
            return function(*arguments)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            return function(*arguments)

    def after(self, step: int, result: Any, pause: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Stops the trace, within `pause()`, once the last traced step has its result."""
        if self._tracing and step == self._steps[-1]:
            with pause():
                jax.block_until_ready(result)
                self._stop()

    def _stop(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
