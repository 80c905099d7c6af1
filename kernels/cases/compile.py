"""Compiles builds and writes their files; `python -m mxjax.kernels.cases` is its command line."""

import argparse
import concurrent.futures
import fnmatch
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mxjax.kernels.launch  # noqa: F401, first because without Triton it says what to install

# isort: split
from triton import knobs
from triton.compiler import CompiledKernel

from mxjax.kernels.cases.builds import Build
from mxjax.kernels.cases.record import make_record
from mxjax.kernels.lowering import build_kernel, specialized
from mxjax.runtime.devices import Target
from mxjax.runtime.tables import table

DESCRIPTION = "Compiles every kernel for the shapes of Llama 3.1 8B, on a machine with or without a GPU."
TARGETS = ("gfx950", "sm_90", "sm_100", "sm_120")
MODULES = ("matmul", "quantize", "block16", "attention")


def list_builds(module: str, target: str, candidates: bool = False) -> list[Build]:
    """Returns the builds of one of MODULES, on request with small ones of what benchmarks time."""
    found = importlib.import_module(f"mxjax.kernels.cases.{module}")
    more = found.candidate_builds if candidates and hasattr(found, "candidate_builds") else lambda _: []
    return [*found.builds(parse_target(target)), *more(parse_target(target))]


def parse_target(name: str) -> Target:
    """Returns the target of a name like gfx950 or sm_100."""
    return Target("hip" if name.startswith("gfx") else "cuda", name)


def compile_build(build: Build, target: str) -> CompiledKernel:
    """Compiles a build as `mxjax.dot` compiles its kernels: without fusing products and sums."""
    backend, arch = parse_target(target)[:2]
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": False}
    return build_kernel(
        build.kernel,
        {name: argument.dtype for name, argument in build.signature.items()},
        specialized(build.kernel, backend, build.constants),
        backend,
        arch,
        options | build.options,
        line_info=True,
    )


def build_one(module: str, target: str, name: str, out: Path) -> dict[str, Any]:
    """Compiles one build, writes its files and returns its record."""
    [build] = [b for b in list_builds(module, target, candidates=True) if b.name == name]
    compiled = compile_build(build, target)
    hip = target.startswith("gfx")
    record = make_record(build, target, compiled, "" if hip else _resource_usage(compiled.asm["cubin"]))
    kinds = ("hsaco", "amdgcn") if hip else ("cubin", "ptx", "sass")
    record["files"] = {kind: f"{name}.{kind}" for kind in kinds}
    folder = out / target
    folder.mkdir(parents=True, exist_ok=True)
    for kind, file in record["files"].items():
        content = compiled.asm[kind]
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2, default=vars) + "\n")
    return record


def build_all(
    wanted: Sequence[tuple[str, str, str]], out: Path, jobs: int
) -> tuple[list[dict], dict[str, str]]:
    """Compiles each (module, target, name) in `jobs` processes.

    Returns:
      The records, and the errors by target and name.
    """
    done, failed = [], {}
    if jobs == 1:  # in this process: another would import JAX and Triton again
        pool = concurrent.futures.ThreadPoolExecutor(1)
    else:
        context = multiprocessing.get_context("spawn")
        pool = concurrent.futures.ProcessPoolExecutor(min(jobs, len(wanted)), mp_context=context)
    with pool:
        futures = {pool.submit(build_one, *job, out): job for job in wanted}
        for future in concurrent.futures.as_completed(futures):
            _, target, name = futures[future]
            try:
                done.append(future.result())
            except Exception as error:
                failed[f"{target} {name}"] = str(error).strip().splitlines()[-1][:500]
    return sorted(done, key=lambda record: (record["target"], record["name"])), failed


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds for the targets on the command line, writes and prints; exits with 1 if a build failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.cases", description=DESCRIPTION)
    parser.add_argument(
        "--target", action="append", required=True, help=f"one of {', '.join(TARGETS)}; repeatable"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    only = "pattern of NAME or TARGET/NAME to build; repeatable"
    parser.add_argument("--only", action="append", default=[], help=only)
    candidates = "also build every tile and block that the benchmarks time, in small shapes"
    parser.add_argument("--candidates", action="store_true", help=candidates)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compiles at a time")
    options = parser.parse_args(arguments)
    for target in options.target:
        if target not in TARGETS:
            parser.error(f"unknown target {target!r}; there are {', '.join(TARGETS)}")
    if knobs.runtime.interpret:
        parser.error("TRITON_INTERPRET is set, which replaces the compiler: unset it")
    wanted = [
        (module, target, build.name)
        for target in dict.fromkeys(options.target)
        for module in MODULES
        for build in list_builds(module, target, options.candidates)
        if not options.only or _matches(target, build.name, options.only)
    ]
    if not wanted:
        parser.error(f"no build is named like {', '.join(options.only)}")
    done, failed = build_all(wanted, options.out, options.jobs)
    print(table(COLUMNS, [_row(record) for record in done], padded=True))
    for name, error in sorted(failed.items()):
        print(f"failed: {name}: {error}", file=sys.stderr)
    print(json.dumps(summarize(done, failed)))
    if failed:
        sys.exit(1)


def _matches(target: str, name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(x, pattern) for x in (name, f"{target}/{name}") for pattern in patterns)


COLUMNS = "target | name | tile | warps | registers | spills | scratch | shared | waves | main loop"


def _row(record: dict[str, Any]) -> list[object]:
    resources, constants = record["resources"], record["constants"]
    return [
        record["target"],
        record["name"],
        "x".join(str(v) for name, v in constants.items() if name.startswith("BLOCK")),
        record["warps"],
        resources.get("vgprs", resources.get("registers")),
        sum(count for name, count in resources.items() if name.endswith("spills")),
        resources["scratch_bytes"],
        record["shared_bytes"],
        resources.get("waves_per_simd", resources.get("warps_per_multiprocessor", 0) // 4),
        " ".join(f"{name} {count}" for name, count in record["main_loop"]["classes"].items()),
    ]


def summarize(done: Sequence[dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    """Returns the content of the last line printed."""
    kept = ("target", "name", "shared_bytes", "resources")
    builds = [{k: r[k] for k in kept} | {"main_loop": r["main_loop"]["classes"]} for r in done]
    return {"built": len(done), "failed": failed, "builds": builds}


def _resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.sub(r".*Function", "Function", usage, count=1, flags=re.S)
