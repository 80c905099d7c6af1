"""Tokens in `eval.py compare`: the study's runs give its tables, and stretched curves their factor."""

import csv
import json
import math

import numpy as np

from analysis.compare.compare import CompareConfig, compare
from studies.ladder import report
from studies.ladder.results import read_runs
from tests.support.study_runs import power_law
from training.command_line import parse
from training.run.record import to_json


def make_run(folder, evaluations, policy, steps, seed, more=()):
    """Writes a run with losses by step; steps have 32 x 64 tokens."""
    folder.mkdir(parents=True)
    flags = ["--batch-size", "32", "--seq-len", "64", "--policy", policy, "--steps", str(steps)]
    config = parse([*flags, "--seed", str(seed), "--warmup-steps", "1", *more])
    (folder / "config.json").write_text(json.dumps({"config": to_json(config)}))
    lines = [{"step": step, "eval_loss": loss} for step, loss in evaluations.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def of_study(tmp_path, cells):
    """Writes the runs of cells of the study, by their evaluations."""
    runs = []
    for run in read_runs(report.RUNS):
        if run["cell"] not in cells:
            continue
        tokens = run["evaluations"][-1][0]
        steps = round(tokens / (64 * 512))
        losses = {round(n / (64 * 512)): loss for n, loss in run["evaluations"]}
        name = f"{run['cell']}-{run['seed']}"
        runs.append(make_run(tmp_path / name, losses, run["policy"], steps, run["seed"]))
    return runs


def rows_of(name):
    """Returns the rows of a table of the study by their first cell."""
    with (report.FOLDER / f"{name}.csv").open() as file:
        return {row[0]: row[1:] for row in csv.reader(file)}


def test_tokens_at_a_constant_rate_are_the_study_s(tmp_path, capsys):
    cells = [f"{name}.60m.constant-60m" for name in ("fp8.own", "wgrad.floor", "wgrad_hadamard.floor")]
    runs = of_study(tmp_path, cells)
    found = compare(CompareConfig(tuple(runs)))["token_ratios"]
    table = rows_of("constant-tokens")
    printed = capsys.readouterr().out
    assert {row["group"] for row in found} == {"wgrad", "wgrad_hadamard"}
    for row in found:
        seeds, not_reached, percent, between, p = table[f"{row['group']} floor, 60m constant-60m"]
        over = row["overhead"]
        assert (str(over["pairs"]), str(over["not_reached"])) == (seeds, not_reached)
        assert f"{100 * (over['ratio'] - 1):+.1f} %" == percent
        low, high = (f"{100 * (over[key] - 1):+.1f}" for key in ("low", "high"))
        assert f"{low} to {high}" == between
        assert f"{over['p']:.2g}" == p
        assert f" {percent.removesuffix(' %')} {between} " in " ".join(printed.split())
        assert row["to_target"] is row["effective"] is None
    assert "loss at 80 %: tokens to the loss of fp8 after so much of its run; arXiv 2605.09825's" in printed


def test_final_losses_as_tokens_are_the_study_s(tmp_path, capsys):
    cells = ["wgrad.floor.60m.tuned-60m", "fp8.own.60m.tuned-60m"]
    cells += [f"fp8.own.60m.tuned-60m-x{m}" for m in ("0.65", "0.8", "0.9", "1.1", "1.25", "1.5")]
    result = compare(CompareConfig(tuple(of_study(tmp_path, cells))))
    assert len(result["lengths"]) == 6
    assert [group["group"] for group in result["groups"]] == ["fp8 steps=700", "wgrad steps=700"]
    assert result["warnings"] == []
    [wgrad] = result["token_ratios"]
    shown = next(cell for cell in rows_of("decay-tokens")["wgrad floor"] if "%" in cell)
    effective = wgrad["effective"]
    percent, low, high = (f"{100 * (effective[key] - 1):+.1f}" for key in ("ratio", "low", "high"))
    assert shown == f"{percent} % ({low} to {high})"
    printed = capsys.readouterr().out
    assert "final loss: tokens with which fp8 steps=700 ends at the same loss" in printed
    table, _, lengths = printed.partition("lengths of fp8 steps=700, for final losses alone: ")
    assert "steps=455" not in table
    assert "fp8 steps=455" in lengths


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
