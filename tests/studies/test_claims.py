"""The tests of the study's claims, against scipy's t-tests."""

import math

import numpy as np
import scipy.stats

from studies.ladder import claims
from studies.ladder.claims import CLAIMS, LADDERS, SEEN, Claim
from studies.ladder.results import gather
from studies.ladder.studies import STUDIES
from tests.support.study_runs import record


def test_claims_are_about_cells_of_the_studies():
    names = {cell.name for study in STUDIES.values() for cell in study}
    assert {
        name for protocol in LADDERS for claim in (*CLAIMS, *SEEN) for name in claim.at(protocol).cells
    } <= names


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


def test_claims_are_corrected_with_those_that_wait_for_runs():
    losses = {
        "fp8.own": [2.5, 2.6, 2.4],
        "wgrad.floor": [2.62, 2.69, 2.53],
        "wgrad_hadamard.floor": [2.55, 2.66, 2.44],
    }
    cells = {f"{name}.60m.tuned-60m": found for name, found in losses.items()}
    runs = [record(n, n, seed, loss) for n, found in cells.items() for seed, loss in enumerate(found)]
    found = claims.claims(gather(runs))
    at = np.array(list(losses.values()))
    p = {
        "MXFP4 in all three GEMMs costs loss": scipy.stats.ttest_rel(at[1], at[0]).pvalue,
        "H16 on Wgrad takes off loss": scipy.stats.ttest_rel(at[2], at[1]).pvalue,
        "with H16 on Wgrad a cost remains": scipy.stats.ttest_rel(at[2], at[0]).pvalue,
    }
    planned = len(LADDERS) * len(CLAIMS)
    largest = 0.0
    for rank, claim in enumerate(sorted(p, key=lambda c: p[c])):
        largest = max(largest, (planned - rank) * p[claim])
        [row] = [line for line in found.splitlines() if line.startswith(f"| {claim} (tuned-60m) |")]
        assert row.endswith(f"| {min(1.0, largest):.2g} | 3 |")
    assert "Cells have not run: MXFP4 in all three GEMMs costs loss (decay);" in found
    assert "; Wgrad costs loss beyond Fprop and Dgrad (tuned-60m);" in found
    runs.append(record(runs[-1]["cell"], "", 3, math.nan))
    assert "diverged, without pairs: 1 of wgrad_hadamard.floor.60m.tuned-60m." in claims.claims(gather(runs))
