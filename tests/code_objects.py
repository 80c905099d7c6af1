"""Builds of `python -m mxjax.kernels.aot`, and what their document says of them."""

import json
import os
import pathlib
import re
import subprocess
import sys

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "kernels-aot.md"
LLAMA = ["gemm_1x8192x6144x4096_bfloat16", "gemm_1x4096x6144x8192_float32", "gemm_1x8192x4096x14336_bfloat16"]
# Activation or gradient and weight, of wgrad_hadamard and full_hadamard.
STEP = [
    "quantize_8192x4096_bfloat16_rows_packed_columns_packed-h16",
    "quantize_8192x4096_bfloat16_rows_packed-h16_columns_packed-h16",
    "quantize_4096x6144_float32_rows_packed_columns_packed",
    "quantize_4096x6144_float32_rows_packed-h16_columns_packed-h16",
]


def run_aot(*arguments, env=()):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(env)
    # One process, as tests run in two already: each imports JAX and Triton.
    command = [sys.executable, "-m", "mxjax.kernels.aot", "--jobs=1", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def build(out, targets, patterns=()):
    """Returns the descriptions of builds by name."""
    done = run_aot(
        *(f"--target={t}" for t in targets), "--out", out, *(f"--only={name}" for name in patterns)
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == {}
    found = {(d["target"], d["name"]): d for d in (json.loads(p.read_text()) for p in out.glob("*/*.json"))}
    assert {(d["target"], d["name"]) for d in summary["builds"]} <= found.keys()
    assert summary["built"] == len(summary["builds"])
    return found


def starting(opcodes, *prefixes):
    return {x: n for x, n in opcodes.items() if x.startswith(prefixes)}


def elements_of(d):
    """Returns the elements that a thread of a quantizer takes."""
    return d["constants"]["BLOCK_R"] * d["constants"]["BLOCK_C"] // d["block"][0]


def documented():
    """Returns the functions in docs/kernels-aot.md, which are those of whoever has the files alone."""
    names = {}
    exec(re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1], names)
    return names
