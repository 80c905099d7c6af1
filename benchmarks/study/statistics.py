"""Comparisons paired by seed: mean differences, t-intervals, Holm's correction, detectable differences."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
DIVERGED = 0.5
"""A run has diverged if its loss is not finite, or ends this many nats above its lowest evaluation."""


class Difference(NamedTuple):
    """A mean of differences paired by seed.

    Attributes:
      mean: NaN without pairs.
      low, high: 95 % t-interval, NaN with fewer than two pairs.
      p: two-sided t-test against zero, NaN with fewer than two pairs.
      n: number of pairs.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int


def paired_difference(ours: Mapping[int, float], base: Mapping[int, float]) -> Difference:
    """Returns the mean of ours - base over the seeds in both."""
    d = np.array([ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())])
    if len(d) < 2:
        return Difference(float(d.mean()) if len(d) else math.nan, math.nan, math.nan, math.nan, len(d))
    mean, error = float(d.mean()), float(d.std(ddof=1)) / math.sqrt(len(d))
    half = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, len(d) - 1))
    p = float(2 * stats.t.sf(abs(mean) / error, len(d) - 1)) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, len(d))


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrects p-values by Holm's step-down method; NaN stays NaN and does not count as a test.

    Source: S. Holm, Scandinavian Journal of Statistics 6 (1979), 65-70.
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, largest = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p))
        corrected[i] = largest
    return corrected


def detectable(differences: Sequence[float], power: float = 0.8) -> float:
    """Returns the mean difference that a t-test at 5 % finds with this power, given the pairs' scatter."""
    n = len(differences)
    if n < 2:
        return math.nan
    error = float(np.std(differences, ddof=1)) / math.sqrt(n)
    critical = float(stats.t.ppf(0.975, n - 1))
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        found = float(stats.nct.sf(critical, n - 1, middle))
        low, high = (middle, high) if found < power else (low, middle)
    return high * error


def has_diverged(final_loss: float, evaluations: Sequence[tuple[float, float]]) -> bool:
    """Whether a run has diverged (see DIVERGED)."""
    losses = [loss for _, loss in evaluations]
    return not math.isfinite(final_loss) or final_loss > min(losses, default=final_loss) + DIVERGED
