"""Statistics of paired runs beside scipy's and published sample sizes; ratios of tokens."""

import math

import numpy as np
import pytest
from scipy import stats

from analysis import statistics as token_ratios
from analysis.statistics import detectable, holm, jackknife, t_interval
from tests.support.study_runs import power_law


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


def test_effective_multiples_invert_a_power_law():
    lengths = {
        m: {s: power_law(23 * m) + 0.01 * s for s in range(4)} for m in (0.65, 0.8, 0.9, 1, 1.1, 1.25, 1.5)
    }
    for multiple in (0.7, 0.95, 1.4):
        found = token_ratios.effective_multiple(
            {s: power_law(23 * multiple) + 0.01 * s for s in range(4)}, lengths
        )
        np.testing.assert_allclose(math.exp(found.mean), multiple, rtol=2e-3)
        np.testing.assert_allclose((found.low, found.high), found.mean, atol=1e-3)  # the seeds cancel
    assert token_ratios.effective_multiple({0: 9.0, 1: 9.0}, lengths).mean == -math.inf
    assert token_ratios.effective_multiple({0: 2.0, 1: 2.0}, lengths).mean == math.inf
    assert math.isnan(token_ratios.effective_multiple({0: 3.0}, {1.0: {0: 3.0}}).mean)
    single = token_ratios.effective_multiple({2: power_law(23 * 0.95) + 0.02}, lengths)
    assert single.n == 1
    assert math.isnan(single.low)


def test_a_baseline_may_be_the_shortest_or_the_longest_of_its_lengths():
    generator = np.random.default_rng(0)
    for sizes in ((0.5, 0.75, 1), (1, 1.5, 2), (0.25, 0.5, 0.75, 1)):
        for _ in range(20):
            noise = generator.normal(0, 0.002, len(sizes))
            lengths = {m: {0: power_law(23 * m) + noise[i]} for i, m in enumerate(sizes)}
            inside = 0.9 if sizes[-1] == 1 else 1.1
            found = token_ratios.effective_multiple({0: power_law(23 * inside)}, lengths)
            np.testing.assert_allclose(math.exp(found.mean), inside, rtol=0.03)


def test_the_interval_of_effective_multiples_covers():
    generator = np.random.default_rng(0)
    sizes, covered = (0.65, 0.8, 0.9, 1, 1.1, 1.25, 1.5), []
    for _ in range(150):
        noise = generator.normal(0, 0.005, (len(sizes) + 1, 8))
        lengths = {m: dict(enumerate(power_law(23 * m) + noise[i])) for i, m in enumerate(sizes)}
        found = token_ratios.effective_multiple(dict(enumerate(power_law(23 * 0.9) + noise[-1])), lengths)
        covered.append(found.low <= math.log(0.9) <= found.high)
    assert 0.88 <= np.mean(covered) <= 0.99


def test_the_overhead_is_that_of_a_stretched_curve():
    def curve(stretch):
        return [(n, power_law(n / stretch)) for n in np.linspace(1, 100, 100)]

    base = {s: curve(1) for s in range(4)}
    found = token_ratios.overhead({0: curve(1.2), 1: curve(1.1)}, base)
    np.testing.assert_allclose(math.exp(found.log_ratio.mean), math.sqrt(1.2 * 1.1), rtol=1e-3)
    assert (found.log_ratio.n, found.not_reached) == (2, 0)
    bound = token_ratios.overhead({0: curve(1.2), 1: curve(1.1), 2: curve(5), 3: []}, base)  # 3 diverged
    np.testing.assert_allclose(
        math.exp(bound.log_ratio.mean), (1.2 * 1.1 * 0.99 * 1.25**2) ** 0.25, rtol=1e-3
    )
    assert (bound.log_ratio.n, bound.not_reached) == (4, 2)
    assert math.isnan(bound.log_ratio.low)


def test_few_evaluations_give_no_overhead():
    short = {0: [(10, 4.0), (20, 3.0)], 1: [(10, 4.0), (20, 3.5), (30, 3.0)]}
    assert token_ratios.log_ratios(short, short) == {}
    base = {0: [(n, power_law(n)) for n in range(1, 101)]}
    assert token_ratios.log_ratios({0: [(50, 3.0), (100, 2.0)]}, base) == {}


def test_runs_of_other_lengths_bound_the_overhead_by_their_own():
    def curve(stretch, stop, points):
        return [(n, power_law(n / stretch)) for n in np.linspace(stop / points, stop, points)]

    base = {0: curve(1, 100, 100)}
    for ours, length in ((curve(1.1, 50, 100), 49.5), (curve(0.9, 70, 70), 69), (curve(1.1, 100, 5), 80)):
        [found] = token_ratios.log_ratios({0: ours}, base).values()
        np.testing.assert_allclose(math.exp(found.value), length / 80)
        assert (found.is_low, found.is_high) == (True, False)


def test_a_loss_below_the_first_evaluation_is_a_bound_and_a_diverged_run_counts():
    base = {s: [(n, power_law(n)) for n in range(10, 101)] for s in (0, 1)}
    found = token_ratios.log_ratios_to(9.0, {0: base[0], 1: []}, base)
    assert (found[0].is_low, found[0].is_high) == (True, True)
    np.testing.assert_allclose(math.exp(found[1].value), 100 / 10)
    assert found[1].is_low
    neither = token_ratios.over_seeds([found[0]])
    assert (math.isnan(neither.log_ratio.mean), neither.not_reached) == (True, 1)
    assert token_ratios.log_ratios_to(3.0, base, {0: [], 1: base[1]}).keys() == {1}
