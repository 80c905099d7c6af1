"""Tests mxjax on this machine's GPU, and times its GEMMs: what to run first on a new device.

    python -m mxjax.kernels.selftest [--report FILE] [--minutes 15] [--groups kernels …] [--quick]

  kernels   every kernel against its definition, bit for bit
  policies  `mxjax.dot` and its gradients under every policy, against implementation "xla"
  training  twenty steps of a small Llama, against the losses of a CPU
  gemms     every candidate tile of the FP4 GEMM at Llama 3.1 8B's shapes, checked and timed beside
            `jnp.dot` in bfloat16 and FP8; the fastest go into the tile table that the library then uses

Each group runs in a process of its own, which is started anew when a case crashes or hangs. Results go to the
report as they come, one JSON line each; a second start skips what passed. Without a GPU the kernels run in
Triton's interpreter, a few small cases of each group. Exits with 1 unless everything passed.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mxjax.kernels.selftest.cases import GROUPS
from mxjax.kernels.selftest.report import SelfTestReport
from mxjax.kernels.selftest.workers import Limits, Result, Worker, run_cases
from mxjax.runtime.devices import INTERPRETER, Target

START_SECONDS, CASE_SECONDS, COMPILE_SECONDS = 180, 180, 300
MOST_COMPILERS = 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the groups that the command line names, and prints the summary."""
    parser = argparse.ArgumentParser(
        prog="python -m mxjax.kernels.selftest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--report", type=Path, default=Path("mxjax-selftest.jsonl"), help="file of results")
    parser.add_argument("--minutes", type=float, default=15, help="time after which no case goes on")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--quick", action="store_true", help="a few small cases of each group")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the timed GEMMs")
    parser.add_argument("--table", type=Path, help="file of the tile table; default: the user's cache")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    device = describe_device(min(deadline, time.monotonic() + START_SECONDS))
    target, environment = Target(*device["target"]), device["environment"]
    quick = options.quick or target == INTERPRETER
    print(f"{environment['device']}, {target.arch}, {environment['runtime'].splitlines()[0]}", flush=True)
    drivers = [f"{name} {text.splitlines()[0]}" for name, text in environment["drivers"].items() if text]
    print("drivers:", ", ".join(drivers) or "none found", flush=True)
    print(", ".join(f"{k} {v}" for k, v in environment["packages"].items()), flush=True)
    if target == INTERPRETER:
        print("no GPU: kernels run in Triton's interpreter, a few small cases of each group", flush=True)
    settings = {"target": list(target), "quick": quick, "tokens": options.tokens}
    try:
        report = SelfTestReport(options.report, environment | settings)
    except (ValueError, OSError) as error:
        raise SystemExit(f"selftest: error: {error}") from error
    if report.resumed:
        print(f"{report.resumed} cases passed before, and are skipped: {options.report}", flush=True)
    if target != INTERPRETER:
        compile_all(settings, deadline)
    for group in options.groups:
        run_group(report, group, settings, deadline)
    print("\n" + report.summary(tuple(options.groups)))
    if "gemms" in options.groups:
        report_gemms(report, target, environment, options.table)
    print(f"report: {options.report}")
    sys.exit(0 if report.ok else 1)


def describe_device(deadline: float) -> Result:
    """Returns the machine's description, from a process of its own; ends this one if there is none."""
    results: list[Result] = []
    limits = Limits(START_SECONDS, START_SECONDS, deadline)
    run_cases(lambda _: start_worker({"group": "device"}), [], limits, results.append)
    if not results or results[-1]["outcome"] != "passed":
        result = results[-1] if results else {"outcome": "hung", "error": "no answer", "details": ""}
        details = str(result.get("details", "")).splitlines()
        raise SystemExit(
            "\n".join(details[-20:])
            + f"\nselftest: error: the device cannot be described ({result['outcome']}: {result['error']}); "
            "the lines above say why. docs/mi355x.md lists what to try"
        )
    return results[-1]


def start_worker(request: Mapping[str, Any], **variables: str) -> Worker:
    """Starts a process for a request; the request's target says what it runs on."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | variables
    if request.get("target") == list(INTERPRETER):
        environment |= {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    return Worker([sys.executable, "-m", "mxjax.kernels.selftest.worker"], request, environment)


def compile_all(settings: Mapping[str, Any], deadline: float) -> None:
    """Compiles all kernels into Triton's cache on all cores; what fails here fails later, with its name."""
    begun, shares = time.monotonic(), min(MOST_COMPILERS, os.cpu_count() or 1)
    print(f"compiling kernels in {shares} processes", flush=True)
    requests = [{**settings, "group": "compile", "share": [i, shares]} for i in range(shares)]
    workers = [start_worker(request, JAX_PLATFORMS="cpu") for request in requests]
    until = min(deadline, begun + COMPILE_SECONDS)
    compiled = 0
    for worker in workers:
        try:
            while (message := worker.next(until - time.monotonic())) is not None:
                compiled += message.get("outcome") == "passed"
        except TimeoutError:
            pass
        worker.close()
    print(f"  {compiled} programs in {time.monotonic() - begun:.0f} s", flush=True)


def run_group(report: SelfTestReport, group: str, settings: Mapping[str, Any], deadline: float) -> None:
    """Runs the cases of a group that have not passed yet."""
    print(group, flush=True)

    def start(skip: Sequence[str]) -> Worker:
        return start_worker({**settings, "group": group, "skip": list(skip)})

    limits = Limits(START_SECONDS, CASE_SECONDS, deadline)
    reason = run_cases(start, report.passed(group), limits, lambda result: report.add(group, result))
    report.give_up(group, reason)


def report_gemms(
    report: SelfTestReport, target: Target, environment: Mapping[str, Any], path: Path | None
) -> None:
    """Prints the times of the GEMMs and writes the tile table."""
    from mxjax.kernels.matmul.tiles import VARIABLE, default_path
    from mxjax.kernels.selftest.measured import header, rows
    from mxjax.kernels.selftest.tune_gemm import save_table
    from mxjax.runtime.tables import table

    records = [report.results["gemms", case] for case in report.passed("gemms")]
    for gemm in dict.fromkeys(record["of"] for record in records):
        print(f"\n{gemm}\n")
        print(table(header("FLOP"), rows([r for r in records if r["of"] == gemm]), padded=True))
    if path is None and target != INTERPRETER:
        path = default_path(target.arch)
    if path is not None and save_table(path, target, environment, records):
        print(f"\ntile table: {path} (the library reads it; set {VARIABLE}= to do without)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("selftest: interrupted; start it again to continue") from None
