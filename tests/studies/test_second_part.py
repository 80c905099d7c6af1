"""The second part of the study: its cells, and its tables from runs that nobody trained."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import scipy.stats

from mxjax.policy import Rotation
from studies.ladder import programs, second_part
from studies.ladder.cells import FRESH, MUON_RATES, PROTOCOLS, Cell, policy_of
from studies.ladder.kinds import ARRANGED, KINDS
from studies.ladder.results import gather
from studies.ladder.studies import STUDIES
from tests.support.study_runs import record

PART = ("mechanism", "mechanism-even", "mechanism-others", "local-60m", "generators-60m", "rates-60m")
PART += ("states-60m", "muon-60m")
CELLS = {cell.name: cell for study in PART for cell in STUDIES[study]}


def test_its_seeds_are_new_and_its_claims_are_about_its_cells():
    assert {seed for cell in CELLS.values() for seed in cell.seed_numbers} == set(range(16, 24))
    assert PROTOCOLS[FRESH] == PROTOCOLS["tuned-60m"]
    every = (
        second_part.PRIMARY,
        second_part.SECONDARY,
        second_part.INTERVALS,
        second_part.OTHERS,
        second_part.LOCALS,
    )
    claims = [claim for claims in every for claim in claims]
    even = [second_part.under_even(claim) for claim in (*claims[:6], *second_part.INTERVALS[1:])]
    assert {name for claim in (*claims, *even) for name in claim.at(FRESH).cells} <= CELLS.keys()
    assert {name for claim in second_part.generator_claims() for name in claim.cells} <= CELLS.keys()


def test_the_primary_test_is_that_of_the_interaction():
    losses = {"rht": [2.6, 2.7, 2.8], "hadamard": [2.5, 2.65, 2.7], "rht+anew": [2.6, 2.6, 2.8]}
    losses["hadamard+anew"] = [2.6, 2.61, 2.79]
    runs = [
        record(f"wgrad_{name}.floor.60m.{FRESH}", name, seed, loss, FRESH)
        for name, of in losses.items()
        for seed, loss in enumerate(of, 16)
    ]
    p = scipy.stats.ttest_1samp([0.1, 0.06, 0.09], 0).pvalue
    found = second_part.mechanism(gather(runs)).splitlines()
    assert found[:2] == ["Primary test:", ""]
    assert "| +0.0833 |" in found[4]
    assert found[4].endswith(f"| {p:.2g} | 3 |")
    assert second_part.mechanism({}) == second_part.generators({}) == "Not run yet: seeds from 16."


def test_states_and_muon_change_the_optimizer_alone():
    for name, changes in {
        "-moments": {"moments": "bfloat16"},
        "-states": {"moments": "bfloat16", "master": "bfloat16"},
        "-muon-lr6e-3": {"optimizer": "muon", "lr": 6e-3},
    }.items():
        assert PROTOCOLS[FRESH + name] == dataclasses.replace(PROTOCOLS[FRESH], **changes)
    tuning = {cell.protocol for cell in STUDIES["muon-60m"] if cell.policy == "fp8"}
    assert len(tuning) == len(MUON_RATES)


@pytest.mark.parametrize("name", ["anew", "once", "means32"])
def test_an_arrangement_changes_both_operands_of_wgrad_alone(name):
    for kind in ARRANGED:
        policy, plain = (policy_of(Cell(k, "even", "60m", FRESH, 1)) for k in (f"{kind}+{name}", kind))
        assert (policy.fprop, policy.dgrad) == (plain.fprop, plain.dgrad)
        order = policy.wgrad.rotation.order if policy.wgrad.rotation else "given"
        assert order == {"anew": "redrawn", "once": "fixed", "means32": "given"}[name]
        assert {o.split_tokens for o in (policy.wgrad.lhs, policy.wgrad.rhs)} == {
            32 if "32" in name else None
        }
    assert KINDS["wgrad+anew"].rotation == Rotation(1, order="redrawn")


def test_defective_bits_repeat_in_all_or_a_third_of_the_steps():
    def words(bits, step):
        return tuple(
            jax.random.key_data(programs.drawing(jax.random.fold_in(jax.random.key(5), step), bits)).tolist()
        )

    assert len({words("fresh", i) for i in range(60)}) == 60
    assert len({words("frozen", i) for i in range(60)}) == 1
    third = [words("third", i) for i in range(60)]
    assert 10 <= third.count(words("frozen", 0)) <= 30
    assert len(set(third)) == 61 - third.count(words("frozen", 0))


def test_gradients_are_rounded_to_bfloat16():
    gradients = {"w": jnp.array([1 + 2**-9, 3e-5, -1 - 3 * 2**-8], jnp.float32)}
    found = programs.to_bfloat16(gradients)["w"]
    assert found.tolist() == gradients["w"].astype(jnp.bfloat16).astype(jnp.float32).tolist()
    assert found.tolist() != gradients["w"].tolist()
