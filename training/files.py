"""Files that are written completely or not at all, checksums that show damage which nothing else shows, and
the paths that flags name."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shlex
import zlib
from typing import IO, Any

from models.received import open_received, parse_json, read_text

HUGGINGFACE = "huggingface"
"""The folder in a run that holds everything of an imported checkpoint except its weights."""


def absolute_path(path: pathlib.Path | str) -> pathlib.Path:
    """Returns a path that a flag names, from the root on: `~` is expanded, also where the shell leaves it.

    It then means the same file in every folder. Links are followed only where `..` comes after one, as the
    system does; tensorstore takes no `..`.

    Raises:
      ValueError: there is no such user, or no current folder.
    """
    try:
        found = pathlib.Path(path).expanduser()
        return pathlib.Path(os.path.realpath(found)) if ".." in found.parts else found.absolute()
    except RuntimeError:
        raise ValueError(f"{path}: there is no such user; write ./{path} for a file of this name") from None
    except FileNotFoundError:
        raise ValueError(f"{path}: the current folder was removed. Change to another") from None


def make_absolute(config: Any, *texts: str) -> None:
    """Makes the paths in the fields of a frozen dataclass absolute, also those in tuples.

    Args:
      config: an instance, in its `__post_init__`.
      texts: names of fields that hold paths as texts; an empty text stays empty.
    """

    def absolute(value: Any, is_text: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(absolute(part, is_text) for part in value)
        if isinstance(value, pathlib.Path):
            return absolute_path(value)
        return str(absolute_path(value)) if is_text and value else value

    for field in dataclasses.fields(config):
        value = absolute(getattr(config, field.name), field.name in texts)
        object.__setattr__(config, field.name, value)


def check_parent(flag: str, path: pathlib.Path) -> None:
    """Raises ValueError, with the command that mends it, if a file that a flag names has no folder."""
    if not os.path.isdir(path.parent):
        raise ValueError(
            f"{flag} {path}: there is no folder {path.parent}; make it: "
            f"mkdir -p {shlex.quote(os.path.realpath(path.parent))}"
        )


def write_atomically(path: pathlib.Path, data: bytes | str) -> None:
    """Writes a file under a temporary name, flushes it to the disk, and renames it.

    After a crash at any moment `path` holds either its old content or all of `data`. An OSError names `path`.
    """
    temporary = temporary_path(path)
    if temporary.is_symlink():  # it may lead anywhere
        temporary.unlink()
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            sync(file)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the temporary name, or none


def temporary_path(path: pathlib.Path) -> pathlib.Path:
    """Returns the name under which a file is written before it is renamed to `path`."""
    return path.with_name(f"{path.name}.tmp")


def sync(file: IO[Any]) -> None:
    """Waits until everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def whole_lines(path: pathlib.Path) -> list[bytes]:
    """Returns a file's lines without a torn last one; none if there is no file."""
    if not path.exists():
        return []
    with open_received(path, largest=_LARGEST_LOG, text=False) as file:
        return file.read().split(b"\n")[:-1]


def unused(path: pathlib.Path) -> pathlib.Path:
    """Returns the path, or one with the first number from 2 on whose name is not in use."""
    number, found = 2, path
    while os.path.lexists(found):  # a broken link is in use: it may lead anywhere
        number, found = number + 1, path.with_name(f"{path.name}-{number}")
    return found


def is_same(descriptor: int, path: pathlib.Path) -> bool:
    """Returns whether a path names the file that a descriptor has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ESTALE}:
            return False
        raise


MISSING = "is missing"
_CHUNK = 2**24
_LARGEST_LOG = 2**33  # bytes; the 1.2 million steps of MLPerf's longest run take a few hundred million


def crc32_of(path: pathlib.Path) -> str:
    """Returns the CRC32 of a file as 8 hexadecimal digits."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def size_and_crc32(path: pathlib.Path) -> tuple[int, str]:
    """Returns a file's size in bytes and its CRC32."""
    return path.stat().st_size, crc32_of(path)


def problem(path: pathlib.Path, recorded: Any, largest: float = float("inf")) -> str | None:
    """Compares a file with its record; returns None, or the difference, such as "is damaged".

    Args:
      recorded: its size and CRC32.
      largest: size in bytes above which only the size is compared.
    """
    size, crc32 = recorded
    if not path.is_file():
        return MISSING
    if path.stat().st_size != size:
        return f"has {path.stat().st_size} bytes instead of {size}"
    return "is damaged" if size <= largest and crc32_of(path) != crc32 else None


def to_checked(content: dict[str, Any]) -> str:
    """Returns an object as a line of JSON with its own CRC32."""
    body = json.dumps(content, sort_keys=True)
    return json.dumps({"crc32": f"{zlib.crc32(body.encode()):08x}", **content}, sort_keys=True) + "\n"


def read_checked(path: pathlib.Path, **fields: type) -> dict[str, Any] | None:
    """Returns the object of which a file holds `to_checked`; None if it is damaged or missing.

    Whoever writes a wrong object may write its right CRC32, so it must also have `files`, the size and CRC32
    of each by name, and the fields given with their types.
    """
    try:
        text = read_text(path)
        content = parse_json(text)
        del content["crc32"]
        is_whole = text == to_checked(content)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    has_all = all(isinstance(content.get(name), kind) for name, kind in fields.items())
    return content if is_whole and has_all and are_sums(content.get("files")) else None


def are_sums(found: Any) -> bool:
    """Returns whether a value read from JSON holds what `size_and_crc32` returns, by name."""
    return isinstance(found, dict) and all(
        isinstance(sums, list) and list(map(type, sums)) == [int, str] for sums in found.values()
    )
