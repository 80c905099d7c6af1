"""The first lines of a program, before its slow imports, the last of which is JAX; optional dependencies."""

import contextlib
import importlib
import importlib.util
import os
import pathlib
import signal
import sys
import types
from collections.abc import Iterator
from typing import Any


def prepare_process() -> None:
    """Opens standard streams that are closed, makes SIGINT end the program with one line, and drops noise.

    A file opened while descriptor 1 or 2 is free would get that number, and then what libraries print. The
    training loop replaces the handler of SIGINT, see `training.process.interruption`. Ends the program with
    one line if JAX cannot be imported because a variable that it reads, as JAX_ENABLE_X64, has no such value.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    signal.signal(signal.SIGINT, _end)
    sys.unraisablehook = _show_unraisable
    try:
        importlib.import_module("jax")
    except ValueError as error:
        sys.exit(f"{program_name()}: error: {error}")


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def output_errors() -> Iterator[None]:
    """Ends the program with one line if standard output does not take what the block prints.

    A reader that has enough, such as `head`, needs no line.
    """
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except (OSError, UnicodeEncodeError) as error:
        if sys.stdout is not None:  # for what is left in the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        enough = isinstance(error, BrokenPipeError)
        sys.exit(128 + signal.SIGPIPE if enough else f"{program_name()}: error: standard output: {error}")


@contextlib.contextmanager
def unwinding_signals(advice: str = "") -> Iterator[None]:
    """Ends the block by SystemExit at SIGINT or SIGTERM, so that it removes what is half-made.

    The status is 128 + the signal's number. A second signal ends the program at once.

    Args:
      advice: what to do then; follows the message.
    """

    def stop(number: int, frame: Any) -> None:
        for each in previous:
            signal.signal(each, _end)
        more = f"; {advice}" if advice else ""
        os.write(2, f"{program_name()}: interrupted{more}\n".encode())
        sys.exit(128 + number)

    previous = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)


def program_name() -> str:
    """Returns the name of the running program, for messages."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None for a script
    name = pathlib.Path(sys.argv[0]).name
    is_module = spec is not None and pathlib.Path(spec.origin or "").name == name
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec and is_module else name


def _show_unraisable(error: Any) -> None:
    """Shows an error of a callback, except those of tensorstore's writes that outlive a failed save."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


def _end(number: int, frame: Any) -> None:
    os.write(2, f"{program_name()}: interrupted\n".encode())
    os._exit(128 + number)  # an exception raised within an import may be swallowed or become another


class MissingExtraError(ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


def check_extra(extra: str, purpose: str, *modules: str) -> None:
    """Raises MissingExtraError unless all modules are installed; imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise MissingExtraError(
                f"{purpose} needs {module}: in a checkout of mxjax, pip install -e '.[{extra}]' or "
                f"uv sync --extra {extra}"
            )


def require(extra: str, purpose: str, module: str) -> types.ModuleType:
    """Imports an optional dependency; raises MissingExtraError if it is not installed."""
    check_extra(extra, purpose, module.partition(".")[0])
    return importlib.import_module(module)
