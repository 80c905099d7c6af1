"""The processes of a run: joining them, and ending all when one fails, so that none waits forever."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from training.process.start import program_name

_PATIENCE = 300  # seconds in which all processes must join; slow file systems delay their imports
_TOLD = "_told"  # an attribute of errors that the other processes know


class ProcessError(RuntimeError):
    """Another process of the run failed; the message is that of its error."""


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Waits at the end of the block for all processes; an error in one is an error in all.

    The block itself must not wait for other processes.

    Raises:
      ProcessError: another process raised an error.
    """
    try:
        yield
    except Exception as error:
        _tell(error)
        raise
    _exchange(None, None)


def is_told(error: BaseException | None) -> bool:
    """Returns whether the other processes know of an error, or of its cause, from `together` or `gather`."""
    return error is not None and (_TOLD in vars(error) or is_told(error.__cause__))


def _tell(error: Exception) -> None:
    _exchange(error, None)
    setattr(error, _TOLD, True)


def gather[T](function: Callable[[], T]) -> list[T]:
    """Returns the function's JSON-compatible result in each process; errors are as in `together`."""
    try:
        value = function()
    except Exception as error:
        _tell(error)
        raise
    return _exchange(None, value)


def _exchange(error: Exception | None, value: Any) -> list[Any]:
    """Returns the values of all processes; raises ProcessError if this one had no error and another did."""
    message = error and (str(error) or repr(error))
    answers = [json.loads(text) for text in _all_texts(json.dumps([message, value]))]
    for index, (message, _) in enumerate(answers):
        if message is not None and error is None:
            raise ProcessError(f"process {index}: {message}")
    return [value for _, value in answers]


def _all_texts(text: str) -> list[str]:
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size, np.int32))
    padded = multihost_utils.process_allgather(np.pad(mine, (0, sizes.max() - mine.size)))
    return [bytes(row[:size]).decode() for row, size in zip(padded, sizes, strict=True)]


def is_first_process() -> bool:
    """Returns whether this process does what only one process may do, such as printing."""
    return jax.process_index() == 0


def join_processes(patience: int = _PATIENCE) -> None:
    """Joins the other processes of the run; ends the program if they do not join within `patience` seconds.

    They are named by JAX_COORDINATOR_ADDRESS (HOST:PORT), JAX_NUM_PROCESSES and JAX_PROCESS_ID, or else found
    by JAX (Slurm, Open MPI, Kubernetes, Cloud TPU).

    Raises:
      ValueError: some of the three variables are missing, JAX finds no processes, or the first process cannot
        be reached or cannot listen.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = {name: os.environ[name] for name in names if name in os.environ}
    missing = [name for name in names if name not in given]
    if given and missing:
        raise ValueError(f"--distributed: {', '.join(given)} set, {', '.join(missing)} not; set all or none")
    if not given:
        try:
            with _waiting_for_all(" processes", patience):
                jax.distributed.initialize(initialization_timeout=2 * patience)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"--distributed: JAX found no other processes ({error}); set {', '.join(names)}"
            ) from error
        return
    address, count, index = given.values()
    if not _is_below(count, 2**31) or int(count) < 1:
        raise ValueError(f"--distributed: JAX_NUM_PROCESSES must be a number of processes, got {count!r}")
    if not _is_below(index, int(count)):
        raise ValueError(f"--distributed: JAX_PROCESS_ID must be from 0 to {int(count) - 1}, got {index!r}")
    parse_address(address)
    if int(index) != 0:
        wait_for_coordinator(address, patience)
    try:
        with _waiting_for_all(f" {count} processes at {address}", patience):
            jax.distributed.initialize(address, int(count), int(index), initialization_timeout=2 * patience)
    except RuntimeError as error:
        raise ValueError(
            f"--distributed: process {index} of {count} cannot join at JAX_COORDINATOR_ADDRESS {address} "
            f"({error}); start all {count}, and choose a free port on the first process's host"
        ) from error


def _is_below(text: str, bound: int) -> bool:
    return text.isdecimal() and len(text) < 20 and int(text) < bound


@contextlib.contextmanager
def _waiting_for_all(which: str, patience: int) -> Iterator[None]:
    """Ends the program with one line after `patience` seconds in the block, where JAX would abort it."""

    def end() -> None:
        message = (
            f"{program_name()}: error: --distributed: not all{which} have joined within "
            f"{patience} s; see what the others say, and start all of them together\n"
        )
        os.write(2, message.encode())
        os._exit(1)

    timer = threading.Timer(patience, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def parse_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT.

    Raises:
      ValueError: the address is malformed.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--distributed: JAX_COORDINATOR_ADDRESS must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def wait_for_coordinator(address: str, seconds: float = _PATIENCE) -> None:
    """Waits until something listens at HOST:PORT, because JAX aborts a program that cannot reach it.

    Raises:
      ValueError: nothing listens there within `seconds`, or the address is malformed.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(parse_address(address), timeout=10).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise ValueError(
                    f"--distributed: nothing answers at JAX_COORDINATOR_ADDRESS {address} ({error}); start "
                    "the process with JAX_PROCESS_ID 0 on that host, and open its port in firewalls"
                ) from error
        time.sleep(min(1.0, seconds))
