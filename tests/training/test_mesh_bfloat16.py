"""Training in bfloat16, as users train, on meshes and on one device; `test_mesh` compares in float32."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param([(4, "fsdp=2,tensor=2")], marks=pytest.mark.slow),
        pytest.param([(2, "data=2"), (2, "tensor=2")], marks=pytest.mark.exhaustive),
    ],
)
def test_in_bfloat16_a_mesh_begins_as_one_device(tmp_path, meshes):
    def curve(devices: int, mesh: str) -> list[float]:
        out = tmp_path / f"run-{devices}-{mesh}"
        flags = f"--steps 2 --batch-size 4 --seq-len 32 --eval-batches 1 --mesh {mesh} --out {out}"
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # LLVM's, which would take longer than the steps
        subprocess.run([sys.executable, ROOT / "train.py", *flags.split()], env=environment, check=True)
        steps = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
        return [value for step in steps if "loss" in step for value in (step["loss"], step["grad_norm"])]

    alone = curve(1, "data=1")
    for devices, mesh in meshes:
        np.testing.assert_allclose(curve(devices, mesh), alone, rtol=1e-6)
