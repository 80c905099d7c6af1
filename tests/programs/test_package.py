"""The public interface: names, signatures, docstrings, imports, the wheel, and missing extras."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import jax.numpy as jnp
import pytest

import mxjax

ROOT = Path(__file__).parents[2]

# What follows these parameters must have a default and be named.
SIGNATURES = """
def quantize(x, format="mxfp4", *, axis=-1, scale_rule="floor", rounding="nearest", block_shape=None,
             prescale=None, key=None): ...
def dequantize(q, dtype=jnp.float32): ...
def pack(q, *, axis=-1): ...
def unpack(packed, *, axis=-1): ...
def rotate(x, size=16, *, axis=-1, signs=None): ...
def hadamard_matrix(n): ...
def random_signs(key, n): ...
def dot(x, w, *, policy, key=None, implementation=None): ...
def dot_general(lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, policy, key=None,
                implementation=None): ...
def einsum(spec, x, w, *, policy, key=None, implementation=None): ...
def make_dot_general(policy, *, key=None, implementation=None, weight=None): ...
def get_policy(name): ...
def policies(): ...
def with_scale_rule(policy, rule): ...
def Operand(format="mxfp4", block_shape=None, scale_rule="floor", rounding="nearest", prescale=None,
            source="original", gradient="straight_through", split="none", quantile=0.99, scale_target=None,
            scale_max=None, four_over_six=None, eden=None, split_tokens=None, scaling="current"): ...
def Rotation(size=16, signs="none", seed=0, values=None, kind="hadamard", order="given"): ...
def Gemm(lhs=mxjax.Operand(), rhs=mxjax.Operand(), rotation=None): ...
def Policy(fprop=mxjax.Gemm(), dgrad=mxjax.Gemm(), wgrad=mxjax.Gemm()): ...
"""


def parameters(function) -> list:
    """Returns (name, default, whether it can be given by position) of each parameter."""
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.default, p.kind is not p.KEYWORD_ONLY) for p in found]


@pytest.mark.parametrize("name", re.findall(r"def (\w+)", SIGNATURES))
def test_signatures_begin_with_these_parameters(name):
    exec(SIGNATURES, names := {"jnp": jnp, "mxjax": mxjax})
    expected, actual = parameters(names[name]), parameters(getattr(mxjax, name))
    assert actual[: len(expected)] == expected
    for _, default, by_position in actual[len(expected) :]:
        assert default is not inspect.Parameter.empty
        assert not by_position


def test_every_public_name_is_listed_once_and_exists():
    assert len(mxjax.__all__) == len(set(mxjax.__all__))
    assert all(hasattr(mxjax, name) for name in mxjax.__all__)


@pytest.mark.parametrize("name", sorted(set(mxjax.__all__) - {"FORMATS"}))
def test_every_public_name_has_a_docstring(name):
    public = getattr(mxjax, name)
    text = inspect.getdoc(public)
    assert text
    assert not text.startswith(f"{name}("), "a dataclass without a docstring gets its signature"


def test_the_documentation_lists_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text()
    listed = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (?:mxjax\.)?(\w+)$", text, re.MULTILINE))
    assert set(mxjax.__all__) <= listed


def test_every_public_name_of_stats_has_a_docstring():
    module = "mxjax.stats.measures"
    defined = [f for f in vars(mxjax.stats).values() if getattr(f, "__module__", None) == module]
    assert {"error", "quantization", "gemms"} <= {f.__name__ for f in defined}
    texts = {f.__name__: inspect.getdoc(f) or "" for f in defined}
    # A named tuple without a docstring gets its signature.
    assert not [name for name, text in texts.items() if not text or text.startswith(f"{name}(")]


def run_python(code: str, **options) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_brings_in_no_training_library_and_starts_no_backend():
    """Programs choose the platform and its devices after they import libraries."""
    code = """
import sys, jax, mxjax
mxjax.dot, mxjax.stats.gemms
heavy = ("flax", "optax", "grain", "orbax", "tyro", "rich", "torch", "beartype", "transformers")
print(*[name for name in sys.modules if name in heavy or name.startswith("training")])
jax.config.update("jax_num_cpu_devices", 2)
print(jax.device_count("cpu"))
"""
    assert run_python(code, cwd=ROOT).split() == ["2"]


REQUIREMENTS = {"jax", "numpy", "jaxtyping"}


def test_the_library_requires_three_packages_and_extras_name_the_rest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]} == REQUIREMENTS
    extras = {"train", "data", "tensorboard", "wandb", "plot", "kernels", "cuda", "rocm", "test"}
    assert extras <= set(project["optional-dependencies"])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        ["uv", "build", "--wheel", "--python", sys.executable, "--out-dir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


needs_uv = pytest.mark.skipif(not shutil.which("uv"), reason="uv builds and installs the wheel")


@pytest.mark.slow
@needs_uv
def test_the_wheel_holds_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"mxjax", f"mxjax-{mxjax.__version__}.dist-info"}
    # rglob does not follow the symbolic link mxjax/kernels.
    modules = {f"mxjax/{path.relative_to(ROOT / 'mxjax')}" for path in (ROOT / "mxjax").rglob("*.py")}
    kernels = {
        f"mxjax/kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.py")
    }
    assert modules | kernels | {"mxjax/py.typed"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or "test" in Path(name).name]


@pytest.mark.slow
@needs_uv
def test_the_wheel_runs_with_its_requirements_alone(wheel, tmp_path):
    environment = tmp_path / "environment"
    for command in (
        ["uv", "venv", "--quiet", "--python", sys.executable, str(environment)],
        ["uv", "pip", "install", "--quiet", "--python", str(environment), str(wheel)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    code = """
import importlib, importlib.metadata, json
import jax.numpy as jnp, mxjax, mxjax.kernels.cases.check

y = mxjax.dot(jnp.ones((2, 3)), jnp.ones((3, 2)), policy="wgrad_hadamard")
missing = {}
for name in ("quantize.quantizer", "matmul.fp4_gemm", "matmul.fp8_matmul", "cases.compile"):
    try:
        importlib.import_module(f"mxjax.kernels.{name}")
        missing[name] = "nothing"
    except ImportError as error:
        missing[name] = str(error)
packages = sorted(d.name.lower() for d in importlib.metadata.distributions())
print(json.dumps([mxjax.__file__, y.tolist(), missing, packages]))
"""
    python = environment / "bin" / "python"
    isolated = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=isolated, capture_output=True, text=True, check=False
    )
    assert out.returncode == 0, out.stderr
    file, y, missing, packages = json.loads(out.stdout)
    assert Path(file).is_relative_to(environment)
    assert y == [[3, 3], [3, 3]]
    assert len(missing) == 4
    assert all("mxjax[kernels]" in message for message in missing.values()), missing
    assert not {"flax", "optax", "triton", "rich"} & set(packages)


# Python runs a module of this name at its start.
WITHOUT = """
import importlib.util

_original = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {module!r} else _original(name, *rest)
"""


def run_without(module, folder, *arguments):
    (folder / "sitecustomize.py").write_text(WITHOUT.format(module=module))
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("training.tokenize", "tyro"),
        ("training.huggingface", "flax"),
        ("training.huggingface", "tyro"),
        ("train.py", "flax"),
        ("eval.py", "flax"),
    ],
)
def test_a_program_without_an_extra_is_one_line(program, module, tmp_path):
    is_file = program.endswith(".py")
    done = run_without(module, tmp_path, *([program] if is_file else ["-m", program]), "--help")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    name = program if is_file else f"python -m {program}"
    assert done.stderr.startswith(f"{name}: error: ")
    assert f"needs {module}: in a checkout of mxjax, pip install -e '.[train]'" in done.stderr


@pytest.mark.parametrize("package", ["training", "models"])
def test_an_import_without_an_extra_raises_import_error(package, tmp_path):
    code = f"try:\n    import {package}\nexcept ImportError as error:\n    print(error)"
    done = run_without("flax", tmp_path, "-c", code, "-m", "training.tokenize", "training.huggingface")
    assert done.stdout.startswith(f"{package} needs flax: "), done.stderr
