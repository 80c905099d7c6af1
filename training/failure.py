"""The end of all processes of a run when one of them fails between steps, wherever the others wait.

The process that fails leaves its error in the key-value store of JAX's coordination service, where a thread
of every process looks for one. Without it the others wait in a collective operation for a process that has
ended, until JAX notices and aborts them without a reason.
"""

import atexit
import contextlib
import os
import pathlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # orbax too takes the client from here; there is no public way

from training.processes import ProcessError

_KEY = "mxjax/error"
_EVERY = 1.0  # seconds between looks
_TO_NOTICE = 5.0  # seconds in which a process must fail by itself, or be ended
_TO_END = 30.0  # seconds in which a process that has failed must end, or be ended


@contextlib.contextmanager
def failing_together(*shared: type[BaseException]) -> Iterator[None]:
    """Ends all processes within a minute with the error that one of them raises in the block.

    Args:
      shared: errors that all processes raise at the same place, and need not be told.
    Raises:
      ProcessError: a collective operation broke because another process failed.
    """
    if jax.process_count() == 1:
        yield
        return
    watch = _Watch(distributed.global_state.client)
    try:
        yield
    except shared:
        watch.stop()
        raise
    except BaseException as error:
        watch.fail(error)
        raise
    watch.stop()


class _Watch:
    """Looks for the error of a process, and ends this process if it does not end by itself."""

    def __init__(self, client: Any):
        self._client = client
        self._stopped, self._failed = threading.Event(), threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()

    def fail(self, error: BaseException) -> None:
        """Tells all processes of an error of this one, unless it is the consequence of another's.

        Raises:
          ProcessError: it is.
        """
        self._failed.set()
        atexit.register(_end)  # JAX would wait for the other processes
        if isinstance(error, jax.errors.JaxRuntimeError) and (first := self._look()) is not None:
            raise ProcessError(first) from None
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            self._client.key_value_set(_KEY, f"process {jax.process_index()}: {_in_words(error)}")
        if jax.process_index() == 0:  # the store ends with this process
            time.sleep(2 * _TO_NOTICE)

    def _look(self) -> str | None:
        try:
            return self._client.key_value_try_get(_KEY)
        except jax.errors.JaxRuntimeError:  # there is none
            return None

    def _run(self) -> None:
        while (found := self._look()) is None:
            if self._stopped.wait(_EVERY):
                return
        if self._failed.wait(_TO_NOTICE):
            time.sleep(_TO_END)
        print(f"{pathlib.Path(sys.argv[0]).name}: error: {found}", file=sys.stderr)
        _end()


def _in_words(error: BaseException) -> str:
    """Returns the message of an error; that of one that nobody expected begins with its type."""
    if isinstance(error, SystemExit):
        return str(error.code).removeprefix(f"{pathlib.Path(sys.argv[0]).name}: error: ")
    expected = type(error).__module__.startswith("training.")
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _end() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or full
            stream.flush()
    os._exit(1)
