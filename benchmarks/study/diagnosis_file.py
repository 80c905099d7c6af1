"""The file of a diagnosis, and the one of an unfinished diagnosis, with which the same command continues."""

import json
import math
import pathlib
from typing import Any

from training.files import write_atomically

FILE = "diagnosis.json"
PARTIAL = "diagnosis.partial.json"
_MEASURED = ("cells", "wgrad", "compared")


def read(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns the record in a folder, None if there is no finished one."""
    path = folder / FILE
    return json.loads(path.read_text(), object_hook=_with_nan) if path.exists() else None


def read_all(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the finished records in the folders of a folder, by their names."""
    found = map(read, sorted(folder.iterdir()) if folder.exists() else [])
    return [record for record in found if record is not None]


def check_unfinished(folder: pathlib.Path) -> None:
    """Raises ValueError if the folder holds a finished diagnosis."""
    if (folder / FILE).exists():
        raise ValueError(f"{folder / FILE} exists and is complete; name another --out")


def begin(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings and what an unfinished diagnosis in the folder has measured with them.

    Another device may continue; the record then names both.

    Raises:
      ValueError: the unfinished diagnosis has other settings.
    """
    path = folder / PARTIAL
    if not path.exists():
        return settings | {"cells": {}}
    try:
        saved = json.loads(path.read_text(), object_hook=_with_nan)
    except ValueError as error:
        raise ValueError(f"{path} is no whole JSON file; remove it to measure everything again") from error
    ours, theirs = _comparable(settings), _comparable(saved)
    if other := [name for name in ours if ours[name] != theirs.get(name)]:
        differences = "; ".join(f"{name} {theirs.get(name)}, now {ours[name]}" for name in other)
        raise ValueError(
            f"{path} was measured with other settings ({differences}); "
            "give the same ones to continue it, or name another --out"
        )
    devices = dict.fromkeys([*saved["versions"]["device"].split(", "), settings["versions"]["device"]])
    versions = settings["versions"] | {"device": ", ".join(devices)}
    print(f"cells measured before: {len(saved['cells'])}, in {path}", flush=True)
    return settings | {"versions": versions} | {name: saved[name] for name in _MEASURED if name in saved}


def keep(folder: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes an unfinished diagnosis."""
    _write(folder / PARTIAL, record)


def finish(folder: pathlib.Path, record: dict[str, Any]) -> None:
    """Writes a finished diagnosis, and removes the unfinished one."""
    _write(folder / FILE, record)
    (folder / PARTIAL).unlink(missing_ok=True)


def _write(path: pathlib.Path, record: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(_without_nan(record), indent=1, allow_nan=False) + "\n")


def _without_nan(value: Any) -> Any:
    """Returns a record with None in place of NaN, which JSON lacks."""
    if isinstance(value, dict):
        return {name: _without_nan(part) for name, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _with_nan(value: dict[str, Any]) -> dict[str, Any]:
    """Returns an estimate with NaN in place of None, and anything else as it is."""
    if "low" not in value:
        return value
    return {name: math.nan if part is None else part for name, part in value.items()}


def _comparable(record: dict[str, Any]) -> dict[str, Any]:
    """Returns what the parts of one diagnosis must have in common: settings and versions, not the device."""
    left_out = {*_MEASURED, "versions", "device"}
    return {k: v for k, v in (record | record.get("versions", {})).items() if k not in left_out}
