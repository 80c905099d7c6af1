"""Times asynchronous calls: many in flight, in rounds, with the percentiles over rounds."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np


class Timing(NamedTuple):
    """Seconds a call: the median, the 10th and the 90th percentile over rounds."""

    median: float
    p10: float
    p90: float


def measure(
    run: Callable[..., object],
    *args: object,
    rounds: int = 20,
    round_seconds: float = 0.02,
    wait: Callable[[Any], object] = jax.block_until_ready,
) -> Timing:
    """Times `run(*args)` in rounds of as many calls as fill `round_seconds`.

    Args:
      wait: takes the last call's result and returns once all calls are done.
    """
    wait(run(*args))  # compiles
    calls = 1
    while (seconds := _round(run, args, calls, wait)) < round_seconds and calls < 1000:
        calls = max(calls + 1, int(calls * min(10, 1.2 * round_seconds / max(seconds, 1e-6))))
    times = [_round(run, args, calls, wait) / calls for _ in range(rounds)]
    return Timing(*(float(np.quantile(times, q)) for q in (0.5, 0.1, 0.9)))


def _round(run, args, calls: int, wait) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = run(*args)
    wait(result)
    return time.perf_counter() - start
