"""Checksums of a checkpoint's files, by which one that is damaged or half-written is told from a whole one.

Neither OCDBT nor zarr checks the arrays' bytes when reading, so a manifest lists every file's size and CRC32.
"""

import concurrent.futures
import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

NAME = "manifest.json"
MISSING = "is missing"
_METADATA = "_CHECKPOINT_METADATA"
# Orbax completes these after the manifest has been written: the first gets a time, the second holds no data.
_COMPLETED_LATER = {_METADATA, "commit_success.txt", NAME}
_PART = "manifest-{}.json"  # of a process; none is left beside a manifest
_OWN = "ocdbt.process_{}"  # the folders of arrays' bytes that orbax has each process write
_UNFINISHED = ".orbax-checkpoint-tmp"
_CHUNK = 2**24


def write(folder: pathlib.Path) -> None:
    """Writes the manifest of a checkpoint's folder, all of whose files are there.

    Of files in parts, see `write_part`, it takes the checksums from there; the parts are removed.
    """
    parts = list(folder.glob(_PART.format("*")))
    known = {
        name: tuple(sums) for part in parts for name, sums in (_read(part) or {"files": {}})["files"].items()
    }
    for part in parts:
        part.unlink()
    found = _files(folder)
    rest = {name: size for name, size in found.items() if known.get(name, (None,))[0] != size}
    files = known | _sums(folder, rest)
    content = {"files": {name: files[name] for name in found}, "metadata": _read_metadata(folder)}
    (folder / NAME).write_text(_text(content))


def write_part(folder: pathlib.Path, process: int) -> None:
    """Writes the checksums of the arrays' bytes that a process has written, for `write` in the first one.

    Others may still be writing theirs, so that nothing else is looked at.
    """
    sums = {}
    for own in folder.glob(f"*/{_OWN.format(process)}"):
        item = own.parent.name.removesuffix(_UNFINISHED)  # orbax renames it before the manifest is written
        sums |= {f"{item}/{own.name}/{name}": found for name, found in _sums(own, _files(own)).items()}
    (folder / _PART.format(process)).write_text(_text({"files": sums}))


def problems(
    folder: pathlib.Path, largest: float = float("inf"), share: tuple[int, int] = (0, 1)
) -> dict[str, str]:
    """Returns what is wrong with a checkpoint's files, by name; nothing if it is as it was written.

    Any changed byte is found, but in the time of saving that orbax notes and in its top commit_success.txt,
    neither of which is used.

    Args:
      folder: of the checkpoint.
      largest: of longer files, in bytes, only the size is compared.
      share: (i, n) looks at every n-th file from the i-th on, the largest first.
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
    files, (first, step) = found["files"], share
    names = sorted(files, key=lambda name: (-files[name][0], name))[first::step]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = pool.map(lambda name: _problem(folder / name, files[name], largest), names)
        return wrong | {name: result for name, result in zip(names, results, strict=True) if result}


def _files(folder: pathlib.Path) -> dict[str, int]:
    """Returns the size of each file that a manifest lists, by name."""
    paths = ((path, path.relative_to(folder).as_posix()) for path in folder.rglob("*") if path.is_file())
    return {name: path.stat().st_size for path, name in sorted(paths) if name not in _COMPLETED_LATER}


def _sums(folder: pathlib.Path, sizes: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    """Returns the size and checksum of each file, by name."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = pool.map(lambda name: (sizes[name], _crc32(folder / name)), sizes)
        return dict(zip(sizes, sums, strict=True))


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
