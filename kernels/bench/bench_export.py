"""Programs that were lowered elsewhere, beside the same programs lowered here: bits and time.

    python -m mxjax.kernels.bench.bench_export write DIR [--target sm_90] [--programs wgrad_hadamard …]
    python -m mxjax.kernels.bench.bench_export run DIR [--out FILE]

`write` needs flatbuffers and no GPU. It saves programs by `jax.export`, the kernels' machine code inside: a
`dot` with its gradients for each POLICY or POLICY:IMPLEMENTATION, training steps for `step:POLICY`, and
`attention`. `run` compares each with the program that the installed Triton compiles, and prints a table and
JSON as the last line. Exits with 1 if a result has other bits. Both programs sum in a fixed order and take
cuBLAS's first algorithm.
"""

import argparse
import contextlib
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mxjax.devices import Target, current_target, use_target
from mxjax.kernels.bench.export_programs import PROGRAMS, SIZES, program_of
from mxjax.kernels.bench.report import LATE, Absent, Report, add_arguments, versions
from mxjax.kernels.bench.timing import measure
from mxjax.kernels.lowering import CALL, PLATFORMS
from mxjax.tables import table

_SAME_SUMS = {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or runs programs, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_export", description=__doc__)
    parser.add_argument("command", choices=("write", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="sm_90", choices=("sm_90", "sm_100", "gfx950", "cpu"))
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, help="for the CPU, ones without kernels")
    parser.add_argument("--sizes", nargs=3, type=int, default=SIZES, metavar="N")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.command == "write":
        for name in options.programs:
            write(options.folder, name, options.target, options.sizes)
    else:
        run_all(options.folder, Report("mxjax.kernels.bench.bench_export", arguments, options))


def write(folder: Path, name: str, target: str, sizes: Sequence[int]) -> None:
    """Lowers a program for a target that need not be here, and saves it with its description beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = {"c": "cpu", "g": "hip", "s": "cuda"}[target[0]]
    with contextlib.nullcontext() if backend == "cpu" else use_target(Target(backend, target)):
        program = program_of(name, sizes)
        check = jax.export.DisabledSafetyCheck.custom_call(CALL)
        export = jax.export.export(
            jax.jit(program.run), platforms=(PLATFORMS.get(backend, backend),), disabled_checks=[check]
        )
        exported = export(*jax.eval_shape(program.inputs))
    file = folder / (name.replace(":", "-") + ".bin")
    file.write_bytes(exported.serialize())
    about = {"program": name, "target": target, "sizes": list(sizes), "packages": versions()}
    file.with_suffix(".json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about | {"bytes": file.stat().st_size}), flush=True)


def run_all(folder: Path, report: Report) -> None:
    """Compares the programs of a folder with those that are compiled here.

    Raises:
      SystemExit: there are none, the device is another, or results differ.
    """
    files = sorted(folder.glob("*.bin"))
    if not files:
        raise SystemExit(f"{folder} has no programs: make them with `bench_export write {folder}`")
    if current_target() is not None:
        importlib.import_module("jaxlib.gpu_triton")  # registers the custom call
    for file in files:
        if report.is_late:
            report.add(Absent(file.stem, LATE, ours=True), program=file.stem)
        else:
            report.add(None, **compare(file, report.rounds))
    records = [record for record in report.content["records"] if "differing" in record]
    rows = [
        (r["program"], sum(r["differing"].values()), f"{1e6 * r['carried']:.0f}", f"{1e6 * r['native']:.0f}")
        for r in records
    ]
    print(table("program | elements that differ | carried, us | native, us", rows))
    report.print()
    if bad := [r["program"] for r in records if any(r["differing"].values())]:
        raise SystemExit(f"other bits: {', '.join(bad)}")


def compare(file: Path, rounds: int) -> dict[str, Any]:
    """Returns how many elements of each result differ from the native program's, and both times in seconds.

    Raises:
      SystemExit: the program is for another device.
    """
    about = json.loads(file.with_suffix(".json").read_text())
    here = current_target()
    name = here.arch if here is not None else "cpu"
    if name != about["target"]:
        raise SystemExit(f"{file} is for {about['target']}, and this device is {name}: write it for this one")
    program = program_of(about["program"], about["sizes"])
    options = _SAME_SUMS if here is not None and here.backend == "cuda" else {}
    carried = jax.jit(jax.export.deserialize(bytearray(file.read_bytes())).call, compiler_options=options)
    native = jax.jit(program.run, compiler_options=options)
    inputs = program.inputs()
    pairs = zip(program.results, carried(*inputs), native(*inputs), strict=True)
    differing = {name: int(np.sum(_bits(a) != _bits(b))) for name, a, b in pairs}
    times = {
        name: measure(run, *inputs, rounds=rounds).median
        for name, run in (("carried", carried), ("native", native))
    }
    return about | {"differing": differing} | times


def _bits(x: jax.Array) -> np.ndarray:
    return np.frombuffer(np.asarray(x).tobytes(), f"u{x.dtype.itemsize}")


if __name__ == "__main__":
    main()
