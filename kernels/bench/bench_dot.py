"""Time of `mxjax.dot` forward and backward at Llama 3.1 8B's shapes, beside `jnp.dot` in bfloat16 and others.

    python -m mxjax.kernels.bench.bench_dot [--tokens 8192] [--linears mlp.down …] [--policies …] [--out FILE]

Before our cases are timed, they are compared with the reference on a part of the tensors. All results are
compared with the baseline: "differs" is the largest relative distance of y, dx and dw. Preparing the operands
(rotate, quantize, encode for the GEMM) is also timed alone; the rest is the three GEMMs. A case of another
library that cannot run here is listed with the reason. `--compile` times compilation in separate processes.
Prints one table a shape, and JSON as the last line. XLA tunes its GEMMs for each new shape, which takes most
of the time: choose few shapes a run, and give all runs one `--cache`.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from mxjax.kernels.bench.bench_compile import compile_seconds
from mxjax.kernels.bench.dot_cases import (
    BASELINE,
    LARGEST_DIFFERENCE,
    POLICIES,
    Case,
    Tensors,
    check,
    distance,
    dot_cases,
    make_tensors,
)
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, first_line, print_absent
from mxjax.kernels.bench.timing import Timing, measure
from mxjax.kernels.shapes import LINEARS, TOKENS
from mxjax.tables import table


class Result(NamedTuple):
    """A case's time, its parts' times, its first call's seconds, and its distance to the baseline."""

    name: str
    whole: Timing
    parts: dict[str, Timing]
    first_call: float
    differs: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the cases that the command line names and prints them; exits with 1 if one of ours failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_dot", description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    linears = list(LINEARS)
    parser.add_argument("--linears", nargs="+", default=linears, choices=linears, help=", ".join(linears))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--implementations", nargs="+", default=["xla", "fp8_carriers"])
    parser.add_argument(
        "--peers", nargs="*", default=[""], help="parts of the names of other libraries' cases"
    )
    parser.add_argument(
        "--compile", nargs="*", default=["wgrad_hadamard"], help="policies whose compilation to time"
    )
    parser.add_argument("--cache", type=Path, help="folder of JAX's compilation cache")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for --compile's processes
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache.absolute()))
    report = Report("mxjax.kernels.bench.bench_dot", arguments, options)
    cases = list(dot_cases(options.policies, options.implementations, options.peers))
    shapes = [(tokens, name) for tokens in options.tokens for name in options.linears]
    for tokens, name in shapes:
        bench_shape(report, cases, tokens, name)
    for policy in options.compile:
        time_compilation(report, policy, *shapes[0])
    report.print()


def bench_shape(report: Report, cases: Sequence[Case], tokens: int, linear: str) -> None:
    """Measures all cases at one shape and prints the table."""
    d_in, d_out = LINEARS[linear]
    tensors = make_tensors(tokens, d_in, d_out)
    baseline = cases[0].run(*tensors)
    results = []
    for case in cases:
        result = time_case(case, tensors, baseline, report)
        results.append(result)
        shape = {"tokens": tokens, "linear": linear, "d_in": d_in, "d_out": d_out}
        report.add(result, **shape, name=case.name, **numbers(result, results[0]))
    print(f"\n{linear}: {tokens} x {d_in} -> {d_out}\n")
    timed = [r for r in results if isinstance(r, Result)]
    header = " | ms | p10 | p90 | of jnp.dot | quantize | operands | GEMMs | differs"
    print(table(header, [row(r, timed[0]) for r in timed], padded=True), flush=True)
    print_absent(results)


def time_case(case: Case, tensors: Tensors, baseline: Sequence[jax.Array], report: Report) -> Result | Absent:
    """Checks a case's results and returns its times, or why there are none."""
    ours = case.policy is not None or case.name == BASELINE
    if report.is_late and case.name != BASELINE:
        return Absent(case.name, LATE)
    try:
        check(case, tensors)
        start = time.perf_counter()
        results = jax.block_until_ready(case.run(*tensors))
        first_call = time.perf_counter() - start
        differs = max(float(distance(*pair)) for pair in zip(results, baseline, strict=True))
        if not differs < LARGEST_DIFFERENCE:
            return Absent(case.name, f"wrong: differs from jnp.dot by {differs}", ours)
        del results
        timer: Callable[..., Timing] = functools.partial(measure, rounds=report.rounds)
        parts = {name: timer(run, *tensors) for name, run in case.parts.items()}
        return Result(case.name, timer(case.run, *tensors), parts, first_call, differs)
    except Exception as error:  # keep the other cases
        return Absent(case.name, first_line(error), ours)


def numbers(result: Result | Absent, baseline: Result | Absent) -> dict[str, object]:
    """Returns a case's numbers for the JSON, in seconds; none if it did not run."""
    if isinstance(result, Absent):
        return {}
    of_baseline = {}
    if isinstance(baseline, Result):
        of_baseline["of_jnp_dot"] = result.whole.median / baseline.whole.median
    return {
        **result.whole._asdict(),
        **of_baseline,
        "parts": {name: timing._asdict() for name, timing in result.parts.items()},
        "first_call": result.first_call,
        "differs": result.differs,
    }


def row(result: Result, baseline: Result) -> list[str]:
    """Returns a row of the table, in milliseconds."""
    whole = result.whole.median
    cells = [result.name, *(f"{1e3 * t:.2f}" for t in result.whole), f"{whole / baseline.whole.median:.2f}"]
    for name in ("quantize", "operands"):
        cells.append(f"{1e3 * result.parts[name].median:.2f}" if name in result.parts else "")
    gemms = f"{1e3 * (whole - result.parts['operands'].median):.2f}" if "operands" in result.parts else ""
    return [*cells, gemms, f"{result.differs:.3f}"]


def time_compilation(report: Report, policy: str, tokens: int, linear: str) -> None:
    """Times the compilation of `dot` by fp8_carriers at one shape, and prints it."""
    name = f"{policy}, fp8_carriers: compilation"
    seconds: dict[str, dict[str, float]] | Absent
    try:
        late = report.is_late
        seconds = (
            Absent(name, LATE) if late else compile_seconds(policy, "fp8_carriers", tokens, *LINEARS[linear])
        )
    except RuntimeError as error:
        seconds = Absent(name, first_line(error), ours=True)
    record = {} if isinstance(seconds, Absent) else {"seconds": seconds}
    report.add(seconds, name=name, tokens=tokens, linear=linear, **record)
    if isinstance(seconds, Absent):
        print_absent([seconds])
        return
    print(f"\n{name} of {linear} at {tokens} tokens, in seconds\n")
    rows = []
    for state, numbers in seconds.items():
        times = [numbers[part] for part in ("trace", "lower", "compile")]
        rows.append([state, *(f"{t:.1f}" for t in (*times, sum(times))), numbers["compiled"]])
    print(table("cache | trace | lower | compile | all | kernels compiled", rows, padded=True), flush=True)


if __name__ == "__main__":
    main()
