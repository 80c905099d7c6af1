"""The shape of a decoder from a JSON file: fields of Hugging Face's config.json, or of `DecoderConfig`."""

import contextlib
import dataclasses
import difflib
import pathlib
import typing
from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

from models.configs import DecoderConfig
from models.huggingface.config import read_config, read_context
from models.received import read_object

_IGNORED = {"parameters"}  # in the record of a run's model, `models.configs.to_dict`

MOST_LAYERS = 10_000
"""The largest number of blocks: each has policies of its own, which are listed and recorded."""


def load_config(path: pathlib.Path) -> DecoderConfig:
    """Returns the shape in a JSON file, whose fields are Hugging Face's if it has a `model_type`, else ours.

    The vocabulary comes from the data. It is 1 without a `vocab_size`, too few for data that brings none.

    Raises:
      ValueError: the file cannot be read, or a field is unknown, missing or of the wrong type.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file in it, such as {path / 'config.json'}")
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    raw = {"vocab_size": 1} | read_object(path)
    if raw.keys() >= {"config", "model"}:
        raise ValueError(
            f'{path} records a run: --init {path.parent} begins with its model, or save its "model" as a file'
        )
    try:
        return _checked(read_config(raw) if "model_type" in raw else _from_fields(DecoderConfig, raw))
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def context_length(path: pathlib.Path) -> int | None:
    """Returns the longest sequence that a file with Hugging Face's fields names, if it is there and does."""
    with contextlib.suppress(ValueError, OSError):
        raw = read_object(path)
        return read_context(raw) if "model_type" in raw else None
    return None


def from_dict(raw: object) -> DecoderConfig:
    """Returns the shape from which `models.configs.to_dict` made `raw`.

    Raises:
      ValueError: `raw` is something else; the message names the field.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"the model must be an object, got {short(raw)}")
    return _checked(_from_fields(DecoderConfig, raw))


def _checked(config: DecoderConfig) -> DecoderConfig:
    """Returns the shape, unless it has too many blocks to list the policies of each."""
    if config.n_layers > MOST_LAYERS:
        raise ValueError(f"n_layers must be at most {MOST_LAYERS:,}, got {config.n_layers:,}")
    return config


def _from_fields(cls: type, raw: Mapping[str, Any]) -> Any:
    """Returns an instance of a dataclass of positive numbers, switches, words and such dataclasses."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in sorted(raw.keys() - fields.keys() - _IGNORED):
        close = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(
            f"unknown field {name!r}; {hint}the fields are {', '.join(fields)}, or with a model_type those "
            "of Hugging Face's config.json"
        )
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in raw]
    if missing:
        raise ValueError(f"the fields {', '.join(missing)} are missing")
    hints = typing.get_type_hints(cls)
    return cls(**{name: _value(name, hints[name], raw[name]) for name in fields if name in raw})


def _value(name: str, hint: Any, value: Any) -> Any:
    """Returns a field's value, of the kind that its annotation names."""
    kinds, or_null = typing.get_args(hint), ""
    if type(None) in kinds:
        if value is None:
            return None
        hint, or_null = kinds[0], " or null"
    if isinstance(hint, type) and hasattr(hint, "__dataclass_fields__"):
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object or null, got {short(value)}")
        return _from_fields(hint, value)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or any(not _is_number(int, v) or v < 0 for v in value):
            raise ValueError(f"{name} must be a list of integers from 0 to 2**31, got {short(value)}")
        return tuple(value)
    if typing.get_origin(hint) is typing.Literal:
        if value not in kinds:
            raise ValueError(f"{name} must be {' or '.join(map(repr, kinds))}, got {short(value)}")
        return value
    if hint is bool:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {short(value)}")
        return value
    if not _is_number(hint, value) or value <= 0:
        kind = "integer" if hint is int else "number"
        raise ValueError(f"{name} must be a positive {kind} below 2**31{or_null}, got {short(value)}")
    return hint(value)


def _is_number(hint: type, value: Any) -> bool:
    of_type = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return of_type and value < 2**31
