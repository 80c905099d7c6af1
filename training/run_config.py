"""config.json, the record of a run: its configuration, model, phases, data and environment."""

import dataclasses
import json
import pathlib
from typing import Any

from training.config import (
    Config,
    DataConfig,
    MLPerfConfig,
    ObserveConfig,
    OptimizerConfig,
    PrecisionConfig,
)
from training.files import write_atomically

FILE = "config.json"
HUGGINGFACE = "huggingface"
"""The folder in a run that holds everything of an imported checkpoint except its weights."""


def to_json(config: Config) -> dict[str, Any]:
    """Returns the configuration as nested dicts for JSON."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(raw: dict[str, Any]) -> Config:
    """Returns the configuration from which `to_json` made `raw`."""
    precision = raw["precision"] | {"layers": tuple(raw["precision"]["layers"])}
    data = raw["data"] | {"data": tuple(raw["data"]["data"])}
    return Config(
        **raw
        | {
            "precision": PrecisionConfig(**precision),
            "data": DataConfig(**data),
            "optimizer": OptimizerConfig(**raw["optimizer"]),
            "mlperf": MLPerfConfig(**raw["mlperf"]),
            "observe": ObserveConfig(**raw["observe"]),
            "out": _path(raw["out"]),
            "init": _path(raw["init"]),
        }
    )


def read_run_config(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the config.json of the run in `folder`.

    Raises:
      ValueError: there is none.
    """
    path = folder / FILE
    if not path.exists():
        raise ValueError(f"{folder} holds no run: it has no {FILE}")
    return json.loads(path.read_text())


def write_run_config(folder: pathlib.Path, values: dict[str, Any]) -> None:
    """Writes the config.json of the run in `folder`."""
    write_atomically(folder / FILE, json.dumps(values, indent=2) + "\n")


def _path(value: str | None) -> pathlib.Path | None:
    return None if value is None else pathlib.Path(value)
