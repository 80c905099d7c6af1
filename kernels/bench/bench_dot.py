"""Time of `mxjax.dot` forward and backward at Llama 3.1 8B's shapes, beside `jnp.dot` in bfloat16 and others.

    python -m mxjax.kernels.bench.bench_dot [--tokens 8192] [--linears mlp.down …] [--policies …] [--out FILE]

Each line of ours is first compared with the reference on a part of the tensors, and every result with the
baseline's: "differs" is the largest of the three relative distances. The operands alone (rotate, quantize,
encode for the GEMM) are measured apart; the rest of a line's time is its three GEMMs. A line of others that
does not run here is listed with the reason. `--compile` measures compilation in processes of its own. Prints
a table a shape, and as its last line JSON. XLA tunes its GEMMs for each new shape, which takes most of the
time: choose few shapes a run, and give all runs one `--cache`.
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
from mxjax.kernels.bench.lines import (
    BASELINE,
    LARGEST_DIFFERENCE,
    POLICIES,
    Line,
    Tensors,
    check,
    distance,
    lines_of,
    make_tensors,
)
from mxjax.kernels.bench.timing import (
    LATE,
    Absent,
    Report,
    Timing,
    add_arguments,
    first_line,
    measure,
    print_absent,
    print_table,
)
from mxjax.kernels.shapes import LINEARS, TOKENS


class Result(NamedTuple):
    """A line's time, that of its parts, its first call's seconds, and how far its results are off."""

    name: str
    whole: Timing
    parts: dict[str, Timing]
    first_call: float
    differs: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the command line asks for and prints it; exits with 1 if a line of ours failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_dot", description=__doc__)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    linears = list(LINEARS)
    parser.add_argument("--linears", nargs="+", default=linears, choices=linears, help=", ".join(linears))
    parser.add_argument("--policies", nargs="*", default=list(POLICIES))
    parser.add_argument("--implementations", nargs="+", default=["xla", "fp8_carriers"])
    parser.add_argument("--peers", nargs="*", default=[""], help="others whose names hold one of these")
    parser.add_argument("--compile", nargs="*", default=["wgrad_hadamard"], help="policies, by fp8")
    parser.add_argument("--cache", type=Path, help="folder of JAX's compilation cache")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # --compile's processes need memory too
    if options.cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(options.cache.absolute()))
    report = Report("mxjax.kernels.bench.bench_dot", arguments, options)
    lines = list(lines_of(options.policies, options.implementations, options.peers))
    shapes = [(tokens, name) for tokens in options.tokens for name in options.linears]
    for tokens, name in shapes:
        bench_shape(report, lines, tokens, name)
    for policy in options.compile:
        time_compilation(report, policy, *shapes[0])
    report.print()


def bench_shape(report: Report, lines: Sequence[Line], tokens: int, linear: str) -> None:
    """Measures all lines at one shape and prints the table."""
    d_in, d_out = LINEARS[linear]
    tensors = make_tensors(tokens, d_in, d_out)
    baseline = lines[0].run(*tensors)
    results = []
    for line in lines:
        result = time_line(line, tensors, baseline, report)
        results.append(result)
        shape = {"tokens": tokens, "linear": linear, "d_in": d_in, "d_out": d_out}
        report.add(result, **shape, name=line.name, **numbers(result, results[0]))
    print(f"\n{linear}: {tokens} x {d_in} -> {d_out}\n")
    timed = [r for r in results if isinstance(r, Result)]
    columns = ["", "ms", "p10", "p90", "of jnp.dot", "quantize", "operands", "GEMMs", "differs"]
    print_table(columns, [row(r, timed[0]) for r in timed])
    print_absent(results)


def time_line(line: Line, tensors: Tensors, baseline: Sequence[jax.Array], report: Report) -> Result | Absent:
    """Returns the times of a line once its results are checked, or why there are none."""
    ours = line.policy is not None or line.name == BASELINE
    if report.is_late and line.name != BASELINE:
        return Absent(line.name, LATE)
    try:
        check(line, tensors)
        start = time.perf_counter()
        results = jax.block_until_ready(line.run(*tensors))
        first_call = time.perf_counter() - start
        differs = max(float(distance(*pair)) for pair in zip(results, baseline, strict=True))
        if not differs < LARGEST_DIFFERENCE:
            return Absent(line.name, f"wrong: differs from jnp.dot by {differs}", ours)
        del results
        timer: Callable[..., Timing] = functools.partial(measure, rounds=report.rounds)
        parts = {name: timer(run, *tensors) for name, run in line.parts.items()}
        return Result(line.name, timer(line.run, *tensors), parts, first_call, differs)
    except Exception as error:  # the other lines are worth having
        return Absent(line.name, first_line(error), ours)


def numbers(result: Result | Absent, baseline: Result | Absent) -> dict[str, object]:
    """Returns what the JSON says of a line, in seconds; nothing if it did not run."""
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
    """Returns a line of the table, in milliseconds."""
    whole = result.whole.median
    cells = [result.name, *(f"{1e3 * t:.2f}" for t in result.whole), f"{whole / baseline.whole.median:.2f}"]
    for name in ("quantize", "operands"):
        cells.append(f"{1e3 * result.parts[name].median:.2f}" if name in result.parts else "")
    gemms = f"{1e3 * (whole - result.parts['operands'].median):.2f}" if "operands" in result.parts else ""
    return [*cells, gemms, f"{result.differs:.3f}"]


def time_compilation(report: Report, policy: str, tokens: int, linear: str) -> None:
    """Measures how long `dot` compiles at one shape, by fp8, and prints it."""
    name = f"{policy}, fp8: compilation"
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
    table = [[k, *(f"{t:.1f}" for t in (*v.values(), sum(v.values())))] for k, v in seconds.items()]
    print_table(["cache", "lower", "compile", "both"], table)


if __name__ == "__main__":
    main()
