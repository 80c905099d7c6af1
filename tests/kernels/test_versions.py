"""The oldest and the newest JAX and Triton that mxjax allows: kernels lower, and their bits are right.

Each pair of versions is installed into an environment of its own, with nothing that tests and training need.
"""

import importlib.metadata
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from support.marks import parametrize

from mxjax.kernels.selftest import kernels
from mxjax.kernels.selftest.cases import Settings
from mxjax.runtime.devices import INTERPRETER

ROOT = pathlib.Path(__file__).parents[2]
OLDEST, NEWEST = ("0.11.1", "3.6.0"), ("0.12.0.1", "3.9.0")
# Triton 3.6's interpreter cannot run tl.dot_scaled.
MULTIPLIES = ("gemm_1x1x1x32_float32", "gemm_1x5x7x96_float32", "gemm_1x64x64x256_float32")

LOWER = """
import json
from mxjax.runtime.devices import Target
from support.programs import calls_of, lower_dot

names = {}
for backend, arch in (("hip", "gfx950"), ("cuda", "sm_90")):
    calls = calls_of(lower_dot(Target(backend, arch), "wgrad_hadamard").as_text())
    names[arch] = [call.name for call in calls]
print(json.dumps(names))
"""


def install(folder, *requirements):
    """Makes an environment and returns its Python, or skips the test."""
    tool = shutil.which("uv")
    if not tool:
        pytest.skip("uv makes the environments")
    python = folder / "bin" / "python"
    for command in (
        ["venv", "--quiet", "--python", sys.executable, folder],
        ["pip", "install", "--quiet", "--python", python, *requirements],
    ):
        done = subprocess.run([tool, *command], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{requirements} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


@parametrize(("jax", "triton"), slow=[OLDEST], exhaustive=[NEWEST])
def test_kernels_lower_and_give_the_defined_bits(jax, triton, tmp_path):
    """Lowers a dot and its gradients for gfx950 and sm_90, and runs kernels in the interpreter."""
    numpy = importlib.metadata.version("numpy")
    python = install(
        tmp_path / "environment", f"jax=={jax}", f"triton=={triton}", f"numpy=={numpy}", "jaxtyping"
    )
    removed = ("TRITON_INTERPRET", "TRITON_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests")))}

    def run(*arguments, status=0):
        command = [python, *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    names = json.loads(run("-c", LOWER))
    assert {arch: len(calls) for arch, calls in names.items()} == {"gfx950": 6, "sm_90": 10}
    failing = MULTIPLIES if (jax, triton) == OLDEST else ()
    said = run("-m", "mxjax.kernels.selftest", "--groups", "kernels", status=1 if failing else 0)
    assert f"jax {jax}" in said
    assert f"triton {triton}" in said
    lines = [json.loads(line) for line in (tmp_path / "mxjax-selftest.jsonl").read_text().splitlines()]
    outcomes = {line["case"]: line["outcome"] for line in lines[1:]}
    assert len(outcomes) == len(kernels.cases(Settings(INTERPRETER, quick=True, tokens=0)))
    assert {case for case, outcome in outcomes.items() if outcome != "passed"} == set(failing)
