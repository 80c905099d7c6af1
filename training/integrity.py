"""Sizes and CRC32 of files, and files of JSON that carry their own: damage that nothing else shows."""

import json
import pathlib
import zlib
from typing import Any

MISSING = "is missing"
_CHUNK = 2**24


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
      path: the file.
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


def read_checked(path: pathlib.Path) -> dict[str, Any] | None:
    """Returns the object of which a file holds `to_checked`; None if it is damaged or missing."""
    try:
        text = path.read_text()
        content = json.loads(text)
        del content["crc32"]
        return content if text == to_checked(content) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
