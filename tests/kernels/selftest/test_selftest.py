"""The self-test survives what it tests, resumes, and writes a tile table that the library reads."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
from support.marks import parametrize
from support.programs import run_compiled

from mxjax.kernels.selftest import training
from mxjax.kernels.selftest.cases import GROUPS, Settings, cases_of
from mxjax.kernels.selftest.report import SelfTestReport
from mxjax.kernels.selftest.workers import Limits, Worker, run_cases
from mxjax.runtime.devices import INTERPRETER

# A worker without JAX: each case does what its name says.
WORKER = textwrap.dedent("""
    import json, os, signal, sys, time

    pipe, request = open(int(sys.argv[1]), "w", buffering=1), json.load(sys.stdin)
    send = lambda **message: print(json.dumps(message), file=pipe)
    print("a library's words on standard output")
    if request["cases"] == ["no start"]:
        sys.exit("no device is here")
    cases = [case for case in request["cases"] if case not in request["skip"]]
    send(cases=cases)
    for case in cases:
        send(start=case)
        if case.startswith("segfault"):
            print("fatal: page not present", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if case.startswith("hang"):
            time.sleep(600)
        if case.startswith("fail"):
            send(case=case, outcome="failed", error="AssertionError: wrong bits")
        else:
            send(case=case, outcome="passed")
    send(end=True)
    pipe.close()
    os.kill(os.getpid(), signal.SIGABRT)  # as a driver may when its process ends
""")


def run(*cases, skip=(), case_seconds=1.5, seconds=60.0):
    """Returns the results of the worker's cases, the reason why some did not run, and the seconds."""
    results, begun = [], time.monotonic()

    def start(skip):
        request = {"cases": cases, "skip": list(skip)}
        return Worker([sys.executable, "-c", WORKER], request, os.environ)

    limits = Limits(20, case_seconds, begun + seconds)
    reason = run_cases(start, skip, limits, results.append)
    return results, reason, time.monotonic() - begun


def test_a_case_that_fails_crashes_or_hangs_ends_no_other():
    results, reason, _ = run("a", "fail", "b", "segfault", "c", "hang", "d", "skipped", skip=["skipped"])
    outcomes = {result["case"]: result["outcome"] for result in results}
    failed = {"fail": "failed", "segfault": "crashed", "hang": "hung"}
    assert outcomes == dict.fromkeys("abcd", "passed") | failed
    assert reason is None
    [crash] = [result for result in results if result["case"] == "segfault"]
    assert "SIGSEGV" in crash["error"]
    assert "page not present" in crash["details"]


def test_a_device_that_is_lost_ends_its_group():
    results, reason, _ = run("a", "segfault 1", "segfault 2", "segfault 3", "b")
    assert [result["case"] for result in results] == ["a", "segfault 1", "segfault 2", "segfault 3"]
    assert reason == "3 cases in a row ended their process"
    [result], reason, _ = run("no start")
    assert (result["outcome"], result["error"]) == ("crashed", "exit status 1")
    assert "no device is here" in result["details"]
    assert reason == "its process crashed before the first case"


def test_nothing_runs_past_the_deadline():
    results, reason, seconds = run("a", "hang", "b", case_seconds=600, seconds=2)
    assert [result["case"] for result in results] == ["a"]
    assert reason == "the time is over"
    assert seconds < 10


def result_of(case, outcome="passed"):
    return {"case": case, "outcome": outcome, "error": "wrong bits"}


def test_a_report_resumes_in_the_same_environment_alone(tmp_path):
    path = tmp_path / "report.jsonl"
    report = SelfTestReport(path, {"device": "one"})
    report.add("kernels", result_of("a"))
    report.add("kernels", result_of("b", "crashed"))
    assert not report.ok
    with path.open("a") as file:
        file.write('{"group": "kern')  # a full disk, or a kill
    again = SelfTestReport(path, {"device": "one"})
    assert again.passed("kernels") == ["a"]
    again.add("kernels", result_of("b"))
    assert again.ok
    assert SelfTestReport(path, {"device": "one"}).passed() == ["a", "b"]
    assert SelfTestReport(path, {"device": "two"}).passed() == []


def test_a_file_that_is_no_report_is_refused_and_kept(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"loss": 2.5}\n{"loss": 2.4}\n')
    with pytest.raises(ValueError, match=r"notes.jsonl is no report of a self-test: .*--report"):
        SelfTestReport(path, {})
    assert path.read_text().count("loss") == 2


def test_a_loss_that_is_not_the_cpus_fails(monkeypatch):
    wanted = json.loads(training.LOSSES.read_text())
    assert set(wanted) == set(training.POLICIES)
    assert all(len(losses) == training.STEPS and losses[0] - losses[-1] > 1 for losses in wanted.values())
    losses = wanted["wgrad"].copy()
    monkeypatch.setattr(training, "train", lambda policy: losses)
    assert training.compare("wgrad")["differs"] == 0
    losses[7] += 2 * training.TOLERANCE
    with pytest.raises(AssertionError, match="at step 8, on the CPU"):
        training.compare("wgrad")
    losses[7] = float("nan")
    with pytest.raises(AssertionError, match="loss nan at step 8"):
        training.compare("wgrad")


def selftest(folder, *arguments):
    """Runs the self-test on the CPU as a user does, and returns its process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "mxjax.kernels.selftest", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@parametrize("groups", slow=[("kernels", "gemms")], exhaustive=[tuple(GROUPS)], ids=["some", "all"])
def test_on_the_cpu_groups_pass_once_and_write_a_table(tmp_path, groups):
    """In their smallest form; a second start runs nothing again."""
    options = [] if len(groups) == len(GROUPS) else ["--groups", *groups]
    first = selftest(tmp_path, *options, "--table", "tiles.json")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "drivers: " in first.stdout
    lines = [json.loads(line) for line in (tmp_path / "mxjax-selftest.jsonl").read_text().splitlines()]
    assert {"device", "packages", "source", "target"} <= lines[0]["environment"].keys()
    settings = Settings(INTERPRETER, quick=True, tokens=0)
    wanted = [group for group in GROUPS if group in groups for _ in cases_of(group, settings)]
    assert [line["group"] for line in lines[1:]] == wanted
    table = json.loads((tmp_path / "tiles.json").read_text())
    assert (table["arch"], len(table["gemms"])) == ("software", 1)

    second = selftest(tmp_path, *options)
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"{len(wanted)} cases passed before" in second.stdout
    assert len((tmp_path / "mxjax-selftest.jsonl").read_text().splitlines()) == len(lines) + 1


LOWER = """
import json, sys
from mxjax.kernels import lowering
from mxjax.kernels.call_message import MachineCode
from mxjax.kernels.selftest.worker import run_group

lowering.compile_kernel = lambda *_: MachineCode(b"\\x7fELF", "kernel", 4, 0, 0, 1, 0)
messages = []
request = {"group": "compile", "target": sys.argv[1:], "quick": True, "tokens": 8192, "share": [0, 1]}
run_group(request, messages.append)
results = [m for m in messages if "case" in m]
print(json.dumps([len(results), [r for r in results if r["outcome"] != "passed"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [("hip", "gfx950"), ("cuda", "sm_90")], ids=["gfx950", "sm_90"])
def test_every_kind_of_case_lowers_for_a_gpu_that_is_not_here(target):
    cases, failed = json.loads(run_compiled(LOWER, *target).splitlines()[-1])
    assert cases > 15
    assert not failed
