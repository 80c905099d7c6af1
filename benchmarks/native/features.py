"""Checks of flags: a schedule, exceptions by layer, statistics and traces, MLPerf's preset, `eval.py`."""

import gzip
import importlib.util
import json
import pathlib
from typing import Any

from benchmarks.native.runs import difference, differing, final, peak_gib, records, series, step_ms
from benchmarks.native.work import SOME, ZERO, Found, Work

SCHEDULE = "wgrad_hadamard; fp8 from 0.5"
EXCEPTIONS = ("head=fp8", "blocks[:1].*=bf16", "blocks[-1:].mlp.down=full_sr")


def schedule(work: Work) -> Found:
    """A change of policy: the steps before it are those of the run without one."""
    work.train("schedule", *work.small(), "--policy", SCHEDULE)
    run, whole, half = work.folder / "schedule", work.folder / "whole", work.sizes.steps // 2
    figures = {
        "loss_error_before": difference(run, whole, "loss", range(1, half + 1)),
        "norm_error_before": difference(run, whole, "grad_norm", range(1, half + 1)),
        "loss_error_after": difference(run, whole, "loss", range(half + 1, work.sizes.steps + 1)),
        "eval_loss": final(run, "eval_loss"),
        "step_ms": step_ms(run),
        "peak_gib": peak_gib(run),
    }
    return Found(
        figures, {"loss_error_before": ZERO, "norm_error_before": ZERO, "loss_error_after": (1e-9, None)}
    )


def layers(work: Work) -> Found:
    """Exceptions by layer: another loss, but a near one."""
    work.train("layers", *work.small(), "--layers", *EXCEPTIONS)
    found, whole = (final(work.folder / run, "eval_loss") for run in ("layers", "whole"))
    figures = {"eval_loss": found, "eval_loss_without": whole, "difference": abs(found - whole)}
    return Found(figures, {"difference": (1e-9, 0.5)})


def observed(work: Work) -> Found:
    """Statistics of layers, a trace, event files and MLPerf's log leave the bits of `schedule`."""
    first = work.sizes.steps // 2 - 1
    flags = ["--policy", SCHEDULE, "--stats-every", str(work.sizes.every)]
    flags += ["--profile", f"{first}:{first + 2}"]
    flags += ["--mllog", *(["--tensorboard"] if importlib.util.find_spec("tensorboardX") else [])]
    work.train("observed", *work.small(), *flags)
    run = work.folder / "observed"
    measured = [r["layers"] for r in records(run) if "layers" in r]
    ratios = [float(layer["fprop"]["sqnr_db"]) for layers in measured for layer in layers.values()]
    on_gpu, events = _trace(run / "profile")
    figures = {
        "differing_records": differing(run, work.folder / "schedule"),
        "statistics": len(measured),
        "least_fprop_sqnr_db": min(ratios),
        "largest_fprop_sqnr_db": max(ratios),
        "trace_events": events,
        "trace_events_on_gpu": None if work.cpu else on_gpu,
        "event_file_bytes": sum(path.stat().st_size for path in run.rglob("*tfevents*")),
        "mllog_lines": len((run / "mllog.txt").read_text().splitlines()),
    }
    some = dict.fromkeys(("statistics", "trace_events", "trace_events_on_gpu", "mllog_lines"), SOME)
    finite = {"least_fprop_sqnr_db": (-100.0, None), "largest_fprop_sqnr_db": (None, 1000.0)}
    return Found(figures, some | finite | {"differing_records": ZERO})


def _trace(folder: pathlib.Path) -> tuple[int, int]:
    """Returns the events on GPUs, and all events with a duration, of a trace."""
    events: list[dict[str, Any]] = []
    for path in folder.rglob("*trace.json.gz"):
        events += json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    timed = [names.get(e["pid"], "") for e in events if e.get("ph") == "X"]
    return sum("GPU" in name for name in timed), len(timed)


def mlperf(work: Work) -> Found:
    """MLPerf's preset, scaled down, to its target; the log has the evaluations of metrics.jsonl."""
    work.train("mlperf", *work.sizes.mlperf.split(), *work.data)
    run = work.folder / "mlperf"
    lines = (run / "mllog.txt").read_text().splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    size = next(e["value"] for e in events if e["key"] == "global_batch_size")
    logged = {
        e["metadata"]["samples_count"] // size: e["value"] for e in events if e["key"] == "eval_accuracy"
    }
    evaluated = series(run, "eval_loss")
    kinds = [e["event_type"] for e in events]
    stops = [e["metadata"].get("status") for e in events if e["key"] == "run_stop"]
    figures = {
        "events": len(events),
        "evaluations": len(evaluated),
        "differing_evaluations": len(logged.items() ^ evaluated.items()),
        "open_intervals": kinds.count("INTERVAL_START") - kinds.count("INTERVAL_END"),
        "successes": stops.count("success"),
        "eval_loss": final(run, "eval_loss"),
        "steps": max(evaluated),
    }
    exact = {"differing_evaluations": ZERO, "open_intervals": ZERO, "successes": (1.0, 1.0)}
    return Found(figures, exact)


def evaluate(work: Work) -> Found:
    """`eval.py` gives the loss of the run's last evaluation, and samples text."""
    run = work.folder / "whole"
    found = json.loads(work.start("eval.py", run, "--json").done().last_json)
    flags = ["--prompt", "The weather is", "--tokens", str(work.sizes.tokens), "--temperature", "0", "--json"]
    sampled = json.loads(work.start("eval.py", "sample", run, *flags, name="sample").done().last_json)
    recorded = final(run, "eval_loss")
    difference = abs(found["eval_loss"] - recorded) / recorded
    figures = {"eval_loss": found["eval_loss"], "difference": difference, "sampled_tokens": sampled["tokens"]}
    return Found(figures, {"difference": (0.0, 1e-5), "sampled_tokens": SOME})
