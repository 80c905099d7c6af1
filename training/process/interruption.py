"""Interruption by SIGINT or SIGTERM: the training loop asks for it, and all processes get the same answer."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

GRACE = 2.0
"""Seconds after the first signal in which another counts as the same one: `timeout` and schedulers send it to
a program and again to its group."""


class RunInterrupted(SystemExit):
    """SIGINT or SIGTERM ended the run after a checkpoint; the message says how to resume."""


class Interrupted(Exception):
    """SIGINT or SIGTERM ended an evaluation."""


class Interruption:
    """Notes the first SIGINT or SIGTERM without ending the program.

    A signal more than GRACE seconds later ends it at once. A thread does that, because it also runs while the
    main thread compiles; Python writes a byte to its socket for every signal. With several processes a signal
    to one is a signal to all: JAX's preemption service, which then takes SIGTERM, finds a call of `requested`
    that every process has yet to make.

    A context manager for the main thread; in other threads it notes nothing.
    """

    def __init__(self):
        self._arrived = False
        self._calls = 0
        self._signals = [signal.SIGINT] if jax.process_count() > 1 else [signal.SIGINT, signal.SIGTERM]
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._receiver, self._sender = socket.socketpair()
            self._sender.setblocking(False)
            self._thread = threading.Thread(target=self._end_at_second_signal, daemon=True)
            self._thread.start()
            self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
            self._previous = {s: signal.signal(s, self._note) for s in self._signals}
        return self

    def __exit__(self, *exception) -> None:
        if not self._previous:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._sender.close()  # ends the thread
        self._thread.join()
        self._receiver.close()

    def requested(self) -> bool:
        """Returns whether to save and end now. All processes must call it equally often."""
        if jax.process_count() > 1:
            self._calls += 1
            return multihost_utils.reached_preemption_sync_point(self._calls)
        return self._arrived

    def guard[T](self, batches: Iterable[T]) -> Iterator[T]:
        """Yields the batches; raises Interrupted instead of a batch once a signal has arrived."""
        for batch in batches:
            if self.requested():
                raise Interrupted
            yield batch

    def _note(self, number: int, frame: Any) -> None:
        self._arrived = True
        if jax.process_count() > 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def _end_at_second_signal(self) -> None:
        first: float | None = None
        while numbers := self._receiver.recv(64):
            for number in numbers:
                now = time.monotonic()
                if number not in self._signals:
                    continue
                if first is None:
                    first = now
                    _say(f"interrupted: ends after this step; a signal after {GRACE:g} s ends it at once")
                elif now - first > GRACE:
                    _say("ended at once by another signal; continue with --resume")
                    os._exit(128 + number)


def _say(line: str) -> None:
    """Writes a line to stderr past Python's buffer, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())
