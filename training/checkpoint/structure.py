"""The structure of a saved checkpoint: the names and shapes of its arrays, and whether they can be opened."""

import collections
import contextlib
import pathlib
import unicodedata
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
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
    """Raises ValueError unless a saved item holds values of these arrays and can be opened."""
    try:
        base = {"driver": "file", "path": f"{item}/"}
        keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
        # An array has one key for its metadata and others for its values.
        stored = collections.Counter(key.decode().rpartition("/")[0] for key in keys)
        if absent := sorted(name for name in expected if stored[name] < 2):
            raise ValueError(f"it lacks {', '.join(absent[:3])}")
        if (saved := saved_shapes(item)) != expected:
            raise ValueError(f"it has arrays of shapes {saved}")
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise ValueError(f"{item} was written but cannot be read: {error}") from error


def check_saveable(folder: pathlib.Path) -> None:
    """Raises ValueError for a path below which orbax 0.12 writes checkpoints that nobody can read.

    It takes the path for a pattern when it merges the files of the processes, and UTF-8 for its encoding.
    """
    text = str(folder.absolute())
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):  # Cs: bytes that are no UTF-8
        raise ValueError(f"checkpoints cannot be saved in {text!r}: name a path without control characters")
    if found := sorted(set("*?[]\\") & set(text)):
        raise ValueError(f"checkpoints cannot be saved in {folder}: name a path without {' '.join(found)}")
