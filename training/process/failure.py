"""The end of all processes of a run when one of them fails, wherever the others wait.

The process that fails leaves its error in the key-value store of JAX's coordination service, where a thread
of every process looks for one. Without it the others wait in a collective operation for a process that has
ended, until JAX notices and aborts them without a reason. A process that is killed leaves no error: the
threads count seconds in the store, and the first process leaves the error for one that counts no more.
"""

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # orbax too takes the client from here; there is no public way

from training.process.start import program_name
from training.process.together import ProcessError, is_told, join_processes

_KEY, _ALIVE, _DONE = "mxjax/error", "mxjax/alive", "done"
_EVERY = 1.0  # seconds between looks
_SILENT = 30  # looks after which a process that counts no more is dead
_TO_NOTICE = 5.0  # seconds in which a process must fail by itself, or be ended
_TO_END = 20.0  # seconds in which a process that has failed must end, or be ended
_TO_JOIN = 50  # seconds in which the others must join a process that cannot start
_CONSEQUENCE = re.compile("connection|socket|peer|remote|network|unavailable|timed out|deadline", re.I)
"""Words of errors that another process may have caused by its end."""
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")


@contextlib.contextmanager
def failing_together(*shared: type[BaseException]) -> Iterator[None]:
    """Ends all processes within a minute with the error that one of them raises in the block.

    Blocks may be nested. Errors that `together` has told the other processes are theirs already.

    Args:
      shared: errors that all processes raise at the same place, and need not be told.
    Raises:
      ProcessError: a collective operation broke because another process failed.
    """
    if distributed.global_state.client is None:
        yield
        return
    outer, watch = _Watch.running, _Watch.running or _Watch()
    try:
        yield
    except shared:
        raise
    except BaseException as error:
        if not is_told(error):
            watch.fail(error)
        raise
    finally:
        if outer is None:
            watch.stop()


@contextlib.contextmanager
def telling_others(distributed: bool) -> Iterator[None]:
    """Ends the processes that wait for this one, if an error in the block keeps it from joining them.

    Args:
      distributed: there are others.
    """
    try:
        yield
    except SystemExit as error:
        if not distributed or not error.code:
            raise
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        with contextlib.suppress(ValueError):  # a variable is missing, so that none can be told
            join_processes(_TO_JOIN)
            _Watch().fail(error)
        _end(error.code if isinstance(error.code, int) else 1)


class _Watch:
    """Looks for the error of a process, and ends this process if it does not end by itself."""

    running: "_Watch | None" = None

    def __init__(self):
        state = distributed.global_state
        self._client: Any = state.client
        self._index = state.process_id
        self._stopped, self._failed = threading.Event(), threading.Event()
        self._seen: dict[str, tuple[str, int]] = {}
        _Watch.running = self
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless the process has failed."""
        if not self._failed.is_set():
            self._stopped.set()
            self._thread.join(_TO_NOTICE)  # its last count must not come after this one
            self._count(_DONE)
        _Watch.running = None

    def fail(self, error: BaseException) -> None:
        """Tells all processes of an error of this one, unless it is the consequence of another's.

        Raises:
          ProcessError: it is.
        """
        if self._failed.is_set():
            return
        self._failed.set()
        atexit.register(_end)  # JAX would wait for the other processes
        if _is_from_jax(error) and (first := self._cause_of(error)) is not None:
            raise ProcessError(first) from None
        self._leave(f"process {self._index}: {_in_words(error)}")
        if self._index == 0:  # the store ends with this process
            time.sleep(2 * _TO_NOTICE)

    def _cause_of(self, error: BaseException) -> str | None:
        """Returns the error of the process that failed first; waits for one that may have been killed."""
        waits = _SILENT + _TO_NOTICE if _CONSEQUENCE.search(str(error)) else 0
        end = time.monotonic() + waits * _EVERY
        while (found := self._look()) is None and time.monotonic() < end:
            time.sleep(_EVERY)
        return found

    def _leave(self, message: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
            self._client.key_value_set(_KEY, message)

    def _look(self) -> str | None:
        try:
            return self._client.key_value_try_get(_KEY)
        except jax.errors.JaxRuntimeError:  # there is none
            return None

    def _run(self) -> None:
        second = 0
        while (found := self._look()) is None:
            self._count(str(second := second + 1))
            if self._index == 0:
                self._check_counts()
            if self._stopped.wait(_EVERY):
                return
        if self._failed.wait(_TO_NOTICE):
            time.sleep(_TO_END)
        print(f"{program_name()}: error: {found}", file=sys.stderr)
        _end()

    def _count(self, value: str) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{_ALIVE}/{self._index}", value, allow_overwrite=True)

    def _check_counts(self) -> None:
        """Leaves an error for a process that counts no more.

        It counts looks, not seconds: a run that was suspended as a whole goes on.
        """
        found: list[tuple[str, str]] = []
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            found = self._client.key_value_dir_get(_ALIVE)
        for key, value in found:
            before, looks = self._seen.get(key, ("", 0))
            self._seen[key] = (value, looks + 1 if value == before else 0)
            if value != _DONE and self._seen[key][1] == _SILENT:
                self._leave(
                    f"process {key.rpartition('/')[2]} has not answered for {_SILENT} s: it was killed or "
                    "stopped, or its host or the network failed; continue with --resume"
                )


def _is_from_jax(error: BaseException) -> bool:
    """Whether JAX's runtime raised it; a broken collective on the CPU is a ValueError with a status' name."""
    is_status = isinstance(error, ValueError) and _STATUS.match(str(error)) is not None
    return is_status or isinstance(error, jax.errors.JaxRuntimeError)


def _in_words(error: BaseException) -> str:
    """Returns the message of an error; that of one that nobody expected begins with its type."""
    if isinstance(error, SystemExit):
        message = getattr(error, "message", error.code)  # of a FlagError
        return str(message).removeprefix(f"{program_name()}: error: ")
    expected = type(error).__module__.startswith("training.")
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _end(status: int = 1) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # closed, or full
            stream.flush()
    os._exit(status)
