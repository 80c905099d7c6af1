"""The tests of the study's claims, against scipy's t-tests."""

import math

import numpy as np
import scipy.stats

from analysis.statistics import detectable
from studies.ladder import claims
from studies.ladder.claim_lists import (
    ALONE,
    ALONE_SEEN,
    CLAIMS,
    ELSEWHERE_SEEN,
    GRID,
    GRID_SEEN,
    HARD_EVEN_SEEN,
    HARD_SEEN,
    LADDERS,
    RCEIL_SEEN,
    SEEN,
    Claim,
)
from studies.ladder.results import gather
from studies.ladder.studies import HARD, HARD_EVEN, STUDIES
from tests.support.study_runs import record


def test_claims_are_about_cells_of_the_studies():
    names = {cell.name for study in STUDIES.values() for cell in study}
    assert {
        name for protocol in LADDERS for claim in (*CLAIMS, *SEEN) for name in claim.at(protocol).cells
    } <= names
    assert {name for claim in (*ALONE, *ALONE_SEEN) for name in claim.at(LADDERS[1]).cells} <= names
    assert {
        name for claim in ELSEWHERE_SEEN["scale-125m"] for name in claim.at("tuned-125m", "125m").cells
    } <= names
    regimes = [f"tuned-60m-{regime}" for regime in HARD]
    assert {name for claim in HARD_SEEN for at in regimes for name in claim.at(at).cells} <= names
    regimes = [f"tuned-60m-{regime}" for regime in HARD_EVEN]
    assert {name for claim in HARD_EVEN_SEEN for at in regimes for name in claim.at(at).cells} <= names
    grid = {cell.name for cell in STUDIES["grid-60m"]}
    assert {name for claim in GRID for name in claim.at(LADDERS[1]).cells} <= grid
    assert {name for claim in (*GRID_SEEN, *RCEIL_SEEN) for name in claim.at(LADDERS[1]).cells} <= names


def test_a_claim_beside_another_is_a_difference_of_differences():
    losses = {"a": [4.0, 5.0], "b": [3.0, 3.5], "c": [2.0, 3.0, 9.0], "d": [1.5, 1.0, 0.0]}
    runs = [record(name, name, seed, loss) for name in losses for seed, loss in enumerate(losses[name])]
    gathered = gather(runs)
    assert claims.by_seed(gathered, Claim("", "a", "b")) == {0: 1.0, 1: 1.5}
    assert claims.by_seed(gathered, Claim("", "a", "b", ("c", "d"))) == {0: 0.5, 1: -0.5}
    assert claims.by_seed(gathered, Claim("", "a", "none")) == {}


def test_both_ladders_give_one_difference_a_seed():
    losses = {
        "wgrad.floor.60m.decay": [3.0, 3.2, 3.1],
        "fp8.own.60m.decay": [2.9, 3.0, 3.1],
        "wgrad.floor.60m.tuned-60m": [2.6, 2.7, 2.8, 9.0],
        "fp8.own.60m.tuned-60m": [2.4, 2.7, 2.6, 0.0],  # the fourth seed has not run in the other protocol
    }
    runs = [record(n, n, seed, loss) for n, found in losses.items() for seed, loss in enumerate(found)]
    wanted = scipy.stats.ttest_1samp([0.15, 0.1, 0.1], 0)
    low, high = wanted.confidence_interval()
    row = f"| +0.1000 | +0.1333 | +0.1167 | {low:+.4f} to {high:+.4f} |"
    found = claims.both(gather(runs)).splitlines()
    assert len(found) == 3
    assert row in found[2]
    assert found[2].endswith(f"| {wanted.pvalue:.2g} | 3 |")


def test_hard_regimes_are_averaged_by_seed_where_policies_learn():
    gaps = {"lr2x": [0.1, 0.2, 0.3], "batch16": [0.0, 0.1, 0.1], "seq2048": [0.2, 0.2, 0.2]}
    gaps |= {"outliers": [0.1, 0.1, 0.4], "lr4x": [-9.0, -8.0, -9.0]}
    runs = []
    for regime, of_seeds in gaps.items():
        for seed, gap in enumerate(of_seeds):
            for policy, loss in (("wgrad.floor", 2.0 + gap), ("fp8.own", 2.0)):
                name = f"{policy}.60m.tuned-60m-{regime}"
                runs.append(record(name, name, seed, loss))
    (row,) = [line for line in claims.hard(gather(runs)).splitlines() if "all three GEMMs costs" in line]
    wanted = scipy.stats.ttest_1samp([0.1, 0.15, 0.25], 0)
    low, high = wanted.confidence_interval()
    shown = f"{detectable(np.std([0.1, 0.15, 0.25], ddof=1), 3):.3f}"
    assert row.endswith(f"| +0.167 ({low:+.3f} to {high:+.3f}) | {shown} |")
    assert "| -8.667 (" in row
    assert claims.hard({}) == "Not run yet: `hard-60m`."


def test_claims_at_another_size_are_corrected_with_those_that_wait_for_runs():
    losses = {
        "fp8.own": [2.5, 2.6, 2.4],
        "wgrad.floor": [2.62, 2.69, 2.53],
        "wgrad_hadamard.floor": [2.55, 2.66, 2.44],
    }
    cells = {f"{name}.125m.tuned-125m": found for name, found in losses.items()}
    runs = [record(n, n, seed, loss) for n, found in cells.items() for seed, loss in enumerate(found)]
    found = claims.elsewhere(gather(runs))
    at = np.array(list(losses.values()))
    p = {
        "MXFP4 in all three GEMMs costs loss": scipy.stats.ttest_rel(at[1], at[0]).pvalue,
        "H16 on Wgrad takes off loss": scipy.stats.ttest_rel(at[2], at[1]).pvalue,
        "with H16 on Wgrad a cost remains": scipy.stats.ttest_rel(at[2], at[0]).pvalue,
    }
    planned = 9
    largest = 0.0
    for rank, claim in enumerate(sorted(p, key=lambda c: p[c])):
        largest = max(largest, (planned - rank) * p[claim])
        [row] = [line for line in found.splitlines() if line.startswith(f"| {claim} (tuned-125m) |")]
        assert row.endswith(f"| {min(1.0, largest):.2g} | 3 |")
    assert "Cells have not run: Wgrad costs loss beyond Fprop and Dgrad (tuned-125m);" in found
    runs.append(record(runs[-1]["cell"], "", 3, math.nan))
    assert "diverged, without pairs: 1 of wgrad_hadamard.floor.125m.tuned-125m." in claims.elsewhere(
        gather(runs)
    )
    assert claims.elsewhere({}) == "Not run yet: `scale-125m`, `scale-350m`, `epochs-60m`."
