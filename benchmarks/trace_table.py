"""A GPU's time: a profile's kernels by kind, and the longest ones.

    python -m benchmarks.trace_table FOLDER --steps 3

FOLDER is what `jax.profiler.trace` wrote. Its trace.json.gz has at most a million events: trace a few steps.
A kernel's kind follows from its name; "elementwise" are all others. Kinds on several streams may overlap in
time. "idle" is the time between a device's first and last kernel in which it runs nothing.
"""

import argparse
import collections
import gzip
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mxjax.tables import table

# The first pattern that a kernel's name matches decides.
KINDS = {
    "collectives": r"nccl|rccl|all_?reduce_kernel|ragged_all_to_all",
    "attention": r"sdpa|flash|fmha|attention",
    "quantize": r"quantize_(pairs_|normed_|gated_|gated_gradient_)?kernel|draw_kernel",
    "carrier": r"carry_(both_)?kernel",
    "correction": r"sift_kernel|correct_kernel",
    "GEMM": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|Cijk_|splitk",
    "copies": r"memcpy|memset",
    "elementwise": r"",
}
LONGEST = 15


class Kernel(NamedTuple):
    """One kernel's run on a device; times in microseconds."""

    device: str
    name: str
    start: float
    duration: float


def read(folder: pathlib.Path) -> list[Kernel]:
    """Reads the kernels of the newest profile under a folder.

    Raises:
      ValueError: there is no profile.
    """
    paths = sorted(folder.rglob("*.trace.json.gz"))
    if not paths:
        raise ValueError(
            f"{folder} holds no *.trace.json.gz; name the folder that jax.profiler.trace wrote to"
        )
    newest = [path for path in paths if path.parent == paths[-1].parent]
    return [
        k for path in newest for k in kernels(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    ]


def kernels(events: Iterable[dict[str, Any]]) -> list[Kernel]:
    """Returns the kernels on GPU streams; a device's other threads repeat them by module, step or scope."""
    names: dict[tuple[str, Any, Any], str] = {}
    complete = []
    for event in events:
        if event.get("ph") == "M" and event["name"] in ("process_name", "thread_name"):
            thread = event["tid"] if event["name"] == "thread_name" else None
            names[event["name"], event["pid"], thread] = event["args"]["name"]
        elif event.get("ph") == "X":
            complete.append(event)
    found = []
    for event in complete:
        device = names.get(("process_name", event["pid"], None), "")
        thread = names.get(("thread_name", event["pid"], event["tid"]), "")
        if device.startswith("/device:GPU") and thread.startswith("Stream #"):
            found.append(Kernel(device, event["name"], event["ts"], event.get("dur", 0.0)))
    return found


def kind_of(name: str) -> str:
    """Returns the kind of a kernel."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def summarize(found: list[Kernel], steps: int) -> dict[str, Any]:
    """Returns milliseconds and launches a step and device, by kind and by longest kernel, and "idle"."""
    devices = sorted({k.device for k in found})
    if not devices:
        return {"devices": 0, "kinds": {}, "longest": {}, "idle": 0.0, "span": 0.0}
    each = steps * len(devices)
    by_kind: dict[str, list[float]] = collections.defaultdict(list)
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for kernel in found:
        by_kind[kind_of(kernel.name)].append(kernel.duration)
        by_name[kernel.name].append(kernel.duration)
    span = busy = 0.0
    for device in devices:
        mine = [k for k in found if k.device == device]
        span += max(k.start + k.duration for k in mine) - min(k.start for k in mine)
        busy += covered(mine)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    return {
        "devices": len(devices),
        "kinds": {kind: _each(by_kind[kind], each) for kind in KINDS if kind in by_kind},
        "longest": {name: _each(times, each) | {"kind": kind_of(name)} for name, times in longest},
        "idle": (span - busy) / each / 1e3,
        "span": span / each / 1e3,
    }


def covered(found: list[Kernel]) -> float:
    """Returns the microseconds in which at least one of the kernels runs."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(found, key=lambda k: k.start):
        stop = kernel.start + kernel.duration
        total += max(0.0, stop - max(end, kernel.start))
        end = max(end, stop)
    return total


def _each(times: list[float], runs: int) -> dict[str, Any]:
    return {"ms": sum(times) / runs / 1e3, "launches": len(times) / runs}


def print_summary(summary: dict[str, Any]) -> None:
    """Prints the tables of a summary."""
    if not summary["devices"]:
        print("the profile holds no kernel of a GPU")
        return
    span = summary["span"]
    rows = [
        [kind, f"{v['ms']:.2f}", f"{v['ms'] / span:.1%}", f"{v['launches']:.0f}"]
        for kind, v in summary["kinds"].items()
    ]
    rows += [["idle", f"{summary['idle']:.2f}", f"{summary['idle'] / span:.1%}", ""]]
    rows.append(["step", f"{span:.2f}", "", ""])
    print(table("kind | ms a step | of the step | launches", rows, padded=True))
    rows = [
        [name[:80], v["kind"], f"{v['ms']:.2f}", f"{v['launches']:.0f}"]
        for name, v in summary["longest"].items()
    ]
    print()
    print(table("kernel | kind | ms a step | launches", rows, padded=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables of the profile that the command line names, and JSON last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace_table", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=1, help="steps that were traced")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    try:
        found = read(options.folder)
    except ValueError as error:
        parser.error(str(error))
    summary = summarize(found, options.steps)
    print_summary(summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
