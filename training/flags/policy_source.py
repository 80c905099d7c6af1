"""Policies on the command line: a name, a JSON file, or a variable of a Python file."""

import contextlib
import os
import pathlib
import re
import runpy
import sys
import types
from collections.abc import Iterator

from models.received import LARGEST, open_received, read_text
from mxjax.policy import Policy
from mxjax.policy.json import policy_from_json
from mxjax.recipes import get_policy, policies

_IN_PYTHON = re.compile(r"(.+\.py):(\w+)")


def load_policy(source: str) -> Policy:
    """Returns the policy that a text names.

    Args:
      source: a name of `mxjax.policies()`; FILE.json, as `mxjax.policy_to_json` writes it; or FILE.py:NAME, a
        Python file that is run, without what is below `if __name__ == "__main__"`, and its variable that
        holds a `Policy` or such a name. The file may import others of its folder.
    Raises:
      ValueError: unknown name, or the file cannot be read or run, or holds no such policy, or one with a
        `source` that has no effect.
    """
    source = os.path.expanduser(source)  # the shell leaves ~ after =
    if source.endswith(".json"):
        try:
            text = read_text(source)
        except OSError as error:
            raise ValueError(f"{source}: {error.strerror}") from None
        try:
            return check_sources(policy_from_json(text))
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if found := _IN_PYTHON.fullmatch(source):
        return _from_python(*found.groups())
    if source.endswith(".py"):
        raise ValueError(f"{source} may hold several policies; write {source}:NAME")
    if pathlib.PurePath(source).suffix or os.sep in source:
        raise ValueError(f"unknown policy {source!r}: a file of one is named FILE.json or FILE.py:NAME")
    return get_policy(source)


def check_sources(policy: Policy) -> Policy:
    """Returns the policy.

    Raises:
      ValueError: an operand has source "dequantized" for a tensor that the Fprop reads in float32.
    """
    for name in policy.idle_sources:
        raise ValueError(
            f"{name}.source=dequantized has no effect: the Fprop reads that tensor in float32; use original"
        )
    return policy


def label(policy: Policy | str) -> str:
    """Returns the short name of a policy in records: as it was written, its own name, or "custom"."""
    if isinstance(policy, str):
        return policy
    return next((name for name, known in policies().items() if known == policy), "custom")


@contextlib.contextmanager
def _importing_neighbours(folder: pathlib.Path) -> Iterator[None]:
    """Lets a file import others of its folder, as `python FILE.py` does.

    They are forgotten afterwards, because those of another file's folder may have the same names.
    """
    path, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        new = sys.modules.keys() - modules
        neighbours = {name for name in new if "." not in name and _lies_in(folder, sys.modules[name])}
        for name in new:
            if name.partition(".")[0] in neighbours:
                del sys.modules[name]


def _lies_in(folder: pathlib.Path, module: types.ModuleType) -> bool:
    """Whether a module, or a package with or without __init__.py, is directly in the folder."""
    paths = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", None) or ""]
    return any(pathlib.Path(path).parent == folder for path in paths)


def _from_python(path: str, name: str) -> Policy:
    try:
        open_received(path, largest=LARGEST).close()
        with _importing_neighbours(pathlib.Path(path).resolve().parent):
            values = runpy.run_path(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except BaseException as error:  # whatever the user's file raises is an error in the input
        text = ""
        with contextlib.suppress(Exception):  # of its own __str__
            text = " ".join(str(error).split())
        raise ValueError(
            f"{path} raises {type(error).__name__}: {text}; all of it is run to read {name}, except for what "
            'is below if __name__ == "__main__"'
        ) from None
    value = values.get(name)
    if isinstance(value, str):
        value = get_policy(value)
    if not isinstance(value, Policy):
        there = [
            n for n, v in values.items() if isinstance(v, Policy) or (isinstance(v, str) and v in policies())
        ]
        is_other = f", {name} is of type {type(value).__name__}" if name in values else ""
        is_other += f" (give a name to what it returns: own = {name}())" if callable(value) else ""
        raise ValueError(
            f"{path} has no mxjax.Policy called {name}{is_other}; it has {', '.join(there) or 'none'}"
        )
    try:
        return check_sources(value)
    except ValueError as error:
        raise ValueError(f"{path}:{name}: {error}") from None
