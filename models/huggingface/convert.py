"""The files and parameters of a Hugging Face checkpoint, read, written and converted one by one."""

import contextlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from models import llama
from models.configs import LlamaConfig
from models.huggingface.safetensors_files import Reader, Spec
from models.huggingface.tensors import (
    DTYPES,
    check_tensors,
    check_tied_head,
    flat_shape,
    shapes,
    views,
)

_KEPT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ""}


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Gives a folder to fill that becomes `path` when all has gone well, and else is removed.

    Raises:
      ValueError: `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not an empty folder; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        yield partial
        if path.exists():
            path.rmdir()
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_params(source: pathlib.Path, config: LlamaConfig) -> tuple[llama.Params, dict[str, str]]:
    """Returns the parameters in float32, and the dtype that each tensor has in the checkpoint."""
    abstract, tree = jax.tree.flatten(shapes(config))
    leaves: list[Any] = [np.empty(leaf.shape, leaf.dtype) for leaf in abstract]
    dtypes = _fill(views(config, jax.tree.unflatten(tree, leaves)), source, config)
    for i in range(len(leaves)):  # one by one: orbax would copy numpy's arrays, all at once
        leaves[i] = jnp.asarray(leaves[i])
    return jax.tree.unflatten(tree, leaves), dtypes


def _fill(named: Mapping[str, np.ndarray], source: pathlib.Path, config: LlamaConfig) -> dict[str, str]:
    """Reads every tensor into its view; returns their dtypes."""
    with Reader(source) as reader:
        check_tensors(reader.specs, config)
        check_tied_head(reader, config)
        for name, view in progress(named, "importing"):
            view[...] = reader.read(name).reshape(view.shape)
        return {name: reader.specs[name].dtype for name in named}


def specs_of(named: Mapping[str, np.ndarray], dtype: str | None, kept: pathlib.Path) -> dict[str, Spec]:
    """Returns what to write of each tensor."""
    dtypes = json.loads(kept.read_text()) if kept.exists() and dtype is None else {}
    default = DTYPES[dtype or "float32"]
    return {name: Spec(dtypes.get(name, default), flat_shape(view)) for name, view in named.items()}


def dtype_field(raw: Mapping[str, Any]) -> str:
    return "dtype" if "dtype" in raw else "torch_dtype"  # transformers 5 and 4


def spelled(dtype: str) -> str:
    return next(name for name, theirs in DTYPES.items() if theirs == dtype)


def small_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint besides its weights: configuration, tokenizer, license."""
    files = sorted(f for f in folder.glob("*") if f.is_file() and not f.name.startswith("."))
    return [f for f in files if f.suffix in _KEPT_SUFFIXES and not f.name.endswith(".index.json")]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is no Hugging Face checkpoint: it has no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold an object")
    return raw


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def progress(named: Mapping[str, np.ndarray], what: str) -> Iterator[tuple[str, np.ndarray]]:
    yield from track(named.items(), what, len(named), disable=not sys.stdout.isatty())
