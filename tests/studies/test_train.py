"""The runner of the study, in small: what it trains, claims, prepares ahead, and leaves for later."""

import dataclasses
import json
import math
import subprocess
import time

import numpy as np
import pytest
from support.marks import parametrize

from studies.ladder import __main__ as program
from studies.ladder import cells, programs, recipes_page, report, results, whole_runs
from studies.ladder import train as runner
from studies.ladder.cells import PROTOCOLS, Cell, Protocol
from studies.ladder.results import read_runs
from training.config import DataConfig
from training.data.indexed_dataset import IndexedWriter
from training.data.megatron import load_megatron
from training.log.health import NonFiniteError
from training.process.interruption import RunInterrupted


@pytest.fixture
def settings(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    for name, size in (("train", 900), ("validation", 200)):
        with IndexedWriter(tmp_path / name, np.dtype(np.uint16)) as writer:
            writer.add(generator.integers(0, 64, size).astype(np.uint16))
    small = Protocol(lr=1e-2, steps=4, warmup=1, batch=4, seq=16, evaluations=2)
    monkeypatch.setattr(cells, "PROTOCOLS", {**PROTOCOLS, "small": small})
    data = (str(tmp_path / "train"), str(tmp_path / "validation"))
    return runner.Settings("test", tmp_path / "runs", *data, vocab_size=64, commit="0" * 40)


CELLS = (Cell("fp8", "", "tiny", "small", 2), Cell("wgrad_sr", "even", "tiny", "small", 2))


@pytest.mark.slow
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
    printed = capsys.readouterr().out
    assert "0 runs left" in printed
    assert "of other data" not in printed
    path = settings.out / "fp8.own.tiny.small.s0.json"
    path.write_text(path.read_text().replace('"crc32": "', '"crc32": "0'))
    assert runner.run_cells(CELLS, settings)
    assert (
        f"1 finished runs in {settings.out}, such as {path.name}, are of other data"
        in capsys.readouterr().out
    )
    assert "| wgrad_sr even | 2 | 0 |" in report.tables_of(read_runs(settings.out))["final losses"]


@parametrize("optimizer", slow=["sgd"], exhaustive=["adamw", "muon"])
def test_a_run_of_the_training_program_is_that_of_a_cells_own_programs(settings, optimizer):
    """But with adamw, states in bfloat16, which draw the same bits. sgd compiles fastest."""
    dtype = "float32" if optimizer == "adamw" else "bfloat16"
    small = dataclasses.replace(cells.PROTOCOLS["small"], optimizer=optimizer, moments=dtype, master=dtype)
    cell = dataclasses.replace(CELLS[0], training=small)
    data = DataConfig((settings.data,), (settings.eval_data,), settings.vocab_size)
    corpus = load_megatron(data, settings.vocab_size)
    own = programs.Programs(cell, corpus)
    held_out = sum(map(len, own.held_out))
    whole = whole_runs.WholeRuns(cell, data, programs.IMPLEMENTATION, held_out)
    expected, found = own.train(1), whole.train(1)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["evaluations"], expected["evaluations"], rtol=1e-5)
    assert found["finite"]
    assert found["seconds"] > 0


def test_a_deadline_keeps_finished_runs(settings):
    assert not runner.run_cells(CELLS, dataclasses.replace(settings, deadline=0.0))
    assert not list(settings.out.glob("*.json"))


class Trainer:
    """Stands for a cell's programs, whose runs say that they took so many seconds."""

    seconds = 0.01
    compilations_a_run, compile_seconds, step_bytes, policy = 0, None, None, "none"
    protocol = Protocol(lr=1e-2, steps=4, warmup=1, batch=4, seq=16, evaluations=2)

    def train(self, seed):
        found = {"evaluations": [[256, 3.0 + seed]], "losses": [4.0] * 4, "finite": True}
        return found | {"seconds": self.seconds}


@pytest.mark.slow
def test_the_recipes_page_shows_loss_speed_and_memory(settings, tmp_path, capsys, monkeypatch):
    """Those of fp8, from which the others' losses are subtracted, are no run's."""
    prepare = runner._prepare
    monkeypatch.setattr(Trainer, "step_bytes", 2**26)
    monkeypatch.setattr(
        runner, "_prepare", lambda cell, *rest: Trainer() if cell.policy == "fp8" else prepare(cell, *rest)
    )
    group = [Cell(name, "", "tiny", "small", 2) for name in ("fp8", "tetrajet_v2_reset")]
    assert runner.run_cells(group, settings)
    recipes_page.main(settings.out)
    shown = capsys.readouterr().out.splitlines()[-2:]
    assert sorted(line.split("|")[1].strip() for line in shown) == ["fp8", "tetrajet_v2_reset"]
    for line in shown:
        *_, loss, gap, _, rate, memory = (cell.strip() for cell in line.strip("|").split("|"))
        assert float(loss) > 0
        assert gap == "-" or float(gap) != 0
        assert float(rate.replace(",", "")) > 0
        assert 0 < float(memory) < 1
    page = tmp_path / "recipes.md"
    page.write_text("<!-- recipes -->\n<!-- end recipes -->\n")
    monkeypatch.setattr(recipes_page, "RUNS", settings.out)
    recipes_page.main(page=page)
    recipes_page.main(page=page, check=True)
    page.write_text(page.read_text().replace("runs a recipe: 2", "runs a recipe: 3"))
    with pytest.raises(SystemExit, match="is not what the runs give; regenerate it"):
        recipes_page.main(page=page, check=True)


def test_the_next_cell_is_prepared_before_a_cell_trains(settings, monkeypatch):
    events = []

    class Recorded(Trainer):
        def __init__(self, cell, *_):
            events.append(f"prepares {cell.policy}")

        def train(self, seed):
            time.sleep(0.1)
            events.append("trains")
            return super().train(seed)

    monkeypatch.setattr(runner, "_prepare", Recorded)
    assert runner.run_cells(CELLS, settings)
    assert events == ["prepares fp8", "prepares wgrad_sr", "trains", "trains", "trains", "trains"]


def test_a_failing_preparation_keeps_the_runs_before_it(settings, monkeypatch):
    def prepare(cell, *_):
        if cell.policy != "fp8":
            raise ValueError("no such thing")
        return Trainer()

    monkeypatch.setattr(runner, "_prepare", prepare)
    with pytest.raises(ValueError, match="no such thing"):
        runner.run_cells(CELLS, settings)
    assert len(list(settings.out.glob("fp8.*.json"))) == 2
    monkeypatch.setattr(runner, "_prepare", lambda *_: Trainer())
    assert runner.run_cells(CELLS, settings)  # its claim has ended


def test_no_other_cell_is_begun_that_may_not_end_in_time(settings, monkeypatch):
    prepared = []
    monkeypatch.setattr(runner, "_prepare", lambda cell, *_: prepared.append(cell.policy) or Trainer())
    soon = dataclasses.replace(settings, deadline=time.monotonic() + 100)
    monkeypatch.setattr(Trainer, "seconds", 90.0)
    assert not runner.run_cells(CELLS, soon)
    assert prepared == ["fp8"]
    assert len(list(settings.out.glob("*.json"))) == 1


def test_a_compilation_is_allowed_the_time_that_others_of_the_model_took(settings, monkeypatch):
    monkeypatch.setattr(runner, "_prepare", lambda *_: Trainer())
    monkeypatch.setattr(Trainer, "compile_seconds", 5.0)
    monkeypatch.setattr(Trainer, "seconds", 20.0)
    soon = dataclasses.replace(settings, deadline=time.monotonic() + 70)
    assert runner.run_cells(CELLS, soon)  # the first cell is allowed a minute, the second ten seconds
    assert len(list(settings.out.glob("*.json"))) == 4


def test_a_cell_is_claimed_by_one_process_until_it_lets_go(tmp_path):
    (first, lock), (second, other) = (runner._claim_next(CELLS, tmp_path) for _ in range(2))
    assert (first, second) == CELLS
    assert runner._claim_next(CELLS, tmp_path) is None
    lock.close()
    again, lock = runner._claim_next(CELLS, tmp_path)
    assert again == first
    lock.close()
    other.close()


@pytest.mark.parametrize("ending", ["nan", "nonfinite", "interrupted"])
def test_a_run_of_the_training_program_may_end_early(settings, monkeypatch, ending):
    def train(config):
        config.out.mkdir()
        lines = ['{"step": 1, "loss": "nan", "step_s": 2.0}']
        if ending == "nan":
            lines += [
                '{"step": 2, "loss": 1.5, "step_s": 0.5}',
                '{"step": 2, "tokens": 9, "eval_loss": "nan"}',
            ]
        (config.out / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        if ending == "nonfinite":
            raise NonFiniteError("a loss", 1)
        if ending == "interrupted":
            raise RunInterrupted("continue with: python train.py")

    monkeypatch.setattr(whole_runs, "train", train)
    data = DataConfig((settings.data,), (settings.eval_data,), settings.vocab_size)
    whole = whole_runs.WholeRuns(Cell("heal", "", "tiny", "small", 1), data, "xla", 4)
    if ending == "interrupted":
        with pytest.raises(SystemExit, match="the same command continues"):
            whole.train(0)
        return
    found = whole.train(0)
    assert found["finite"] == (ending == "nan")
    assert math.isnan(found["losses"][0])
    assert found["seconds"] == {"nan": 1.0, "nonfinite": 2.0}[ending]
    assert [math.isnan(loss) for _, loss in found["evaluations"]] == [True] * (ending == "nan")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"workers": 0}, "--workers must be at least 1 and at most 1,024, got 0"),
        ({"workers": 2**40}, "--workers must be at least 1 and at most 1,024, got"),
        ({"minutes": -1.0}, "--minutes must be positive, got -1.0"),
        ({"minutes": math.nan}, "--minutes must be positive, got nan"),
    ],
)
def test_limits_that_leave_nothing_to_run_are_refused(tmp_path, flags, message):
    with pytest.raises(SystemExit, match=message):
        program.run("ladder-60m", out=tmp_path, data="none", eval_data="none", **flags)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run ladder-60m", "Missing from python -m studies.ladder run: --out PATH; see"),
        ("run ladder-60m --out x --seed 3", "Unrecognized options: --seed, 3; did you mean --seeds?; see"),
        ("report --chekc", "Unrecognized options: --chekc; did you mean --check?; see"),
    ],
)
def test_wrong_flags_of_the_study_are_one_line(words, message, monkeypatch, capsys):
    monkeypatch.setattr(program.sys, "argv", ["study", *words.split()])
    with pytest.raises(SystemExit) as ended:
        program.main()
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    assert message in said


def test_a_part_of_a_study_is_chosen(tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(program.runner, "run_cells", lambda cells, settings: chosen.append(cells))
    options = {"out": tmp_path, "data": "none", "eval_data": "none"}
    program.run("ladder-60m", cells="wgrad.*", seeds="3", **options)
    found = [(cell.name, cell.seeds) for cell in chosen[0]]
    assert found == [(name, 3) for name in ("wgrad.floor.60m.decay", "wgrad.even.60m.decay")]
    with pytest.raises(SystemExit, match=r"no cell is called 'nvfp4.\*'; the cells are fp8.own.60m.decay, "):
        program.run("ladder-60m", cells="nvfp4.*", **options)


def test_workers_take_the_visible_devices_in_turn(monkeypatch):
    started = []

    class Process:
        def __init__(self, command, env):
            share = env.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
            started.append((command[3:], env["CUDA_VISIBLE_DEVICES"], share))

        def wait(self):
            return -15

    monkeypatch.setattr(program.subprocess, "Popen", Process)
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    monkeypatch.setattr(program.sys, "argv", ["study", "run", "grid-60m", "--workers=2"])
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.setattr(program, "_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command = ["run", "grid-60m", "--workers=2", "--workers", "1"]
    for visible, count, gpus, share in (
        (None, 3, "010", "0.45"),
        ("4,5", 2, "45", None),
        ("4,5", 3, "454", "0.45"),
        ("", 2, ["", ""], "0.45"),
    ):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        started.clear()
        assert program._run_workers(count) == 143
        assert started == [(command, gpu, share) for gpu in gpus]


def test_workers_count_the_devices_in_another_process(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert program._gpus() == 1
    monkeypatch.setenv("JAX_PLATFORMS", "none")
    with pytest.raises(ValueError, match=r"JAX cannot start: .*none"):
        program._gpus()


def test_validation_data_too_short_for_a_cell_leaves_nothing(settings, tmp_path):
    with IndexedWriter(tmp_path / "validation", np.dtype(np.uint16)) as writer:
        writer.add(np.arange(30, dtype=np.uint16))
    with pytest.raises(ValueError, match="--eval-data has 30 tokens, fewer than a batch of 4 x 16"):
        runner.run_cells(CELLS, settings)
    assert not settings.out.exists()


def test_results_leave_the_commit_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"]
    for command in (["git", "init", "-q"], commit):
        subprocess.run(command, check=True)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "a.json").write_text("{}")
    (tmp_path / "tokens.bin").touch()
    assert len(runner.current_commit()) == 40
    (tmp_path / "a.py").touch()
    assert runner.current_commit().endswith("+changes")


def test_a_run_that_cannot_be_kept_says_so(tmp_path):
    with pytest.raises(ValueError, match=r"a\.json cannot be written: No such file.* trains it again"):
        runner._keep(tmp_path / "none" / "a.json", {})


def test_a_diverged_run_is_kept_as_json(tmp_path):
    path = tmp_path / "a.json"
    runner._keep(path, {"final_loss": math.nan, "evaluations": [[9, 3.0], [18, math.inf]]})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["final_loss"] == "nan"
    run = results.read_record(path)
    assert results.diverged(run)
    assert run["evaluations"] == [[9, 3.0], [18, math.inf]]
