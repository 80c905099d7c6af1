"""Comparing runs: names, groups, statistics beside scipy's, the target, and MLPerf's published curves."""

import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats
from support.runs import file_sizes, make_run

import eval as evaluation_program
from analysis.compare.compare import CompareConfig, compare
from analysis.compare.runs import group_by_configuration, read_runs
from analysis.runs import short_names
from mxjax import get_policy
from mxjax.policy.layers import LayerPolicies
from training.flags import mlperf
from training.phases import Phase, to_record

FACTS = {"source": "text", "train_tokens": 9, "validation_tokens": 9, "crc32": "0"}


def change(folder, **values):
    """Changes parts of a run's description."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def phases_by(name):
    """Returns the record of a file's policy, which is this one by name."""
    return to_record([Phase(1, "own.json", LayerPolicies(("head",), (get_policy(name),)))])


def make_seeds(tmp_path, policy, finals):
    flags = ["--policy", policy, "--steps", "20", "--warmup-steps", "1"]
    train = {step: 5.0 - step / 10 for step in range(1, 21)}
    return [
        make_run(tmp_path / f"{policy}-{i}", {10: final + 1, 20: final}, [*flags, "--seed", str(i)], train)
        for i, final in enumerate(finals)
    ]


def test_names_are_the_last_parts_that_differ(tmp_path):
    assert short_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert short_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]
    with pytest.raises(ValueError, match="named twice"):
        short_names([tmp_path, tmp_path])


@pytest.mark.parametrize(
    ("one", "other"),
    [(phases_by("wgrad"), phases_by("fp8")), ({"model": {"d_model": 64}}, {"model": {"d_model": 128}})],
    ids=["policy", "model"],
)
def test_a_file_that_changed_between_runs_makes_two_groups(tmp_path, one, other):
    folders = make_seeds(tmp_path, "own.json", [3.0, 3.0, 3.0])
    for folder, record in zip(folders, (one, one, other), strict=True):
        change(folder, **record)
    groups = group_by_configuration(read_runs(folders, sequences=False))
    assert [len(group.runs) for group in groups] == [2, 1]


@pytest.mark.parametrize(("checksum", "groups"), [("a", 1), ("b", 2)])
def test_seeds_are_one_group_wherever_their_data_lies(tmp_path, checksum, groups):
    folders = []
    for seed, (place, crc32) in enumerate([("one", "a"), ("other", checksum)]):
        flags = ["--seed", str(seed), "--data", f"/{place}/train", "--eval-data", f"/{place}/validation"]
        folders.append(make_run(tmp_path / place, {1: 3.0}, flags))
        facts = FACTS | {"source": place, "crc32": crc32}
        change(folders[-1], model={}, policies={}, phases=[], data=facts)
    found = group_by_configuration(runs := read_runs(folders, sequences=False))
    assert len(found) == groups
    assert runs[0].held_out == runs[1].held_out


@pytest.mark.parametrize(
    ("flags", "record", "groups"),
    [
        (["--spike-factor", "2", "--devices", "2"], {}, 1),
        ([], {"branch": "/seed-1/checkpoints/1"}, 1),  # each seed's from its own run
        ([], {"documents": {"end": 256, "restart_positions": False}}, 2),  # older versions had no mask
    ],
)
def test_seeds_are_one_group_if_they_train_alike(tmp_path, flags, record, groups):
    one = make_run(tmp_path / "one", {1: 3.0})
    other = make_run(tmp_path / "other", {1: 3.0}, ["--seed", "1", *flags])
    config = json.loads((other / "config.json").read_text())["config"]
    change(other, **record, config=config | {name: record[name] for name in record if name in config})
    assert len(group_by_configuration(read_runs([one, other], sequences=False))) == groups


def test_runs_stand_beside_the_published_ones(tmp_path, capsys):
    preset = ["--preset", "mlperf-llama3.1-8b"]
    run = make_run(tmp_path / "run", {384: 5.5, 768: 4.25, 5376: 3.25}, preset)
    result = compare(CompareConfig((run,)))
    printed = capsys.readouterr().out
    assert list(result["curves"]) == ["run", "reference bf16", "AMD fp8", "AMD mxfp4"]
    assert result["unit"] == "sequences"
    assert result["curves"]["run"] == {12_288: 5.5, 24_576: 4.25, 172_032: 3.25}
    assert result["reached"] == {"run": 172_032}
    rows = [line.split() for line in printed.splitlines()]
    assert ["24,576", "4.2500", "4.4740", "4.4731", "4.5237"] in rows
    assert ["36,864", "4.0500", "4.0737"] in rows
    assert "32 sequences a step: 179,405 (172,032 to 196,608 in 20 runs)" in printed


def test_other_runs_are_compared_by_tokens_unless_asked(tmp_path, capsys):
    runs = (make_run(tmp_path / "a", {10: 3.0}), make_run(tmp_path / "b", {10: 3.5, 20: 2.5}))
    result = compare(CompareConfig(runs))
    assert (list(result["curves"]), result["unit"]) == (["a", "b"], "tokens")
    assert "until" not in capsys.readouterr().out
    assert compare(CompareConfig(runs, target=3.0))["reached"] == {"a": 20_480, "b": 40_960}
    published = compare(CompareConfig(runs, mlperf=True))
    assert published["target"] == mlperf.TARGET_LOSS
    assert published["curves"]["a"] == {320: 3.0}


def test_groups_have_names_of_their_own(tmp_path):
    """Two policies without a name, and the same policies but for de-oscillation."""
    folders = make_seeds(tmp_path, "own.json", [3.0, 3.0, 2.0, 2.0])
    for folder, name in zip(folders, ("wgrad", "wgrad", "fp8", "fp8"), strict=True):
        change(folder, **phases_by(name))
    first, second = group_by_configuration(read_runs(folders, sequences=False))
    assert (first.name, second.name) == ("own.json (own.json-0)", "own.json (own.json-2)")
    snapped = [
        make_run(tmp_path / f"{setting}{seed}", {20: 3.0}, ["--deoscillate", setting, "--seed", str(seed)])
        for setting in ("3:9:1", "8:9:1")
        for seed in (0, 1)
    ]
    groups = group_by_configuration(read_runs(snapped, sequences=False))
    assert [group.name for group in groups] == ["deoscillate=3:9:1", "deoscillate=8:9:1"]


def test_groups_differ_in_more_than_the_seed(tmp_path):
    folders = [*make_seeds(tmp_path, "fp8", [3, 3]), *make_seeds(tmp_path, "wgrad", [3, 3, 3])]
    folders.append(make_run(tmp_path / "one", {20: 3.0}, ["--lr", "1e-3"]))
    folders.append(
        make_run(tmp_path / "again", {20: 3.0}, ["--policy", "fp8", "--steps", "20", "--warmup-steps", "1"])
    )
    groups = group_by_configuration(read_runs(folders[:-1], sequences=False))
    assert [len(group.runs) for group in groups] == [2, 3, 1]
    assert groups[0].name.split()[0] == "fp8"
    assert groups[2].name == "one"
    twice = group_by_configuration(read_runs([folders[0], folders[-1]], sequences=False))
    assert [group.name for group in twice] == ["fp8-0", "again"]  # the same seed, not a pair


def test_a_setting_that_a_run_leaves_out_is_not_named(tmp_path):
    more = ["--vocab-size", "300"]
    folders = [make_run(tmp_path / f"own{seed}", {20: 3.0}, ["--seed", str(seed)]) for seed in (0, 1)]
    folders += [make_run(tmp_path / f"x{s}", {20: 3.0}, [*more, "--seed", str(s)]) for s in (0, 1)]
    groups = group_by_configuration(read_runs(folders, sequences=False))
    assert [group.name for group in groups] == ["own", "vocab_size=300"]


def test_what_differs_is_said(tmp_path, capsys):
    """Runs of one seed have no statistics, and another held-out text no comparable loss."""
    folders = [
        make_run(tmp_path / name, {20: 3.0}, ["--policy", name, "--lr", lr, "--data", f"{name}.txt"])
        for name, lr in (("fp8", "1e-3"), ("wgrad", "2e-3"))
    ]
    compare(CompareConfig(tuple(folders)))
    printed = capsys.readouterr().out.splitlines()
    got = printed[-2:]
    assert got == ["  fp8: fp8 data=['fp8.txt'] lr=0.001", "  wgrad: wgrad data=['wgrad.txt'] lr=0.002"]
    assert "one seed each: no intervals; train more with --seed" in printed
    assert not any("detectable" in line for line in printed)
    change(folders[1], data=FACTS)
    compare(CompareConfig(tuple(folders)))
    assert capsys.readouterr().out.startswith("warning: the runs are evaluated on different tokens")
    found = compare(CompareConfig(tuple(folders), json=True))
    assert found["settings"]["fp8"] == "fp8 data=['fp8.txt'] lr=0.001"
    (warning,) = found["warnings"]
    assert warning.startswith("the runs are evaluated on different tokens")
    for folder, crc in zip(folders, "01", strict=True):
        values = json.loads((folder / "config.json").read_text())
        values["config"]["data"]["eval_data"] = ["held"]
        values["data"] = FACTS | {"crc32": crc, "train_tokens": int(crc)}
        (folder / "config.json").write_text(json.dumps(values))
    compare(CompareConfig(tuple(folders)))
    assert "different tokens" not in capsys.readouterr().out


def test_a_baseline_may_be_named_by_its_policy(tmp_path):
    runs = [
        make_run(tmp_path / f"{policy}-{steps}", {9: 3.0}, ["--policy", policy, "--steps", str(steps)])
        for policy, steps in (("fp8", 20), ("wgrad", 30), ("wgrad", 20))
    ]
    found = compare(CompareConfig(tuple(runs), baseline="wgrad"))
    (base,) = [group["group"] for group in found["groups"] if not group["pairs"]]
    assert base == "wgrad-20"


def test_runs_of_different_lengths_are_told(tmp_path):
    folders = [make_run(tmp_path / str(step), {step: 3.0}, ["--steps", str(step)]) for step in (20, 40)]
    (warning,) = compare(CompareConfig(tuple(folders), json=True))["warnings"]
    assert "the runs' last evaluations are after 40,960 to 81,920 tokens: a shorter run" in warning
    assert compare(CompareConfig((folders[0],), json=True))["warnings"] == []


def test_differences_are_scipys_paired_by_seed(tmp_path, capsys):
    generator = np.random.default_rng(0)
    base, ours = generator.normal(3, 0.05, 5), generator.normal(3.1, 0.05, 4)
    folders = [*make_seeds(tmp_path, "wgrad", ours), *make_seeds(tmp_path, "fp8", base)]
    result = compare(CompareConfig(tuple(folders)))
    wgrad, fp8 = result["groups"]
    assert (wgrad["group"], fp8["group"]) == ("wgrad", "fp8")
    expected = stats.ttest_rel(ours, base[:4])
    found = [wgrad[key] for key in ("difference", "low", "high", "p")]
    wanted = [np.mean(ours - base[:4]), *expected.confidence_interval(), expected.pvalue]
    np.testing.assert_allclose(found, wanted)
    np.testing.assert_allclose(fp8["train_loss"], 3.0)
    assert wgrad["at"] == 20 * 32 * 64
    printed = capsys.readouterr().out
    assert "after 40,960 tokens" in printed
    assert f"{wgrad['low']:+.4f} to {wgrad['high']:+.4f}" in printed
    other = compare(CompareConfig(tuple(folders), baseline="wgrad"))["groups"]
    np.testing.assert_allclose(other[1]["difference"], -wgrad["difference"])


def test_diverged_runs_are_counted_and_left_out(tmp_path):
    folders = make_seeds(tmp_path, "fp8", [3.0, 3.1])
    flags = ["--policy", "wgrad", "--steps", "20", "--warmup-steps", "1"]
    folders.append(make_run(tmp_path / "w0", {10: 3.5, 20: 3.2}, [*flags, "--seed", "0"]))
    folders.append(make_run(tmp_path / "w1", {10: 3.5, 15: 4.1}, [*flags, "--seed", "1"]))
    fp8, wgrad = compare(CompareConfig(tuple(folders)))["groups"]
    assert (wgrad["diverged"], wgrad["pairs"], fp8["at"]) == (1, 1, 20 * 32 * 64)
    np.testing.assert_allclose(wgrad["difference"], 0.2)


def test_overfitted_runs_have_losses(tmp_path, capsys):
    flags = ["--steps", "20", "--warmup-steps", "1", "--policy"]
    train = {10: 2.5, 20: 0.1}
    folders = [
        make_run(tmp_path / policy, {10: 3.0, 20: 5.0}, [*flags, policy], train) for policy in ("fp8", "bf16")
    ]
    found = compare(CompareConfig(tuple(folders)))["groups"]
    got = [[row[key] for key in ("diverged", "overfitted", "loss", "train_loss")] for row in found]
    assert got == [[0, 1, 5.0, 0.1], [0, 1, 5.0, 0.1]]
    assert "overfitted: likewise, but training ends below the lowest evaluation" in capsys.readouterr().out
    diverged = [
        make_run(tmp_path / f"d{i}", {10: 3.0, 20: 5.0}, [*flags, "wgrad", "--lr", f"{i}e-3"]) for i in (1, 2)
    ]
    compare(CompareConfig(tuple(diverged)))
    assert "every run has diverged" in capsys.readouterr().out


@pytest.mark.parametrize("last", [float("nan"), float("inf")])
def test_a_run_whose_loss_is_not_finite_has_diverged_however_low_training_ends(tmp_path, last):
    folder = make_run(tmp_path / "run", {10: 3.0, 20: last}, train={10: 2.5, 20: 0.1})
    [run] = read_runs((folder,), sequences=False)
    assert (run.diverged, run.overfitted) == (True, False)


def test_a_target_is_reached_by_some_runs_of_a_group(tmp_path, capsys):
    folders = make_seeds(tmp_path, "fp8", [2.8, 2.5, 2.6])
    result = compare(CompareConfig(tuple(folders), target=2.7))
    assert result["reached"] == {"fp8": 40_960}
    assert result["reached_by_run"] == {"fp8-0": None, "fp8-1": 40_960, "fp8-2": 40_960}
    assert "  fp8: 40,960 by the mean, 2 of 3 runs reach it\n" in capsys.readouterr().out


def test_runs_of_different_length_are_compared_where_both_have_been_evaluated(tmp_path, capsys):
    runs = (make_run(tmp_path / "a", {10: 3.0, 20: 2.0}), make_run(tmp_path / "b", {10: 3.5, 30: 1.0}))
    a, b = compare(CompareConfig(runs))["groups"]
    assert (a["loss"], b["loss"]) == (3.0, 3.5)
    compare(CompareConfig((runs[0], make_run(tmp_path / "c", {7: 3.0}))))
    assert "the runs share no evaluation" in capsys.readouterr().out


def test_nothing_to_compare_is_said(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        compare(CompareConfig((tmp_path,)))
    with pytest.raises(ValueError, match="no evaluation to compare"):
        compare(CompareConfig((make_run(tmp_path / "a", {}),)))
    with pytest.raises(ValueError, match="at least one run"):
        CompareConfig(())
    with pytest.raises(ValueError, match="--baseline 'x' is no group of these runs; they are b"):
        compare(CompareConfig((make_run(tmp_path / "b", {10: 3.0}),), baseline="x"))


def test_the_command_prints_text_or_json(tmp_path, capsys, monkeypatch):
    runs = [str(make_run(tmp_path / name, {10: 3.0})) for name in ("run", "other")]
    monkeypatch.setattr(sys, "argv", ["eval.py", "compare", *runs, "--target", "3"])
    runpy.run_path(evaluation_program.__file__, run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.endswith("  run: 20,480\n  other: 20,480\n")
    assert "nan" not in printed
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
    runpy.run_path(evaluation_program.__file__, run_name="__main__")
    result = json.loads(capsys.readouterr().out)
    assert result["reached"] == {"run": 20_480, "other": 20_480}
    found = [[group[key] for key in ("low", "p", "sd", "detectable")] for group in result["groups"]]
    assert found == [[None] * 4, [None] * 4]


def test_a_plot_in_a_folder_that_does_not_exist_says_how_to_make_it(tmp_path):
    path = tmp_path / "no folder" / "x.svg"
    with pytest.raises(ValueError, match=f"--plot {path}: there is no folder .*; make it: ") as error:
        CompareConfig((tmp_path,), plot=(path,))
    subprocess.run(str(error.value).partition("make it: ")[2], shell=True, check=True)
    assert CompareConfig((tmp_path,), plot=(path,)).plot == (path,)


@pytest.mark.parametrize("name", ["curves.xyz", "curves"])
def test_a_plot_of_an_unknown_format_is_refused_before_runs_are_read(name, tmp_path):
    path = tmp_path / name
    with pytest.raises(ValueError, match=r"no image format; take .*\.png, .*\.svg") as error:
        compare(CompareConfig((tmp_path / "no run",), plot=(path.with_name("curves.SVG"), path)))
    assert str(error.value).startswith(f"--plot {path}: {path.suffix or 'no suffix'} is ")


def test_curves_can_be_drawn(tmp_path):
    folders = tuple([*make_seeds(tmp_path, "fp8", [3.0, 3.1]), *make_seeds(tmp_path, "wgrad", [3.2])])
    files = (tmp_path / "curves.svg", tmp_path / "curves.png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install -e '.\[plot\]'"):
            compare(CompareConfig(folders, plot=files))
        return
    compare(CompareConfig(folders, mlperf=True, plot=files))
    assert "</svg>" in files[0].read_text()
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path):
    pytest.importorskip("matplotlib")
    folder = make_run(tmp_path / "run", {20: 3.0}, ["--steps", "20"])
    with file_sizes(1000), pytest.raises(OSError, match="File too large"):
        compare(CompareConfig((folder,), plot=(tmp_path / "curves.svg",)))
    assert list(tmp_path.iterdir()) == [folder]


def test_gradient_norms_of_a_short_run_are_of_ten_steps(tmp_path):
    """The last 5 % of 20 steps is one step, which may be a spike."""
    folder = make_run(tmp_path / "run", {20: 3.0}, ["--steps", "20"])
    with (folder / "metrics.jsonl").open("a") as file:
        norms = [7.0] * 10 + [0.5] * 9 + [80.0]
        file.writelines(json.dumps({"step": n, "grad_norm": x}) + "\n" for n, x in enumerate(norms, 1))
    [found] = compare(CompareConfig((folder,)))["health"]
    assert (found["grad_norm"], found["largest_grad_norm"]) == (0.5, 80.0)


def test_gradient_norms_spikes_sqnr_and_sets_are_compared(tmp_path, capsys):
    gemms = ("fprop", "dgrad", "wgrad")
    folders = []
    for policy, decibels in (("fp8", 30.0), ("wgrad", 20.0)):
        folder = make_run(tmp_path / policy, {}, ["--policy", policy, "--steps", "40"])
        lines = [{"step": n, "loss": 4.0 - n / 100, "grad_norm": 0.5} for n in range(1, 41)]
        lines[29] |= {"loss": 5.0, "grad_norm": 12.0}
        lines[38] |= {"loss": "nan", "grad_norm": "nan", "skipped": True}
        for step in (20, 40):
            layers = {
                f"blocks.{i}.{kind}": {g: {"sqnr_db": decibels + i + g.startswith("w")} for g in gemms}
                for i in (0, 1)
                for kind in ("mlp.down", "attention.qkv")
            }
            layers["blocks.0.mlp.down"]["fprop"] = {"sqnr_db": "inf"}  # exact, and no part of a mean
            lines.append({"step": step, "layers": layers | {"blocks.0.mlp.router": {"load": 1.0}}})
        sets = {"a": {"eval_loss": 3.0, "eval_bits_per_byte": 1.25}, "b": {"eval_loss": 2.0}}
        lines.append({"step": 40, "eval_loss": 3.0, "eval_sets": sets})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        folders.append(folder)
    plot = (tmp_path / "plot.svg",)
    _, found = compare(CompareConfig(tuple(folders), plot=plot))["health"]
    assert (found["grad_norm"], found["largest_grad_norm"], found["spikes"]) == (0.5, 12.0, {"wgrad": [30]})
    assert found["sqnr_db"] == {"fprop": pytest.approx(62.0 / 3), "dgrad": 20.5, "wgrad": 21.5}
    assert found["sqnr_db_by_kind"]["mlp.down"] == {"fprop": 21.0, "dgrad": 20.5, "wgrad": 21.5}
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["attention.qkv", "fprop", "30.5", "20.5"] in rows
    assert ["fp8", "3.0000", "1.2500", "2.0000"] in rows
    assert "</svg>" in plot[0].read_text()
