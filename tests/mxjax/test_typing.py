"""Type checking of a user's script: strict pyright and mypy accept a right one and flag each wrong line."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RIGHT = """
import jax
import jax.numpy as jnp

import mxjax
from mxjax import Gemm, MXArray, Operand, Policy, Rotation

x: jax.Array = jax.random.normal(jax.random.key(0), (4, 64))
w: jax.Array = jax.random.normal(jax.random.key(1), (64, 32))
q: MXArray = mxjax.quantize(x, "mxfp4", axis=-1, scale_rule="even", rounding="nearest")
packed: jax.Array = mxjax.pack(q)
elements: jax.Array = q.elements
values: jax.Array = mxjax.dequantize(q, jnp.bfloat16)
rotated: jax.Array = mxjax.rotate(x, 16, axis=-1)
policy = Policy(wgrad=Gemm(Operand(rounding="stochastic"), Operand(), Rotation(16, "redrawn")))
y: jax.Array = mxjax.dot(x, w, policy=policy, key=jax.random.key(0), implementation="xla")
y = mxjax.dot(x, w, policy="wgrad_hadamard")
y = mxjax.dot(x, mxjax.quantize(w, axis=0), policy="wgrad_hadamard")
y = mxjax.einsum("td,df->ft", x, w, policy="wgrad_hadamard")
dot_general: mxjax.DotGeneral = mxjax.make_dot_general("full_sr", key=lambda: jax.random.key(0), weight="rhs")
y = dot_general(x, w, (((1,), (0,)), ((), ())))
error: float = float(mxjax.stats.quantization(x, q).sqnr_db)
"""
WRONG = """
import jax

import mxjax

x = jax.random.normal(jax.random.key(0), (4, 64))
q = mxjax.quantize(x)
q.elments  # wrong
mxjax.quantize(x, scale_rul="floor")  # wrong
mxjax.quantize(x, scale_rule="flor")  # wrong
mxjax.quantize(x, "mxpf4")  # wrong
mxjax.Operand("mxpf4")  # wrong
mxjax.Operand(rounding="stochastc")  # wrong
mxjax.Rotation(16, "redrwan")  # wrong
mxjax.rotate(x, siz=16)  # wrong
mxjax.dequantize(x)  # wrong
mxjax.dot(x, x, policy="bf16", implementation="fp8")  # wrong
mxjax.dot(x, x, polcy="bf16")  # wrong
mxjax.dot([1.0], x, policy="bf16")  # wrong
mxjax.dot(x, x, policy="bf16", key=0)  # wrong
mxjax.einsum("td,df->tf", x, policy="bf16")  # wrong
mxjax.make_dot_general("bf16", weight="left")  # wrong
mxjax.Gemm("mxfp4", "bf16")  # wrong
mxjax.Policy("mxfp4")  # wrong
"""

pytestmark = pytest.mark.slow


def by_pyright(folder: pathlib.Path, script: str) -> set[int]:
    """Returns the lines, from 0, in which pyright finds errors."""
    (folder / "script.py").write_text(script)
    config = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["script.py"]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "-p", folder, "--pythonpath", sys.executable, "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return {d["range"]["start"]["line"] for d in found["generalDiagnostics"] if d["severity"] == "error"}


def by_mypy(folder: pathlib.Path, script: str) -> set[int]:
    """Returns the lines, from 0, in which mypy finds errors."""
    path = folder / "script.py"
    path.write_text(script)
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={folder / 'cache'}"]
    command = [sys.executable, "-m", "mypy", *options, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {int(line) - 1 for line in re.findall(r"script\.py:(\d+): error", done.stdout)}


@pytest.fixture(params=[by_pyright, by_mypy])
def wrong_lines(request):
    checker = request.param.__name__.removeprefix("by_")
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"needs {checker}: uv sync --group lint")
    return request.param


def test_a_right_script_is_typed_fully(tmp_path, wrong_lines):
    assert wrong_lines(tmp_path, RIGHT) == set()


def test_each_wrong_line_is_flagged(tmp_path, wrong_lines):
    wrong = {i for i, line in enumerate(WRONG.splitlines()) if line.endswith("# wrong")}
    assert wrong_lines(tmp_path, WRONG) >= wrong
    assert len(wrong) == 17
