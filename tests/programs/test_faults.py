"""Runs that are killed, interrupted, out of space, or not finite: what is lost (nothing) and what is said."""

import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.marks import parametrize
from support.runs import error_of, file_sizes, free_address, start, untimed, weights

import train as training_program
from training import trainer as programs
from training.command_line import parse
from training.log.health import NonFiniteError
from training.log.reporter import RunLog

SMALL = "--batch-size 2 --seq-len 16 --eval-batches 2 --warmup-steps 2 --policy bf16"


def arguments(text, out, *flags):
    return [*SMALL.split(), "--data", str(text), "--out", str(out), *flags]


def train(*flags):
    return training_program.train(parse([str(flag) for flag in flags]))


def poison(monkeypatch, bad_steps):
    """Makes the loss of the batches of some steps NaN."""
    original = programs.make_losses

    def make_losses(run, phase):
        loss, losses = original(run, phase)
        stream = run.corpus.batches(run.config.data, run.config.seed, run.config.steps)
        batches = [next(stream) for _ in range(run.config.steps)]
        bad = jnp.array([batches[step - 1] for step in bad_steps])

        def poisoned(params, batch, key):
            is_bad = jnp.any(jnp.all(batch[None] == bad, axis=(1, 2)))
            return loss(params, batch, key) * jnp.where(is_bad, jnp.nan, 1.0)

        return poisoned, losses

    monkeypatch.setattr(programs, "make_losses", make_losses)


@pytest.mark.slow
def test_skipped_steps_leave_the_run_going_and_resuming_equal(text, tmp_path, monkeypatch):
    """Also where the run has stopped, and goes on by skipping."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags, skip = ["--steps", "8"], ["--on-nonfinite", "skip"]
    poison(monkeypatch, (3, 4, 7))
    train(*arguments(text, whole, *flags, *skip))
    steps = [r for r in untimed(whole) if "loss" in r]
    assert [r["step"] for r in steps if r.get("skipped")] == [3, 4, 7]
    assert [r["step"] for r in steps if r["loss"] == "nan"] == [3, 4, 7]
    assert [r["lr"] for r in steps[2:5]] == [steps[2]["lr"]] * 3  # of as many updates
    _, final = weights(whole)
    assert (final["rest"]["step"], final["rest"]["skipped"]) == (8, 3)
    assert {path.name for path in whole.glob("nonfinite-*")} == {f"nonfinite-step-{i}" for i in (3, 4, 7)}
    with pytest.raises(NonFiniteError, match=r"at step 3, policy bf16.*--resume --on-nonfinite skip"):
        train(*arguments(text, parts, *flags, "--checkpoint-every", "1"))
    train("--resume", "--out", parts, *skip, "--stop-after", "3")
    train("--resume", "--out", parts, *skip)
    assert [r for r in untimed(parts) if "loss" in r] == steps
    jax.tree.map(np.testing.assert_array_equal, weights(parts)[1], final)


@pytest.mark.slow
def test_ten_skips_in_a_row_end_the_run(text, tmp_path):
    out = tmp_path / "run"
    flags = ["--steps", "20", "--on-nonfinite", "skip", "--lr", "1e30", "--clip", "1e30"]
    with pytest.raises(NonFiniteError, match="the 10th in a row"):
        train(*arguments(text, out, *flags))
    assert sum(r.get("skipped", False) for r in untimed(out)) == 10
    assert len(list(out.glob("nonfinite-step-*/batch.npz"))) == 4  # the first three and the last


@pytest.mark.slow
def test_a_loss_that_leaps_is_reported_with_its_batch(text, tmp_path, monkeypatch, capsys):
    original = RunLog.step

    def step_30_is_large(self, step, state, metrics):
        original(self, step, state, metrics._replace(loss=metrics.loss * 7) if step == 30 else metrics)

    monkeypatch.setattr(RunLog, "step", step_30_is_large)
    train(*arguments(text, tmp_path / "run", "--steps", "32", "--spike-factor", "3"))
    (spike,) = [json.loads(line) for line in (tmp_path / "run" / "spikes.jsonl").read_text().splitlines()]
    assert spike["step"] == 30
    assert len(spike["batch"]["windows"]) == 2
    assert "times the recent median" in capsys.readouterr().out


def test_files_that_cannot_be_written_end_the_run_with_a_message(text, tmp_path):
    said = r"writing to .*run/config\.json: File too large\. Raise the limit of file sizes, ulimit -f"
    with pytest.raises(SystemExit, match=said), file_sizes(1000):
        train(*arguments(text, tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # as `prepare_process` does
def test_a_full_disk_ends_the_run_with_a_message(text, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    train(*arguments(text, whole, "--steps", "4"))
    train(*arguments(text, out, "--steps", "4", "--stop-after", "2"))
    with file_sizes(300_000):
        said = error_of("--resume", "--out", out)
    assert "the checkpoint of step 4 could not be saved" in said
    assert "the last good one is of step 2" in said
    train("--resume", "--out", out)
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(whole))


IMPORTS = """
import json, pathlib, shutil, sys, time, jax, numpy as np, optax
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from training.run import checksums
from training.run.checkpoints import CheckpointError, Checkpoints
from training.run.checksums import set_aside_damaged
from training.process.interruption import Interruption
from training.process.together import ProcessError
from training.step import init_state
"""
COUNT = """
with Interruption() as interruption:
    print("ready", flush=True)
    for step in range(3000):
        if interruption.requested():
            print(step, flush=True)
            break
        time.sleep(0.01 * (1 + jax.process_index()))
"""
PARAMS = """
place = jax.sharding.NamedSharding(jax.make_mesh((2,), ("data",)), jax.P("data"))
params = {"w": jax.device_put(np.arange(4096.0), place)}
state = jax.jit(lambda w: init_state(w, optax.adam(0.1)))(params)
"""
SAVE = (
    PARAMS
    + """
at_step = jax.jit(lambda state, step: state._replace(step=step))
folder = pathlib.Path(sys.argv[3])
summed, crc32, problem = set(), checksums.crc32_of, checksums.problem
checksums.crc32_of = lambda path: summed.add(path.parents[path.parent.name == "d"].name) or crc32(path)
with Checkpoints(folder, keep=2, losses={1: 1.0}) as checkpoints:
    for step in range(1, 5):
        checkpoints.save(at_step(state, np.int32(step)), {"next_index": step})
print(json.dumps(sorted(summed)))
read = set()
checksums.problem = lambda path, *rest: read.add(str(path.relative_to(folder))) or problem(path, *rest)
checksums.problems(folder / "4", share=(jax.process_index(), 2))
print(json.dumps(sorted(read)))
if jax.process_index() == 0:
    (folder / "4" / "params" / "_METADATA").write_bytes(b"{}")
print(set_aside_damaged(folder)[1:])
with Checkpoints(folder, keep=2) as checkpoints:
    restored, position = checkpoints.restore(state)
print(position, restored.params["w"].sharding == place)
"""
)
FAIL = (
    PARAMS
    + """
checksums.crc32_of, checksums.problem = crc32, problem
folder = pathlib.Path(sys.argv[4])
def refuse(*_):
    raise PermissionError(13, "Permission denied")
with Checkpoints(folder, keep=2) as checkpoints:
    usage = shutil.disk_usage
    if jax.process_index() == 1:
        shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10, 5, 5)
    try:
        checkpoints.save(state, {})
    except CheckpointError as error:
        print(error)
    shutil.disk_usage = usage
    checkpoints.save(state, {})
if jax.process_index() == 0:
    (folder / "0" / "params" / "_METADATA").write_bytes(b"{}")
    shutil.copytree(folder / "0", folder / "1")
    checksums.write(folder / "0", 0)
    pathlib.Path.rename = refuse
try:
    set_aside_damaged(folder)
except (ValueError, ProcessError) as error:
    print(type(error).__name__, error)
"""
)


def two_processes(program, number, *folders):
    """Returns the lines that two processes that know of each other print; the second gets a signal."""
    address = free_address()
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    runs = [start("-c", IMPORTS + program, address, i, *folders, **gloo) for i in range(2)]
    for run in runs:
        while run.stdout.readline() not in ("ready\n", ""):
            pass
    runs[1].send_signal(number)
    return [run.communicate()[0].splitlines() for run in runs]


@pytest.mark.slow
def test_processes_agree_where_to_end_save_together_and_end_together(tmp_path):
    """One of two, of which the other is slower, gets a signal; both end before the same step.

    They save together, and set aside what is damaged. At last there is no room for a checkpoint where the
    second runs, and the first may rename nothing: what fails in one ends both.
    """
    saved, failed = tmp_path / "saved", tmp_path / "failed"
    lines = two_processes(COUNT + SAVE + FAIL, signal.SIGTERM, str(saved), str(failed))
    assert lines[0][0] == lines[1][0]
    assert lines[0][0].isdigit()
    first, second = (of_one[-6:-2] for of_one in lines)
    assert first[2:] == ["['continuing from the checkpoint of step 3']", "{'next_index': 3} True"]
    assert second[2:] == first[2:]
    assert {path.name for path in saved.iterdir()} == {"1", "3", "damaged-4"}
    assert {path.name for path in saved.glob("*/checksums*")} == {"checksums.json"}
    # Each adds up the bytes of arrays that it wrote itself, the first what belongs to all, too.
    summed, summed_by_second = (json.loads(of_one[0]) for of_one in (first, second))
    assert summed_by_second == ["ocdbt.process_1"]
    assert "ocdbt.process_0" in summed
    assert "ocdbt.process_1" not in summed
    read, read_by_second = (set(json.loads(of_one[1])) for of_one in (first, second))
    assert not read & read_by_second
    assert 0 <= len(read) - len(read_by_second) <= 1
    first, second = (of_one[-2:] for of_one in lines)
    assert first[0].endswith("process 1: [Errno 28] No space left on device")
    assert second[0].endswith("--resume. [Errno 28] No space left on device")
    assert re.match("ValueError the checkpoints in .* for damage: .* Permission denied", first[1])
    assert second[1] == first[1].replace("ValueError", "ProcessError process 0:")


def life(out, flags):
    """A process of the loop below: begins the run, or goes on with it."""
    resumes = ["--resume", "--out", str(out)] if (out / "config.json").exists() else flags
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        training_program.train(parse(resumes))


def wait_for(process, condition):
    """Returns when the condition holds, or the process has ended."""
    while process.is_alive() and not condition():
        time.sleep(0.001)


@parametrize(("kills", "steps"), slow=[(4, "48")], exhaustive=[(20, "160")])
def test_a_run_killed_many_times_equals_one_left_alone(text, tmp_path, kills, steps):
    """SIGKILL at random moments: while it starts, between steps, and, half of them, while it saves."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    flags = ["--steps", steps, "--eval-every", "9", "--keep-checkpoints", "2", "--log-every", "50"]
    train(*arguments(text, whole, *flags, "--checkpoint-every", steps))
    flags += ["--checkpoint-every", "3"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    moments, during_saves = random.Random(0), 0

    def saving():
        """Returns the inodes of what is being saved, which may be renamed or removed any time."""
        folder = out / "checkpoints"
        return (
            {entry.inode() for entry in os.scandir(folder) if "tmp" in entry.name}
            if folder.exists()
            else set()
        )

    def written():
        return (out / "metrics.jsonl").stat().st_size if (out / "metrics.jsonl").exists() else 0

    for kill in range(kills + 1):
        process = context.Process(target=life, args=(out, arguments(text, out, *flags)))
        before, begun = saving(), written()
        process.start()
        if kill == kills:
            break
        if kill % 4 == 0:
            process.join(moments.uniform(0, 4))
        elif kill % 4 == 1:
            more = moments.uniform(0, 1000)
            wait_for(process, lambda: written() > begun + more)  # noqa: B023
        else:
            wait_for(process, lambda: saving() - before)  # noqa: B023
            time.sleep(moments.uniform(0, 0.03))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        during_saves += bool(saving() - before)
    process.join()
    assert process.exitcode == 0
    assert during_saves > 0
    jax.tree.map(np.testing.assert_array_equal, weights(out), weights(whole))
    assert untimed(out) == untimed(whole)
