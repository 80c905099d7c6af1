"""The caller's end of `mxjax.kernels.compile_server`, a process that compiles kernels."""

import contextlib
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

PLACE = struct.Struct("<I")
"""A reply: the place of a compiled kernel in the list that was sent."""

PATIENCE = 120.0
"""Seconds after which a caller compiles a kernel itself."""

Job = tuple[Any, ...]
"""The arguments of `mxjax.kernels.lowering.compile_kernel`; on its way, the kernel is its module and name."""


class CompileServer:
    """Hands kernels to the process, and waits for them."""

    def __init__(self, process: subprocess.Popen):
        self._process = process
        self._done: dict[Job, threading.Event] = {}
        self._changing, self._talking = threading.Lock(), threading.Lock()

    def begin(self, jobs: Sequence[Job]) -> None:
        """Hands kernels to the process, those that it can import."""
        with self._changing:
            new = [job for job in dict.fromkeys(jobs) if job not in self._done and _name_of(job[0])]
            events = {job: threading.Event() for job in new}
            self._done |= events
        if events:
            threading.Thread(target=self._talk, args=(events,), daemon=True).start()

    def wait(self, job: Job) -> None:
        """Waits until the process is done with a kernel, or gone, but no longer than PATIENCE."""
        if done := self._done.get(job):
            done.wait(PATIENCE)

    def _talk(self, events: dict[Job, threading.Event]) -> None:
        """Sends kernels, and sets the event of each when it is compiled, or of all if the process is gone."""
        requests = self._process.stdin
        assert requests is not None
        try:
            with self._talking:
                if not requests.closed and not self._exchange(events):
                    with contextlib.suppress(OSError):
                        requests.close()
                    self._process.wait()
        finally:
            for event in events.values():
                event.set()

    def _exchange(self, events: dict[Job, threading.Event]) -> bool:
        """Returns whether the process has answered for each kernel."""
        requests, replies, jobs = self._process.stdin, self._process.stdout, list(events)
        assert requests is not None
        assert replies is not None
        try:
            pickle.dump([(_name_of(job[0]), *job[1:]) for job in jobs], requests)
            requests.flush()
        except OSError:
            return False
        for _ in jobs:
            place = replies.read(PLACE.size)
            if len(place) < PLACE.size:
                return False
            events[jobs[PLACE.unpack(place)[0]]].set()
        return True


def _name_of(kernel) -> tuple[str, str] | None:
    """Returns the module and the name by which another process finds a kernel, or None."""
    module, name = kernel.fn.__module__, kernel.fn.__qualname__
    found = getattr(sys.modules.get(module), name, None) is kernel and module != "__main__"
    return (module, name) if found else None
