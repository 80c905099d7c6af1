"""The study's diagnosis: the cells that it measures, and how it continues after an interruption."""

import functools
import json
import math
import os
import signal

import pytest

import train as training_program
from analysis.diagnose.wgrad import VARIANTS, wgrad_grams
from benchmarks.study import diagnosis, diagnosis_file, diagnosis_tables
from benchmarks.study.cells import Cell
from training.command_line import parse

SETTINGS = {"run": "a", "step": 2, "batch_size": 4, "versions": {"jax": "0.11", "device": "H100"}}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a run, of which a study of two cells measures two variants of Wgrad."""
    flags = ["--policy", "fp8", "--batch-size", "2", "--seq-len", "32", "--eval-batches", "1", "--steps", "2"]
    training_program.train(parse([*flags, "--warmup-steps", "1", "--out", str(tmp_path / "run")]))
    study = (Cell("fp8", "", "60m", "decay", 1), Cell("wgrad_sr", "even", "tiny", "small", 2))
    monkeypatch.setattr(diagnosis, "STUDIES", {"two": study, "last": study[1:]})
    few = {name: VARIANTS[name] for name in ("nearest even", "stochastic even")}
    monkeypatch.setattr(diagnosis, "wgrad_grams", functools.partial(wgrad_grams, variants=few))
    return tmp_path / "run"


def interrupt(monkeypatch, number):
    """Sends a signal once the next cell, or Wgrad, has been kept."""

    def keep(folder, record, write=diagnosis_file.keep):
        write(folder, record)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(diagnosis_file, "keep", keep)


def test_checkpoints_of_several_policies_are_compared_by_the_cells_of_all(tmp_path):
    assert diagnosis_tables.own_table(diagnosis_file.read_all(tmp_path / "own")) == "Not measured yet."

    def keep(policy, errors):
        cells = {
            name: {"error": {"mean": e, "low": e - 0.01, "high": e + 0.01}} for name, e in errors.items()
        }
        folder = tmp_path / "own" / policy
        folder.mkdir(parents=True)
        diagnosis_file.finish(folder, {"policy": policy, "step": 200, "cells": cells})

    keep("wgrad", {"fp8": 0.1, "wgrad floor": 0.3, "full_rht floor": 0.2})
    keep("full_hadamard", {"full_rht floor": 0.4, "fp8": 0.2})
    (tmp_path / "own" / "unfinished").mkdir()
    shown = diagnosis_tables.own_table(diagnosis_file.read_all(tmp_path / "own")).splitlines()
    assert shown[0] == "| trained in | full_rht floor | fp8 |"
    assert shown[2:] == [
        "| full_hadamard, step 200 | 0.4000 ± 0.0100 | 0.2000 ± 0.0100 |",
        "| wgrad, step 200 | 0.2000 ± 0.0100 | 0.1000 ± 0.0100 |",
    ]


@pytest.mark.slow
def test_the_cells_of_a_study_are_measured_on_a_checkpoint(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    measure = functools.partial(diagnosis.main, run, study="two,last", batches=4)
    measure(out=out)
    found = diagnosis_file.read(out)
    assert found is not None
    assert (found["model"], found["policy"], found["step"], found["tokens"]) == ("tiny", "fp8", 2, 256)
    assert (found["batches"], found["batch_size"]) == (4, 2)
    assert "| stochastic even | " in diagnosis_tables.compared_table(found)
    errors = {name: parts["error"]["mean"] for name, parts in found["cells"].items()}
    assert 0 < errors["fp8"] < errors["wgrad_sr even"]
    shown = diagnosis_tables.cells_table(found)
    assert "| loss beyond bf16's | descent of a normalized step | for its length |" in shown
    parts = found["cells"]["fp8"]
    assert parts["descent"]["low"] < parts["descent"]["mean"] < parts["descent"]["high"]
    with pytest.raises(SystemExit, match="--batches must be at least 4, got 3"):
        diagnosis.main(run, study="two", batches=3, out=tmp_path)
    with pytest.raises(SystemExit, match="unknown study three, four; the studies are two, last, and none"):
        diagnosis.main(run, study="two,three,four", out=tmp_path)
    with pytest.raises(SystemExit, match="--cells chooses among the cells of a study; --study none has none"):
        diagnosis.main(run, study="none", cells="wgrad*", out=tmp_path)
    with pytest.raises(SystemExit, match=r"no cell is called 'w'; the cells are fp8\.own"):
        diagnosis.main(run, study="two", cells="w", batches=4, out=tmp_path)
    with pytest.raises(SystemExit, match=r"diagnosis\.json exists and is complete; name another --out"):
        measure(out=out)

    again = tmp_path / "again"
    for number, cells in ((signal.SIGTERM, []), (signal.SIGINT, ["fp8"])):
        with monkeypatch.context() as patches:
            interrupt(patches, number)
            with pytest.raises(SystemExit, match=str(128 + number)):
                measure(out=again)
        assert [path.name for path in again.iterdir()] == ["diagnosis.partial.json"]
        partial = json.loads((again / "diagnosis.partial.json").read_text())
        assert list(partial["cells"]) == cells
        assert partial["wgrad"] == found["wgrad"]
    with pytest.raises(
        SystemExit, match=r"other settings \(batches 4, now 5; tokens 256, now 320; .*\); give"
    ):
        diagnosis.main(run, study="two,last", batches=5, out=again)
    monkeypatch.setattr(diagnosis, "wgrad_grams", None)
    capsys.readouterr()
    measure(out=again)
    printed = capsys.readouterr().out
    assert "cells measured before: 1, in " in printed
    assert ("fp8: error" in printed, "wgrad_sr even: error" in printed) == (False, True)
    assert (again / "diagnosis.json").read_text() == (out / "diagnosis.json").read_text()
    assert [path.name for path in again.iterdir()] == ["diagnosis.json"]


def test_another_device_may_continue_an_unfinished_diagnosis(tmp_path):
    record = diagnosis_file.begin(tmp_path, SETTINGS)
    assert record == SETTINGS | {"cells": {}}
    record["cells"]["fp8"] = 1.0
    diagnosis_file.keep(tmp_path, record)
    assert diagnosis_file.read(tmp_path) is None
    for device, names in (("H200", "H100, H200"), ("H100", "H100, H200")):
        record = diagnosis_file.begin(tmp_path, SETTINGS | {"versions": {"jax": "0.11", "device": device}})
        assert record == SETTINGS | {"versions": {"jax": "0.11", "device": names}, "cells": {"fp8": 1.0}}
        diagnosis_file.keep(tmp_path, record)
    diagnosis_file.finish(tmp_path, record)
    assert diagnosis_file.read(tmp_path) == record
    with pytest.raises(ValueError, match="is complete"):
        diagnosis_file.check_unfinished(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 4}, r"\(step 2, now 4\)"),
        ({"versions": {"jax": "0.12", "device": "H100"}}, r"\(jax 0\.11, now 0\.12\)"),
        ({"weights": "b"}, r"\(weights None, now b\)"),
    ],
)
def test_an_unfinished_diagnosis_of_other_settings_is_refused(tmp_path, changed, message):
    diagnosis_file.keep(tmp_path, diagnosis_file.begin(tmp_path, SETTINGS))
    diagnosis_file.begin(tmp_path, SETTINGS)
    with pytest.raises(
        ValueError, match=message + "; give the same ones to continue it, or name another --out"
    ):
        diagnosis_file.begin(tmp_path, SETTINGS | changed)


def test_an_estimate_without_an_interval_is_null_in_json(tmp_path):
    record = diagnosis_file.begin(tmp_path, SETTINGS)
    record["cells"]["fp8"] = {"descent": {"mean": 0.5, "low": math.nan, "high": math.nan}}
    diagnosis_file.keep(tmp_path, record)
    assert (
        json.loads((tmp_path / "diagnosis.partial.json").read_text())["cells"]["fp8"]["descent"]["low"]
        is None
    )
    again = diagnosis_file.begin(tmp_path, SETTINGS)["cells"]["fp8"]["descent"]
    assert math.isnan(again["low"])
    diagnosis_file.finish(tmp_path, record)
    found = diagnosis_file.read(tmp_path)
    assert found is not None
    assert math.isnan(found["cells"]["fp8"]["descent"]["high"])


def test_a_torn_file_is_named(tmp_path):
    (tmp_path / "diagnosis.partial.json").write_text("{")
    with pytest.raises(ValueError, match=r"partial\.json is no whole JSON file; remove it"):
        diagnosis_file.begin(tmp_path, SETTINGS)
