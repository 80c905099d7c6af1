"""Tokens in `eval.py compare`: curves that are stretched need the stretch's factor of tokens."""

import math

import numpy as np
from scipy import stats
from support.runs import make_run as make_run_by_flags

from analysis.compare.compare import CompareConfig, compare
from tests.support.study_runs import power_law


def make_run(folder, evaluations, policy, steps, seed):
    flags = ["--policy", policy, "--steps", str(steps), "--seed", str(seed), "--warmup-steps", "1"]
    return make_run_by_flags(folder, evaluations, flags, train={})


def make_seeds(tmp_path, policy, stretches, steps=100, every=2):
    """Writes a run for each seed, whose losses fall as a power law of its steps over the seed's stretch."""
    return [
        make_run(
            tmp_path / f"{policy}-{steps}-{seed}",
            {n: power_law(n / stretch) for n in range(every, steps + 1, every)},
            policy,
            steps,
            seed,
        )
        for seed, stretch in enumerate(stretches)
    ]


def test_tokens_to_the_baseline_s_loss_are_the_stretches_with_scipys_interval(tmp_path, capsys):
    stretches = (1.1, 1.15, 1.2)
    runs = [*make_seeds(tmp_path, "fp8", (1, 1, 1)), *make_seeds(tmp_path, "wgrad", stretches)]
    [row] = compare(CompareConfig(tuple(runs)))["token_ratios"]
    over = row["overhead"]
    assert (row["group"], over["pairs"], over["not_reached"], over["bound"]) == ("wgrad", 3, 0, "")
    expected = stats.ttest_1samp(np.log(stretches), 0)
    low, high = expected.confidence_interval()
    wanted = [math.exp(x) for x in (np.mean(np.log(stretches)), low, high)]
    np.testing.assert_allclose([over[key] for key in ("ratio", "low", "high")], wanted, rtol=2e-3)
    np.testing.assert_allclose(over["p"], expected.pvalue, rtol=0.05)
    assert row["to_target"] is row["effective"] is None
    assert f" {100 * (over['ratio'] - 1):+.1f} " in capsys.readouterr().out


def test_final_losses_as_tokens_are_the_lengths_that_the_baseline_needs(tmp_path, capsys):
    """All rates have decayed at the end, so that only final losses of whole runs are comparable."""
    lengths = [folder for n in (80, 120, 150) for folder in make_seeds(tmp_path, "fp8", (1, 1), n, every=n)]
    compared = [
        *make_seeds(tmp_path, "fp8", (1, 1), every=100),
        *make_seeds(tmp_path, "wgrad", (1.1, 1.1), every=100),
    ]
    result = compare(CompareConfig((*compared, *lengths)))
    assert len(result["lengths"]) == 3
    assert [group["group"] for group in result["groups"]] == ["fp8 steps=100", "wgrad steps=100"]
    assert result["warnings"] == []
    [wgrad] = result["token_ratios"]
    np.testing.assert_allclose(wgrad["effective"]["ratio"], 1.1, rtol=2e-3)  # the fit's error
    assert wgrad["effective"]["bound"] == ""
    table, _, shown = capsys.readouterr().out.partition("lengths of fp8 steps=100, for final losses alone: ")
    assert "steps=150" not in table
    assert "fp8 steps=150" in shown


def test_a_target_is_reached_by_interpolation_and_paired(tmp_path, capsys):
    def losses(stretch):
        return {n: power_law(n / stretch) for n in range(2, 101, 2)}

    runs = [make_run(tmp_path / f"fp8-{s}", losses(1), "fp8", 100, s) for s in (0, 1)]
    runs += [make_run(tmp_path / f"wgrad-{s}", losses(k), "wgrad", 100, s) for s, k in ((0, 1.2), (1, 1.1))]
    runs += [make_run(tmp_path / f"full-{s}", losses(4), "full_sr", 100, s) for s in (0, 1)]
    found = compare(CompareConfig(tuple(runs), target=power_law(51)))["token_ratios"]
    wgrad, full = (row["to_target"] for row in found)
    np.testing.assert_allclose(wgrad["ratio"], math.sqrt(1.2 * 1.1), rtol=1e-3)
    assert (wgrad["bound"], wgrad["not_reached"], full["bound"], full["not_reached"]) == ("", 0, ">", 2)
    np.testing.assert_allclose(full["ratio"], 100 / 51, rtol=1e-3)
    assert full["low"] is full["p"] is None
    printed = capsys.readouterr().out
    assert f"> {100 * (full['ratio'] - 1):+.1f}\n" in printed
    assert "> and <: bounds" in printed


def test_a_loss_outside_all_lengths_is_a_bound(tmp_path):
    runs = [
        make_run(tmp_path / f"fp8-{steps}-{s}", {steps: power_law(steps) + s / 100}, "fp8", steps, s)
        for steps in (80, 100, 120)
        for s in (0, 1)
    ]
    runs += [
        make_run(tmp_path / f"{p}-{s}", {100: loss}, p, 100, s)
        for s in (0, 1)
        for p, loss in (("wgrad", 9.0), ("full_sr", 2.0))
    ]
    runs.append(make_run(tmp_path / "unfinished", {90: 3.0}, "amazon", 100, 0))
    found = compare(CompareConfig(tuple(runs), json=True))["token_ratios"]
    of_group = {row["group"].split()[0]: row["effective"] for row in found}
    assert (of_group["wgrad"]["bound"], of_group["full_sr"]["bound"]) == (">", "<")
    np.testing.assert_allclose([of_group["wgrad"]["ratio"], of_group["full_sr"]["ratio"]], [1 / 0.8, 1 / 1.2])
    assert of_group["unfinished"] is None


def test_lengths_are_shown_unless_another_group_is_counted_by_them(tmp_path, capsys):
    runs = [
        make_run(tmp_path / f"{policy}-{steps}", {steps: power_law(steps)}, policy, steps, 0)
        for policy in ("fp8", "wgrad")
        for steps in (80, 100, 120)
    ]
    alone = compare(CompareConfig(tuple(runs[:3])))
    assert (len(alone["groups"]), alone["lengths"]) == (3, [])
    both = compare(CompareConfig(tuple(runs)))
    assert (len(both["groups"]), both["lengths"]) == (4, ["fp8-100", "fp8-120"])
    assert "lengths of fp8-80, for final losses alone: fp8-100, fp8-120\n" in capsys.readouterr().out
    again = make_run(tmp_path / "again", {100: 3.0}, "fp8", 100, 0)  # a seed twice makes two groups
    assert compare(CompareConfig((*runs[:4], again)))["lengths"] == []


def test_diverged_and_unfinished_runs_bound_or_leave_out(tmp_path):
    def losses(stretch, stop=100):
        return {n: power_law(n / stretch) for n in range(2, stop + 1, 2)}

    runs = [make_run(tmp_path / f"fp8-{s}", losses(1), "fp8", 100, s) for s in (0, 1)]
    runs.append(make_run(tmp_path / "fp8-2", losses(1, 50), "fp8", 100, 2))  # has not ended
    runs.append(make_run(tmp_path / "w-0", losses(1.1), "wgrad", 100, 0))
    runs.append(make_run(tmp_path / "w-1", losses(1.1, 40) | {42: 9.0}, "wgrad", 100, 1))  # has diverged
    runs.append(make_run(tmp_path / "w-2", losses(1.1), "wgrad", 100, 2))
    [wgrad] = compare(CompareConfig(tuple(runs), target=power_law(45), json=True))["token_ratios"]
    assert [wgrad["overhead"][key] for key in ("pairs", "bound", "not_reached")] == [2, ">", 1]
    assert [wgrad["to_target"][key] for key in ("pairs", "bound", "not_reached")] == [3, ">", 1]
