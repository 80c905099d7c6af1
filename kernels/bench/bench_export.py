"""A program that was lowered elsewhere, beside the same program lowered here: bits and time.

    python -m mxjax.kernels.bench.bench_export write FILE [--target sm_90] [--policy wgrad_hadamard]
    python -m mxjax.kernels.bench.bench_export run FILE [--rounds 20]

`write` needs flatbuffers and no GPU. It saves one `dot` with its gradients at mlp.down's shape by
`jax.export`, the kernels' machine code inside. `run` compares it with the program that the installed Triton
compiles, and prints JSON as the last line. Exits with 1 if a result has other bits.
"""

import argparse
import functools
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.devices import Target, current_target, use_target
from mxjax.implementations import Implementation
from mxjax.kernels.bench.dot_cases import make_step, make_tensors
from mxjax.kernels.bench.report import versions
from mxjax.kernels.bench.timing import measure
from mxjax.kernels.lowering import CALL, PLATFORMS
from mxjax.kernels.shapes import LINEARS


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes or runs a program, as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_export", description=__doc__)
    parser.add_argument("command", choices=("write", "run"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--target", default="sm_90", help="sm_90, sm_100, gfx950, or cpu")
    parser.add_argument("--policy", default="wgrad_hadamard")
    parser.add_argument("--sizes", nargs=3, type=int, default=[8192, *LINEARS["mlp.down"]], metavar="N")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    if options.command == "write":
        write(options.file, options.target, options.policy, options.sizes)
    else:
        run(options.file, options.rounds)


def write(file: Path, target: str, policy: str, sizes: Sequence[int]) -> None:
    """Lowers a program for a target that need not be here, and saves it with its description beside it."""
    shapes = jax.eval_shape(functools.partial(make_tensors, *sizes))
    if target == "cpu":
        program = _export("cpu", make_step(policy, "xla"), shapes)
    else:
        backend = "hip" if target.startswith("gfx") else "cuda"
        with use_target(Target(backend, target)):
            program = _export(PLATFORMS[backend], make_step(policy, None), shapes)
    file.write_bytes(program.serialize())
    about = {"target": target, "policy": policy, "sizes": list(sizes), "packages": versions()}
    _description(file).write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about | {"bytes": file.stat().st_size}))


def _export(platform: str, step: Any, shapes: Any) -> jax.export.Exported:
    check = jax.export.DisabledSafetyCheck.custom_call(CALL)
    return jax.export.export(step, platforms=(platform,), disabled_checks=[check])(*shapes)


def run(file: Path, rounds: int) -> None:
    """Compares a saved program with the one that is compiled here.

    Raises:
      SystemExit: the device is another, or the results differ.
    """
    about = json.loads(_description(file).read_text())
    here = current_target()
    name = here.arch if here is not None else "cpu"
    if name != about["target"]:
        raise SystemExit(f"{file} is for {about['target']}, and this device is {name}: write one for it")
    if here is not None:
        importlib.import_module("jaxlib.gpu_triton")  # registers the custom call
    implementation: Implementation | None = None if here is not None else "xla"
    carried = jax.jit(jax.export.deserialize(bytearray(file.read_bytes())).call)
    native = make_step(about["policy"], implementation)
    tensors = make_tensors(*about["sizes"])
    pairs = zip(("y", "dx", "dw"), carried(*tensors), native(*tensors), strict=True)
    differing = {name: int(jnp.sum(a != b)) for name, a, b in pairs}
    times = {
        name: measure(program, *tensors, rounds=rounds)._asdict()
        for name, program in (("carried", carried), ("native", native))
    }
    print(json.dumps({"written": about, "here": versions(), "differing": differing, "seconds": times}))
    if any(differing.values()):
        raise SystemExit(f"elements that differ: {differing}")


def _description(file: Path) -> Path:
    return file.with_name(file.name + ".json")


if __name__ == "__main__":
    main()
