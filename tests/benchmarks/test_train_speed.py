"""benchmarks/train_speed.py on the CPU: its arithmetic, checks and processes."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import train_speed, train_worker
from benchmarks.train_worker import OURS, PEER, Job
from models.configs import get_config

TINY = ["--model", "tiny", "--batch", "2", "--seq", "16", "--steps", "2", "--before", "1", "--commit", "abc"]


def tiny(program=OURS, subject="bf16", steps=2, **more):
    return Job(program, subject, "tiny", batch=2, seq=16, steps=steps, before=1, **more)


def outcome(program=OURS, subject="bf16", **changes):
    job = Job(program, subject, "llama3.2-1b", batch=4, seq=4096, steps=3, before=1)
    found = {
        "name": job.name,
        "job": vars(job),
        "times": [0.5, 0.4, 0.9],
        "times_before": [],
        "losses": [12.0, 11.9],
        "compile_seconds": 7.0,
        "peak_bytes": 10,
        "environment": {"device": "NVIDIA H200"},
    }
    return found | changes


def test_a_line_by_hand():
    gemms = {"gemm_flops": {"8192x8192x8192": 800e12, "8192x4096x14336": 790e12}}
    first, second = outcome(**gemms), outcome(times=[0.6, 0.6], peak_bytes=30)
    peer = outcome(PEER, "autocast", times=[1.0])
    ours, theirs = train_speed.lines([first, second, peer])
    assert ours["step_seconds"]["median"] == 0.6  # of 0.4, 0.5, 0.6, 0.6, 0.9
    assert ours["tokens_per_s"] == pytest.approx(4 * 4096 / 0.6)
    # 6 a parameter, the tied embedding once, and 6 S d a layer.
    flops = 6 * 1_235_814_400 + 6 * 16 * 2048 * 4096
    assert ours["flops_per_s_per_device"] == pytest.approx(4 * 4096 * flops / 0.6)
    assert ours["mfu"] == pytest.approx(ours["flops_per_s_per_device"] / 989e12)
    assert ours["mfu_of_measured_gemm"] == pytest.approx(ours["flops_per_s_per_device"] / 800e12)
    assert (ours["peak_bytes"], ours["rounds"]) == (30, 2)
    assert (ours["of_peer"], theirs["of_bf16"]) == (pytest.approx(1 / 0.6), pytest.approx(0.6))


def test_steps_in_the_middle_of_a_run_are_compared_with_the_first():
    first, second = ([t] * 24 + [2 * t] * 76 for t in (0.1, 0.3))  # steps 2 to 101
    runs = [outcome(times_before=first[:50], times=first[50:]), outcome(times_before=[], times=second)]
    [line] = train_speed.lines(runs)
    assert line["step_seconds_at"] == {25: 0.2, 50: 0.4, 100: 0.4}  # medians of both rounds
    assert line["slowest_of_first"] == 2
    assert train_speed.lines([outcome()])[0]["slowest_of_first"] is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"losses": [12.0, math.nan]}, "a loss was not finite"),
        ({"losses": [12.0, 12.1]}, "the loss rose from 12.0000 to 12.1000"),
        ({"subject": "fp8", "losses": [12.2, 11.0]}, "the first loss is 12.2000, and bf16's 12.0000"),
    ],
)
def test_wrong_losses_are_no_times(changes, reason):
    runs = [outcome(), outcome(**changes)]
    train_speed.check(runs)
    assert reason in runs[-1]["absent"]
    assert runs[-1]["failed"]


@pytest.mark.parametrize(
    ("changes", "is_bytes"),
    [
        ({"program": PEER, "subject": "autocast", "losses": [12.4, 12.3]}, False),  # has weights of its own
        ({"subject": "fp8", "losses": [12.3, 11.0]}, True),
    ],
)
def test_right_losses_are_times(changes, is_bytes):
    runs = [outcome(), outcome(**changes)]
    train_speed.check(runs, is_bytes=is_bytes)
    assert "absent" not in runs[-1]


def test_losses_are_fetched_once_the_next_step_is_under_way():
    events = []

    def step(tokens):
        events.append(f"step {tokens}")
        return tokens

    def fetch(pending):
        events.append(f"fetch {pending}")
        return float(pending)

    losses, times = train_worker.run_steps(step, fetch, [0, 1, 2])
    assert events == ["step 0", "step 1", "fetch 0", "step 2", "fetch 1", "fetch 2"]
    assert (losses, len(times)) == ([0.0, 1.0, 2.0], 1)


def test_batches_differ_from_step_to_step_and_repeat_from_job_to_job():
    job = tiny(steps=3)
    first, second = train_worker.batches(job, 257), train_worker.batches(job, 257)
    assert (len(first), first[0].shape, first[0].dtype) == (5, (2, 17), np.int32)
    assert not np.array_equal(first[0], first[1])
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_jobs_of_a_round():
    flags = [*TINY, "--policies", "bf16", "fp8", "--peer", "--remat", "full", "--profile", "traces"]
    options = train_speed.parse(flags)
    ours, other, peer = train_speed.jobs(options, 0)
    assert (ours.name, other.name, peer.name) == ("bf16", "fp8", "PyTorch, autocast")
    assert ours.trace == str(pathlib.Path("traces/bf16").absolute())
    assert (peer.remat, peer.trace) == ("full", None)
    assert train_speed.jobs(options, 1)[0].trace is None


def test_the_peers_loss_falls_back_to_chunks_when_memory_ends(monkeypatch):
    asked = []

    def run(job, environment, end):
        asked.append(job.loss)
        full = job.loss == "whole"
        return {"absent": "torch.OutOfMemoryError: CUDA out of memory"} if full else {"times": [1.0]}

    monkeypatch.setattr(train_speed, "run", run)
    job = tiny(PEER, "autocast")
    found = train_speed.run_with_fallback(job, {}, math.inf)
    assert asked == ["whole", "chunked"]
    assert "out of memory" in found["whole_loss"]
    assert "absent" in train_speed.run_with_fallback(tiny(), {}, math.inf)


def test_a_process_that_fails_says_why(tmp_path):
    found = train_speed.run(tiny("benchmarks.no_such_module"), {"PYTHONPATH": ":".join(sys.path)}, math.inf)
    assert "No module named benchmarks.no_such_module" in found["absent"]


def test_bad_arguments_are_refused_before_anything_runs(capsys):
    for flags, message in [
        (["--model", "nonsense"], "unknown model 'nonsense'"),
        (["--policies", "nonsense"], "nonsense"),
        (["--before", "0"], "must be at least 1"),
        (["--devices", "3"], "must be a multiple of --devices 3"),
        (["--policies"], "name --policies, or give --peer"),
        (["--policies", "bf16", "fp8", "bf16"], "names a policy twice"),
        (["--out", "/no/such/folder/out.json"], "there is no folder /no/such/folder"),
        (["--random-tokens", "--data", "text"], "exclude each other"),
    ]:
        with pytest.raises(SystemExit):
            train_speed.parse([*TINY, *flags])
        assert message in capsys.readouterr().err


def test_text_that_cannot_be_read_ends_with_one_line(tmp_path):
    (tmp_path / "short").write_text("short")
    for data, message in [("none", "no such file"), ("short", "17 are needed to train on")]:
        with pytest.raises(SystemExit, match=message):
            train_speed.main([*TINY, "--policies", "bf16", "--data", str(tmp_path / data)])


def test_random_tokens_are_called_so(capsys):
    train_speed.main([*TINY, "--policies", "bf16", "--seconds", "0", "--random-tokens"])
    *printed, report = capsys.readouterr().out.splitlines()
    assert "Steps on random tokens" in printed
    assert json.loads(report)["data"] == "random tokens"


def test_after_its_seconds_nothing_starts(capsys, tmp_path):
    train_speed.main([*TINY, "--policies", "bf16", "--seconds", "0", "--out", str(tmp_path / "out.json")])
    *printed, report = capsys.readouterr().out.splitlines()
    report = json.loads(report)
    assert report["data"]["source"] == "the source of Python's standard library"
    assert f"Steps on {report['data']['source']}, {report['data']['train_tokens']:,} tokens" in printed
    assert "--seconds have passed" in report["runs"][0]["absent"]
    assert json.loads((tmp_path / "out.json").read_text()) == report


def test_all_jobs_train_on_the_same_text(tmp_path):
    job = tiny(steps=3, tokens=str(tmp_path / "tokens.npy"))
    (tmp_path / "text").write_text("to be or not to be " * 50)
    data = train_worker.write_tokens(tmp_path / "tokens.npy", job, str(tmp_path / "text"))
    sizes = {"train_tokens": 904, "validation_tokens": 47}  # with the end of the document
    assert data == {"source": "text", **sizes, "crc32": "fa14730d"}
    batches = train_worker.batches(job, 257)
    assert (len(batches), batches[0].shape, batches[0].dtype) == (5, (2, 17), np.int32)
    assert bytes(batches[0][0].tolist()).decode() in "to be or not to be " * 50
    assert train_worker.rate_of(job) == (1e-3, 100)


@pytest.mark.slow
def test_a_policys_steps_are_measured():
    found = train_worker.run(tiny())
    assert (len(found["times"]), len(found["losses"])) == (2, 4)
    assert found["losses"][0] == pytest.approx(math.log(get_config("tiny").vocab_size), abs=0.3)
    with pytest.raises(ValueError, match="keeps packed MXFP4 operands"):
        train_worker.run(tiny(remat="fp4"))
    with pytest.raises(ValueError, match="--devices is 2, but JAX sees 1"):
        train_worker.run(tiny(devices=2))


@pytest.mark.exhaustive
def test_policies_are_measured_in_processes_of_their_own(capsys):
    train_speed.main([*TINY, "--policies", "bf16", "wgrad", "--rounds", "2"])
    printed = capsys.readouterr().out.splitlines()
    report = json.loads(printed[-1])
    assert [line["name"] for line in report["lines"]] == ["bf16", "wgrad"]
    assert [line["rounds"] for line in report["lines"]] == [2, 2]
    assert (report["commit"], len(report["runs"])) == ("abc", 4)
    assert sum(line.startswith("| wgrad") for line in printed) == 1


def test_a_process_that_takes_too_long_is_ended(monkeypatch, tmp_path):
    (tmp_path / "sleeps.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(600)\n")
    found = train_speed.run(tiny("sleeps"), {"PYTHONPATH": str(tmp_path)}, time.monotonic() + 2)
    assert found["absent"] == "not finished when --seconds had passed"


def test_a_signal_ends_the_process_of_a_job_too(monkeypatch, tmp_path):
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(train_speed, "OURS", "sleeps")
    waiting, ended = subprocess.Popen.wait, []

    def wait(process, timeout=None):
        if not ended:
            ended.append(process)
            os.kill(os.getpid(), signal.SIGTERM)
        return waiting(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    with pytest.raises(SystemExit, match="143"):
        train_speed.main([*TINY, "--random-tokens", "--policies", "bf16"])
    assert ended[0].returncode == -signal.SIGKILL


@pytest.mark.exhaustive
def test_a_mesh_is_measured(monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    train_speed.main([*TINY, "--policies", "bf16", "--devices", "2", "--mesh", "fsdp=2"])
    [line] = json.loads(capsys.readouterr().out.splitlines()[-1])["lines"]
    assert line["name"] == "bf16"
