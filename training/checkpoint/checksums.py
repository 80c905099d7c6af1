"""Checksums of a checkpoint's files, which detect damaged and half-written checkpoints.

Neither OCDBT nor zarr verifies array bytes when reading, so checksums.json lists every file's size and CRC32.
"""

import concurrent.futures
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from training.files import write_atomically
from training.integrity import MISSING, crc32_of, problem, read_checked, to_checked

NAME = "checksums.json"
_METADATA = "_CHECKPOINT_METADATA"
# Orbax completes these after checksums.json is written: the first gets a time, the second holds no data.
_COMPLETED_LATER = {_METADATA, "commit_success.txt", NAME}
_PART = "checksums-{}.json"  # one a process; removed once checksums.json is written
_OWN = "ocdbt.process_{}"  # the folders into which each process writes array bytes
_UNFINISHED = ".orbax-checkpoint-tmp"


def write(folder: pathlib.Path, step: int) -> None:
    """Writes checksums.json for a checkpoint's folder, in which all other files are complete.

    Checksums that `write_part` has computed are reused; its files are removed.

    Args:
      folder: the checkpoint's folder.
      step: the step of the state in it, which is to be the folder's name.
    """
    parts = list(folder.glob(_PART.format("*")))
    read = (read_checked(part) or {"files": {}} for part in parts)
    known = {name: tuple(sums) for part in read for name, sums in part["files"].items()}
    for part in parts:
        part.unlink()
    found = _files(folder)
    rest = {name: size for name, size in found.items() if known.get(name, (None,))[0] != size}
    files = known | _sums(folder, rest)
    listed = {name: files[name] for name in found}
    content = {"files": listed, "metadata": _read_metadata(folder), "step": step}
    write_atomically(folder / NAME, to_checked(content))


def write_part(folder: pathlib.Path, process: int) -> None:
    """Writes the checksums of the array bytes that a process wrote, for `write` in the first process.

    Other processes may still be writing, so nothing else is read.
    """
    sums = {}
    for own in folder.glob(f"*/{_OWN.format(process)}"):
        item = own.parent.name.removesuffix(_UNFINISHED)  # orbax renames it before checksums.json is written
        sums |= {f"{item}/{own.name}/{name}": found for name, found in _sums(own, _files(own)).items()}
    (folder / _PART.format(process)).write_text(to_checked({"files": sums}))


def problems(
    folder: pathlib.Path, largest: float = float("inf"), share: tuple[int, int] = (0, 1)
) -> dict[str, str]:
    """Returns the problems of a checkpoint's files, by file name; empty if there are none.

    Every changed byte is found, except in orbax's time of saving and in its commit_success.txt, which are not
    used.

    Args:
      folder: the checkpoint's folder.
      largest: size in bytes above which only a file's size is compared.
      share: (i, n) checks every n-th file from the i-th on, largest first.
    """
    if not (folder / NAME).exists():
        return {NAME: MISSING}
    found = read_checked(folder / NAME)
    if found is None:
        return {NAME: "is damaged"}
    wrong = {}
    if (step := str(found.get("step", folder.name))) != folder.name:
        wrong["state"] = f"is of step {step}"
    if not (folder / _METADATA).exists():
        wrong[_METADATA] = MISSING
    elif _read_metadata(folder) != found["metadata"]:
        wrong[_METADATA] = "is damaged"
    files, (first, step) = found["files"], share
    names = sorted(files, key=lambda name: (-files[name][0], name))[first::step]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = pool.map(lambda name: problem(folder / name, files[name], largest), names)
        return wrong | {name: result for name, result in zip(names, results, strict=True) if result}


def _files(folder: pathlib.Path) -> dict[str, int]:
    """Returns the size of each file to list, by name."""
    paths = ((path, path.relative_to(folder).as_posix()) for path in folder.rglob("*") if path.is_file())
    return {name: path.stat().st_size for path, name in sorted(paths) if name not in _COMPLETED_LATER}


def _sums(folder: pathlib.Path, sizes: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    """Returns the size and checksum of each file, by name."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = pool.map(lambda name: (sizes[name], crc32_of(folder / name)), sizes)
        return dict(zip(sizes, sums, strict=True))


def _read_metadata(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns orbax's metadata of a checkpoint without the time of saving; None if damaged."""
    try:
        found = json.loads((folder / _METADATA).read_text())
        time = found.pop("commit_timestamp_nsecs", None)
    except (ValueError, AttributeError):
        return None
    return found if time is None or isinstance(time, int) else None
