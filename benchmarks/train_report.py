"""Checks, ratios and tables of what the processes of `benchmarks.train_speed` measured."""

import math
import statistics
from typing import Any

import numpy as np

from benchmarks import trace_table
from benchmarks.train_job import OURS, Job
from models.configs import get_config
from mxjax.tables import table
from training.throughput import peak_flops

FIRST_LOSS_TOLERANCE = 0.1  # nats from bf16's; quantization moves the first loss by about 0.01
WINDOW = 20  # steps of which a median is taken
NOISE = 6.0  # nats times the root of a step's tokens: the most that two random batches' losses differ


def with_speed(job: Job, outcome: dict[str, Any]) -> dict[str, Any]:
    """Adds the speed of the median step to an outcome."""
    model, seconds = get_config(job.model), statistics.median(outcome["times"])
    tokens = job.batch * job.seq
    per_device = tokens * model.flops_per_token(job.seq) / seconds / job.devices
    return outcome | {"tokens_per_s": tokens / seconds, "flops_per_s_per_device": per_device}


def check(runs: list[dict[str, Any]]) -> None:
    """Marks the last run as absent if its losses are wrong."""
    run = runs[-1]
    if "absent" in run:
        return
    losses = run["losses"]
    base = next((r["losses"][0] for r in runs if r["name"] == "bf16" and "losses" in r), None)
    far = base is not None and run["job"]["program"] == OURS and abs(losses[0] - base) > FIRST_LOSS_TOLERANCE
    if not all(map(math.isfinite, losses)):
        run["absent"] = f"a loss was not finite: {losses}"
    elif losses[-1] > losses[0] + NOISE / math.sqrt(run["job"]["batch"] * run["job"]["seq"]):
        run["absent"] = f"the loss rose from {losses[0]:.4f} to {losses[-1]:.4f}"
    elif far:
        run["absent"] = f"the first loss is {losses[0]:.4f}, and bf16's {base:.4f}"
    run["failed"] = "absent" in run and run["job"]["program"] == OURS


def lines(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one line a subject over all rounds, with its ratios to our bf16 and to the peer."""
    done = [r for r in runs if "absent" not in r]
    rates = [rate for r in done for rate in r.get("gemm_flops", {}).values()]
    found = []
    for name in dict.fromkeys(r["name"] for r in done):
        mine = [r for r in done if r["name"] == name]
        times = [t for r in mine for t in r["times"]]
        median, p10, p90 = (float(np.quantile(times, q)) for q in (0.5, 0.1, 0.9))
        speed = with_speed(Job(**mine[0]["job"]), {"times": times})
        device = mine[0]["environment"]["device"]
        peak = peak_flops(device)
        flops, windows = speed["flops_per_s_per_device"], at(mine)
        found.append(
            {
                "name": name + (", loss in chunks" if mine[0]["job"]["loss"] == "chunked" else ""),
                "rounds": len(mine),
                "step_seconds": {"median": median, "p10": p10, "p90": p90},
                "step_seconds_at": windows,
                "slowest_of_first": slowest_of_first(windows),
                "tokens_per_s": speed["tokens_per_s"],
                "flops_per_s_per_device": flops,
                "mfu": flops / peak if peak else None,
                "mfu_of_measured_gemm": flops / max(rates) if rates else None,
                "peak_bytes": max((r["peak_bytes"] for r in mine if r["peak_bytes"]), default=None),
                "compile_seconds": mine[0].get("lower_seconds", 0.0) + mine[0]["compile_seconds"],
                "first_loss": mine[0]["losses"][0],
                "last_loss": mine[0]["losses"][-1],
            }
        )
    bf16 = next((f for f in found if f["name"] == "bf16"), None)
    peer = next((f for f in found if f["name"].startswith("PyTorch")), None)
    for line in found:
        for key, base in (("of_bf16", bf16), ("of_peer", peer)):
            line[key] = line["tokens_per_s"] / base["tokens_per_s"] if base else None
    return found


def at(runs: list[dict[str, Any]]) -> dict[int, float]:
    """Returns the median seconds of `WINDOW` steps by the step that they end at: the 25th, 50th, 100th, …."""
    found = {}
    times = [run["times_before"] + run["times"] for run in runs]  # the first is step 2's
    steps = len(times[0]) + 1
    for end in (25, *range(50, steps + 1, 50)):
        if end <= steps:
            window = slice(end - 1 - WINDOW, end - 1)
            found[end] = statistics.median(t for run in times for t in run[window])
    return found


def slowest_of_first(windows: dict[int, float]) -> float | None:
    """Returns the slowest window's seconds relative to the first window's; None if there are not two."""
    first, *later = windows.values() or [math.nan]
    return max(later) / first if later else None


def print_report(report: dict[str, Any]) -> None:
    """Prints the table, the profiles, and the runs that are absent."""
    header = (
        " | step ms | p10 | p90 | slowest x first | tokens/s | TFLOP/s | MFU | of GEMM | peak GB | compile s"
    )
    rows = []
    for line in report.get("lines", []):
        seconds = line["step_seconds"].values()
        numbers = [f"{t * 1e3:.1f}" for t in seconds]
        numbers += [f"{line['slowest_of_first']:.3f}" if line["slowest_of_first"] else "-"]
        numbers += [f"{line['tokens_per_s']:,.0f}"]
        numbers += [f"{line['flops_per_s_per_device'] / 1e12:.1f}"]
        numbers += [_percent(line["mfu"]), _percent(line["mfu_of_measured_gemm"])]
        numbers += [f"{line['peak_bytes'] / 1e9:.1f}" if line["peak_bytes"] else "-"]
        numbers += [f"{line['compile_seconds']:.0f}"]
        numbers += [f"{line[k]:.3f}" if line[k] else "-" for k in ("of_bf16", "of_peer")]
        rows.append([line["name"], *numbers, f"{line['first_loss']:.4f}", f"{line['last_loss']:.4f}"])
    print(f"\nSteps on {_described(report['data'])}\n")
    print(table(f"{header} | x bf16 | x PyTorch | first loss | last loss", rows, padded=True))
    for run in report["runs"]:
        if "trace" in run:
            print(f"\n{run['name']}, profile\n")
            trace_table.print_summary(run["trace"])
        if "absent" in run:
            print(f"absent: {run['name']}: {run['absent']}", flush=True)
        if "whole_loss" in run:
            print(f"{run['name']}: loss in chunks, since with transformers' own: {run['whole_loss']}")
    print()


def _described(data: dict[str, Any] | str) -> str:
    """Returns what was trained on: the name of a text and its number of tokens, or "random tokens"."""
    return data if isinstance(data, str) else f"{data['source']}, {data['train_tokens']:,} tokens"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"
