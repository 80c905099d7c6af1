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
MLPERF = "--preset mlperf-llama3.1-8b --vocab-size 16384 --warmup-steps 5 --stop-after 150 --lr 4e-3 "
MLPERF += (
    "--model tiny --batch-size 4 --seq-len 32 --eval-every 4 --eval-sequences 16 --target-loss 5.5"
    if ON_CPU
    else "--model 20m --seq-len 256 --eval-every 10 --eval-sequences 64 --target-loss 4"
)


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


def test_the_steps_before_a_change_of_policy_are_those_without_it(whole, scheduled):
    before, after = (
        {s: x for s, x in series(scheduled, "loss").items() if (s > STEPS // 2) == late} for late in (0, 1)
    )
    alone = series(whole, "loss")
    assert before == {s: alone[s] for s in before}
    assert all(x != alone[s] for s, x in after.items())


def test_exceptions_by_layer_change_the_loss_a_little(programs, whole):
    exceptions = ("head=fp8", "blocks[:1].*=bf16", "blocks[-1:].mlp.down=full_sr")
    run = programs.train("layers", *SMALL, "--layers", *exceptions)
    assert 1e-9 < abs(final(run, "eval_loss") - final(whole, "eval_loss")) < 0.5


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


def test_mlperfs_preset_ends_at_its_target_and_logs_its_evaluations(programs):
    run = programs.train("mlperf", *MLPERF.split())
    lines = (run / "mllog.txt").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    size = next(e["value"] for e in events if e["key"] == "global_batch_size")
    accuracy = (e for e in events if e["key"] == "eval_accuracy")
    logged = {e["metadata"]["samples_count"] // size: e["value"] for e in accuracy}
    assert logged == series(run, "eval_loss")
    kinds = [e["event_type"] for e in events]
    assert kinds.count("INTERVAL_START") == kinds.count("INTERVAL_END")
    assert [e["metadata"]["status"] for e in events if e["key"] == "run_stop"] == ["success"]


def test_eval_gives_the_runs_last_loss_and_samples(programs, whole):
    found = json.loads(finish(programs.start("eval.py", whole, "--json")).splitlines()[-1])
    assert found["eval_loss"] == pytest.approx(final(whole, "eval_loss"), rel=1e-5)
    flags = ["--prompt", "import", "--tokens", "4", "--temperature", "0", "--json"]
    sampled = json.loads(finish(programs.start("eval.py", "sample", whole, *flags)).splitlines()[-1])
    assert sampled["tokens"] == 4
