"""Files that are written completely or not at all."""

import os
import pathlib
from typing import IO, Any


def write_atomically(path: pathlib.Path, data: bytes | str) -> None:
    """Writes a file under a temporary name, flushes it to the disk, and renames it.

    After a crash at any moment `path` holds either its old content or all of `data`.
    """
    temporary = temporary_path(path)
    with temporary.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        sync(file)
    temporary.replace(path)


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the name under which a file is written before it is renamed to `path`."""
    return path.with_name(f"{path.name}.tmp")


def sync(file: IO[Any]) -> None:
    """Waits until everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def whole_lines(path: pathlib.Path) -> list[str]:
    """Returns a file's lines without a torn last one; none if there is no file."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
