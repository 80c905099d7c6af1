"""Checksums of a checkpoint's files, by which one that is damaged or half-written is told from a whole one.

Neither OCDBT nor zarr checks the arrays' bytes when reading, so a manifest lists every file's size and CRC32.
"""

import concurrent.futures
import json
import pathlib
import zlib
from typing import Any

NAME = "manifest.json"
MISSING = "is missing"
_METADATA = "_CHECKPOINT_METADATA"
# Orbax completes these after the manifest has been written: the first gets a time, the second holds no data.
_COMPLETED_LATER = {_METADATA, "commit_success.txt", NAME}
_CHUNK = 2**24


def write(folder: pathlib.Path) -> None:
    """Writes the manifest of a checkpoint's folder, all of whose files are there."""
    names = sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and (name := path.relative_to(folder).as_posix()) not in _COMPLETED_LATER
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = pool.map(lambda name: [(folder / name).stat().st_size, _crc32(folder / name)], names)
        files = dict(zip(names, sums, strict=True))
    (folder / NAME).write_text(_text({"files": files, "metadata": _read_metadata(folder)}))


def problems(folder: pathlib.Path, largest: float = float("inf")) -> dict[str, str]:
    """Returns what is wrong with a checkpoint's files, by name; nothing if it is as it was written.

    Any changed byte is found, but in the time of saving that orbax notes and in its top commit_success.txt,
    neither of which is used.

    Args:
      folder: of the checkpoint.
      largest: of longer files, in bytes, only the size is compared.
    """
    if not (folder / NAME).exists():
        return {NAME: MISSING}
    found = _read(folder / NAME)
    if found is None:
        return {NAME: "is damaged"}
    wrong = {}
    if not (folder / _METADATA).exists():
        wrong[_METADATA] = MISSING
    elif _read_metadata(folder) != found["metadata"]:
        wrong[_METADATA] = "is damaged"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        names = found["files"]
        results = pool.map(lambda name: _problem(folder / name, names[name], largest), names)
        return wrong | {name: result for name, result in zip(names, results, strict=True) if result}


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns what a manifest says; None if it is damaged."""
    try:
        text = path.read_text()
        content = json.loads(text)
        del content["crc32"]
        return content if text == _text(content) else None
    except (ValueError, KeyError, TypeError):
        return None


def _problem(path: pathlib.Path, recorded: list[Any], largest: float) -> str | None:
    size, crc32 = recorded
    if not path.is_file():
        return MISSING
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes instead of {size}"
    return "is damaged" if size <= largest and _crc32(path) != crc32 else None


def _text(content: dict[str, Any]) -> str:
    body = json.dumps(content, sort_keys=True)
    return json.dumps({"crc32": f"{zlib.crc32(body.encode()):08x}", **content}, sort_keys=True) + "\n"


def _crc32(path: pathlib.Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def _read_metadata(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns orbax's metadata of a checkpoint without the time of saving; None if they are damaged."""
    try:
        found = json.loads((folder / _METADATA).read_text())
        time = found.pop("commit_timestamp_nsecs", None)
    except (ValueError, AttributeError):
        return None
    return found if time is None or isinstance(time, int) else None
