"""A trace of some steps, by JAX's profiler."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax


class StepTracer:
    """Traces the steps in a range into a folder, and no others. A context manager."""

    def __init__(self, steps: range, folder: pathlib.Path):
        """Takes consecutive steps; the folder is made when the first of them runs."""
        self._steps, self._folder, self._tracing = steps, folder, False

    def __enter__(self) -> "StepTracer":
        return self

    def __exit__(self, *exception) -> None:
        self._stop()

    def run(self, step: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns function(*arguments), the work of a step; waits for it if it is the last to be traced."""
        if step not in self._steps:
            return function(*arguments)
        if not self._tracing:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            result = function(*arguments)
        if step == self._steps[-1]:
            jax.block_until_ready(result)
            self._stop()
        return result

    def _stop(self) -> None:
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
