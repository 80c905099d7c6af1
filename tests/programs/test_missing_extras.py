"""Programs in an installation without the extra `train`: one line names what to install."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

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
