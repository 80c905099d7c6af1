"""The study: its table, its runner in small, and its statistics beside scipy's and published ones."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import stats

from benchmarks.study import cells, report, runner
from benchmarks.study.cells import PROTOCOLS, STUDIES, Cell, Protocol, policy_of
from benchmarks.study.statistics import detectable, has_diverged, holm, paired_difference
from mxjax.policy import Gemm
from mxjax.recipes import get_policy
from training.data.indexed_dataset import IndexedWriter


@pytest.fixture
def settings(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    for name, size in (("train", 900), ("validation", 200)):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            writer.add(generator.integers(0, 64, size).astype(np.uint16))
    small = Protocol(lr=1e-2, steps=4, warmup=1, batch=4, seq=16, evaluations=2)
    monkeypatch.setattr(cells, "PROTOCOLS", {**PROTOCOLS, "small": small})
    monkeypatch.setattr(runner, "PROTOCOLS", {**PROTOCOLS, "small": small})
    data = (str(tmp_path / "train"), str(tmp_path / "validation"))
    return runner.Settings("test", tmp_path / "runs", *data, vocab_size=64, commit="0" * 40)


CELLS = (Cell("fp8", "", "tiny", "small", 2), Cell("wgrad_sr", "even", "tiny", "small", 2))


def test_a_study_trains_what_is_missing_and_nothing_else(settings, capsys):
    assert runner.run_cells(CELLS[:1], settings)
    first = {path.name: path.read_bytes() for path in settings.out.glob("*.json")}
    assert sorted(first) == ["fp8.own.tiny.small.s0.json", "fp8.own.tiny.small.s1.json"]
    (settings.out / "fp8.own.tiny.small.s1.json").unlink()
    assert runner.run_cells(CELLS, settings)
    records = {path.name: json.loads(path.read_text()) for path in settings.out.glob("*.json")}
    assert len(records) == 4
    assert (settings.out / "fp8.own.tiny.small.s0.json").read_bytes() == first["fp8.own.tiny.small.s0.json"]
    again, before = records["fp8.own.tiny.small.s1.json"], json.loads(first["fp8.own.tiny.small.s1.json"])
    assert again["evaluations"] == before["evaluations"]
    for record in records.values():
        keys = "study cell policy seed model tokens final_loss evaluations commit device versions"
        assert set(keys.split()) <= set(record)
        assert record["tokens"] == 4 * 4 * 16
        assert [tokens for tokens, _ in record["evaluations"]] == [128, 256]
        assert record["final_loss"] == record["evaluations"][-1][1]
    assert "0 runs left" in capsys.readouterr().out
    assert "| wgrad_sr even | 2 | 0 |" in report.report(report.read_runs(settings.out))


def test_a_deadline_keeps_finished_runs(settings):
    assert not runner.run_cells(CELLS, dataclasses.replace(settings, deadline=0.0))
    assert not list(settings.out.glob("*.json"))


def test_every_cell_has_a_policy_a_protocol_and_a_name_of_its_own():
    everything = [cell for study in STUDIES.values() for cell in study]
    for cell in everything:
        assert policy_of(cell) is not None
        assert cell.protocol in PROTOCOLS
    for study in STUDIES.values():
        assert len({cell.name for cell in study}) == len(study)


def test_rules_are_those_of_each_gemm():
    policy = policy_of(Cell("wgrad_hadamard", "even-floor-ceil", "60m", "decay", 1))
    rules = [(g.lhs.scale_rule, g.rhs.scale_rule) for g in policy.gemms.values()]
    assert rules == [("even", "even"), ("floor", "floor"), ("ceil", "ceil")]
    assert policy.wgrad.rotation == get_policy("wgrad_hadamard").wgrad.rotation
    alone = policy_of(Cell("only_wgrad", "floor", "60m", "decay", 1))
    assert alone == dataclasses.replace(get_policy("fp8"), wgrad=Gemm())


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
    shifted = noise + detectable(list(unit))
    found = stats.ttest_1samp(shifted, 0, axis=1).pvalue < 0.05
    assert abs(found.mean() - 0.8) < 0.03


@pytest.mark.parametrize(
    ("final", "diverged"), [(3.0, False), (3.6, True), (math.nan, True), (math.inf, True)]
)
def test_divergence(final, diverged):
    assert has_diverged(final, [(1, 3.2), (2, 3.0), (3, final)]) == diverged
