"""benchmarks/native on the CPU: its lanes, records and table, and one check on two virtual devices."""

import json

import pytest

from benchmarks.native import __main__ as program
from benchmarks.native import lanes, plan
from benchmarks.native.plan import CHECKS, LANES, Check, gpus_of, with_needed
from benchmarks.native.program import ROOT, CheckFailed
from benchmarks.native.runs import difference, differing
from benchmarks.native.table import page, table
from benchmarks.native.work import ZERO, Found


def test_every_check_is_in_one_lane_and_waits_for_earlier_ones_only():
    order = [name for lane in LANES for name in lane]
    assert sorted(order) == sorted(CHECKS)
    for name, check in CHECKS.items():
        assert all(order.index(need) < order.index(name) for need in check.needs)
        for count in (1, 2, 8):
            gpus = gpus_of(name, [str(i) for i in range(count)])
            assert len(set(gpus)) == min(check.gpus, count)
    assert with_needed(["observed"]) == {"observed", "schedule", "whole"}
    with pytest.raises(ValueError, match="unknown check meshes; the checks are axes"):
        with_needed(["meshes"])


def run_lanes(monkeypatch, tmp_path, checks, gpus=("0",), seconds=60.0):
    for module in (plan, lanes):
        monkeypatch.setattr(module, "CHECKS", checks)
        monkeypatch.setattr(module, "LANES", [list(checks)])
    kept = []
    records = lanes.Lanes(set(checks), tmp_path, [], gpus, False, seconds, kept.append).run()
    assert kept[-1] == records
    return {name: (record["outcome"], record.get("reason")) for name, record in records.items()}


def test_outcomes_follow_bounds_needs_and_devices(monkeypatch, tmp_path):
    def fails(work):
        raise CheckFailed("it did not run")

    def breaks(work):
        return Found({}, {"nothing": ZERO})

    checks = {
        "good": Check(lambda work: Found({"a": 0.0, "b": None}, {"a": ZERO, "b": (1.0, None)}), 60),
        "after": Check(lambda work: Found({"a": 1.0}), 60, needs=("good",)),
        "far": Check(lambda work: Found({"a": float("nan"), "b": 1.0}, {"a": ZERO, "b": (0.0, 1.0)}), 60),
        "needing": Check(fails, 60, needs=("far",)),
        "failing": Check(fails, 60),
        "broken": Check(breaks, 60),
        "wide": Check(fails, 60, gpus=2),
    }
    assert run_lanes(monkeypatch, tmp_path, checks) == {
        "good": ("pass", None),
        "after": ("pass", None),
        "far": ("fail", "outside of its bounds: a"),
        "needing": ("skip", "needs far, which did not pass"),
        "failing": ("fail", "it did not run"),
        "broken": ("fail", "KeyError: 'nothing'"),
        "wide": ("skip", "needs 2 devices"),
    }
    assert run_lanes(monkeypatch, tmp_path, checks, seconds=5.0)["good"] == ("skip", "no time was left")


def test_a_program_past_its_time_is_ended_and_named(monkeypatch, tmp_path):
    sleeper = "print('begun', flush=True); import time; time.sleep(60)"

    def sleeps(work):
        work.start("-c", sleeper, name="sleeper").done()

    monkeypatch.setattr(lanes, "SHORTEST", 0.0)
    [(outcome, reason)] = run_lanes(monkeypatch, tmp_path, {"slow": Check(sleeps, 1)}).values()
    assert outcome == "fail"
    assert reason == "not finished: no time was left for sleeper, last: begun"


def test_runs_are_compared_without_times(tmp_path):
    for name, losses in (("a", [4.0, 3.0]), ("b", [4.0, 2.0])):
        lines = [{"step": i, "loss": loss, "step_s": hash(name)} for i, loss in enumerate(losses, 1)]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    a, b = tmp_path / "a", tmp_path / "b"
    assert (differing(a, b), differing(a, a)) == (1, 0)
    assert (difference(a, b, "loss"), difference(a, b, "loss", {1})) == (0.5, 0.0)
    with pytest.raises(CheckFailed, match="a and b do not have loss at the same steps"):
        difference(a, b, "loss", {3})


def test_the_table_has_a_row_for_each_check():
    checks = {
        "good": {"outcome": "pass", "seconds": 9.6, "figures": {"elements": 34659076, "peak_gib": 1.25}},
        "far": {
            "outcome": "fail",
            "seconds": 2.0,
            "figures": {"loss": 0.25, "eval_loss": 5e-08, "ratio": None, "norm": float("nan")},
            "reason": "outside of its bounds: loss",
        },
        "wide": {"outcome": "skip", "seconds": 0.0, "figures": {}, "reason": "needs 2 devices"},
    }
    assert table({"checks": checks}).splitlines()[2:] == [
        "| `good` | pass | 10 | elements 34,659,076, peak 1.25 GiB |",
        "| `far` | fail | 2 | **loss 0.25**, eval loss 5e-08, norm nan |",
        "| `wide` | skip | 0 | needs 2 devices |",
    ]


def test_the_page_has_the_table_of_its_results():
    results = ROOT / "docs/results"
    assert page(results / "native-h100.json", results / "native.md") == (results / "native.md").read_text()


@pytest.mark.slow
def test_the_program_checks_products_on_two_virtual_devices(tmp_path, capsys):
    out = tmp_path / "native.json"
    assert program.main(data="train", eval_data="validation", out=out, checks=("shard_map",), cpu=True) == 0
    results = json.loads(out.read_text())
    assert (results["platform"], results["devices"]) == ("cpu", 2)
    assert {"commit", "command", "device", "jax", "seconds"} <= results.keys()
    [record] = results["checks"].values()
    assert record["outcome"] == "pass"
    assert len(record["figures"]) == 6
    assert "| `shard_map` | pass |" in capsys.readouterr().out
