"""Files that others made, opened in one place and refused in one line.

Only regular files of bounded size are opened: a pipe or a device might never end. The first bytes tell what
is no text: compressed and binary files, other encodings, and git-lfs's stand-ins for files. JSON is bounded
in depth, so that whatever walks through it ends.

Source: RFC 1952 (gzip), RFC 8878 (zstd), the formats of xz, bzip2 and LZ4 frames; git-lfs, docs/spec.md;
git's own test for binary files, a NUL in the first 8000 bytes.
"""

import codecs
import io
import json
import os
import pathlib
import re
import stat
from typing import Any

LARGEST = 100_000_000
"""The largest size in bytes of a configuration, index or policy; large checkpoints have a few million."""
_HEAD = 8000  # bytes that tell what a file is
_DEEPEST = 100  # levels of JSON; Python's own limit depends on how deep the caller is
_POINTER, _LARGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024
_COMPRESSED = (
    (rb"\x1f\x8b\x08", "gzip"),
    (rb"\x28\xb5\x2f\xfd", "zstd"),
    (rb"\xfd7zXZ\x00", "xz"),
    (rb"BZh[1-9]1AY&SY", "bzip2"),
    (rb"\x04\x22\x4d\x18", "lz4"),
)
_ENCODINGS = (  # UTF-32's little-endian mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def special_kind(path: str | os.PathLike[str]) -> str | None:
    """Returns "pipe", "socket" or "device" for a path that names one; reading it might never end."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


def check_regular(path: str | os.PathLike[str], name: str) -> None:
    """Raises ValueError, with the name that messages give it, for a pipe, socket or device."""
    if (kind := special_kind(path)) is not None:
        raise ValueError(f"{name} is a {kind}: write what it gives into a file, and name that")


def fault_of(head: bytes, *, text: bool = True) -> str | None:
    """Returns the fault of a file that begins with these bytes, and the remedy; None if it is sound.

    Args:
      head: the first 8000 bytes, or all of a shorter file.
      text: whether it should be text; else only a stand-in is wrong.
    """
    if head.startswith(_POINTER) and len(head) < _LARGEST_POINTER:
        return "is a pointer of git-lfs, not the file itself; run `git lfs pull` in its folder"
    if not text:
        return None
    for magic, name in _COMPRESSED:
        if re.match(magic, head):
            return f"is compressed by {name}, not text; decompress it first"
    for mark, name in _ENCODINGS:
        if head.startswith(mark):
            return f"is in {name}; convert it: iconv -f {name} -t UTF-8"
    if b"\0" in head[:_HEAD]:
        return "holds NUL bytes, so it is no text"
    return None


def open_received(
    path: str | os.PathLike[str], name: str | None = None, *, largest: int | None = None, text: bool = True
) -> io.BufferedReader:
    """Opens a file that somebody else made.

    Args:
      name: what messages call it, such as a flag and the path. Default: the path.
      largest: its largest size in bytes.
      text: whether it must be text.
    Raises:
      ValueError: it is no regular file, too large, or `fault_of` finds something.
      OSError: it cannot be read; `filename` is set.
    """
    name = os.fspath(path) if name is None else name
    check_regular(path, name)
    if largest is not None and (size := os.stat(path).st_size) > largest:
        raise ValueError(f"{name} has {size:,} bytes, and such a file at most {largest:,}")
    file = open(path, "rb")  # noqa: SIM115, the caller closes it
    try:
        head = file.read(_HEAD)
        file.seek(0)
        if (fault := fault_of(head, text=text)) is not None:
            raise ValueError(f"{name} {fault}")
    except BaseException as error:
        file.close()
        if isinstance(error, OSError):
            error.filename = error.filename or os.fspath(path)  # an error while reading names no file
        raise
    return file


def read_text(path: str | os.PathLike[str], name: str | None = None, *, largest: int = LARGEST) -> str:
    """Returns the text of a file in UTF-8 without its byte order mark; raises as `open_received`."""
    with open_received(path, name, largest=largest) as file:
        try:
            return file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name or os.fspath(path)} is not UTF-8 ({error})") from None


def parse_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text, in UTF-8 if it is bytes; a byte order mark is skipped.

    Raises:
      ValueError: "not JSON", with the reason, or "nested too deeply", to be put after a name and "is".
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return value
    raise ValueError("nested too deeply")


def read_json(path: str | os.PathLike[str], *, largest: int = LARGEST) -> Any:
    """Returns the value in a JSON file; raises as `open_received`, and ValueError if it is not JSON."""
    text = read_text(path, largest=largest)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is {error}") from None


def read_object(path: pathlib.Path, *, largest: int = LARGEST) -> dict[str, Any]:
    """Returns the object in a JSON file; raises as `read_json`, and ValueError for any other value."""
    found = read_json(path, largest=largest)
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object")
    return found
