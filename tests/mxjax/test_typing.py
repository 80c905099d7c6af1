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
SCRIPTS = {"right.py": RIGHT, "wrong.py": WRONG}

pytestmark = pytest.mark.slow


def by_pyright(folder: pathlib.Path) -> str:
    """Returns what strict pyright says of the scripts, errors as `file:line: error`."""
    config = {"typeCheckingMode": "strict", "extraPaths": [str(ROOT)], "include": ["*.py"]}
    (folder / "pyrightconfig.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "pyright", "-p", folder, "--pythonpath", sys.executable, "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    assert found["summary"]["filesAnalyzed"] == len(SCRIPTS)
    lines = [(d["file"], d["range"]["start"]["line"] + 1, d["severity"]) for d in found["generalDiagnostics"]]
    return "\n".join(f"{file}:{line}: {severity}" for file, line, severity in lines)


def by_mypy(folder: pathlib.Path) -> str:
    """Returns what strict mypy says of the scripts."""
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={folder / 'cache'}"]
    command = [sys.executable, "-m", "mypy", *options, *(str(folder / name) for name in SCRIPTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("check", [by_pyright, by_mypy])
def test_a_right_script_is_typed_fully_and_each_wrong_line_is_flagged(tmp_path, check):
    checker = check.__name__.removeprefix("by_")
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"needs {checker}: uv sync --group lint")
    for name, script in SCRIPTS.items():
        (tmp_path / name).write_text(script)
    errors = re.findall(r"(\w+\.py):(\d+): error", check(tmp_path))
    found = {name: {int(line) for file, line in errors if file == name} for name in SCRIPTS}
    wrong = {n for n, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")}
    assert found["right.py"] == set()
    assert found["wrong.py"] >= wrong
    assert len(wrong) == 17
