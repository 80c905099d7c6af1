"""Seconds to compile one `dot` forward and backward, with empty and with filled caches.

    python -m mxjax.kernels.bench.bench_compile POLICY IMPLEMENTATION TOKENS D_IN D_OUT [--target sm_90]

It compiles once with the caches that the environment names and prints JSON; `compile_seconds` runs it twice.
With `--target` it only lowers, which needs no GPU. Beside the seconds it prints the number of kernels that
Triton compiled, and of those that it took from its cache on disk.
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp

from mxjax import implementations
from mxjax.devices import Target, has_triton, use_target
from mxjax.implementations import Implementation
from mxjax.kernels.bench.dot_cases import make_step
from mxjax.kernels.lowering import PLATFORMS
from mxjax.recipes import get_policy


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles the `dot` that the command line names with its gradients, and prints the seconds."""
    parser = argparse.ArgumentParser(prog="python -m mxjax.kernels.bench.bench_compile", description=__doc__)
    parser.add_argument("policy")
    parser.add_argument("implementation", choices=get_args(Implementation))
    for name in ("tokens", "d_in", "d_out"):
        parser.add_argument(name, type=int)
    parser.add_argument("--target", help="sm_90, sm_100 or gfx950: lower for it, without a GPU")
    options = parser.parse_args(arguments)
    tokens, d_in, d_out = options.tokens, options.d_in, options.d_out
    shapes = (
        jax.ShapeDtypeStruct((tokens, d_in), jnp.bfloat16),
        jax.ShapeDtypeStruct((d_in, d_out), jnp.float32),
        jax.ShapeDtypeStruct((tokens, d_out), jnp.bfloat16),
    )
    target = options.target and Target("hip" if options.target.startswith("gfx") else "cuda", options.target)
    with use_target(target) if target else contextlib.nullcontext():
        step = make_step(options.policy, options.implementation)  # starts the device
        from_disk = _watch_triton()
        times = [time.perf_counter()]
        traced = step.trace(*shapes)
        times.append(time.perf_counter())
        lowered = traced.lower(lowering_platforms=(PLATFORMS[target.backend],) if target else None)
        times.append(time.perf_counter())
    if not target:
        policy = get_policy(options.policy)
        lowered.compile(implementations.compiler_options([policy], options.implementation))
    times.append(time.perf_counter())
    spans = (after - before for before, after in itertools.pairwise(times))
    seconds = dict(zip(("trace", "lower", "compile"), spans, strict=True))
    print(json.dumps(seconds | {"compiled": from_disk.count(False), "from_disk": from_disk.count(True)}))


def _watch_triton() -> list[bool]:
    """Returns a list to which every kernel that Triton compiles adds whether it was on disk."""
    from_disk: list[bool] = []
    if has_triton():
        from triton import knobs

        knobs.compilation.listener = lambda *, cache_hit, **_: from_disk.append(cache_hit)
    return from_disk


def compile_seconds(
    policy: str, implementation: str, tokens: int, d_in: int, d_out: int, target: str | None = None
) -> dict[str, dict[str, float]]:
    """Times tracing, lowering and compiling in separate processes, "cold" and "warm".

    Args:
      target: sm_90, sm_100 or gfx950 to lower for it, without a GPU.

    Raises:
      RuntimeError: a process failed; the message is its last line.
    """
    command = [sys.executable, "-m", "mxjax.kernels.bench.bench_compile", policy, implementation]
    command += [str(n) for n in (tokens, d_in, d_out)]
    removed = ()
    if target:
        command += ["--target", target]
        removed = ("TRITON_INTERPRET",)
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        kept = {name: value for name, value in os.environ.items() if name not in removed}
        environment = kept | {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/jax",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "CUDA_CACHE_PATH": f"{folder}/cuda",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        for state in ("cold", "warm"):
            result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError((result.stderr.strip() or "no message").splitlines()[-1])
            seconds[state] = json.loads(result.stdout.splitlines()[-1])
    return seconds


if __name__ == "__main__":
    main()
