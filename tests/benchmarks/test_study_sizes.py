"""Tables of several sizes of the model, beside scipy."""

import numpy as np
import pytest
import scipy.stats

from analysis.statistics import holm, mean_of_means
from benchmarks.study import sizes
from benchmarks.study.results import gather
from tests.support.study_runs import record

COSTS = {
    "60m.tuned-60m": (5, {"full_sr": 0.2, "wgrad": 0.08, "fprop_dgrad": 0.05, "wgrad_hadamard": 0.03}),
    "125m.tuned-125m": (4, {"full_sr": 0.2, "wgrad": 0.03, "fprop_dgrad": 0.05, "wgrad_hadamard": 0.08}),
    "350m.tuned-350m": (2, {"full_sr": 0.03, "wgrad": 0.08, "fprop_dgrad": 0.05, "wgrad_hadamard": 0.2}),
    "60m.tuned-60m-4epochs": (3, {"wgrad": 0.3, "wgrad_hadamard": 0.1}),
}
"""Seeds and costs under `floor` in each column: no two rank the policies alike, and some have not run."""
ORDER = ["wgrad_hadamard", "fprop_dgrad", "wgrad", "full_sr"]


@pytest.fixture(name="losses")
def _losses():
    generator = np.random.default_rng(0)
    return {
        place: {
            name: 2.5 + cost + generator.normal(0, 0.005, n) for name, cost in {"fp8": 0.0, **costs}.items()
        }
        for place, (n, costs) in COSTS.items()
    }


def _cells(losses):
    return gather(
        [
            record(f"{name}.{'own' if name == 'fp8' else 'floor'}.{place}", name, seed, float(loss))
            for place, found in losses.items()
            for name, values in found.items()
            for seed, loss in enumerate(values)
        ]
    )


def _rows(text: str) -> dict[str, list[str]]:
    rows = [[column.strip() for column in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {first: others for first, *others in rows}


def _interval(values: np.ndarray) -> str:
    low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval()
    return f"{np.mean(values):+.3f} ({low:+.3f} to {high:+.3f})"


def test_costs_at_each_size_and_how_sizes_rank_them(losses):
    rows = _rows(sizes.sizes(_cells(losses)))
    ranks = [f"rank correlation with the first, {of}" for of in ("all", "without full_sr")]
    assert list(rows) == [*(f"{name} `floor`" for name in ORDER), *ranks]
    for name in ORDER:
        expected = [_interval(at[name] - at["fp8"]) if name in at else "" for at in losses.values()]
        assert rows[f"{name} `floor`"] == expected
    first, *others = losses.values()
    for row, names in zip(ranks, (ORDER, ORDER[:-1]), strict=True):
        blank, *shown, two_policies = rows[row]
        assert (blank, two_policies) == ("", "- (-)")
        for at, found in zip(others[:2], shown, strict=True):
            means = [[np.mean(x[name] - x["fp8"]) for name in names] for x in (first, at)]
            expected = scipy.stats.spearmanr(*means).statistic
            assert found.startswith(f"{expected:+.2f} (")
            assert expected < 0.9
    del losses["60m.tuned-60m"]["wgrad"]
    assert list(_rows(sizes.sizes(_cells(losses))))[-3] == "wgrad `floor`"  # without runs in the first
    assert sizes.sizes({}) == "Not run yet."


def _contrast(differences: list[np.ndarray]) -> tuple[str, float]:
    """Returns the mean of the sizes by least squares with a column for each, and its p."""
    n = len(differences)
    x = np.zeros((sum(map(len, differences)), n))
    x[np.arange(len(x)), np.repeat(range(n), [len(d) for d in differences])] = 1
    means, squares, _, _ = np.linalg.lstsq(x, np.concatenate(differences))
    contrast, freedom = np.full(n, 1 / n), len(x) - n
    error = np.sqrt(squares[0] / freedom * contrast @ np.linalg.inv(x.T @ x) @ contrast)
    low, high = scipy.stats.t.interval(0.95, freedom, means.mean(), error)
    p = 2 * scipy.stats.t.sf(abs(means.mean()) / error, freedom)
    return f"{means.mean():+.3f} ({low:+.3f} to {high:+.3f})", p


def test_claims_in_the_mean_over_sizes_are_linear_contrasts(losses):
    rows = _rows(sizes.together(_cells(losses)))
    pairs = {
        "MXFP4 in all three GEMMs costs loss": ("wgrad", "fp8"),
        "Wgrad costs loss beyond Fprop and Dgrad": ("wgrad", "fprop_dgrad"),
        "H16 on Wgrad takes off loss": ("wgrad_hadamard", "wgrad"),
        "with H16 on Wgrad a cost remains": ("wgrad_hadamard", "fp8"),
    }
    assert list(rows) == list(pairs)
    p, p_own, p_later = [], [], []
    for claim, (ours, base) in pairs.items():
        at = [x[ours] - x[base] if {ours, base} <= x.keys() else np.array([]) for x in losses.values()]
        mean, of_mean = _contrast(at[:3])
        later, of_later = _contrast(at[1:3])
        assert rows[claim][:5] == [*(_interval(d) if len(d) else "" for d in at), mean]
        assert rows[claim][8] == later
        p.append(of_mean)
        p_own.append(mean_of_means([list(d) for d in at[:3]], pooled=False).p)
        p_later.append(of_later)
    others = [1.0] * 5  # claims that wait for runs
    for column, values in ((6, p), (7, p_own), (9, p_later)):
        corrected = holm([*values, *others])[: len(values)]
        assert [row[column] for row in rows.values()] == [f"{x:.2g}" for x in corrected]
    assert sizes.together({}) == "Not run yet."
