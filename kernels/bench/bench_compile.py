"""Seconds to compile one `dot` forward and backward, with an empty and with a filled compilation cache.

    python -m mxjax.kernels.bench.bench_compile POLICY IMPLEMENTATION TOKENS D_IN D_OUT

It compiles once with the caches that the environment names and prints JSON; `compile_seconds` runs it twice.
"""

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

from mxjax.implementations import Implementation
from mxjax.kernels.bench.dot_cases import make_step


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles the `dot` that the command line names with its gradients, and prints the seconds."""
    policy, implementation, *sizes = sys.argv[1:] if arguments is None else arguments
    assert implementation in get_args(Implementation), implementation
    tokens, d_in, d_out = (int(n) for n in sizes)
    shapes = (
        jax.ShapeDtypeStruct((tokens, d_in), jnp.bfloat16),
        jax.ShapeDtypeStruct((d_in, d_out), jnp.float32),
        jax.ShapeDtypeStruct((tokens, d_out), jnp.bfloat16),
    )
    step = make_step(policy, implementation)  # starts the device
    start = time.perf_counter()
    lowered = step.lower(*shapes)  # compiles Triton's kernels
    middle = time.perf_counter()
    lowered.compile()
    print(json.dumps({"lower": middle - start, "compile": time.perf_counter() - middle}))


def compile_seconds(
    policy: str, implementation: str, tokens: int, d_in: int, d_out: int
) -> dict[str, dict[str, float]]:
    """Times lowering and compiling in separate processes, "cold" and "warm".

    Raises:
      RuntimeError: a process failed; the message is its last line.
    """
    command = [sys.executable, "-m", "mxjax.kernels.bench.bench_compile", policy, implementation]
    command += [str(n) for n in (tokens, d_in, d_out)]
    seconds = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
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
