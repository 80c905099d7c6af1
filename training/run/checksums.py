"""Checksums of a checkpoint's files, which detect damaged and half-written checkpoints.

Neither OCDBT nor zarr verifies array bytes when reading, so checksums.json lists every file's size and CRC32.
Damaged checkpoints are renamed at the start, so that the newest checkpoint is a good one.
"""

import collections
import concurrent.futures
import contextlib
import pathlib
import shutil
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath  # orbax's class of paths

from models.received import read_object
from training.files import MISSING, crc32_of, problem, read_checked, to_checked, unused, write_atomically
from training.process.environment import in_one_line
from training.process.together import gather, is_first_process

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
    folder: pathlib.Path, largest: float = float("inf"), share: tuple[int, int] = (0, 1), item: str = ""
) -> dict[str, str]:
    """Returns the problems of a checkpoint's files, by file name; empty if there are none.

    Every changed byte is found, except in orbax's time of saving and in its commit_success.txt, which are not
    used.

    Args:
      largest: size in bytes above which only a file's size is compared.
      share: (i, n) checks every n-th file from the i-th on, largest first.
      item: checks the files of this item alone, such as params.
    """
    if not (folder / NAME).exists():
        return {NAME: MISSING}
    found = read_checked(folder / NAME, metadata=dict)
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
    names = [name for name in files if name.startswith(item)]
    names = sorted(names, key=lambda name: (-files[name][0], name))[first::step]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        results = pool.map(lambda name: problem(folder / name, files[name], largest), names)
        return wrong | {name: result for name, result in zip(names, results, strict=True) if result}


def _files(folder: pathlib.Path) -> dict[str, int]:
    paths = ((path, path.relative_to(folder).as_posix()) for path in folder.rglob("*") if path.is_file())
    return {name: path.stat().st_size for path, name in sorted(paths) if name not in _COMPLETED_LATER}


def _sums(folder: pathlib.Path, sizes: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = pool.map(lambda name: (sizes[name], crc32_of(folder / name)), sizes)
        return dict(zip(sizes, sums, strict=True))


def _read_metadata(folder: pathlib.Path) -> dict[str, Any] | None:
    """Returns orbax's metadata of a checkpoint without the time of saving; None if damaged."""
    try:
        found = read_object(folder / _METADATA)
    except ValueError:
        return None
    time = found.pop("commit_timestamp_nsecs", None)
    return found if time is None or isinstance(time, int) else None


_SMALL = 2**16  # bytes; in older checkpoints only files up to this size are read


def set_aside_damaged(folder: pathlib.Path) -> list[str]:
    """Renames damaged checkpoints to damaged-STEP; returns messages about them.

    If an older one only lacks files, the run was killed while removing it, and its rest is removed. The
    newest is read in full, older ones only in their small files. All processes share the reading; the first
    one renames.

    Raises:
      ValueError: all checkpoints are damaged, and nothing is changed; or they cannot be read or renamed.
      ProcessError: another process raised this error.
    """
    folder = folder.absolute()
    good, damaged = None, {}
    for step in reversed(gather(_file_errors(folder)(lambda: saved_steps(folder)))[0]):
        found = find_problems(folder / str(step), float("inf") if good is None else _SMALL)
        if found:
            damaged[step] = found
        elif good is None:
            good = step
    if not is_first_process():
        return gather(list)[0]
    return gather(_file_errors(folder)(lambda: _set_aside(folder, good, damaged)))[0]


def find_problems(path: pathlib.Path, largest: float = float("inf"), item: str = "") -> dict[str, str]:
    """Returns `problems` of a checkpoint's folder; each process reads its share of the files.

    Raises:
      ValueError: the files cannot be read.
      ProcessError: another process raised this error.
    """
    share = jax.process_index(), jax.process_count()
    shares = gather(_file_errors(path.parent)(lambda: problems(path, largest, share, item)))
    return {name: problem for found in shares for name, problem in found.items()}


def _set_aside(folder: pathlib.Path, good: int | None, damaged: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Removes or renames the damaged checkpoints, given by step; returns messages."""
    removals, renames, damage, messages = [], [], [], []
    for step, problems in damaged.items():
        path = folder / str(step)
        older = good is not None and step < good
        if older and path.is_dir() and set(problems.values()) == {MISSING}:
            removals.append(path)
            messages.append(f"removed the rest of {path}, whose removal was interrupted")
        else:
            renames.append((path, unused(folder / f"damaged-{step}")))
            damage.append(describe_damage(path, problems))
            messages.append(f"{damage[-1]}; renamed it {renames[-1][1].name}")
    if renames and good is None:
        raise ValueError(
            f"no good checkpoint remains in {folder}: {'; '.join(damage[:3])}. "
            "Put a copy back, or start a new run"
        )
    for path in removals:
        shutil.rmtree(path)
    for path, target in renames:
        path.rename(target)
    return [*messages, f"continuing from the checkpoint of step {good}"] if renames else messages


@contextlib.contextmanager
def _file_errors(folder: pathlib.Path) -> Iterator[None]:
    """Turns an OSError into a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the checkpoints in {folder} cannot be checked for damage: {in_one_line(error, folder)}"
        ) from error


def describe_damage(path: pathlib.Path, problems: Mapping[str, str]) -> str:
    """Returns a sentence on the problems of a checkpoint's folder."""
    name, problem = next(iter(problems.items()))
    more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"the checkpoint {path} is damaged ({name} {problem}{more})"


def saved_steps(folder: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, damaged ones included, in ascending order."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name)))


Shapes = dict[str, tuple[int, ...]]
"""Shapes of arrays by name."""


def shapes(tree: Any) -> Shapes:
    """Returns the shapes of a tree's arrays."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape) for path, x in leaves}


def saved_shapes(item: pathlib.Path) -> Shapes:
    """Returns the shapes of a saved item's arrays; opens each array, but reads none of its values."""
    return shapes(saved_tree(item))


def saved_tree(item: pathlib.Path) -> Any:
    """Returns the tree of a saved item, with shapes and dtypes of its arrays; reads none of their values."""
    with contextlib.closing(ocp.StandardCheckpointHandler()) as handler:
        return handler.metadata(epath.Path(item)).tree


def check_opens(item: pathlib.Path, expected: Shapes) -> None:
    """Raises ValueError unless a saved item holds values of these arrays and can be opened."""
    try:
        base = {"driver": "file", "path": f"{item}/"}
        keys = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()
        # An array has one key for its metadata and others for its values.
        stored = collections.Counter(key.decode().rpartition("/")[0] for key in keys)
        if absent := sorted(name for name in expected if stored[name] < 2):
            raise ValueError(f"it lacks {', '.join(absent[:3])}")
        if (saved := saved_shapes(item)) != expected:
            raise ValueError(f"it has arrays of shapes {saved}")
    except Exception as error:  # orbax and tensorstore raise many kinds
        raise ValueError(f"{item} was written but cannot be read: {error}") from error


def check_saveable(folder: pathlib.Path) -> None:
    """Raises ValueError for a path below which orbax 0.12 writes checkpoints that nobody can read.

    It takes the path for a pattern when it merges the files of the processes, UTF-8 for its encoding, and
    `gs:` at the end of a component for a bucket. Of a bucket, pathlib has made a folder's name.
    """
    text = str(folder.absolute())
    kinds = {unicodedata.category(c) for c in text}
    if kinds & {"Cc", "Cs"}:  # Cs: bytes that are no UTF-8, or a locale of another encoding
        what = "in UTF-8, or set PYTHONUTF8=1" if "Cs" in kinds else "without control characters"
        raise ValueError(f"checkpoints cannot be saved in {text!r}: name a path {what}")
    if any(f"{bucket}/" in f"{text}/" for bucket in ("gs:", "s3:")):
        raise ValueError(f"checkpoints cannot be saved in {folder}: name a folder, no bucket, gs: or s3:")
    if found := sorted(set("*?[]\\") & set(text)):
        raise ValueError(f"checkpoints cannot be saved in {folder}: name a path without {' '.join(found)}")
