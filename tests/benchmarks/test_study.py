"""The study: its table of cells, its statistics, and its report, which equals the committed one."""

import dataclasses
import json
import math
import types
from typing import Any, cast

import jax
import numpy as np
import pytest

import mxjax
from benchmarks.study import __main__ as program
from benchmarks.study import (
    cells,
    constant_rate,
    diagnosis_tables,
    layer_tables,
    outside,
    programs,
    recipes_page,
    report,
    tables,
    token_tables,
    tuning,
    whole_runs,
)
from benchmarks.study.cells import PROTOCOLS, RATES, WGRAD_KINDS, WGRAD_ONLY, Cell, policy_of, recipe_of
from benchmarks.study.results import gather, read_runs
from benchmarks.study.studies import STUDIES
from models import llama
from models.configs import get_config
from mxjax.policy import OPERANDS, Gemm
from mxjax.recipes import get_policy
from mxjax.recipes.whole_runs import RECIPES
from tests.support.study_runs import power_law, record


def test_the_committed_recipes_page_is_what_the_committed_runs_give():
    recipes_page.main(check=True)


def test_recipes_with_several_programs_a_run_are_told_from_the_others():
    found = [name for name in (*RECIPES, *mxjax.policies()) if whole_runs.changes_program(name)]
    assert found == ["heal"]


def test_every_published_recipe_is_a_cell():
    names = {cell.policy for cell in STUDIES["recipes"]}
    assert {"quartet", "averis", "ms_fp4", "uniform4", "nvfp4", "primus_deosc"} <= names
    tiny = {cell.policy for cell in STUDIES["recipes-tiny"]}
    assert names == tiny | {"primus_deosc"} != tiny
    assert set(RECIPES) < names


def test_what_begins_late_in_a_recipe_begins_at_the_same_part_of_a_shorter_run():
    assert recipe_of("tetrajet_v2_reset", 700).deoscillate == "8:200:440:50"  # of 23842
    assert recipe_of("tetrajet_v2_reset", 23842) == RECIPES["tetrajet_v2_reset"]
    assert recipe_of("primus_deosc", 700) == RECIPES["primus_deosc"]  # of unknown length
    assert recipe_of("fp8", 700) is None


def test_a_recipe_without_effect_on_the_model_is_refused():
    corpus = types.SimpleNamespace(vocab_size=64)
    with pytest.raises(ValueError, match="no weight of the blocks is in 4 bits"):
        programs.Programs(Cell("primus_deosc", "", "tiny", "tiny", 1), cast(Any, corpus))


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


def test_a_uniform_grid_replaces_e2m1_and_nothing_else():
    uniform = policy_of(Cell("e1m2_full_rht", "rceil", "60m", "decay", 1))
    like = policy_of(Cell("full_rht", "rceil", "60m", "decay", 1))
    assert uniform == mxjax.set_fields(like, ["*.*.format=mxfp4_e1m2"])


def test_an_unknown_study_names_those_there_are(tmp_path):
    with pytest.raises(SystemExit, match=r"unknown study grid-1m; the studies are .*grid-60m"):
        program.run("grid-1m", out=tmp_path, data="none", eval_data="none")


def test_outlier_channels_change_activations_and_no_function():
    model = dataclasses.replace(get_config("tiny"), vocab_size=64)
    params = llama.init(model, jax.random.key(0))
    outliers = programs.with_outliers(params, 8)
    np.testing.assert_allclose(outliers["blocks"]["mlp_norm"]["scale"][:, 7:9], [[16, 1]] * model.n_layers)
    batch = jax.random.randint(jax.random.key(1), (2, 17), 0, 64)
    policies = llama.layer_policies(model, get_policy("fp32"))
    losses = jax.jit(lambda params: llama.losses(model, params, batch, policies=policies, dtype="float32"))
    np.testing.assert_allclose(losses(params), losses(outliers), rtol=1e-6)


@pytest.fixture(scope="module")
def computed_once():
    """Keeps what the report makes of runs, its parts and its plots: each takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sections", "drawings"):
            patch.setattr(report, name, kept(getattr(report, name)))
        yield


def kept(function):
    """Returns a function of runs that computes the results of the same runs once."""
    found = {}

    def of_runs(runs):
        key = json.dumps(runs)
        if key not in found:
            found[key] = function(runs)
        return found[key]

    return of_runs


@pytest.mark.usefixtures("computed_once")
def test_the_committed_report_is_what_the_committed_runs_give():
    page = report.PAGE.read_bytes()
    program.report.main(check=True)
    with pytest.raises(SystemExit, match="leave out the folder"):
        program.report.main(program.report.RUNS, check=True)
    assert report.PAGE.read_bytes() == page


@pytest.mark.slow
@pytest.mark.usefixtures("computed_once")
def test_a_changed_number_fails_the_check(tmp_path):
    page = tmp_path / "study.md"
    page.write_text(report.PAGE.read_text().replace("| 8 | 0 | 2.8990 |", "| 8 | 0 | 2.8991 |"))
    found = report.differences(read_runs(report.RUNS), page)
    assert found == [
        f"{page}: the part 'final losses' is not what the runs give",
        *(f"{page.with_suffix('') / name} does not show what the runs give" for name in report.PLOTS),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("computed_once")
def test_plots_of_other_losses_fail_the_check():
    runs = read_runs(report.RUNS)
    found = report.drawings([runs[0] | {"final_loss": runs[0]["final_loss"] + 1e-4}, *runs[1:]])
    for name, drawing in report.drawings(runs).items():
        assert report._texts(drawing) != report._texts(found[name])


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="holds no run"):
        report.main(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(record("wgrad.own.tiny.tiny", "wgrad", 0, 3.0, "tiny")))
    with pytest.raises(SystemExit, match=r"holds no run of the study; benchmarks\.study recipes prints"):
        report.main(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SystemExit, match="is no record of a run: it has no cell, evaluations"):
        report.main(tmp_path)
    (tmp_path / "a.json").write_text('{"cell": "fp8')
    with pytest.raises(SystemExit, match=r"a\.json is no whole JSON file; remove it"):
        report.main(tmp_path)


def test_a_cell_names_the_devices_of_its_runs():
    devices = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    runs = [record("a", "fp8", seed, 3.0) | {"device": device} for seed, device in enumerate(devices)]
    assert gather(runs)["a"].devices == "2 H200, 1 H100"
    assert gather([runs[0] | {"device": "cpu"}])["a"].devices == "cpu"


def test_the_papers_layout_counts_diverged_runs():
    losses = {"fp8": [3.0, 3.0], "wgrad floor": [3.1, 3.1]}
    losses |= {"wgrad_sr floor": [3.2, math.nan], "full_sr floor": [math.nan, math.nan]}
    runs = [record(name, name, seed, loss) for name in losses for seed, loss in enumerate(losses[name])]
    found = tables.paper_layout(gather(runs))
    assert "| +0.200, 1 of 2 diverged |" in found
    assert "| 2 of 2 diverged |" in found


def test_token_tables_of_finished_studies():
    runs = []
    for seed in range(4):
        for m in (1.0, *cells.MULTIPLES):
            name = "tuned-60m" if m == 1 else f"tuned-60m-x{m:g}"
            runs.append(record(f"fp8.own.60m.{name}", "fp8", seed, power_law(23 * m) + 0.01 * seed, name))
        runs.append(record("wgrad.own.60m.tuned-60m", "wgrad", seed, power_law(23 * 0.9) + 0.01 * seed))
        runs.append(record("full_sr.own.60m.tuned-60m", "full_sr", seed, 9.0))
        for policy, stretch in (("fp8", 1.0), ("wgrad", 1.1)):
            curve = [(n, power_law(n / stretch)) for n in np.linspace(1, 100, 100)]
            runs.append(record(f"{policy}.c", policy, seed, curve[-1][1], "constant-60m", curve))
    found = gather(runs)
    assert "| wgrad | 4 | 0.900 |" in token_tables.decay_tokens(found)
    assert "| full_sr | 4 | < 0.65 | - | - |" in token_tables.decay_tokens(found)
    assert "| wgrad, 60m constant-60m | 4 | 0 | +10.0 % |" in constant_rate.constant_tokens(found)


def test_claims_at_a_constant_rate_compare_tokens():
    stretches = {"fp8.own": 1.0, "fprop_dgrad.floor": 1.05, "wgrad.floor": 1.155, "wgrad_hadamard.floor": 5.0}
    stretches |= {"wgrad_rht.floor": 1.1, "fprop.floor": 1.2}
    runs = []
    for name, stretch in stretches.items():
        for seed in range(4):
            curve = [(n, power_law(n / stretch) + 0.01 * seed) for n in np.linspace(1, 100, 100)]
            policy, rules = name.split(".")
            run = record(f"{name}.60m.constant-60m", policy, seed, curve[-1][1], "constant-60m", curve)
            runs.append(run | {"rules": rules})
    found = {row.split(" | ")[0]: row for row in constant_rate.constant_claims(gather(runs)).splitlines()}
    assert "| +15.5 % |" in found["| MXFP4 in all three GEMMs costs loss"]
    assert "| +10.0 % |" in found["| Wgrad costs loss beyond Fprop and Dgrad"]
    assert "| > +7.1 % | - | - |" in found["| H16 on Wgrad takes off loss"]  # never: 0.99 * 1.25 / 1.155
    assert "| < -11.1 % | - | - |" in found["| redrawn signs differ from H16"]  # 1.1 / 0.99 / 1.25
    assert "| -4.8 % | " in found["| redrawn signs take off loss"]
    assert "| +9.1 % | " in found["| Fprop costs more than Wgrad"]  # 1.2 * 1.05 / 1.155
    assert constant_rate.constant_claims({}) == constant_rate.costs({}) == constant_rate.NOT_RUN
    costs = constant_rate.costs(gather(runs))
    slope = -2.4 * 80**-0.3  # of the power law, over the logarithm
    [wgrad] = [row for row in costs.splitlines() if row.startswith("| wgrad floor |")]
    np.testing.assert_allclose(float(wgrad.split("|")[2]), -slope * math.log(1.155), rtol=0.02)
    assert "| wgrad_hadamard floor | > +0." in costs  # never reached
    layout = token_tables.paper_layout_in_tokens(gather(runs))
    assert "| +15.5 % (" in layout
    assert "| > +23.8 % (4 did not reach it) |" in layout


def test_the_learning_rate_is_the_best_or_a_lower_one_that_is_as_good():
    def rates(losses):
        runs = [
            record(f"fp8.{lr}", "fp8", seed, loss, lr=lr)
            for lr, values in losses.items()
            for seed, loss in enumerate(values)
        ]
        [found] = tuning.candidates(gather(runs).values()).values()
        return found

    clear = {1e-3: [3.0, 3.01, 3.02], 2e-3: [2.8, 2.81, 2.82], 4e-3: [2.9, 2.91, 2.92]}
    assert tuning.choose(rates(clear)) == (2e-3, False)
    assert tuning.choose(rates(clear | {4e-3: [2.795, 2.805, 2.81]})) == (2e-3, False)  # within the error
    assert tuning.choose(rates(clear | {4e-3: [2.7, 2.71, 2.72]})) == (4e-3, True)
    assert tuning.choose(rates(clear | {4e-3: [2.0, 2.0]})) == (2e-3, True)  # two runs are too few
    assert tuning.choose(rates({1e-3: [3.0]})) is None


def test_the_rate_in_use_is_the_one_that_the_rule_chooses():
    chosen = {
        s: tuning.choose(r) for s, r in tuning.candidates(gather(read_runs(report.RUNS)).values()).items()
    }
    for (model, warmup, constant), choice in chosen.items():
        if warmup == 150 and not constant and choice is not None:
            assert RATES[model] == choice.lr


def measured(values):
    """Returns a record of a diagnosis in which every statistic of a cell has the given value."""
    estimate = {
        name: {"mean": value, "low": value - 0.1, "high": value + 0.1} for name, value in values.items()
    }
    cells = {name: dict.fromkeys(diagnosis_tables.STATISTICS, estimate[name]) for name in values}
    facts = {"parameters": 1000, "policy": "fp8", "step": 5, "batches": 3, "tokens": 96, "commit": "0" * 40}
    return facts | {"versions": {"device": "cpu"}, "cells": cells, "wgrad": cells}


def test_statistics_predict_the_losses_that_they_rank():
    policies = ("fprop", "fprop_dgrad", "wgrad", "wgrad_sr", "full_sr", "wgrad_rht")
    runs = [
        record(f"{p}.c", p, s, 3 + i + 0.01 * s) for i, p in enumerate(("fp8", *policies)) for s in (0, 1)
    ]
    same_order = measured({policy: i**2 for i, policy in enumerate(policies)})
    found = diagnosis_tables.prediction(gather(runs), same_order)
    assert "| relative error | +1.00 (+1.00 to +1.00), p 0, 6 cells | +1.00 (" in found
    assert found.count("5 cells") == len(diagnosis_tables.STATISTICS)  # without full_sr
    missing = [
        run | {"final_loss": run["final_loss"] + 9 * run["seed"]} for run in runs[:-1]
    ]  # a pair is left
    assert "| relative error | +1.00 (" in diagnosis_tables.prediction(gather(missing), same_order)
    few = diagnosis_tables.prediction(gather(runs[:8]), same_order)
    assert "3 cells have run (`fprop`, `fprop_dgrad`, `wgrad`); a rank correlation needs at least 5" in few
    assert "| full_sr | 16.0000 ± 0.1000 |" in diagnosis_tables.cells_table(same_order)
    assert (
        "1,000 parameters, trained in `fp8`, step 5; 3 batches of 32 tokens"
        in diagnosis_tables.variants_table(same_order)
    )
    alone = [WGRAD_ONLY + kind for kind in WGRAD_KINDS]
    runs += [record(f"{p}.c", p, s, 5 - i + 0.01 * s) for i, p in enumerate(alone) for s in (0, 1)]
    also = measured({policy: i**2 for i, policy in enumerate((*policies, *alone))})
    [row] = [r for r in diagnosis_tables.prediction(gather(runs), also).splitlines() if "| relative" in r]
    assert row.split("|")[-2].startswith(" -1.00 (-1.00 to -1.00), p ")  # the family's losses fall
    assert row.endswith(", 5 cells |")
    constant = measured(dict.fromkeys((*policies, *alone), 0.1))
    assert "| relative error | - | - | - |" in diagnosis_tables.prediction(gather(runs), constant)
    assert diagnosis_tables.prediction(gather(runs), None) == "Not measured yet."
    assert not diagnosis_tables.prediction(gather(runs), same_order | {"parameters": 999})  # another size


def test_layers_are_averaged_by_kind_and_their_repeating_shares_counted():
    def operand(flushed):
        shape = {"kurtosis": 3.0, "outliers": 0.001, "crest": 2.0}
        return {"flushed": flushed, "before_rotation": shape, "after_rotation": shape | {"crest": 3.0}}

    def gemms(flushed):
        return {gemm: dict.fromkeys(names, operand(flushed)) for gemm, names in OPERANDS.items()}

    def share(mean, half):
        return {"repeating_share": {"mean": mean, "low": mean - half, "high": mean + half}}

    shares = {
        "all": share(9, 1),
        "blocks.0.mlp.down": share(0.02, 0.01),
        "blocks.1.mlp.down": share(0.03, 0.04),
    }
    measured = {"layers": {"blocks.0.mlp.down": gemms(0.1), "blocks.1.mlp.down": gemms(0.3)}}
    measured |= {"wgrad": {"nearest even": shares}}
    row = "| mlp.down, wgrad dy | 0.200 | 0.100 | 0.300 | 3.0 | 3.0 | 0.0010 | 0.0010 | 2.00 | 3.00 |"
    assert row in layer_tables.operands(measured)
    largest = "1.mlp.down 0.0300 (-0.0100 to +0.0700) | 0.mlp.down 0.0200 (+0.0100 to +0.0300)"
    assert f"| nearest even | 1 | 2 | {largest} |" in layer_tables.repeating(measured)


def test_averages_of_the_last_evaluations_are_compared_by_the_scatter_of_differences():
    runs = []
    generator = np.random.default_rng(0)
    for policy in ("fp8.own", "wgrad.floor"):
        for seed in range(8):
            name = f"{policy}.60m.tuned-60m"
            losses = [[n, x] for n, x in enumerate(generator.normal(3, 0.1, 4))]
            runs.append(record(name, policy.split(".")[0], seed, losses[-1][1]) | {"evaluations": losses})
    shown = tables.averaging(gather(runs))
    at = np.array([[loss for _, loss in run["evaluations"]] for run in runs]).reshape(2, 8, 4)
    d = [np.std(at[1, :, -k:].mean(axis=1) - at[0, :, -k:].mean(axis=1), ddof=1) for k in (1, 2, 3)]
    assert "| " + " | ".join(f"{x:.4f}" for x in d) + " |" in shown
    assert f"| 1.000 | {d[1] / d[0]:.3f} | {d[2] / d[0]:.3f} |" in shown


def test_published_runs_are_counted_by_what_they_needed(tmp_path):
    one = {"precision": "NVFP4", "stated_by": "log", "gpus": "8 B300", "batch": 16}
    one |= {"folder": "A/llama31_8b", "first_file": 1, "sequences": [172_032, 184_320, 172_032]}
    (tmp_path / "outside.json").write_text(json.dumps({"submissions": [one]}))
    shown = outside.submissions(tmp_path / "outside.json")
    files = "`A/llama31_8b/result_1.txt` to `3`"
    row = f"| NVFP4 | 16 | 8 B300 | 3 | 172,032 (2), 184,320 (1) | 176,128 | `log` | {files} |"
    assert row in shown
    assert "| BF16, reference | 16 | 8 B200 a node | 20 | 159,744 (17), 172,032 (3) | 161,587 |" in shown
