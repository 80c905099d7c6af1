"""The study: its table of cells, its report, which equals the committed one, and numbers in its prose."""

import dataclasses
import json
import types
from typing import Any, cast

import jax
import numpy as np
import pytest

import mxjax
from models import decoder
from models.configs import get_config
from mxjax.policy import Gemm
from mxjax.recipes import get_policy
from mxjax.recipes.whole_runs import RECIPES, RunRecipe
from studies import documents
from studies.documents import as_csv
from studies.ladder import __main__ as program
from studies.ladder import cells, programs, recipes_page, report, token_tables, whole_runs
from studies.ladder.cells import PROTOCOLS, Cell, Protocol, policy_of, recipe_of
from studies.ladder.results import add_runs, gather, read_runs
from studies.ladder.studies import STUDIES
from tests.support.study_runs import power_law, record


def test_the_committed_recipes_page_is_what_the_committed_runs_give():
    recipes_page.main(check=True)


def tuned(policy, steps=700):
    return Cell(policy, "", "60m", "tuned", 1, training=Protocol(lr=1e-3, steps=steps))


def test_recipes_that_need_all_of_train_py_are_told_from_the_others():
    found = [name for name in (*RECIPES, *mxjax.policies()) if whole_runs.is_whole_run(tuned(name))]
    assert found == ["heal", "fp8_delayed"]
    recipe = RunRecipe("wgrad", layers=("*.mlp.down=fp8_delayed",))
    assert whole_runs.is_whole_run(dataclasses.replace(tuned("wgrad"), recipe=recipe))


def test_every_published_recipe_is_a_cell():
    names = {cell.policy for cell in STUDIES["recipes"]}
    assert {"quartet", "averis", "ms_fp4", "uniform4", "nvfp4", "primus_deosc"} <= names
    tiny = {cell.policy for cell in STUDIES["recipes-tiny"]}
    assert names == tiny | {"primus_deosc"} != tiny
    assert set(RECIPES) < names


def test_what_begins_late_in_a_recipe_begins_at_the_same_part_of_a_shorter_run():
    assert recipe_of(tuned("tetrajet_v2_reset", 700)).deoscillate == "8:200:440:50"  # of 23842
    assert recipe_of(tuned("tetrajet_v2_reset", 23842)) == RECIPES["tetrajet_v2_reset"]
    assert recipe_of(tuned("primus_deosc", 700)) == RECIPES["primus_deosc"]  # of unknown length
    assert recipe_of(tuned("fp8", 700)) is None


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


@pytest.mark.slow
def test_outlier_channels_change_activations_and_no_function():
    model = dataclasses.replace(get_config("tiny"), vocab_size=64)
    params = decoder.init(model, jax.random.key(0))
    outliers = programs.with_outliers(params, 8)
    np.testing.assert_allclose(outliers["blocks"]["mlp_norm"]["scale"][:, 7:9], [[16, 1]] * model.n_layers)
    batch = jax.random.randint(jax.random.key(1), (2, 17), 0, 64)
    policies = decoder.layer_policies(model, get_policy("fp32"))
    losses = jax.jit(lambda params: decoder.losses(model, params, batch, policies=policies, dtype="float32"))
    np.testing.assert_allclose(losses(params), losses(outliers), rtol=1e-6)


def test_the_committed_report_is_what_the_committed_runs_give():
    page = report.PAGE.read_bytes()
    program.report.main(check=True)
    with pytest.raises(SystemExit, match="leave out the folder"):
        program.report.main(program.report.RUNS, check=True)
    assert report.PAGE.read_bytes() == page


@pytest.mark.slow
def test_a_changed_number_fails_the_check(tmp_path):
    runs = [run for run in read_runs(report.RUNS) if run["protocol"]["name"] in ("decay", "tuned-60m")]
    page = tmp_path / "study.md"
    quote = '[0.5][a]\n\n[a]: both.csv "-H16 on Wgrad takes off loss | mean"\n'
    page.write_text("".join(f"<!-- {name} -->\n<!-- end {name} -->\n" for name in report.SHOWN) + quote)
    report.write(runs, page, tmp_path)
    assert report.differences(runs, page, tmp_path) == []
    changed = [runs[0] | {"final_loss": runs[0]["final_loss"] + 1e-3}, *runs[1:]]
    found = "\n".join(report.differences(changed, page, tmp_path))
    assert f"{tmp_path / 'final-losses.csv'} is not what the runs give" in found
    for name in report.PLOTS:
        assert f"{tmp_path / name} does not show what the runs give" in found
    assert "\n[0.0][a]\n" in page.read_text()
    page.write_text(page.read_text().replace("| 8 |", "| 9 |").replace("[0.0]", "[0.1]"))
    found = report.differences(runs, page, tmp_path)
    assert f"{page}: the part 'both' is not what the runs give" in found
    assert f"{page}: a number in the text is not that of its table" in found


def test_runs_are_added_once_in_the_order_of_cells(tmp_path):
    kept = tmp_path / "runs.jsonl"
    old = [record("b", "fp8", 0, 3.0), record("c", "fp8", 1, 3.1)]
    kept.write_text("".join(json.dumps(run) + "\n" for run in old))
    (tmp_path / "x.json").write_text(json.dumps(record("a", "fp8", 0, 2.9)))
    (tmp_path / "y.json").write_text(json.dumps(record("b", "fp8", 0, 2.8)))
    before = kept.read_text()
    with pytest.raises(ValueError, match=r"has 1 other runs .* such as b seed 0; keep repeats apart"):
        add_runs(tmp_path, kept)
    assert kept.read_text() == before
    (tmp_path / "y.json").write_text(json.dumps(old[0]))  # the same run again
    assert add_runs(tmp_path, kept) == 1
    found = [(run["cell"], run["seed"], run["final_loss"]) for run in read_runs(kept)]
    assert found == [("a", 0, 2.9), ("b", 0, 3.0), ("c", 1, 3.1)]


def test_tables_as_csv_keep_captions_and_headers_that_differ():
    text = "`a`:\n\n| x | y |\n| --- | ---: |\n| 1, 2 | `3` |\n\nb:\n\n| x | z |\n| --- | ---: |\n| 4 |  |"
    assert as_csv(text) == 'table,x,y\na,"1, 2",3\ntable,x,z\nb,4,\n'


def test_a_folder_without_runs_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match="holds no run"):
        report.main(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(record("wgrad.own.tiny.tiny", "wgrad", 0, 3.0, "tiny")))
    with pytest.raises(SystemExit, match=r"holds no run of the study; studies\.ladder recipes prints"):
        report.main(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds no record of a run: it has no cell, evaluations"):
        report.main(tmp_path)
    (tmp_path / "a.json").write_text('{"cell": "fp8')
    with pytest.raises(SystemExit, match=r"a\.json is no whole JSON file; remove it"):
        report.main(tmp_path)


def test_a_cell_names_the_devices_of_its_runs():
    devices = ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    runs = [record("a", "fp8", seed, 3.0) | {"device": device} for seed, device in enumerate(devices)]
    assert gather(runs)["a"].devices == "2 H200, 1 H100"
    assert gather([runs[0] | {"device": "cpu"}])["a"].devices == "cpu"


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
    assert "| wgrad | 4 | 0.900 |" in token_tables.decay_tokens(found)


TABLE = "table,claim,mean,95 %,p\nfirst,H16,-0.0281,-0.0370 to -0.0204,0.0004\nsecond,H16,-0.5,-,1e-05\n"
DEFINED = '\n[a]: t.csv "-first > H16 | mean"\n[p]: t.csv "second > H16 | p"\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "t.csv").write_text(TABLE)
    return tmp_path


def test_a_quote_has_the_sign_and_the_decimals_of_its_text(folder):
    text = "off [1.000 (2.000 to 3.000)][a], [+9.0][a], p = [0.5][p], [0.00000][p]" + DEFINED
    shown = "off [0.028 (0.020 to 0.037)][a], [+0.0][a], p = [0.0][p], [0.00001][p]" + DEFINED
    assert documents.fill(text, folder) == shown
    assert documents.fill(shown, folder) == shown


def test_tables_with_columns_of_their_own(folder):
    (folder / "t.csv").write_text(TABLE + "table,claim,loss\nthird,H16,2.5\n")
    assert documents.fill('[1.1][x]\n[x]: t.csv "third > H16 | loss"', folder).startswith("[2.5][x]")


@pytest.mark.parametrize(
    ("title", "message"),
    [
        ("third > H16 | mean", "t.csv has no row third > H16"),
        ("first > H16 | loss", "t.csv has no column loss, only table, claim, mean"),
        ("second > H16 | mean", "has more numbers than its cell"),
    ],
)
def test_a_quote_without_a_source_is_an_error(folder, title, message):
    with pytest.raises(ValueError, match=rf"\[x\]: .*{message}"):
        documents.fill(f'[1.0 (1.0 to 2.0)][x]\n[x]: t.csv "{title}"', folder)


def test_numbers_without_a_quote_are_found():
    text = (
        "Llama 3.1 costs 0.5 ([arXiv 2605.09825](a.md)) and `0.2`, [0.3][a], 8 to 0.75.\n| 0.1 |\n" + DEFINED
    )
    assert documents.bare_numbers(text) == ["0.5", "0.75"]
    assert documents.undefined(text) == {"p"}


def test_every_number_in_the_study_is_quoted_from_its_tables():
    text = report.PAGE.read_text()
    assert documents.bare_numbers(text) == []
    assert documents.undefined(text) == set()
