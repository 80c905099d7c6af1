"""What config.json says of a run, and whether another configuration continues it."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from training.config import (
    Config,
    DataConfig,
    MLPerfConfig,
    ObserveConfig,
    OptimizerConfig,
    PrecisionConfig,
)

HUGGINGFACE = "huggingface"
"""The folder of a run that holds what an imported checkpoint has besides weights."""

# A resumed run may differ in these and still be the same run.
_MAY_CHANGE = {
    "out",
    "resume",
    "stop_after",
    "checkpoint_every",
    "keep_checkpoints",
    "eval_every",
    "eval_batches",
    "eval_sequences",
    "target_loss",
    "log_every",
    "mesh",
    "distributed",
    "observe",
    "on_nonfinite",
    "spike_factor",
}


def to_json(config: Config) -> dict[str, Any]:
    """Returns the configuration as nested dicts that JSON holds."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_json(raw: dict[str, Any]) -> Config:
    """Returns the configuration that `to_json` made `raw` of."""
    source = raw["data"]["data"]  # of earlier versions: a path or null
    data = raw["data"] | {"data": (source,) if isinstance(source, str) else tuple(source or ())}
    precision = raw["precision"] | {"layers": tuple(raw["precision"]["layers"])}
    return Config(
        **raw
        | {
            "precision": PrecisionConfig(**precision),
            "data": DataConfig(**data),
            "remat": {True: "full", False: "none"}.get(raw["remat"], raw["remat"]),  # once a bool
            "optimizer": OptimizerConfig(**raw["optimizer"]),
            "mlperf": MLPerfConfig(**raw.get("mlperf", {})),
            "observe": ObserveConfig(**raw.get("observe", {})),
            "out": _path(raw["out"]),
            "init": _path(raw.get("init")),
        }
    )


def read_description(folder: pathlib.Path) -> dict[str, Any]:
    """Returns what config.json says of the run in `folder`.

    Raises:
      ValueError: there is none.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} holds no run: it has no config.json")
    return json.loads(path.read_text())


def check_resumable(config: Config, saved: Config, folder: pathlib.Path) -> None:
    """Raises ValueError if `config` is not the run that `folder` holds, naming each difference."""
    asked, begun = (_flat(dataclasses.asdict(c)) for c in (config, saved))
    differences = [
        f"--{name.replace('_', '-')}: the run has {begun[name]}, the command line {asked[name]}"
        for name in begun
        if name not in _MAY_CHANGE and begun[name] != asked[name]
    ]
    if differences:
        raise ValueError(
            f"--resume: {folder} holds another run; leave these flags out or choose another --out.\n  "
            + "\n  ".join(differences)
        )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of nested dicts by their own names, as the flags have them."""
    found = {}
    for name, value in values.items():
        found |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return found


def _path(value: str | None) -> pathlib.Path | None:
    return None if value is None else pathlib.Path(value)
