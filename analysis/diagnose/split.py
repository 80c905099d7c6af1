"""The split of an error into what repeats from batch to batch and what averages out.

Batch a has the gradient g_a and its computed value the error e_a. With <,> the inner product over all
weights,

    repeating = mean over a != b of <e_a, e_b>        averaging = mean of <e_a, e_a> - repeating

`repeating` is an unbiased estimate of the energy of the expected error, whatever the number of batches;
averaging over N batches leaves it as it is and divides the rest by N. The same of g_a gives the energy of the
expected gradient, and mean <e_a, g_b> the part of the repeating error that lies along it. An optimizer that
normalizes its steps, as Adam does, hardly notices an error along the gradient.
"""

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
    with np.errstate(divide="ignore", invalid="ignore"):  # without an error, its parts are NaN
        without_one = zip(*(_numbers(grams.without(i)) for i in range(n)), strict=True)
        return Split(*map(jackknife, _numbers(grams), map(list, without_one)))


def _numbers(g: Grams) -> list[float]:
    error, gradient = np.trace(g.ee), np.trace(g.gg)
    along = _between(g.eg) / _between(g.gg)
    across = np.sqrt(max(_between(g.ee) / _between(g.gg) - along**2, 0.0))
    repeating = _between(g.ee) / (error / len(g.ee))
    noise = np.sqrt(gradient / (3 * error))
    return [*map(float, (np.sqrt(error / gradient), repeating, along, across, noise))]


def _between(m: Matrix) -> np.float64:
    """Returns the mean over pairs of different batches."""
    n = len(m)
    return (m.sum() - np.trace(m)) / (n * (n - 1))
