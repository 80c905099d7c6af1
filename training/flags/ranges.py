"""Ranges of numbers that flags give, in the type that a number becomes: float32 for most, int32 for steps."""

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)  # XLA flushes smaller ones to zero


class Range(NamedTuple):
    """The words of a range for messages, and whether it contains a number; comparisons with NaN are false."""

    words: str
    contains: Callable[[Any], bool]


# Steps, tokens and their ids are int32.
COUNT = Range("at least 1 and less than 2**31", lambda n: 1 <= n < 2**31)
SEED = Range("from 0 to 2**32 - 1", lambda n: 0 <= n < 2**32)
POSITIVE = Range("a positive float32", lambda x: _SMALLEST <= x <= _LARGEST)
POSITIVE_OR_INF = Range("a positive float32, or inf", lambda x: POSITIVE.contains(x) or x == math.inf)
NOT_NEGATIVE = Range("0 or a positive float32", lambda x: x == 0 or POSITIVE.contains(x))
FINITE = Range("finite", lambda x: abs(x) <= sys.float_info.max)  # of 10**400 isfinite raises
DECAY = Range("at least 0 and in float32 less than 1", lambda x: 0 <= x < 1 and bool(np.float32(x) < 1))


def at_most(largest: int) -> Range:
    """Returns the range of a number of things."""
    return Range(f"at least 1 and at most {largest:,}", lambda n: 1 <= n <= largest)


def check_ranges(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> None:
    """Checks the values of flags by name; None is a default.

    Raises:
      ValueError: a number is out of its range.
    """
    for name, allowed in ranges.items():
        value = values[name]
        if value is not None and not allowed.contains(value):
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed.words}, got {value}")
