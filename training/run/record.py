"""config.json, the record of a run: its configuration, model, phases, data and environment.

Its checksum shows damage and edits; to edit it on purpose, remove the line `crc32`.
"""

import dataclasses
import json
import pathlib
import shlex
import types
import typing
import zlib
from typing import Any

from models.config_file import from_dict
from models.configs import LlamaConfig
from mxjax.policy import Policy
from mxjax.policy.json import policy_from_json
from training.config import Config, DataConfig, MLPerfConfig, ObserveConfig, OptimizerConfig, PrecisionConfig
from training.files import special_kind, write_atomically
from training.log.metrics import FILE as METRICS
from training.log.metrics import SPIKES
from training.log.mlperf import FILE as MLLOG

FILE = "config.json"
COPY = "config.copy.json"
HUGGINGFACE = "huggingface"
"""The folder in a run that holds everything of an imported checkpoint except its weights."""


def to_json(config: Config) -> dict[str, Any]:
    """Returns the configuration as nested dicts for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(raw: dict[str, Any]) -> Config:
    """Returns the configuration from which `to_json` made `raw`.

    Raises:
      ValueError: `raw` is no configuration, or one of another version.
    """
    try:
        precision = raw["precision"] | {name: tuple(raw["precision"][name]) for name in ("layers", "set")}
        if isinstance(precision["policy"], dict):
            precision["policy"] = _policy(precision["policy"])
        data = raw["data"] | {"data": tuple(raw["data"]["data"])}
        config = Config(
            **raw
            | {
                "precision": PrecisionConfig(**precision),
                "data": DataConfig(**data),
                "optimizer": OptimizerConfig(**raw["optimizer"]),
                "mlperf": MLPerfConfig(**raw["mlperf"]),
                "observe": ObserveConfig(**raw["observe"]),
                "out": _path(raw["out"]),
                "init": _path(raw["init"]),
                "model_config": _path(raw["model_config"]),
            }
        )
        _check_types(config)
        return config
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{FILE} holds no configuration of this version of mxjax ({type(error).__name__}: {error}); "
            "use the version that wrote it"
        ) from error


def _policy(fields: dict[str, Any]) -> Policy:
    try:
        return policy_from_json(fields)
    except ValueError as error:
        raise ValueError(f"{FILE} holds no policy of this version of mxjax: {error}") from error


def model_of(saved: dict[str, Any]) -> LlamaConfig:
    """Returns the model's shape that the config.json of a run holds.

    Raises:
      ValueError: it holds none, or one of another version.
    """
    try:
        return from_dict(saved.get("model"))
    except ValueError as error:
        raise ValueError(
            f"{FILE} holds no model of this version of mxjax: {error}; use the version that wrote it"
        ) from error


def read_run_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the config.json of the run in `folder`; one without a checksum is taken as it is.

    Raises:
      ValueError: there is none, or it has been damaged or edited; the message says how to restore it. Or
        something else than a file lies where a run has files.
    """
    path = folder / FILE
    _check_files(folder)
    if not path.exists():
        remedy = _restoring(path)
        raise ValueError(f"{folder} holds no run: it has no {FILE}{f'; {remedy}' if remedy else ''}")
    try:
        return _parse(path)
    except ValueError as error:
        remedy = _restoring(path) or "put a copy of yours back, or start a new run"
        raise ValueError(f"{path} {error}; {remedy}") from None


def _check_files(folder: pathlib.Path) -> None:
    """Raises ValueError if anything but a file lies where a run has files.

    Reading a pipe, socket or device might never end; a file behind a link may be away for a while.
    """
    for path in (*folder.glob("*"), *folder.glob("checkpoints/*/*")):
        if special_kind(path) is not None:
            raise ValueError(f"{path} is not a file: remove it")
    for path in (folder / name for name in (FILE, COPY, METRICS, SPIKES, MLLOG)):
        if path.is_dir():
            raise ValueError(f"{path} is a folder, and a run has a file there: move it away")
        if path.is_symlink() and not path.exists() and path.name != COPY:
            remedy = _restoring(path) if path.name == FILE else "remove the link"
            raise ValueError(
                f"{path} is a link to {path.readlink()}, which does not exist: put that file back"
                f"{f', or {remedy}' if remedy else ''}"
            )


def write_run_config(folder: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes the config.json of the run in `folder`, with a checksum, and a copy of it."""
    values = json.loads(json.dumps(values))  # as it is read
    text = json.dumps({"crc32": _crc32(values), **values}, indent=2) + "\n"
    for name in (FILE, COPY):
        write_atomically(folder / name, text)


def _parse(path: pathlib.Path) -> dict[str, Any]:
    """Returns the values of a config.json; the message of a ValueError completes "PATH"."""
    try:
        values = json.loads(path.read_bytes().decode())
    except RecursionError:
        raise ValueError("is damaged: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is damaged: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise ValueError("is damaged: it holds no configuration")
    if values.pop("crc32", None) not in (None, _crc32(values)):
        raise ValueError("was edited or damaged: its crc32 is not that of its values")
    return values


def _restoring(path: pathlib.Path) -> str | None:
    """Returns advice to restore a config.json from its copy; None if there is no good copy."""
    copy = path.with_name(COPY)
    try:
        _parse(copy)
    except (ValueError, OSError):
        return None
    target = shlex.quote(str(path))
    first = f"rm {target} && " if path.is_symlink() else ""  # cp writes through a link
    return f"restore it: {first}cp {shlex.quote(str(copy))} {target}"


def _crc32(values: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(values, sort_keys=True).encode()):08x}"


def _check_types(config: Any) -> None:
    """Raises TypeError unless the fields of a dataclass, and those of its fields, have their types."""
    hints = typing.get_type_hints(type(config))
    for name in (field.name for field in dataclasses.fields(config)):
        value, hint = getattr(config, name), hints[name]
        if dataclasses.is_dataclass(value) and not isinstance(value, Policy):
            _check_types(value)
        elif not _is_instance(value, hint):
            raise TypeError(f"{name} is {value!r}")


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


def _path(value: str | None) -> pathlib.Path | None:
    return None if value is None else pathlib.Path(value)
