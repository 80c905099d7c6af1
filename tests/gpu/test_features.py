"""On a GPU: memory estimates, and the flags that change or observe a run."""

import gzip
import json
import re

import pytest
from support import gpu_runs
from support.gpu_runs import EVERY, ON_CPU, SMALL, STEPS, final, finish, kill_at, series, without_times

SCHEDULE = "wgrad_hadamard; fp8 from 0.5"
# A CPU's own implementation packs nothing, and refuses --remat fp4.
MEMORY = "--model tiny --batch-size 4 --seq-len 32 --implementation fp8_carriers"
MEMORY = MEMORY if ON_CPU else "--model 125m --batch-size 16 --seq-len 512"


@pytest.fixture(scope="module")
def whole(programs):
    return programs.train("whole", *SMALL)


@pytest.fixture(scope="module")
def scheduled(programs):
    return programs.train("scheduled", *SMALL, "--policy", SCHEDULE)


@pytest.mark.parametrize("remat", ["none", "dots", "fp4", "full"])
def test_the_estimate_of_memory_is_near_the_peak(programs, remat):
    run = programs.folder / remat
    flags = f"{MEMORY} --policy wgrad_hadamard --remat {remat} --log-every 1 --steps 400 --eval-every 400"
    process = programs.begin(remat, *flags.split(), "--checkpoint-every", 400)
    kill_at(process, run, 5)  # neither a checkpoint nor an evaluation is wanted
    estimate = float(re.search(r"memory a device, .*?: ([\d.]+) GiB", process.output)[1])
    if not ON_CPU:  # which reports no peak
        assert 0.5 < estimate / (max(series(run, "memory_peak_bytes").values()) / 2**30) < 2


def test_statistics_a_trace_and_logs_leave_the_bits_as_they_are(programs, scheduled):
    first = STEPS // 2 - 1
    flags = ["--policy", SCHEDULE, "--stats-every", EVERY, "--profile", f"{first}:{first + 2}", "--mllog"]
    run = programs.train("observed", *SMALL, *flags)
    assert without_times(run) == without_times(scheduled)
    measured = [layer for r in gpu_runs.records(run) if "layers" in r for layer in r["layers"].values()]
    assert all(-100 < float(layer["fprop"]["sqnr_db"]) < 1000 for layer in measured)
    assert measured
    events = []
    for path in (run / "profile").rglob("*trace.json.gz"):
        events += json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    assert any(ON_CPU or "GPU" in names.get(e["pid"], "") for e in events if e.get("ph") == "X")
    assert (run / "mllog.txt").read_text()


def test_eval_gives_the_runs_last_loss_and_samples(programs, whole):
    found = json.loads(finish(programs.start("eval.py", whole, "--json")).splitlines()[-1])
    assert found["eval_loss"] == pytest.approx(final(whole, "eval_loss"), rel=1e-5)
    flags = ["--prompt", "import", "--tokens", "4", "--temperature", "0", "--json"]
    sampled = json.loads(finish(programs.start("eval.py", "sample", whole, *flags)).splitlines()[-1])
    assert sampled["tokens"] == 4
