"""The numbers that the flags of a run may have; anything else ends the run before it begins."""

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np


class Range(NamedTuple):
    """The words of a range for messages, and whether it contains a number."""

    words: str
    contains: Callable[[Any], bool]


_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)  # XLA flushes smaller ones to zero

# Steps, tokens and their ids are int32. Comparisons with NaN are false.
_COUNT = Range("at least 1 and less than 2**31", lambda n: 1 <= n < 2**31)
_POSITIVE = Range("a positive float32", lambda x: _SMALLEST <= x <= _LARGEST)
_NOT_NEGATIVE = Range("a float32 of at least 0", lambda x: 0 <= x <= _LARGEST)
_DECAY = Range("at least 0 and in float32 less than 1", lambda x: 0 <= x < 1 and bool(np.float32(x) < 1))

_RANGES: Mapping[str, Range] = types.MappingProxyType(
    {
        "lr": _POSITIVE,
        "warmup_steps": Range("at least 0 and less than 2**31 - 1", lambda n: 0 <= n < 2**31 - 1),
        "min_lr_ratio": Range("from 0 to 1", lambda x: 0 <= x <= 1),
        "b1": _DECAY,
        "b2": _DECAY,
        "eps": _NOT_NEGATIVE,
        "weight_decay": _NOT_NEGATIVE,
        "clip": Range("positive; inf does not clip", lambda x: x > 0),
        "seed": Range("from 0 to 2**32 - 1", lambda n: 0 <= n < 2**32),
        "target_loss": Range("finite", lambda x: abs(x) <= sys.float_info.max),
        "spike_factor": Range("greater than 1", lambda x: x > 1),
    }
    | dict.fromkeys(
        ("steps", "batch_size", "seq_len", "vocab_size", "accumulate", "unroll", "checkpoint_every"), _COUNT
    )
    | dict.fromkeys(
        ("keep_checkpoints", "eval_every", "eval_batches", "eval_sequences", "log_every", "stats_every"),
        _COUNT,
    )
)


def check_ranges(values: Mapping[str, Any]) -> None:
    """Checks the values of flags by name; None is a default.

    Raises:
      ValueError: a number is out of its range.
    """
    for name, allowed in _RANGES.items():
        value = values[name]
        if value is not None and not allowed.contains(value):
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed.words}, got {value}")
