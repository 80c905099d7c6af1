"""Tables of costs beside the paper's."""

import math

import numpy as np
import pytest

from studies.ladder import tables
from studies.ladder.results import gather
from tests.support.study_runs import power_law, record


def runs_of(stretches, seeds=3):
    """Returns runs of `60m` that need so many times the tokens of fp8, by cell."""
    tokens = np.linspace(1e6, 20e6, 20)
    runs = []
    for name, stretch in stretches.items():
        for seed in range(seeds):
            curve = [[n, power_law(n / stretch) + 0.01 * seed] for n in tokens]
            cell, policy = f"{name}.60m.tuned-60m", name.partition(".")[0]
            runs.append(record(cell, policy, seed, curve[-1][1], curve=curve))
    return runs


def test_tokens_of_the_paper_in_nats_lie_between_the_published_slopes():
    """By hand: 0.049 nats over 147,456 to 172,032 sequences, and 0.027 over 159,744 to 172,032."""
    low, high = tables.in_nats((0.26, 0.27))
    assert low == pytest.approx(0.049 / math.log(172032 / 147456) * math.log(1.26), abs=0.002)
    assert high == pytest.approx(0.027 / math.log(172032 / 159744) * math.log(1.27), abs=0.002)
    found = tables.nats(gather(runs_of({"fp8.own": 1.0, "wgrad.floor": 1.2})))
    cost = power_law(20e6 / 1.2) - power_law(20e6)
    assert f"| all three | 26 to 27 % | {low:.3f} to {high:.3f} | {cost:+.4f}" in found
    assert "| all three, stochastic rounding of Wgrad | does not converge | does not converge |  |" in found
