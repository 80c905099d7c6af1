"""Runs whose files, paths or output are broken: one line says what is wrong, and the rest goes on.

One short run is trained once; each test breaks a copy of it.
"""

import contextlib
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.marks import parametrize
from support.runs import error_of

import eval as evaluation_program
import train as training_program
from models import decoder
from models.config_file import from_dict
from training.huggingface.exporting import export_checkpoint
from training.log.metrics import read_records
from training.process.start import prepare_process
from training.run.checkpoints import Checkpoints, save_params
from training.run.checksums import saved_steps
from training.run.lock import locked
from training.run.record import read_run_config

ROOT = pathlib.Path(__file__).parents[2]
FLAGS = "--batch-size 2 --seq-len 16 --eval-batches 2 --warmup-steps 2 --policy bf16 --checkpoint-every 2"
LONG = ["--steps", "100000", "--log-every", "100000", *FLAGS.split()]
SHORT = [*LONG, "--stop-after", "6"]  # the same program, so that it is compiled once


@pytest.fixture(scope="module")
def text(text):
    return str(text)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run of six steps, with checkpoints of steps 4 and 6."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    training_program.main([*SHORT, "--data", text, "--out", str(out)])
    return out


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the run."""
    return shutil.copytree(whole, tmp_path / "run")


def begin(arguments, errors, output):
    """Runs the command line in a process of `start`, with its standard error in a file."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    if output == "closed":
        os.close(1)
        sys.stdout = None
    else:
        reader, writer = os.pipe()
        os.close(reader)
        path = {"full": "/dev/full", "none": os.devnull}.get(output)
        os.dup2(os.open(path, os.O_WRONLY) if path else writer, 1)
        sys.stdout = os.fdopen(1, "w", closefd=False)
    prepare_process()
    training_program.main([str(argument) for argument in arguments])


def start(errors, *arguments, output="none"):
    """Starts a run in a process that has imported its modules already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    process = context.Process(target=begin, args=(arguments, errors, output))
    process.start()
    return process


def wait_for_lines(process, path, count):
    while process.is_alive() and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.005)


def broken_paths(tmp_path):
    """Yields paths that cannot be a run's folder, with a part of the message."""
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    yield tmp_path / "file", "Not a directory"
    yield tmp_path / "file" / "run", "Not a directory"
    yield tmp_path / ("n" * 300), "File name too long"
    yield tmp_path / "loop" / "run", "Too many levels of symbolic links"
    yield pathlib.Path("/proc/run"), "No such file or directory"
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        yield tmp_path / "closed" / "run", "Permission denied"


def test_a_path_that_cannot_be_a_folder_is_named_in_one_line(text, tmp_path):
    for path, cause in broken_paths(tmp_path):
        said = error_of(*SHORT, "--data", text, "--out", path)
        assert str(path) in said
        assert cause in said
    assert str(tmp_path) in error_of("--resume", "--out", tmp_path / ("n" * 300))


@pytest.mark.slow
def test_a_folder_in_use_is_left_alone(run):
    with locked(run):
        before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
        for flags in (["--resume"], [*SHORT, "--data", run]):
            said = f"{run} is in use by process {os.getpid()} on {os.uname().nodename}"
            assert said in error_of(*flags, "--out", run)
        assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


@pytest.mark.slow
def test_damaged_records_and_a_renamed_checkpoint_cost_nothing_else(run, whole, capsys):
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join([lines[0], b"\0\0\0\n", *lines[2:]])
    (run / "metrics.jsonl").write_bytes(damaged)
    (run / "spikes.jsonl").write_text("null\n")
    (run / "checkpoints" / "6").rename(run / "checkpoints" / "60")
    training_program.main(["--resume", "--out", str(run), "--stop-after", "6"])
    said = capsys.readouterr().out
    assert "60 is damaged (state is of step 6); renamed it damaged-60" in said
    assert "continuing from the checkpoint of step 4" in said
    for name, line in (("metrics.jsonl", 2), ("spikes.jsonl", 1)):
        assert (
            f"{run}/{name} is damaged (line {line}: it is no JSON object); renamed it damaged-{name}" in said
        )
    assert (run / "damaged-metrics.jsonl").read_bytes() == damaged
    losses = {(r["step"], r.get("loss"), r.get("eval_loss")) for r in read_records(whole)}
    found = {(r["step"], r.get("loss"), r.get("eval_loss")) for r in read_records(run)}
    assert {step for step, *_ in found} == {5, 6}
    assert found < losses


@pytest.mark.slow
def test_moments_that_would_become_nan_end_the_run_with_its_last_finite_state(text, tmp_path):
    out = tmp_path / "run"
    said = error_of(*SHORT, "--data", text, "--out", out, "--eps", "0")
    assert "at step 1, but parameters or moments would become NaN or infinite" in said
    assert list((out / "checkpoints").iterdir()) == []
    (out / "checkpoints").rmdir()
    shutil.copytree(out / "nonfinite-step-1" / "checkpoints", out / "checkpoints")
    export_checkpoint(out, tmp_path / "exported")  # finite


@pytest.mark.slow
def test_a_state_that_holds_nan_is_neither_exported_nor_continued(run, text, tmp_path):
    model = from_dict(read_run_config(run)["model"])
    with Checkpoints(run / "checkpoints") as checkpoints:
        params = checkpoints.restore_params(decoder.abstract_params(model))
    shutil.rmtree(run / "checkpoints")
    params["embedding"] = params["embedding"].at[5, 7].set(np.nan)
    save_params(run / "checkpoints", params)
    said = r"run holds NaN or infinity in model.embed_tokens.weight; export"
    with pytest.raises(ValueError, match=said):
        export_checkpoint(run, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    export_checkpoint(run, tmp_path / "exported", allow_nonfinite=True)
    assert "holds NaN or infinity; go on from an earlier one" in error_of("--resume", "--out", run)
    said = error_of(*SHORT, "--data", text, "--init", run, "--out", tmp_path / "new")
    assert "holds NaN or infinity; go on from an earlier one" in said
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    assert "go on from" in error_of(*SHORT, "--data", text, "--init", run, "--out", tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []
    for command in ([run], ["sample", run], ["diagnose", run]):
        said = error_of(*command, program=evaluation_program.main)
        assert f"the weights of step 0 in {run} hold NaN or infinity" in said


@pytest.mark.slow
def test_nothing_is_copied_through_a_link_of_a_run_to_begin_with(run, text, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (run / "huggingface").mkdir()
    (run / "huggingface" / "notes.txt").symlink_to(tmp_path / "secret")
    said = error_of(*SHORT, "--data", text, "--init", run, "--out", tmp_path / "out")
    assert "notes.txt is a link out of its folder" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_one_line(run):
    command = [sys.executable, "eval.py", run, "--batches", "1"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "eval.py: error: standard output: [Errno 28] No space left on device\n"


@pytest.mark.slow
def test_output_that_cannot_be_written_stops_nothing(text, tmp_path):
    outputs = ("full", "pipe", "closed")
    runs = [
        start(tmp_path / f"{output}.txt", *SHORT, "--data", text, "--out", tmp_path / output, output=output)
        for output in outputs
    ]
    for process in runs:
        process.join()
    assert [process.exitcode for process in runs] == [0, 0, 0]
    said = [(tmp_path / f"{output}.txt").read_text() for output in outputs]
    assert [text.count("\n") for text in said] == [1, 1, 0]
    assert "warning: standard output cannot be written (No space left on device): going on without" in said[0]
    assert "(Broken pipe)" in said[1]
    for output in outputs:
        assert [r["step"] for r in read_records(tmp_path / output) if "loss" in r] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_folder_that_is_moved_ends_the_run_and_another_s_in_its_place_is_left_alone(text, run, tmp_path):
    out, errors, moved = tmp_path / "out", tmp_path / "errors.txt", tmp_path / "moved"
    process = start(errors, *LONG, "--data", text, "--out", out)
    wait_for_lines(process, out / "metrics.jsonl", 5)
    before = {path.relative_to(run): path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    out.rename(moved)
    while not renamed(run, out):  # a save that was under way has made the folder anew
        shutil.rmtree(out, ignore_errors=True)
    process.join(30)
    assert process.exitcode == 1
    said = errors.read_text()
    assert said.count("\n") == 1
    assert f"{out} is no longer this run's: it was moved. {moved} holds metrics.jsonl and the check" in said
    found = {path.relative_to(out): path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}
    # A save that was under way may leave its files, but never becomes a checkpoint.
    assert {path: at for path, at in found.items() if "-tmp" not in str(path)} == before
    newest = max(saved_steps(moved / "checkpoints"))
    training_program.main(["--resume", "--out", str(moved), "--stop-after", str(newest + 1)])
    assert read_records(moved)[-1]["step"] == newest + 1


def renamed(folder, name):
    """Renames a folder; returns whether nothing was in the way."""
    try:
        folder.rename(name)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def unwritable(folder):
    """Makes a folder, with all in it, one in which this user can create nothing."""
    if os.geteuid() == 0:  # whom no permission stops
        commands = [["chattr", "-R", sign + "i", str(folder)] for sign in "+-"]
    else:
        commands = [["chmod", "-R", f"u{sign}w", str(folder)] for sign in "-+"]
    if shutil.which(commands[0][0]) is None or subprocess.run(commands[0], capture_output=True).returncode:
        subprocess.run(commands[1], capture_output=True)
        pytest.skip("files cannot be made immutable here")
    try:
        yield
    finally:
        subprocess.run(commands[1], check=True)


@pytest.mark.slow
def test_a_folder_that_becomes_unwritable_ends_the_run_and_resuming_is_possible(text, tmp_path):
    out, errors = tmp_path / "run", tmp_path / "errors.txt"
    process = start(errors, *LONG, "--data", text, "--out", out)
    wait_for_lines(process, out / "metrics.jsonl", 5)
    with unwritable(out):
        process.join(30)
        assert process.exitcode == 1
        assert str(out) in error_of("--resume", "--out", out)
    said = errors.read_text()
    assert said.count("\n") == 1
    assert f"could not be saved in {out}/checkpoints" in said
    newest = max(saved_steps(out / "checkpoints"))
    training_program.main(["--resume", "--out", str(out), "--stop-after", str(newest + 1)])
    assert read_records(out)[-1]["step"] == newest + 1


@parametrize("program", "train.py", slow=["eval.py"])
def test_an_interrupt_while_modules_are_imported_is_one_line(tmp_path, program):
    """In place of a module that takes long to import, one that waits to be interrupted."""
    (tmp_path / "grain.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, program]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, **pipes)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", f"{program}: interrupted\n")
    assert process.returncode == 128 + signal.SIGINT
