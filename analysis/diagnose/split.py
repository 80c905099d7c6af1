"""The split of an error into what repeats from batch to batch and what averages out.

Batch a has the gradient g_a and its computed value the error e_a. With <,> the inner product over all
weights,

    repeating = mean over a != b of <e_a, e_b>        averaging = mean of <e_a, e_a> - repeating

`repeating` is an unbiased estimate of the energy of the expected error, whatever the number of batches;
averaging over N batches leaves it as it is and divides the rest by N. The same of g_a gives the energy of the
expected gradient, and mean <e_a, g_b> the part of the repeating error that lies along it. An optimizer that
normalizes its steps, as Adam does, hardly notices an error along the gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from analysis.statistics import Estimate, jackknife

Matrix = Float[np.ndarray, "batches batches"]


class Grams(NamedTuple):
    """Inner products between batches; those of several layers add up to those of the model.

    Attributes:
      ee: <e_a, e_b>.
      eg: <e_a, g_b>.
      gg: <g_a, g_b>.
    """

    ee: Matrix
    eg: Matrix
    gg: Matrix

    def without(self, batch: int) -> "Grams":
        """Returns the matrices without one batch."""
        return Grams(*(np.delete(np.delete(m, batch, 0), batch, 1) for m in self))

    def __add__(self, other: object) -> "Grams":
        """Returns the matrices of both layers together."""
        assert isinstance(other, Grams)
        return Grams(*(a + b for a, b in zip(self, other, strict=True)))


class Split(NamedTuple):
    """The split, each number with a jackknife interval over the batches.

    Attributes:
      error: relative error of a batch's gradient, ||e|| / ||g||.
      repeating_share: repeating / (repeating + averaging).
      along: the repeating error along the expected gradient, relative to it; -0.02 shrinks it by 2 %.
      across: norm of the rest of the repeating error over that of the expected gradient; 0 if the estimate of
        its square is negative.
      gradient_over_noise: ||g|| / (sqrt(3) ||e||). Below 1, training is expected to stall (arXiv 2505.19115).
    """

    error: Estimate
    repeating_share: Estimate
    along: Estimate
    across: Estimate
    gradient_over_noise: Estimate


def split(grams: Grams) -> Split:
    """Returns the split of an error.

    Raises:
      ValueError: fewer than three batches.
    """
    n = len(grams.ee)
    if n < 3:
        raise ValueError(f"an error is split with at least 3 batches, got {n}; raise --batches")

    def estimate(statistic: Callable[[Grams], float]) -> Estimate:
        return jackknife(statistic(grams), [statistic(grams.without(i)) for i in range(n)])

    with np.errstate(divide="ignore", invalid="ignore"):  # without an error, its parts are NaN
        return Split(*map(estimate, (_error, _repeating_share, _along, _across, _gradient_over_noise)))


def _error(g: Grams) -> float:
    return float(np.sqrt(np.trace(g.ee) / np.trace(g.gg)))


def _repeating_share(g: Grams) -> float:
    return float(_between(g.ee) / (np.trace(g.ee) / len(g.ee)))


def _along(g: Grams) -> float:
    return float(_between(g.eg) / _between(g.gg))


def _across(g: Grams) -> float:
    square = _between(g.ee) / _between(g.gg) - _along(g) ** 2
    return float(np.sqrt(max(square, 0.0)))


def _gradient_over_noise(g: Grams) -> float:
    return float(np.sqrt(np.trace(g.gg) / (3 * np.trace(g.ee))))


def _between(m: Matrix) -> float:
    """Returns the mean over pairs of different batches."""
    n = len(m)
    return float((m.sum() - np.trace(m)) / (n * (n - 1)))
