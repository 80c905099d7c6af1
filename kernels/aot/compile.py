"""Compiles builds and writes their files; `python -m mxjax.kernels.aot` is its command line."""

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

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from mxjax.kernels.aot.builds import Build
from mxjax.kernels.aot.record import ALIGNMENT, TYPES, describe
from mxjax.kernels.launch import Target

DESCRIPTION = "Compiles every kernel for the shapes of Llama 3.1 8B, on a machine with or without a GPU."
TARGETS = ("gfx950", "sm_90", "sm_100")
MODULES = ("aot.gemm_builds", "aot.quantize_builds", "matmul.carry")


def list_builds(module: str, target: str) -> list[Build]:
    """Returns the builds of one kernel module."""
    return importlib.import_module(f"mxjax.kernels.{module}").builds(parse_target(target))


def parse_target(name: str) -> Target:
    """Returns the target of a name like gfx950 or sm_100."""
    return Target("hip" if name.startswith("gfx") else "cuda", name)


def compile_build(build: Build, target: str) -> CompiledKernel:
    """Returns the compiled kernel: pointers are multiples of 16 bytes, products and sums are not fused."""
    hip = target.startswith("gfx")
    names = build.kernel.arg_names
    signature = {
        n: "*" + TYPES[build.signature[n].dtype] if n in build.signature else "constexpr" for n in names
    }
    # As in `lowering.compile_kernel`: the code is the code that runs.
    attributes = {(names.index(name),): [["tt.divisibility", ALIGNMENT]] for name in build.signature}
    source = ASTSource(
        fn=build.kernel,
        signature=signature,
        constexprs={(names.index(n),): value for n, value in build.constants.items()},
        attrs=attributes,
    )
    device = GPUTarget("hip", target, 64) if hip else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages, "enable_fp_fusion": False}
    return triton.compile(source, target=device, options=options | build.options)


def build_one(module: str, target: str, name: str, out: Path) -> dict[str, Any]:
    """Compiles one build, writes its files and returns its description."""
    [build] = [b for b in list_builds(module, target) if b.name == name]
    compiled = compile_build(build, target)
    hip = target.startswith("gfx")
    description = describe(build, target, compiled, "" if hip else _resource_usage(compiled.asm["cubin"]))
    kinds = ("hsaco", "amdgcn") if hip else ("cubin", "ptx", "sass")
    description["files"] = {kind: f"{name}.{kind}" for kind in kinds}
    for kind in kinds:
        _write(out / target / f"{name}.{kind}", compiled.asm[kind])
    _write(out / target / f"{name}.json", json.dumps(description, indent=2) + "\n")
    return description


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(unfinished, path)


def build_all(
    wanted: Sequence[tuple[str, str, str]], out: Path, jobs: int
) -> tuple[list[dict], dict[str, str]]:
    """Compiles (module, target, name), by so many processes; returns descriptions, and errors by target and
    name."""
    done, failed = [], {}
    if jobs == 1:  # here: another process would import JAX and Triton again
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
    return sorted(done, key=lambda d: (d["target"], d["name"])), failed


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds for the targets on the command line, writes and prints; exits with 1 if a build failed."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.aot", description=DESCRIPTION)
    parser.add_argument(
        "--target", action="append", required=True, help=f"one of {', '.join(TARGETS)}; repeatable"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--only", action="append", default=[], help="pattern of names to build; repeatable")
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
        for build in list_builds(module, target)
        if not options.only or any(fnmatch.fnmatch(build.name, pattern) for pattern in options.only)
    ]
    if not wanted:
        parser.error(f"no build is named like {', '.join(options.only)}")
    done, failed = build_all(wanted, options.out, options.jobs)
    print_table(done)
    for name, error in sorted(failed.items()):
        print(f"failed: {name}: {error}", file=sys.stderr)
    print(json.dumps(summarize(done, failed)))
    if failed:
        sys.exit(1)


def print_table(descriptions: Sequence[dict[str, Any]]) -> None:
    """Prints one line for each build."""
    columns = (
        "target",
        "name",
        "tile",
        "warps",
        "registers",
        "spills",
        "scratch",
        "shared",
        "waves",
        "main loop",
    )
    rows = [columns, *(_row(d) for d in descriptions)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(description: dict[str, Any]) -> tuple[str, ...]:
    resources, constants = description["resources"], description["constants"]
    spills = sum(count for name, count in resources.items() if name.endswith("spills"))
    return (
        description["target"],
        description["name"],
        "x".join(str(v) for name, v in constants.items() if name.startswith("BLOCK")),
        str(description["warps"]),
        str(resources.get("vgprs", resources.get("registers"))),
        str(spills),
        str(resources["scratch_bytes"]),
        str(description["shared_bytes"]),
        str(resources.get("waves_per_simd", resources.get("warps_per_multiprocessor", 0) // 4)),
        " ".join(f"{name} {count}" for name, count in description["main_loop"]["classes"].items()),
    )


def summarize(done: Sequence[dict[str, Any]], failed: dict[str, str]) -> dict[str, Any]:
    """Returns what the last line prints."""
    kept = ("target", "name", "shared_bytes", "resources")
    builds = [{k: d[k] for k in kept} | {"main_loop": d["main_loop"]["classes"]} for d in done]
    return {"built": len(done), "failed": failed, "builds": builds}


def _resource_usage(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.sub(r".*Function", "Function", usage, count=1, flags=re.S)
