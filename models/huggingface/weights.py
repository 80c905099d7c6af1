"""The weights of Hugging Face's checkpoints as the parameters of `models.decoder`, read and written tensor by
tensor. `models.huggingface.architectures` has their names.
"""

import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import track

from models import decoder
from models.configs import DecoderConfig
from models.gemms import linear_layers
from models.huggingface.architectures import largest_tensors, shape_of, views
from models.huggingface.files import DTYPES, Reader, Spec, read_json, spelling
from models.huggingface.gpt_oss import read_tensor, unpacked
from models.huggingface.quantized import names_of
from models.lora import packed_like, part_of

_IMPORTED = ("F32", "BF16", "F16")
_SHOWN = 8  # problems listed in an error message
_EMBEDDING = "model.embed_tokens.weight"


def check_tensors(specs: Mapping[str, Spec], config: DecoderConfig) -> None:
    """Raises ValueError unless names, shapes and dtypes are those of the configured model."""
    _check_prefix(specs)
    _check_sizes(specs, config)
    empty = jax.tree.map(
        lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), decoder.abstract_params(config)
    )
    wanted = {name: shape_of(name, view) for name, view in views(config, empty).items()}
    found = {name: spec for name, spec in unpacked(specs).items() if not _is_derived(name, config)}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} does not belong to this model" for name in sorted(found) if name not in wanted]
    for name, spec in found.items():
        if name not in wanted:
            continue
        if spec.shape != wanted[name]:
            problems.append(_other_shape(name, spec, wanted[name]))
        if spec.dtype not in _IMPORTED:
            problems.append(f"{name} is in {spec.dtype}; only {', '.join(_IMPORTED)} can be imported")
    _raise(problems)


def _check_prefix(specs: Mapping[str, Spec]) -> None:
    """Raises ValueError if the names are those of a module in a wrapper, or of one inside the model."""
    if _EMBEDDING in specs:
        return
    if _EMBEDDING.removeprefix("model.") in specs:
        raise ValueError(
            "the names of the tensors lack 'model.', as those of a model without its head do: save the "
            "...ForCausalLM that holds it, or rename them"
        )
    wrapped = next((name for name in specs if name.endswith(f".{_EMBEDDING}")), None)
    if wrapped is not None:
        prefix = wrapped.removesuffix(_EMBEDDING)
        raise ValueError(
            f"the names of the tensors begin with {prefix!r}, as those of torch.compile and of DDP do: save "
            f"the module inside, model.{prefix[:-1]}, or rename them"
        )


def _check_sizes(specs: Mapping[str, Spec], config: DecoderConfig) -> None:
    """Raises ValueError unless config.json has the sizes of the tensors; allocates nothing.

    Each size of a model is that of an axis of these tensors, so that all others are as large as files.
    """
    c = config
    layers = {found[1] for name in specs if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    if c.n_layers > len(layers):
        raise ValueError(
            f"config.json: num_hidden_layers is {c.n_layers} and there are tensors of {len(layers)} layers"
        )
    wanted = largest_tensors(config)
    found = {name: specs[name] for name in wanted if name in specs}
    problems = [f"{name} is missing" for name in wanted if name not in found]
    _raise(problems + [_other_shape(n, s, wanted[n]) for n, s in found.items() if s.shape != wanted[n]])


def _other_shape(name: str, spec: Spec, shape: tuple[int, ...]) -> str:
    return f"{name} is {list(spec.shape)} and config.json makes it {list(shape)}"


def _raise(problems: list[str]) -> None:
    """Raises ValueError with the problems if there are any."""
    if problems:
        shown = problems[:_SHOWN]
        more = [f"and {len(problems) - len(shown)} more"] if problems[_SHOWN:] else []
        raise ValueError("\n  ".join(["the tensors do not match config.json:", *shown, *more]))


def as_written(name: str, view: np.ndarray, spec: Spec) -> np.ndarray:
    """Returns a tensor in the dtype and shape of its spec.

    Raises:
      ValueError: a value does not fit the dtype.
    """
    value = view.reshape(spec.shape)
    if spec.dtype == "F16" and not np.max(np.abs(value)) <= np.finfo(np.float16).max:
        raise ValueError(f"{name} does not fit float16; export in bfloat16 or float32")
    return value.astype(spec.numpy_dtype)


def check_tied_head(reader: Reader, config: DecoderConfig) -> None:
    """Raises ValueError if config.json ties the head to the embedding, but the checkpoint's differ."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if config.tied and names[0] in reader.specs:
        head, embedding = (reader.read(name) for name in names)
        if head.shape != embedding.shape or not np.array_equal(head, embedding):
            raise ValueError("config.json ties the head to the embedding, but lm_head.weight differs")


def _is_derived(name: str, config: DecoderConfig) -> bool:
    """Returns whether a tensor is redundant: rotary frequencies in old checkpoints, or a tied head."""
    return name.endswith(".rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


_SHOWN_TENSORS = 8  # tensors listed in an error message


def read_params(
    reader: Reader, config: DecoderConfig, *, keeps_packed: bool = False
) -> tuple[decoder.Params, dict[str, str]]:
    """Returns the parameters in float32, and the dtype of each tensor in the checkpoint.

    Args:
      keeps_packed: linear layers that are in MXFP4 in all blocks stay packed, as in `models.lora`.
    Raises:
      ValueError: the tensors are not those of this model, which is checked before memory is allocated, or
        they hold NaN or infinity; or none can stay packed.
    """
    check_tensors(reader.specs, config)
    check_tied_head(reader, config)
    packed = _packed_layers(reader, config) if keeps_packed else ()
    abstract, tree = jax.tree.flatten(packed_like(decoder.abstract_params(config), packed))
    leaves: list[Any] = [np.empty(leaf.shape, leaf.dtype) for leaf in abstract]
    dtypes = _fill(jax.tree.unflatten(tree, leaves), config, reader)
    for i in range(len(leaves)):  # one by one, because orbax would copy all NumPy arrays at once
        leaves[i] = jnp.asarray(leaves[i])
    return jax.tree.unflatten(tree, leaves), dtypes


def _packed_layers(reader: Reader, config: DecoderConfig) -> list[str]:
    """Returns the linear layers of which every block's matrices are packed in MXFP4, such as "mlp.down"."""
    packed, blocks = reader.packed_weights(), range(config.n_layers)
    found = [
        layer
        for layer in linear_layers(config)
        if {f"{name}.weight" for name in names_of(config, [f"blocks.{i}.{layer}" for i in blocks])} <= packed
    ]
    if not found:
        raise ValueError("--packed: no linear layer is packed in MXFP4 in all blocks; leave it out")
    return found


def _fill(params: decoder.Params, config: DecoderConfig, reader: Reader) -> dict[str, str]:
    """Reads every tensor into its view of the parameters; returns their dtypes."""
    named, scales = (views(config, part_of(params, part)) for part in ("codes", "scales"))
    bad = []
    for name, view in progress(named, "importing"):
        if view.dtype == np.uint8:
            parts = reader.read_packed(name)
            for place, part in zip((view, scales[name]), parts, strict=True):
                place[...] = part.reshape(place.shape)
            finite = (parts[1] != 255).all()
        else:
            view[...] = read_tensor(reader, name).reshape(view.shape)
            finite = np.isfinite(view).all()
        if not finite:
            bad.append(name)
    if bad:
        more = f" and {len(bad) - _SHOWN_TENSORS} more" if len(bad) > _SHOWN_TENSORS else ""
        raise ValueError(
            f"NaN or infinity in {', '.join(bad[:_SHOWN_TENSORS])}{more}; download the weights again"
        )
    specs = unpacked(reader.specs)
    return {name: specs[name].dtype for name in named}


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
    return {name: Spec(dtypes.get(name, default), shape_of(name, view)) for name, view in named.items()}


def check_finite(run: pathlib.Path, named: Mapping[str, np.ndarray], allow_nonfinite: bool) -> None:
    """Raises ValueError if a tensor of a run holds NaN or infinity, unless that is allowed."""
    bad = [name for name, view in named.items() if not np.isfinite(view).all()]
    if bad and not allow_nonfinite:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        raise ValueError(
            f"{run} holds NaN or infinity in {bad[0]}{more}; "
            "export an earlier --step, or add --allow-nonfinite"
        )


def progress(named: Mapping[str, np.ndarray], what: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the items of `named`, with a progress bar on a terminal."""
    yield from track(named.items(), what, len(named), disable=not sys.stdout.isatty())
