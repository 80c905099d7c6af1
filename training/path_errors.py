"""Errors of the operating system in one line: the path, what is wrong with it, and what to do."""

import contextlib
import errno
import os
import pathlib
import shutil

from rich.filesize import decimal

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, a full quota, and a file that may not grow."""
LIMIT = "Raise the limit of file sizes, ulimit -f, and continue with --resume"

_PERMISSION = "Get permission to read and write there, or name another path"
_ADVICE = {
    errno.ENOENT: "Check the name; a folder that a run wrote to was removed or moved",
    errno.ENOTDIR: "A part of the path is a file instead of a folder: name another path",
    errno.EEXIST: "It is a file instead of a folder: name another path",
    errno.EISDIR: "It is a folder instead of a file: move it away, or name another path",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "Name a path on a file system that can be written",
    errno.ENAMETOOLONG: "Name a shorter path",
    errno.ELOOP: "Its symbolic links form a circle: name another path",
    errno.EMFILE: "Raise the limit of open files, ulimit -n",
    errno.ENFILE: "The system has too many open files: end some programs",
    errno.EIO: "The disk may be failing: copy what it holds",
    errno.ESTALE: "The network file system has lost the file: mount it again",
}


def in_one_line(error: OSError, folder: pathlib.Path | None = None) -> str:
    """Returns the path of an error, the cause, and what to do.

    Args:
      error: the error; writes to open files name no path.
      folder: the path to name if the error names none.
    """
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else folder
    if path is None and error.errno == errno.ENOENT and _in_removed_folder():
        return "the current folder was removed. Change to another"
    cause = error.strerror or str(error) or type(error).__name__
    if error.errno in FULL:
        where = pathlib.Path(path or ".")
        if error.errno == errno.EFBIG:
            return f"writing to {where}: {cause}. {LIMIT}"
        free = free_space(where)
        return f"writing to {where}, where {free} are free: {cause}. Make room and continue with --resume"
    advice = _ADVICE.get(error.errno or 0)
    return (f"{path}: " if path else "") + cause + (f". {advice}" if advice else "")


def _in_removed_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def free_space(path: pathlib.Path) -> str:
    """Returns the free space, as text, of the file system that holds a path or its nearest parent."""
    for folder in (path.absolute(), *path.absolute().parents):
        with contextlib.suppress(OSError):
            return decimal(shutil.disk_usage(folder).free)
    return "an unknown number of bytes"
