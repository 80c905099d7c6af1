"""The structure of a saved checkpoint: the names and shapes of its arrays, and whether they can be opened."""

import contextlib
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath  # orbax's class of paths

Shapes = dict[str, tuple[int, ...]]
"""Shapes of arrays by name."""


def shapes(tree: Any) -> Shapes:
    """Returns the shapes of a tree's arrays."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape) for path, x in leaves}


def saved_shapes(item: pathlib.Path) -> Shapes:
    """Returns the shapes of a saved item's arrays; opens each array, but reads none of its values."""
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        return shapes(handler.metadata(epath.Path(item)))


def check_opens(item: pathlib.Path, expected: Shapes) -> None:
    """Raises ValueError unless a saved item can be opened and its arrays have these shapes."""
    try:
        saved = saved_shapes(item)
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise ValueError(f"{item} was written but cannot be opened: {error}") from error
    if saved != expected:
        wrong = sorted(name for name in saved.keys() | expected if saved.get(name) != expected.get(name))
        raise ValueError(f"{item} was written but is incomplete: {', '.join(wrong[:3])}")


def check_saveable(folder: pathlib.Path) -> None:
    """Raises ValueError for a path below which orbax 0.12 writes checkpoints that nobody can read.

    It takes the path for a pattern when it merges the files of the processes.
    """
    if found := sorted(set("*?[]") & set(str(folder.absolute()))):
        raise ValueError(f"checkpoints cannot be saved in {folder}: name a path without {' '.join(found)}")
