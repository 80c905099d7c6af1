"""Statistics of runs paired by seed: t-intervals, Holm's correction, power, token ratios.

Every function is deterministic, so that reports can be regenerated and compared.

Token ratios say how many more tokens than a baseline a policy needs. P1, the paper's measure: under an all
but constant learning rate, the tokens to reach the loss that the baseline, fp8, has at 80 % of the run. P2:
under full decay, the baseline trained for several lengths maps a final loss to the number of tokens that it
needs for it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

CONFIDENCE, POWER = 0.95, 0.8
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
    from scipy import special  # here, because commands without intervals need no scipy

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


def detectable(sd: float, n: int) -> float:
    """Returns the mean that a two-sided t-test at 5 % finds in a share POWER of cases; NaN for n < 2."""
    if n < 2 or math.isnan(sd):
        return math.nan
    from scipy import special

    critical = special.stdtrit(n - 1, (1 + CONFIDENCE) / 2)
    return float(special.nctdtrinc(n - 1, 1 - POWER, critical)) * sd / math.sqrt(n)


def has_diverged(final_loss: float, evaluations: Sequence[tuple[float, float]]) -> bool:
    """Whether a run has diverged (see DIVERGED)."""
    losses = [loss for _, loss in evaluations]
    return not math.isfinite(final_loss) or final_loss > min(losses, default=final_loss) + DIVERGED


SHARE = 0.8
"""Share of the baseline's run whose loss the others must reach (P1). Source: arXiv 2605.09825."""
SMOOTHED = 3
"""Evaluations that are averaged in P1: at a constant rate, single ones are noisy."""

Curve = Sequence[Sequence[float]]
"""(tokens, loss) of each evaluation, in the order of training."""


class LogRatio(NamedTuple):
    """The logarithm of a seed's ratio of tokens.

    Attributes:
      is_low, is_high: whether the value bounds it from below, or from above, because a run never reached the
        loss, or before its first evaluation. Both: nothing is known.
    """

    value: float
    is_low: bool = False
    is_high: bool = False


class Overhead(NamedTuple):
    """P1: the logarithm of the ratio of tokens over seeds.

    Attributes:
      log_ratio: estimate over all seeds. Interval and p are NaN if the mean is a bound; the mean too if seeds
        bound it from both sides.
      not_reached: number of seeds whose ratio is a bound.
      bound: "> " if the mean is a lower bound, "< " if it is an upper one, else "".
    """

    log_ratio: Estimate
    not_reached: int
    bound: str


def smooth(evaluations: Curve) -> list[tuple[float, float]]:
    """Returns means of SMOOTHED neighbouring evaluations, of tokens and of losses."""
    points = np.asarray(evaluations, np.float64).reshape(-1, 2)
    return [tuple(points[i : i + SMOOTHED].mean(axis=0)) for i in range(len(points) - SMOOTHED + 1)]


def loss_at(curve: Curve, tokens: float) -> float:
    """Returns the loss after `tokens`, interpolated; NaN outside the curve."""
    x, y = np.asarray(curve, np.float64).T
    return float(np.interp(tokens, x, y, left=math.nan, right=math.nan))


def tokens_to_reach(curve: Curve, loss: float) -> float | None:
    """Returns the tokens at which the curve first falls to `loss`, interpolated; None if it never does."""
    before = None
    for tokens, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return tokens
            return before[0] + (tokens - before[0]) * (before[1] - loss) / (before[1] - value)
        before = tokens, value
    return None


def overhead(ours: Mapping[int, Curve], base: Mapping[int, Curve]) -> Overhead:
    """Returns P1's overhead of runs over the baseline's, paired by seed.

    Args:
      ours, base: the evaluations of each seed's run; an empty curve is that of a run that diverged.
    """
    return over_seeds(list(log_ratios(ours, base).values()))


def log_ratios(ours: Mapping[int, Curve], base: Mapping[int, Curve]) -> dict[int, LogRatio]:
    """Returns P1's ratio of each seed. Arguments are those of `overhead`.

    A run that never reaches the loss counts with the length of its smoothed curve, one that diverged with the
    baseline's. Seeds with too few evaluations to smooth them, or for the loss at SHARE of the baseline's run,
    are left out.
    """
    found = {}
    for seed in sorted(ours.keys() & base.keys()):
        theirs, curve = smooth(base[seed]), smooth(ours[seed])
        target = loss_at(theirs, SHARE * base[seed][-1][0]) if theirs else math.nan
        if math.isnan(target) or (ours[seed] and not curve):
            continue
        end = base[seed][-1][0]
        found[seed] = _log_ratio(target, curve, [(SHARE * end, target)], end)
    return found


def log_ratios_to(loss: float, ours: Mapping[int, Curve], base: Mapping[int, Curve]) -> dict[int, LogRatio]:
    """Returns each seed's ratio of the tokens at which both runs reach a loss, interpolated.

    A run that never does counts with its whole length, one of ours that diverged with the baseline's; seeds
    whose baseline diverged are left out. Curves are not smoothed.
    """
    seeds = sorted(seed for seed in ours.keys() & base.keys() if base[seed])
    return {seed: _log_ratio(loss, ours[seed], base[seed], base[seed][-1][0]) for seed in seeds}


def _log_ratio(loss: float, ours: Curve, base: Curve, end: float) -> LogRatio:
    """Returns the ratio of the tokens to a loss; a bound where a run is beyond it at once, or never."""
    needed = [tokens_to_reach(curve, loss) for curve in (ours, base)]
    tokens = [
        n if n is not None else curve[-1][0] if curve else end
        for n, curve in zip(needed, (ours, base), strict=True)
    ]
    # The first evaluation is the earliest known.
    early = [len(curve) > 1 and n == curve[0][0] for n, curve in zip(needed, (ours, base), strict=True)]
    is_low, is_high = needed[0] is None or early[1], needed[1] is None or early[0]
    return LogRatio(math.log(tokens[0] / tokens[1]), is_low, is_high)


def over_seeds(ratios: Sequence[LogRatio]) -> Overhead:
    """Returns the estimate over seeds."""
    found, not_reached = t_interval([r.value for r in ratios]), sum(r.is_low or r.is_high for r in ratios)
    is_low, is_high = any(r.is_low for r in ratios), any(r.is_high for r in ratios)
    if not_reached:
        mean = math.nan if is_low and is_high else found.mean
        found = found._replace(mean=mean, low=math.nan, high=math.nan, p=math.nan)
    return Overhead(found, not_reached, "> " if is_low else "< " if is_high else "")


def effective_multiple(ours: Mapping[int, float], lengths: Mapping[float, Mapping[int, float]]) -> Estimate:
    """Returns P2's log multiple: with exp(it) times the tokens the baseline ends at the mean loss of `ours`.

    The baseline's mean losses are fitted by a quadratic in the logarithm of the length. The multiple is
    relative to that at which the fit has the loss of the baseline's own runs of length 1, which the fit need
    not pass through.
    The uncertainty is a jackknife over seeds, which leaves a seed out of all cells at once.

    Args:
      ours: final losses by seed.
      lengths: final losses of the baseline by seed, for each length relative to `ours`, 1 among them.
    Special values: the mean is -inf or inf if the loss is above or below those of all lengths; the interval
      is then NaN. Everything is NaN with fewer than three lengths or without a common seed.
    """
    seeds = sorted(set(ours).intersection(*lengths.values())) if lengths else []
    if len(lengths) < 3 or not seeds:
        return Estimate(math.nan, math.nan, math.nan, math.nan, len(seeds))

    def estimate(chosen: Sequence[int]) -> float:
        means = {m: float(np.mean([losses[s] for s in chosen])) for m, losses in lengths.items()}
        own = _log_length(means, float(np.mean([ours[s] for s in chosen])))
        return own - _log_length(means, means[1.0], is_inside=True)

    whole = estimate(seeds)
    parts = [estimate([s for s in seeds if s != left]) for left in seeds] if len(seeds) > 1 else []
    if not parts or not all(map(math.isfinite, [whole, *parts])):
        return Estimate(whole, math.nan, math.nan, math.nan, len(seeds))
    return jackknife(whole, parts)


def _log_length(means: Mapping[float, float], loss: float, is_inside: bool = False) -> float:
    """Returns the log of the length at which the fit through the means has this loss.

    With `is_inside` a loss beyond the fit's ends, which the fit misses, is at the nearer end.
    """
    lengths = np.log(sorted(means))
    fit = np.polynomial.Polynomial.fit(lengths, [means[m] for m in sorted(means)], 2)
    grid = np.linspace(lengths[0], lengths[-1], 2001)
    fitted = fit(grid)
    if np.any(np.diff(fitted) >= 0):
        return math.nan  # noise exceeds the effect of length
    if not is_inside and not fitted[-1] <= loss <= fitted[0]:
        return -math.inf if loss > fitted[0] else math.inf
    return float(np.interp(loss, fitted[::-1], grid[::-1]))
