"""Statistics of paired runs beside scipy's, published sample sizes, and simulations."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis.statistics import (
    detectable,
    has_diverged,
    holm,
    jackknife,
    paired_difference,
    t_interval,
)


def test_paired_differences_are_scipys():
    generator = np.random.default_rng(0)
    ours, base = generator.normal(3.0, 0.1, 8), generator.normal(2.9, 0.1, 8)
    found = paired_difference(dict(enumerate(ours)), dict(enumerate(base)) | {99: 1.0})
    expected = stats.ttest_rel(ours, base)
    interval = expected.confidence_interval()
    np.testing.assert_allclose(found[:4], [np.mean(ours - base), *interval, expected.pvalue])
    assert found.n == 8
    assert math.isnan(paired_difference({0: 1.0}, {0: 0.5}).low)


def test_holms_correction():
    # The worked example of Holm's method: 4 tests, the third smallest stops.
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    corrected = holm([0.01, math.nan, 0.02])
    np.testing.assert_allclose(corrected[::2], [0.02, 0.02])
    assert math.isnan(corrected[1])


def test_a_detectable_difference_is_found_as_often_as_said():
    generator = np.random.default_rng(1)
    noise = generator.normal(0, 1, (4000, 6))
    unit = noise[0] / noise[0].std(ddof=1)
    shifted = noise + detectable(float(unit.std(ddof=1)), 6)
    found = stats.ttest_1samp(shifted, 0, axis=1).pvalue < 0.05
    assert abs(found.mean() - 0.8) < 0.03


@pytest.mark.parametrize(
    ("final", "diverged"), [(3.0, False), (3.6, True), (math.nan, True), (math.inf, True)]
)
def test_divergence(final, diverged):
    assert has_diverged(final, [(1, 3.2), (2, 3.0), (3, final)]) == diverged


@pytest.mark.parametrize(("effect", "n"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_the_number_of_pairs_is_the_published_one(effect, n):
    """Two-sided paired t-test at 5 %, power 0.8: G*Power's values for Cohen's three sizes of effect."""
    assert detectable(1.0, n) <= effect < detectable(1.0, n - 1)
    assert detectable(3.0, n) <= 3 * effect < detectable(3.0, n - 1)


def test_the_jackknife_of_a_mean_is_its_t_interval():
    x = np.random.default_rng(2).normal(1, 2, 9)
    found = jackknife(float(x.mean()), [float(np.delete(x, i).mean()) for i in range(9)])
    np.testing.assert_allclose(found, t_interval(list(x)))
    expected = stats.ttest_1samp(x, 0)
    np.testing.assert_allclose(found[1:4], [*expected.confidence_interval(), expected.pvalue])
