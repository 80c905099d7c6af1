"""Statistics of runs paired by seed: t-intervals, Holm's correction, power, rank correlation.

Every function is deterministic, so that reports can be regenerated and compared.
"""

import bisect
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

CONFIDENCE = 0.95
DIVERGED = 0.5
"""A run has diverged if its loss is not finite, or ends this many nats above its lowest evaluation."""


class Estimate(NamedTuple):
    """A mean with its uncertainty.

    Attributes:
      mean: NaN without values.
      low, high: 95 % t-interval, NaN with fewer than two values.
      p: two-sided t-test against zero, NaN with fewer than two values.
      n: number of values.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int


def t_interval(values: Sequence[float]) -> Estimate:
    """Returns the mean of independent values with its t-interval and t-test."""
    d = np.asarray(values, np.float64)
    if len(d) < 2:
        return Estimate(float(d.mean()) if len(d) else math.nan, math.nan, math.nan, math.nan, len(d))
    return _estimate(float(d.mean()), float(d.std(ddof=1)) / math.sqrt(len(d)), len(d) - 1, len(d))


def mean_of_means(groups: Sequence[Sequence[float]], *, pooled: bool = True) -> Estimate:
    """Returns the mean of the groups' means, with its t-interval and t-test.

    Every group has the same weight, whatever its number of values.

    Args:
      groups: values that are independent within and between groups. NaN without values in a group.
      pooled: all groups have one variance, from their scatter about their own means, so that a group of two
        values does not decide the estimate of the scatter. Otherwise each has its own, with the degrees of
        freedom of B. L. Welch, Biometrika 34 (1947), 28-35, and no interval if one has a single value.
    """
    n, counts = sum(map(len, groups)), np.array([len(group) for group in groups])
    if not groups or not all(groups):
        return Estimate(math.nan, math.nan, math.nan, math.nan, n)
    mean = float(np.mean([np.mean(group) for group in groups]))
    squares = np.array([np.sum((np.asarray(group) - np.mean(group)) ** 2) for group in groups])
    if (counts.max() if pooled else counts.min()) < 2:
        return Estimate(mean, math.nan, math.nan, math.nan, n)
    if pooled:
        freedom = n - len(groups)
        parts = squares.sum() / freedom / counts
    else:
        parts = squares / (counts - 1) / counts
        freedom = (
            float(parts.sum() ** 2 / np.sum(parts**2 / (counts - 1))) if parts.any() else n - len(groups)
        )
    return _estimate(mean, math.sqrt(parts.sum()) / len(groups), freedom, n)


def jackknife(whole: float, without_one: Sequence[float]) -> Estimate:
    """Returns an estimate with the t-interval of its jackknife standard error.

    Args:
      whole: the estimate from all samples.
      without_one: the estimates that leave out each sample in turn.
    Source: B. Efron and C. Stein, Annals of Statistics 9 (1981), 586-596.
    """
    d, n = np.asarray(without_one, np.float64), len(without_one)
    if n < 2:
        return Estimate(whole, math.nan, math.nan, math.nan, n)
    return _estimate(whole, math.sqrt((n - 1) / n * float(np.sum((d - d.mean()) ** 2))), n - 1, n)


def _estimate(mean: float, error: float, freedom: float, n: int) -> Estimate:
    """Returns the estimate whose standard error is `error`, with so many degrees of freedom."""
    half = error * float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
    p = float(2 * special.stdtr(freedom, -abs(mean) / error)) if error else float(mean == 0)
    return Estimate(mean, mean - half, mean + half, p, n)


def differences(ours: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    """Returns ours - base for each seed in both, in the order of the seeds."""
    return [ours[seed] - base[seed] for seed in sorted(ours.keys() & base.keys())]


def paired_difference(ours: Mapping[int, float], base: Mapping[int, float]) -> Estimate:
    """Returns the mean of ours - base over the seeds in both."""
    return t_interval(differences(ours, base))


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


def standard_deviation(values: Sequence[float]) -> float:
    """Returns the sample standard deviation, NaN of fewer than two values."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def deviation_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the standard deviation of normal values; NaN of fewer than two."""
    n, sd = len(values), standard_deviation(values)
    if n < 2:
        return math.nan, math.nan
    tails = special.chdtri(n - 1, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    low, high = (sd * math.sqrt((n - 1) / float(tail)) for tail in tails)
    return low, high


def detectable(sd: float, n: int, power: float = 0.8) -> float:
    """Returns the mean that a two-sided t-test at 5 % finds with this power; NaN for n < 2.

    Args:
      sd: standard deviation of the values, such as differences of pairs.
      n: number of values.
      power: share of repetitions in which the test finds it.
    """
    if n < 2 or math.isnan(sd):
        return math.nan
    return _noncentrality(n - 1, power) * sd / math.sqrt(n)


def detectable_mean(e: Estimate, freedom: int, power: float = 0.8) -> float:
    """Returns the mean that the t-test of an estimate with so many degrees of freedom finds; NaN without one.

    See `detectable`, which is for the mean of one group.
    """
    if math.isnan(e.high):
        return math.nan
    error = (e.high - e.mean) / float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
    return _noncentrality(freedom, power) * error


@functools.cache
def _noncentrality(freedom: int, power: float) -> float:
    """Returns the mean, in standard errors, that a two-sided t-test at 5 % finds with this power."""
    critical = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        found = 1 - float(special.nctdtr(freedom, middle, critical))
        low, high = (middle, high) if found < power else (low, middle)
    return high


def seeds_needed(sd: float, difference: float, most: int = 1000) -> int | None:
    """Returns the smallest number of pairs for which `difference` is detectable; None above `most`."""
    counts = range(2, most + 1)
    i = bisect.bisect_left(counts, True, key=lambda n: detectable(sd, n) <= difference)
    return counts[i] if i < len(counts) else None


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> Estimate:
    """Returns Spearman's rank correlation; its interval needs four pairs, else it is NaN.

    Source: D. Bonett and T. Wright, Psychometrika 65 (2000), 23-28, for the interval.
    """
    n = len(x)
    if n < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return Estimate(math.nan, math.nan, math.nan, math.nan, n)
    from scipy import stats  # here, because it takes a second or two to import

    found = stats.spearmanr(x, y)
    r, p = float(found.statistic), float(found.pvalue)
    if n < 4:
        return Estimate(r, math.nan, math.nan, p, n)
    z = math.atanh(min(max(r, -1 + 1e-12), 1 - 1e-12))
    half = float(special.ndtri((1 + CONFIDENCE) / 2)) * math.sqrt((1 + r * r / 2) / (n - 3))
    return Estimate(r, math.tanh(z - half), math.tanh(z + half), p, n)


def has_diverged(final_loss: float, evaluations: Sequence[tuple[float, float]]) -> bool:
    """Whether a run has diverged (see DIVERGED)."""
    losses = [loss for _, loss in evaluations]
    return not math.isfinite(final_loss) or final_loss > min(losses, default=final_loss) + DIVERGED
