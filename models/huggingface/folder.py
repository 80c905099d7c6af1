"""The folder of a Hugging Face checkpoint: its files, and new folders that appear when they are complete.

Checkpoints come from others. Nothing outside a checkpoint's folder is read or copied because of what is in
it, and whatever is read has a bounded size.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

_KEPT_SUFFIXES = {".json", ".jinja", ".model", ".txt", ""}
_LARGEST_JSON = 100_000_000  # bytes; the index of a large checkpoint has a few million


def check_files(folder: pathlib.Path) -> None:
    """Checks the entries of a folder, except hidden ones, before any of them is opened.

    A link may lead to a file of the same folder, or, as in the Hub's cache, to `../../blobs`.

    Raises:
      ValueError: there is no such folder, or it holds another link, a pipe, a socket or a device.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with a Hugging Face checkpoint")
    here = folder.resolve()
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        leads_to = pathlib.Path(os.path.realpath(path)).parent
        if path.is_symlink() and leads_to not in (here, here.parent.parent / "blobs"):
            raise ValueError(
                f"{path} is a link out of its folder, to {os.path.realpath(path)}; replace it by the file or "
                "remove it"
            )
        if not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is not a file but a pipe, socket, device or broken link; remove it")


def small_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of a checkpoint except its weights: configuration, tokenizer, license.

    Raises:
      ValueError: the folder holds something that `check_files` refuses.
    """
    check_files(folder)
    files = sorted(f for f in folder.glob("*") if f.is_file() and not f.name.startswith("."))
    return [f for f in files if f.suffix in _KEPT_SUFFIXES and not f.name.endswith(".index.json")]


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      ValueError: the file is missing, too large, malformed, or nested too deeply.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a Hugging Face checkpoint: it has no file {path.name}")
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{path} has more than {_LARGEST_JSON:,} bytes, too many for {path.name}")
    try:
        raw = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply; download it again") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold an object")
    return raw


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes an object as JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def new_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary folder that is renamed to `path` at the end, or removed after an error.

    It also removes what earlier processes that were killed left behind. The system unlocks a folder when
    its process ends, however it ends.

    Raises:
      ValueError: `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not an empty folder; name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.iterdir():
        if left.name.startswith(f".{path.name}.") and left.name.endswith(".partial"):
            with contextlib.suppress(OSError), _locked(left):  # in use, or removed by another process
                shutil.rmtree(left)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # without locks, as on NFS, nobody removes it
                stack.enter_context(_locked(partial))
            yield partial
            if path.exists():
                path.rmdir()
            partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Locks a folder; raises OSError if another process has locked it, or the file system has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
