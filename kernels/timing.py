"""How the kernels' benchmarks measure: many calls in flight, several times over, and what they print."""

import json
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np


class Timing(NamedTuple):
    """Seconds a call: the median, the 10th and the 90th percentile over rounds."""

    median: float
    p10: float
    p90: float


def measure(
    run: Callable[..., object], *args: object, rounds: int = 20, round_seconds: float = 0.02
) -> Timing:
    """Times `run(*args)`, which is asynchronous: rounds of as many calls as fill `round_seconds`."""
    jax.block_until_ready(run(*args))  # compiles
    calls = 1
    while (seconds := _round(run, args, calls)) < round_seconds and calls < 1000:
        calls = max(calls + 1, int(calls * min(10, 1.2 * round_seconds / max(seconds, 1e-6))))
    times = [_round(run, args, calls) / calls for _ in range(rounds)]
    return Timing(*(float(np.quantile(times, q)) for q in (0.5, 0.1, 0.9)))


def _round(run, args, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        result = run(*args)
    jax.block_until_ready(result)
    return time.perf_counter() - start


def print_table(columns: list[str], rows: list[list[str]]) -> None:
    """Prints a Markdown table."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    for row in [columns, ["-" * w for w in widths], *rows]:
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |")


def print_json(record: dict) -> None:
    """Prints what was measured, and on what, as one line."""
    device = jax.devices()[0]
    print(json.dumps({"device": device.device_kind, "jax": jax.__version__, **record}))
