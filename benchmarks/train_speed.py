"""Training steps of a Llama on GPUs: tokens/s, MFU and peak memory of policies side by side, beside PyTorch.

    python -m benchmarks.train_speed --model llama3.2-1b --batch 4 --seq 4096 --policies bf16 fp8 --peer

Trains with train.py's step (float32 weights, AdamW, clipping) on text, and times the steps after the first
`--before` of them: gradients of trained weights have outliers, for which some kernels need more time. So a
line also says how much slower the slowest 20 steps were than the first. Each loss is fetched one step late.
`--random-tokens` times the first steps on random tokens instead. Every policy runs in its own process, so
that its peak memory is its own; `--rounds` repeats the cycle. `--peer` adds transformers' Llama in PyTorch
with the same dimensions, tokens and optimizer (benchmarks/train_peer.py). If its whole logits do not fit, it
computes its loss in chunks, and its line says so.

A line counts only if its losses are finite and do not rise, and if the first is near bf16's, which has the
same weights and tokens. FLOPs are the model's: 6 a parameter and token, and 6 S N H a layer for causal
attention (`DecoderConfig.flops_per_token`), no matter what is recomputed, and the same for the peer. MFU is
relative to the published dense bfloat16 peak, and to the fastest bfloat16 GEMM measured in the same run.
Prints a table, and JSON as the last line; --out has the JSON while it grows.

    python -m benchmarks.train_speed --trace FOLDER

prints where a GPU's time went: kernels by kind, and the longest ones. A kind follows from the kernel's name;
"elementwise" are all others. Kinds on several streams may overlap. "idle" is the time between a device's
first and last kernel in which it runs nothing.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import train_worker
from benchmarks.train_worker import OURS, PEER, TRACED_STEPS, Job
from models.configs import get_config
from mxjax.kernels.selftest.measured import LATE
from mxjax.products.implementations import Implementation
from mxjax.recipes import get_policy
from mxjax.runtime.checkout import commit
from mxjax.runtime.remat import Remat
from mxjax.runtime.tables import table
from training.config import parse_rules
from training.files import write_atomically
from training.log.throughput import peak_flops
from training.process.environment import input_errors
from training.process.start import unwinding_signals

OUT_OF_MEMORY = ("OutOfMemoryError", "RESOURCE_EXHAUSTED", "out of memory")
FIRST_LOSS_TOLERANCE = 0.1  # nats from bf16's; quantization moves the first loss by about 0.01
OF_BYTES = 4  # times that on bytes: most are the same few, and their errors do not average out
WINDOW = 20  # steps of which a median is taken
NOISE = 6.0  # nats times the root of a step's tokens: the most that two random batches' losses differ


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the command line names and prints it; exits with 1 if a line of ours failed."""
    options = parse(arguments)
    if options.trace is not None:
        with input_errors():
            summary = train_worker.summarize(train_worker.read_trace(options.trace), options.steps)
        train_worker.print_trace(summary)
        print(json.dumps(summary))
        return
    given = sys.argv[1:] if arguments is None else list(arguments)
    report: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "benchmarks.train_speed", *_without_places(given)]),
        "commit": options.commit or commit() or "unknown",
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "runs": [],
    }
    end = time.monotonic() + options.seconds
    with unwinding_signals(), tempfile.TemporaryDirectory() as cache:  # a signal ends the job's process too
        environment = child_environment(options, pathlib.Path(options.cache or cache).absolute())
        options.tokens, report["data"] = None, "random tokens"
        if not options.random_tokens:
            options.tokens = str(pathlib.Path(cache) / "tokens.npy")
            with input_errors():
                tokens = pathlib.Path(options.tokens)
                report["data"] = train_worker.write_tokens(tokens, jobs(options, 0)[0], options.data)
        for round_ in range(options.rounds):
            for job in jobs(options, round_):
                report["runs"].append({"round": round_} | run_with_fallback(job, environment, end))
                check(report["runs"], is_bytes=options.data is None and not options.random_tokens)
                report["lines"] = lines(report["runs"])
                if options.out:
                    write_atomically(options.out, json.dumps(report, indent=1) + "\n")
    print_report(report)
    print(json.dumps(report), flush=True)
    failed = [f"{r['name']}: {r['absent']}" for r in report["runs"] if r.get("failed")]
    if failed:
        raise SystemExit("failed: " + "; ".join(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_speed", description=__doc__)
    parser.add_argument("--model", default="llama3.2-1b", help="a name of models/configs.py")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, of all devices together")
    parser.add_argument("--seq", type=int, default=4096, help="tokens a sequence")
    parser.add_argument("--policies", nargs="*", default=["bf16", "fp8", "wgrad_hadamard", "full_hadamard"])
    parser.add_argument("--layers", nargs="*", default=(), help="exceptions by layer, as train.py's")
    how = typing.get_args(Implementation)
    parser.add_argument("--implementation", choices=how, help="of the products; default: the fastest")
    parser.add_argument(
        "--remat",
        default="none",
        choices=typing.get_args(Remat),
        help="as train.py's, and of the peer's layers unless none",
    )
    parser.add_argument("--mesh", help="as train.py's; default: fsdp over all --devices")
    parser.add_argument("--devices", type=int, default=1, help="the first GPUs of the machine")
    parser.add_argument(
        "--peer", nargs="*", choices=("autocast", "bf16"), help="precisions; default: autocast"
    )
    parser.add_argument("--peer-remat", choices=("none", "full"), help="default: full unless --remat none")
    parser.add_argument(
        "--steps", type=int, help=f"timed, default: 10; or of --trace, default: {TRACED_STEPS}"
    )
    parser.add_argument("--before", type=int, help="steps before these; default: 300, or 3 on random tokens")
    parser.add_argument("--data", help="text or dataset PREFIX; default: the source of Python's library")
    parser.add_argument("--random-tokens", action="store_true", help="train on these instead of text")
    parser.add_argument("--rounds", type=int, default=1, help="over all lines, one after another")
    parser.add_argument(
        "--profile", type=pathlib.Path, help="folder for a profile of a few more steps of ours"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument(
        "--out", type=pathlib.Path, help="file for the numbers as JSON, written after every line"
    )
    parser.add_argument("--commit", help="of the code; default: what git says")
    parser.add_argument(
        "--cache", type=pathlib.Path, help="folder for what is compiled; default: this run's own"
    )
    parser.add_argument(
        "--trace", type=pathlib.Path, help="measure nothing: print the profile that --profile left here"
    )
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; exits with an error before any process starts."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        get_config(options.model)
        for policy in options.policies:
            get_policy(policy)
        parse_rules(options.layers)
    except ValueError as error:
        parser.error(str(error))
    if options.before is None:
        options.before = 3 if options.random_tokens else 300
    if options.steps is None:
        options.steps = 10 if options.trace is None else TRACED_STEPS
    if min(options.batch, options.seq, options.steps, options.before, options.rounds, options.devices) < 1:
        parser.error("--batch, --seq, --steps, --before, --rounds and --devices must be at least 1")
    if not options.policies and options.peer is None:
        parser.error("there is nothing to measure: name --policies, or give --peer")
    if len(set(options.policies)) < len(options.policies):
        parser.error("--policies names a policy twice; repeat measurements with --rounds")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        parser.error(f"--out {options.out}: there is no folder {options.out.parent}")
    if options.random_tokens and options.data is not None:
        parser.error("--data and --random-tokens exclude each other")
    if options.batch % options.devices:
        parser.error(f"--batch {options.batch} must be a multiple of --devices {options.devices}")
    return options


def jobs(options: argparse.Namespace, round_: int) -> list[Job]:
    """Returns a round's jobs: ours, then the peer's."""
    names = [f.name for f in dataclasses.fields(Job)]
    common: dict[str, Any] = {
        name: value for name, value in vars(options).items() if name in names and name != "trace"
    }
    profile = options.profile.absolute() if options.profile and round_ == 0 else None
    found = [
        Job(OURS, policy, **common, trace=profile and str(profile / policy)) for policy in options.policies
    ]
    if options.peer is not None:
        remat = options.peer_remat or ("none" if options.remat == "none" else "full")
        common["remat"] = remat
        found += [Job(PEER, precision, **common) for precision in options.peer or ["autocast"]]
    return found


def _without_places(given: Sequence[str]) -> list[str]:
    """Removes the flags that name files of this machine from a command line."""
    flags = ("--out", "--cache", "--profile", "--data")
    places = {i for i, word in enumerate(given) if word in flags}
    words = [word for i, word in enumerate(given) if not places & {i, i - 1}]
    return [word for word in words if not word.startswith(tuple(f"{flag}=" for flag in flags))]


def child_environment(options: argparse.Namespace, cache: pathlib.Path) -> dict[str, str]:
    """Returns this process's environment with the visible devices and the compilation caches."""
    visible = {}
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        all_devices = os.environ.get(name) or ",".join(map(str, range(options.devices)))
        visible[name] = ",".join(all_devices.split(",")[: options.devices])
    defaults = {
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92",  # JAX's default of 0.75 is too little for large models
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    return defaults | dict(os.environ) | visible


def run_with_fallback(job: Job, environment: dict[str, str], end: float) -> dict[str, Any]:
    """Runs a job; runs the peer again with its loss in chunks if memory was not enough."""
    outcome = run(job, environment, end)
    if job.program == PEER and any(text in outcome.get("absent", "") for text in OUT_OF_MEMORY):
        chunked = dataclasses.replace(job, loss="chunked")
        return run(chunked, environment, end) | {"whole_loss": outcome["absent"]}
    return outcome


def run(job: Job, environment: dict[str, str], end: float) -> dict[str, Any]:
    """Runs a job in a process; returns its outcome, or the reason under "absent"."""
    record = {"name": job.name, "job": dataclasses.asdict(job)}
    record["job"] |= {name: record["job"][name] is not None for name in ("trace", "tokens")}
    if time.monotonic() > end:
        return record | {"absent": LATE}
    print(f"\n{job.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        question, answer = pathlib.Path(folder) / "job.json", pathlib.Path(folder) / "outcome.json"
        question.write_text(json.dumps(dataclasses.asdict(job)))
        command = [sys.executable, "-m", job.program, str(question), str(answer)]
        with (pathlib.Path(folder) / "log").open("w+") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(None if math.isinf(end) else max(end - time.monotonic(), 0))
                late = False
            except subprocess.TimeoutExpired:
                late = True
            finally:
                stop(process)
            log.seek(0)
            said = log.read()
        if process.returncode or not answer.exists():
            print(said[-4000:], flush=True)
            if late:
                return record | {"absent": "not finished when --seconds had passed"}
            return record | {"absent": cause(said), "failed": job.program == OURS}
        return record | with_speed(job, json.loads(answer.read_text()))


def stop(process: subprocess.Popen) -> None:
    """Ends a process and the processes that it started, which are in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def cause(said: str) -> str:
    """Returns the last line of a process's output that names an error, or else its last line."""
    found = [line.strip() for line in said.splitlines() if line.strip()] or ["it printed nothing"]
    named = [line for line in found if "Error: " in line or any(text in line for text in OUT_OF_MEMORY)]
    return (named or found)[-1][:400]


def with_speed(job: Job, outcome: dict[str, Any]) -> dict[str, Any]:
    """Adds the speed of the median step to an outcome."""
    model, seconds = get_config(job.model), statistics.median(outcome["times"])
    tokens = job.batch * job.seq
    per_device = tokens * model.flops_per_token(job.seq) / seconds / job.devices
    return outcome | {"tokens_per_s": tokens / seconds, "flops_per_s_per_device": per_device}


def check(runs: list[dict[str, Any]], *, is_bytes: bool = False) -> None:
    """Marks the last run as absent if its losses are wrong."""
    run = runs[-1]
    if "absent" in run:
        return
    losses = run["losses"]
    base = next((r["losses"][0] for r in runs if r["name"] == "bf16" and "losses" in r), None)
    tolerance = FIRST_LOSS_TOLERANCE * (OF_BYTES if is_bytes else 1)
    far = base is not None and run["job"]["program"] == OURS and abs(losses[0] - base) > tolerance
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
        first, *later = windows.values() or [math.nan]
        found.append(
            {
                "name": name + (", loss in chunks" if mine[0]["job"]["loss"] == "chunked" else ""),
                "rounds": len(mine),
                "step_seconds": {"median": median, "p10": p10, "p90": p90},
                "step_seconds_at": windows,
                "slowest_of_first": max(later) / first if later else None,
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
    data = report["data"]  # "random tokens", or the facts of a text
    said = data if isinstance(data, str) else f"{data['source']}, {data['train_tokens']:,} tokens"
    print(f"\nSteps on {said}\n")
    print(table(f"{header} | x bf16 | x PyTorch | first loss | last loss", rows, padded=True))
    for run in report["runs"]:
        if "trace" in run:
            print(f"\n{run['name']}, profile\n")
            train_worker.print_trace(run["trace"])
        if "absent" in run:
            print(f"absent: {run['name']}: {run['absent']}", flush=True)
        if "whole_loss" in run:
            print(f"{run['name']}: loss in chunks, since with transformers' own: {run['whole_loss']}")
    print()


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


if __name__ == "__main__":
    main()
