"""Errors of the operating system in one line: the path, what is wrong with it, and what to do."""

import contextlib
import errno
import os
import pathlib
import shutil

from rich.filesize import decimal

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, a full quota, and a file that may not grow."""

_ADVICE = {
    errno.ENOENT: "check the name; if a run wrote there, its folder has been removed or moved",
    errno.ENOTDIR: "a part of the path is a file where a folder is needed; name another path",
    errno.EISDIR: "a folder is where a file is needed; name another path",
    errno.EEXIST: "a file is where a folder is needed; name another path",
    errno.EACCES: "get permission to read and write there, or name another path",
    errno.EPERM: "get permission to read and write there, or name another path",
    errno.EROFS: "name a path on a file system that can be written",
    errno.ENAMETOOLONG: "name a shorter path",
    errno.ELOOP: "its symbolic links form a circle; name another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "the system has too many open files; close some programs",
    errno.EIO: "the disk may be failing; copy what it holds",
    errno.ESTALE: "the network file system lost the file; mount it again",
}


def in_one_line(error: OSError, folder: pathlib.Path | None = None) -> str:
    """Returns the path of an error, the cause, and what to do.

    Args:
      error: the error; writes to open files name no path.
      folder: the path to name if the error names none.
    """
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else folder
    cause = error.strerror or str(error) or type(error).__name__
    if error.errno in FULL:
        where = pathlib.Path(path or ".")
        free = free_space(where)
        return f"writing to {where}, where {free} are free: {cause}. Make room and continue with --resume"
    advice = _ADVICE.get(error.errno or 0)
    return (f"{path}: " if path else "") + cause + (f"; {advice}" if advice else "")


def free_space(path: pathlib.Path) -> str:
    """Returns the free space, as text, of the file system that holds a path or its nearest parent."""
    for folder in (path.absolute(), *path.absolute().parents):
        with contextlib.suppress(OSError):
            return decimal(shutil.disk_usage(folder).free)
    return "an unknown number of bytes"
