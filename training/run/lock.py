"""The lock of a run's folder: one run at a time writes there. The kernel releases it when a process dies.

A run writes by name. If its folder is moved, removed or replaced, it ends, since it would go on in the
folder of another run that has taken the name.
"""

import contextlib
import datetime
import errno
import fcntl
import functools
import os
import pathlib
import socket
import stat
from collections.abc import Callable, Iterator
from typing import TextIO

from training.files import is_same
from training.log.metrics import METRICS
from training.log.report import command_to_continue
from training.run.checksums import saved_steps

LOCK = "lock"
_BEGIN = "process "
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # on some network file systems


@contextlib.contextmanager
def locked(folder: pathlib.Path) -> Iterator[Callable[[], None]]:
    """Creates the folder and holds its lock during the block; yields a function that calls `_check_place`.

    Raises:
      ValueError: another process holds the lock; the message names the process and its host. Or the file is
        not a run's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Not through a link, which may lead anywhere. Closed in child processes that execute another program.
    descriptor = _open(folder, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "a+", errors="replace") as file, contextlib.ExitStack() as stack:
        _lock(folder, file, fcntl.LOCK_EX)
        _check_content(folder, file)
        file.truncate(0)
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        file.write(f"{_BEGIN}{os.getpid()} on {socket.gethostname()} since {now}\n")
        file.flush()
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        stack.callback(os.close, opened)
        yield functools.partial(_check_place, folder, descriptor, opened)


def check_unlocked(folder: pathlib.Path) -> None:
    """Raises ValueError if a process holds the folder's lock; writes nothing and keeps no lock."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        descriptor = _open(folder, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, errors="replace") as file:
            _lock(folder, file, fcntl.LOCK_SH)


def _open(folder: pathlib.Path, how: int) -> int:
    """Returns a descriptor of the lock; raises ValueError if it is a pipe or a folder."""
    try:
        descriptor = os.open(folder / LOCK, how | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and (folder / LOCK).is_symlink():
            raise ValueError(f"{folder / LOCK} is not a file: remove it") from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{folder / LOCK} is not a file: remove it")
    return descriptor


def _check_content(folder: pathlib.Path, file: TextIO) -> None:
    """Raises ValueError if the file holds what no run has written, or lies elsewhere too."""
    file.seek(0)
    if os.fstat(file.fileno()).st_nlink > 1 or file.read(len(_BEGIN)) not in ("", _BEGIN):
        raise ValueError(f"{folder / LOCK} is not the lock of a run: move it away")


def _lock(folder: pathlib.Path, file: TextIO, how: int) -> None:
    """Locks the file where the file system can; raises ValueError if another process holds it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "another process"
        raise ValueError(
            f"--out {folder} is in use by {holder}; wait until it ends, or name another folder"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


class FolderLostError(RuntimeError):
    """A run's folder is no longer its own; the message says what is kept and where."""


def _check_place(folder: pathlib.Path, lock: int, opened: int) -> None:
    """Raises FolderLostError unless the lock file still lies in the run's folder, under its name.

    Args:
      lock, opened: descriptors of the lock file and of the folder, which stay with what they opened, whatever
        becomes of its name.
    """
    if is_same(lock, folder / LOCK):
        return
    lost, now = f"{folder} is no longer this run's", folder
    if not is_same(opened, folder):
        with contextlib.suppress(OSError):
            now = pathlib.Path(f"/proc/self/fd/{opened}").readlink()  # Linux
    if not is_same(opened, now):
        raise FolderLostError(f"{lost}: it was removed, or moved out of sight, with all that the run saved")
    steps = saved_steps(now / "checkpoints")
    records = f"{METRICS} and " if (now / METRICS).exists() else ""  # it may be in removal
    kept = f"holds {records}no checkpoint"
    if steps:
        kept = f"holds {records}the checkpoint of step {steps[-1]}; continue with: {command_to_continue(now)}"
    if now == folder:
        raise FolderLostError(
            f"{lost} alone: its file {LOCK} was removed or replaced, so that another run may write there. "
            f"It {kept}"
        )
    raise FolderLostError(f"{lost}: it was moved. {now} {kept}")
