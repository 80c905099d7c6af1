"""The processes of a run: joining them, and errors of one that end all, since the rest would wait for it."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

_PATIENCE = 300  # seconds, as long as JAX waits for all to join


class ProcessError(RuntimeError):
    """Another process of the run has failed; the message is that of its error."""


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Ends the block when all processes are at its end, or with an error in all if there was one in any.

    The block itself must not wait for other processes.

    Raises:
      ProcessError: in another process there was an error.
    """
    try:
        yield
    except Exception as error:
        _exchange(error, None)
        raise
    _exchange(None, None)


def gather[T](function: Callable[[], T]) -> list[T]:
    """Returns what the function, of which JSON can be made, returns in each process; errors as `together`."""
    try:
        value = function()
    except Exception as error:
        _exchange(error, None)
        raise
    return _exchange(None, value)


def _exchange(error: Exception | None, value: Any) -> list[Any]:
    """Returns the values of all processes; raises ProcessError if this one had no error and another did."""
    message = error and (str(error) or repr(error))
    said = [json.loads(text) for text in _all_texts(json.dumps([message, value]))]
    for index, (message, _) in enumerate(said):
        if message is not None and error is None:
            raise ProcessError(f"process {index}: {message}")
    return [value for _, value in said]


def _all_texts(text: str) -> list[str]:
    if jax.process_count() == 1:
        return [text]
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size, np.int32))
    padded = multihost_utils.process_allgather(np.pad(mine, (0, sizes.max() - mine.size)))
    return [bytes(row[:size]).decode() for row, size in zip(padded, sizes, strict=True)]


def is_first_process() -> bool:
    """Returns whether this process writes and prints what one of them must."""
    return jax.process_index() == 0


def join_processes() -> None:
    """Joins the other processes of the run: those that JAX_COORDINATOR_ADDRESS (HOST:PORT), JAX_NUM_PROCESSES
    and JAX_PROCESS_ID name, else those that JAX finds by itself (Slurm, Open MPI, Kubernetes, Cloud TPU).

    Raises:
      ValueError: some of the three are missing, there is nothing to find them by, or the first process cannot
        be reached or cannot listen.
    """
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    given = {name: os.environ[name] for name in names if name in os.environ}
    missing = [name for name in names if name not in given]
    if given and missing:
        raise ValueError(f"--distributed: {', '.join(given)} set, {', '.join(missing)} not; set all or none")
    if not given:
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"--distributed: JAX found no other processes ({error}); set {', '.join(names)}"
            ) from error
        return
    address, count, index = given.values()
    if not count.isdecimal() or not index.isdecimal() or int(index) >= int(count):
        raise ValueError(f"--distributed: JAX_PROCESS_ID {index} must be one of 0 to {count} - 1")
    parse_address(address)
    if int(index) != 0:
        wait_for_coordinator(address)
    try:
        jax.distributed.initialize(address, int(count), int(index))
    except RuntimeError as error:
        raise ValueError(
            f"--distributed: process {index} of {count} cannot join at JAX_COORDINATOR_ADDRESS {address} "
            f"({error}); start all {count}, and let the port be a free one of the first process's host"
        ) from error


def parse_address(address: str) -> tuple[str, int]:
    """Returns host and port of HOST:PORT.

    Raises:
      ValueError: this is no such address.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--distributed: JAX_COORDINATOR_ADDRESS must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def wait_for_coordinator(address: str, seconds: float = _PATIENCE) -> None:
    """Returns once something listens at HOST:PORT: JAX ends a program at once that cannot reach it.

    Raises:
      ValueError: nothing has listened there for so many seconds, or this is no such address.
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
                    "the process with JAX_PROCESS_ID 0 on that host, and let its port through firewalls"
                ) from error
        time.sleep(min(1.0, seconds))
