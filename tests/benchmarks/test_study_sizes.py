"""Tables of several sizes of the model, beside scipy."""

import numpy as np
import scipy.stats

from benchmarks.study import sizes
from benchmarks.study.results import gather
from tests.support.study_runs import record

COSTS = {"wgrad.floor": 0.08, "wgrad_hadamard.floor": 0.03, "fprop_dgrad.floor": 0.05, "full_sr.floor": 0.2}
SEEDS = {"60m.tuned-60m": 5, "125m.tuned-125m": 4, "350m.tuned-350m": 2}


def _losses() -> dict[str, dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return {
        place: {
            name: 2.5 + cost + generator.normal(0, 0.01, n)
            for name, cost in {"fp8.own": 0.0, **COSTS}.items()
        }
        for place, n in SEEDS.items()
    }


def _cells(losses):
    return gather(
        [
            record(f"{name}.{place}", name, seed, float(loss))
            for place, found in losses.items()
            for name, values in found.items()
            for seed, loss in enumerate(values)
        ]
    )


def _columns(text: str, first: str) -> list[str]:
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [column.strip() for column in row.strip("|").split("|")]


def test_costs_at_each_size_and_how_sizes_rank_them():
    losses = _losses()
    found = sizes.sizes(_cells(losses))
    for name in COSTS:
        policy, rule = name.split(".")
        columns = _columns(found, f"{policy} `{rule}`")
        for (_, of_place), shown in zip(losses.items(), columns[1:], strict=False):
            assert shown.startswith(f"{np.mean(of_place[name] - of_place['fp8.own']):+.3f} (")
        assert columns[4] == ""  # four epochs have no runs
    means = [[np.mean(at[name] - at["fp8.own"]) for name in COSTS] for at in losses.values()]
    ranks = _columns(found, "rank correlation with the first")
    for mean, shown in zip(means[1:], ranks[2:], strict=False):
        assert shown.startswith(f"{scipy.stats.spearmanr(means[0], mean).statistic:+.2f} (")
    assert sizes.sizes({}) == "Not run yet."


def test_claims_in_the_mean_over_sizes_are_a_linear_contrast():
    """Beside least squares with a column for each size; the contrast is the mean of their coefficients."""
    losses = _losses()
    found = sizes.together(_cells(losses))
    differences = [at["wgrad_hadamard.floor"] - at["wgrad.floor"] for at in losses.values()]
    x = np.zeros((sum(map(len, differences)), 3))
    x[np.arange(len(x)), np.repeat(range(3), [len(d) for d in differences])] = 1
    y = np.concatenate(differences)
    means, squares, _, _ = np.linalg.lstsq(x, y)
    contrast = np.full(3, 1 / 3)
    freedom = len(y) - 3
    error = np.sqrt(squares[0] / freedom * contrast @ np.linalg.inv(x.T @ x) @ contrast)
    low, high = scipy.stats.t.interval(0.95, freedom, means.mean(), error)
    columns = _columns(found, "H16 on Wgrad takes off loss")
    assert columns[5] == f"{means.mean():+.3f} ({low:+.3f} to {high:+.3f})"
    assert sizes.together({}) == "Not run yet."
