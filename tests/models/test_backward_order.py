"""Blocks that are unrolled on a mesh, where barriers order the backward pass."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("fsdp=2", "bf16"), ("data=2,fsdp=1,tensor=1", "wgrad_sr", "tied")])
def test_gradients_are_those_of_the_loop(arguments):
    """The order changes no gradient, and is there: a tie each for `gate_up`, `qkv` above, and the head."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    # On some processors XLA fuses products by YNNPACK, in a loop otherwise than unrolled.
    environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_experimental_ynn_fusion_type="
    command = [sys.executable, "tests/support/unrolled.py", *arguments]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["loss"] < 1e-6
    assert max(found["gradients"]) < 1e-5
    _, ordered, free = found["barriers"]
    blocks = 3
    assert ordered - free == blocks + (blocks - 1) + 1
