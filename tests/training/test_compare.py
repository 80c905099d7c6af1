"""Comparing runs: the table, the target, MLPerf's published curves, and what is not there to compare."""

import json
import runpy
import sys

import pytest

import eval as evaluation_program
from training import mlperf
from training.command_line import parse
from training.compare import CompareConfig, compare, first_at, table
from training.run_config import to_json


def make_run(folder, losses, flags=()):
    folder.mkdir()
    config = parse(["--batch-size", "32", *flags])
    (folder / "config.json").write_text(json.dumps({"config": to_json(config)}))
    lines = [{"step": 1, "loss": 9.0}, *({"step": s, "eval_loss": loss} for s, loss in losses.items())]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_table_has_a_row_for_every_point():
    assert table({"a": {32: 5.0, 1024: 4.0}, "run b": {32: 5.25}}).splitlines() == [
        "sequences       a   run b",
        "       32  5.0000  5.2500",
        "    1,024  4.0000",
    ]


def test_the_first_point_at_the_target_counts():
    assert first_at({96: 3.3, 32: 4.0, 64: 3.2}, 3.3) == 64
    assert first_at({32: 4.0}, 3.3) is None


def test_runs_stand_beside_the_published_ones(tmp_path, capsys):
    preset = ["--preset", "mlperf-llama3.1-8b"]
    run = make_run(tmp_path / "run", {384: 5.5, 768: 4.25, 5376: 3.25}, preset)
    result = compare(CompareConfig((run,)))
    printed = capsys.readouterr().out
    assert list(result["curves"]) == [str(run), "reference bf16", "AMD fp8"]
    assert result["curves"][str(run)] == {12_288: 5.5, 24_576: 4.25, 172_032: 3.25}
    assert result["reached"] == {str(run): 172_032}
    rows = [line.split() for line in printed.splitlines()]
    assert ["24,576", "4.2500", "4.4740", "4.4731"] in rows
    assert ["36,864", "4.0500"] in rows
    assert "32 sequences a step: 179,405 (172,032 to 196,608 in 20 runs)" in printed


def test_other_runs_stand_alone_unless_asked(tmp_path, capsys):
    runs = (make_run(tmp_path / "a", {10: 3.0}), make_run(tmp_path / "b", {10: 3.5, 20: 2.5}))
    assert list(compare(CompareConfig(runs))["curves"]) == [str(run) for run in runs]
    assert "until" not in capsys.readouterr().out
    assert compare(CompareConfig(runs, target=3.0))["reached"] == {str(runs[0]): 320, str(runs[1]): 640}
    assert compare(CompareConfig(runs, mlperf=True))["target"] == mlperf.TARGET_LOSS


def test_nothing_to_compare_is_said(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        compare(CompareConfig((tmp_path,)))
    with pytest.raises(ValueError, match="no evaluation to compare"):
        compare(CompareConfig((make_run(tmp_path / "a", {}),)))
    with pytest.raises(ValueError, match="at least one run"):
        CompareConfig(())


def test_the_command_prints_json_last(tmp_path, capsys, monkeypatch):
    run = make_run(tmp_path / "run", {10: 3.0})
    monkeypatch.setattr(sys, "argv", ["eval.py", "compare", str(run), "--target", "3"])
    with pytest.raises(SystemExit):
        runpy.run_path(evaluation_program.__file__, run_name="__main__")
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["reached"] == {str(run): 320}


def test_curves_can_be_drawn(tmp_path):
    run = make_run(tmp_path / "run", {10: 3.0})
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install .mxjax\[plot\]"):
            compare(CompareConfig((run,), plot=tmp_path / "curves.svg"))
        return
    compare(CompareConfig((run,), mlperf=True, plot=tmp_path / "curves.svg"))
    assert "</svg>" in (tmp_path / "curves.svg").read_text()
