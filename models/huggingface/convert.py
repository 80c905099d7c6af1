"""The parameters of a Hugging Face checkpoint: reading, and the form of writing, tensor by tensor."""

import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from models import llama
from models.configs import LlamaConfig
from models.huggingface.folder import read_json
from models.huggingface.safetensors_files import DTYPES, Reader, Spec, spelling
from models.huggingface.tensors import check_tensors, check_tied_head, flat_shape, views

_SHOWN = 8  # tensors listed in an error message


def read_params(source: pathlib.Path, config: LlamaConfig) -> tuple[llama.Params, dict[str, str]]:
    """Returns the parameters in float32, and the dtype of each tensor in the checkpoint.

    Raises:
      ValueError: the tensors are not those of this Llama, which is checked before memory is allocated, or
        they hold NaN or infinity.
    """
    with Reader(source) as reader:
        check_tensors(reader.specs, config)
        check_tied_head(reader, config)
        abstract, tree = jax.tree.flatten(llama.abstract_params(config))
        leaves: list[Any] = [np.empty(leaf.shape, leaf.dtype) for leaf in abstract]
        dtypes = _fill(views(config, jax.tree.unflatten(tree, leaves)), reader)
    for i in range(len(leaves)):  # one by one, because orbax would copy all NumPy arrays at once
        leaves[i] = jnp.asarray(leaves[i])
    return jax.tree.unflatten(tree, leaves), dtypes


def _fill(named: Mapping[str, np.ndarray], reader: Reader) -> dict[str, str]:
    """Reads every tensor into its view; returns their dtypes."""
    bad = []
    for name, view in progress(named, "importing"):
        view[...] = reader.read(name).reshape(view.shape)
        if not np.isfinite(view).all():
            bad.append(name)
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise ValueError(f"{', '.join(bad[:_SHOWN])}{more} hold NaN or infinity; download the weights again")
    return {name: reader.specs[name].dtype for name in named}


def specs_of(named: Mapping[str, np.ndarray], dtype: str | None, kept: pathlib.Path) -> dict[str, Spec]:
    """Returns the dtype and shape in which to write each tensor.

    Args:
      named: the views of all tensors.
      dtype: dtype of all tensors; None takes those in `kept`, or else float32.
      kept: a JSON file with the dtypes of an imported checkpoint's tensors.
    """
    dtypes = read_json(kept) if kept.exists() and dtype is None else {}
    if unknown := [name for name, value in dtypes.items() if value not in list(DTYPES)]:
        raise ValueError(f"{kept} has no dtype for {unknown[0]}: {dtypes[unknown[0]]!r}; give --dtype")
    default = spelling(dtype or "float32")
    return {name: Spec(dtypes.get(name, default), flat_shape(view)) for name, view in named.items()}


def dtype_field(raw: Mapping[str, Any]) -> str:
    """Returns the name of config.json's field for the dtype."""
    return "dtype" if "dtype" in raw else "torch_dtype"  # transformers 5 and 4


def progress(named: Mapping[str, np.ndarray], what: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the items of `named`, with a progress bar on a terminal."""
    yield from track(named.items(), what, len(named), disable=not sys.stdout.isatty())
