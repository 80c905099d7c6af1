"""The files and parameters of a Hugging Face checkpoint: reading, writing, conversion tensor by tensor."""

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
from models.huggingface.safetensors_files import Reader, Spec, spelling
from models.huggingface.tensors import check_tensors, check_tied_head, flat_shape, views

_KEPT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ""}


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder that is renamed to `path` at the end, or removed after an error.

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
    """Returns the parameters in float32, and the dtype of each tensor in the checkpoint."""
    abstract, tree = jax.tree.flatten(llama.abstract_params(config))
    leaves: list[Any] = [np.empty(leaf.shape, leaf.dtype) for leaf in abstract]
    dtypes = _fill(views(config, jax.tree.unflatten(tree, leaves)), source, config)
    for i in range(len(leaves)):  # one by one, because orbax would copy all NumPy arrays at once
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
    """Returns the dtype and shape in which to write each tensor."""
    dtypes = json.loads(kept.read_text()) if kept.exists() and dtype is None else {}
    default = spelling(dtype or "float32")
    return {name: Spec(dtypes.get(name, default), flat_shape(view)) for name, view in named.items()}


def dtype_field(raw: Mapping[str, Any]) -> str:
    """Returns the name of config.json's field for the dtype."""
    return "dtype" if "dtype" in raw else "torch_dtype"  # transformers 5 and 4


def small_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint except its weights: configuration, tokenizer, license."""
    files = sorted(f for f in folder.glob("*") if f.is_file() and not f.name.startswith("."))
    return [f for f in files if f.suffix in _KEPT_SUFFIXES and not f.name.endswith(".index.json")]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError if it is missing or malformed."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not a Hugging Face checkpoint: it has no {path.name}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold an object")
    return raw


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes an object as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def progress(named: Mapping[str, np.ndarray], what: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the items of `named`, with a progress bar on a terminal."""
    yield from track(named.items(), what, len(named), disable=not sys.stdout.isatty())
