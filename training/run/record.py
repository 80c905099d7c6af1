"""config.json, the record of a run: its configuration, model, phases, data and environment."""

import dataclasses
import json
import pathlib
import shlex
import types
import typing
from typing import Any

from models.attention.documents import Documents
from models.config_file import from_dict
from models.configs import DecoderConfig
from models.received import parse_json, read_text, special_kind
from mxjax.policy import Policy
from mxjax.policy.json import policy_from_json
from training.config import Config
from training.files import write_atomically

CONFIG = "config.json"
_PARTS = {
    "model": dict,
    "phases": list,
    "policies": dict,
    "policy_files": dict,
    "data": dict,
    "imported": str,
    "documents": dict,
}
_FACTS = {"source": str, "train_tokens": int, "validation_tokens": int, "crc32": str}


def to_json(config: Config) -> dict[str, Any]:
    """Returns the configuration as nested dicts for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(raw: dict[str, Any]) -> Config:
    """Returns the configuration from which `to_json` made `raw`.

    Raises:
      ValueError: `raw` is no configuration, or one of another version.
    """
    try:
        return _from_fields(Config, raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{CONFIG} holds no configuration of this version of mxjax ({type(error).__name__}: {error}); "
            "use the version that wrote it"
        ) from error


def _policy(fields: dict[str, Any]) -> Policy:
    try:
        return policy_from_json(fields)
    except ValueError as error:
        raise ValueError(f"{CONFIG} holds no policy of this version of mxjax: {error}") from error


def model_of(saved: dict[str, Any]) -> DecoderConfig:
    """Returns the model's shape that the config.json of a run holds.

    Raises:
      ValueError: it holds none, or one of another version.
    """
    try:
        return from_dict(saved.get("model"))
    except ValueError as error:
        raise ValueError(
            f"{CONFIG} holds no model of this version of mxjax: {error}; use the version that wrote it"
        ) from error


def documents_of_run(saved: dict[str, Any]) -> Documents | None:
    """Returns the documents that a run's attention keeps apart; None without a mask, as in older runs.

    Raises:
      ValueError: config.json holds others.
    """
    found = saved.get("documents")
    if found is None:
        return None
    types = {name: type(value) for name, value in found.items()}
    if types != {"end": int, "restart_positions": bool} or not 0 <= found["end"] < 2**31:
        raise ValueError(
            f"{CONFIG} holds no documents of this version of mxjax; use the version that wrote it"
        )
    return Documents(**found)


def read_run_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the config.json of the run in `folder`.

    Raises:
      ValueError: there is none, or it is damaged. Or a pipe, socket or device lies where a run has files.
    """
    path = folder / CONFIG
    for entry in (*folder.glob("*"), *folder.glob("checkpoints/*/**/*")):
        if special_kind(entry) is not None:  # reading it might never end
            raise ValueError(f"{entry} is not a file: remove it")
    if not path.exists():
        raise ValueError(f"{folder} holds no run: it has no {CONFIG}")
    try:
        values = parse_json(read_text(path, "it"))
        is_checkpoint = isinstance(values, dict) and "config" not in values and "model_type" in values
        if not is_checkpoint:
            _check_parts(values)
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}; put a copy of yours back, or start a new run"
        ) from None
    if is_checkpoint:
        raise ValueError(
            f"{folder} is a Hugging Face checkpoint; import it first: "
            f"python -m training.huggingface import {shlex.quote(str(folder))} RUN"
        )
    return values


def _check_parts(values: Any) -> None:
    """Raises ValueError unless the values of a run have the types that their readers take for granted."""
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise ValueError("it holds no configuration")
    wrong = [name for name, kind in _PARTS.items() if not isinstance(values.get(name, kind()), kind)]
    facts = values.get("data")
    if not wrong and facts is not None:
        wrong = [f"data.{name}" for name, kind in _FACTS.items() if type(facts.get(name)) is not kind]
    if wrong:
        raise ValueError(f"its {wrong[0]} is of another type")


def write_run_config(folder: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes the config.json of the run in `folder`."""
    write_atomically(folder / CONFIG, json.dumps(values, indent=2) + "\n")


def _from_fields(cls: type, raw: dict[str, Any]) -> Any:
    """Returns a dataclass from its fields as JSON has them, without which single ones have their defaults."""
    hints = typing.get_type_hints(cls)
    parts = [name for name, hint in hints.items() if dataclasses.is_dataclass(hint)]
    return cls(**{name: _value(name, hints[name], raw[name]) for name in (*parts, *raw)})


def _value(name: str, hint: Any, value: Any) -> Any:
    """Returns the value of a field from that of JSON; raises TypeError unless it is of the field's type."""
    kinds = typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _from_fields(typing.cast(type, hint), value)
    if Policy in kinds and isinstance(value, dict):
        return _policy(value)
    if pathlib.Path in kinds and isinstance(value, str):
        return pathlib.Path(value)
    value = tuple(value) if isinstance(value, list) else value
    if not _is_instance(value, hint):
        raise TypeError(f"{name} is {value!r:.60}")
    return value


def _is_instance(value: Any, hint: Any) -> bool:
    """Returns whether a value is of a type as the configuration has them."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is_instance(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_instance(item, parts[0]) for item in value)
    if isinstance(value, bool) and hint is not bool:
        return False
    return isinstance(value, (int, float) if hint is float else hint)
