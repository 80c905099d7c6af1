"""Builds by `python -m mxjax.kernels.aot`, made once for all tests that read them."""

import fcntl
import json
import os
import pathlib
import subprocess
import sys

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "kernels-aot.md"
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
    command = [sys.executable, "-m", "mxjax.kernels.aot", "--jobs=2", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def build_once(tmp_path_factory, name, *wanted):
    """Returns a folder, the same in all processes of pytest-xdist, with builds of targets and patterns."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out, done = base / name, base / f"{name}.done"
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            for targets, patterns in wanted:
                _build(out, targets, patterns)
            done.touch()
    return out


def records(out):
    """Returns what the JSON in a folder of builds says, by target and name."""
    found = [json.loads(path.read_text()) for path in out.glob("*/*.json")]
    return {(d["target"], d["name"]): d for d in found}


def _build(out, targets, patterns):
    done = run_aot(
        *(f"--target={t}" for t in targets), "--out", out, *(f"--only={name}" for name in patterns)
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["failed"] == {}
    assert {(d["target"], d["name"]) for d in summary["builds"]} <= records(out).keys()
    assert summary["built"] == len(summary["builds"])


def starting(opcodes, *prefixes):
    return {x: n for x, n in opcodes.items() if x.startswith(prefixes)}


def elements_of(d):
    """Returns the elements that a thread of a quantizer takes."""
    return d["constants"]["BLOCK_R"] * d["constants"]["BLOCK_C"] // d["block"][0]
