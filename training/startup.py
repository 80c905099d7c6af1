"""The first lines of a program, before its slow imports. Imports nothing slow itself."""

import os
import pathlib
import signal
import sys
from typing import Any


def prepare_process() -> None:
    """Opens standard streams that are closed, makes SIGINT end the program with one line, and drops noise.

    A file opened while descriptor 1 or 2 is free would get that number, and then what libraries print. The
    training loop replaces the handler of SIGINT, see `training.interruption`.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    signal.signal(signal.SIGINT, _end)
    sys.unraisablehook = _show_unraisable


def _show_unraisable(error: Any) -> None:
    """Shows an error of a callback, except those of tensorstore's writes that outlive a failed save."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


def _end(number: int, frame: Any) -> None:
    name = pathlib.Path(sys.argv[0]).name
    os.write(2, f"{name}: interrupted\n".encode())
    os._exit(128 + number)  # an exception raised within an import may be swallowed or become another
