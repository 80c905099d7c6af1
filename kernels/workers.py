"""Processes that compile kernels at the same time, where there are cores for them.

Triton compiles a kernel partly in Python, of which a process runs one thread at a time. With many cores and
nothing in Triton's cache, a helper process therefore forks one for each kernel. They fill the cache, out of
which this process then takes the kernels. What a helper does not manage, for whatever reason, this process
compiles itself: an error shows where it would without helpers.

    python -m mxjax.kernels.workers

serves: it reads lists of kernels from standard input, pickled, and writes the place of each in its list
when it is compiled. It ends with its input, or when idle.
"""

import atexit
import contextlib
import functools
import hashlib
import importlib
import os
import pathlib
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import IO, Any, NamedTuple

FEWEST_CORES = 8
"""With fewer, threads are as fast, because a helper's imports take their time."""
MOST_PROCESSES = 32
FEWEST_KERNELS = 4
IDLE_SECONDS = 120


Frozen = tuple[tuple[str, type, Any], ...]
"""A mapping as a hashable value, with types: 1, 1.0 and True are equal, but compile to different kernels."""


class Job(NamedTuple):
    """A kernel to compile.

    Attributes:
      kernel: a function decorated with `triton.jit`; on its way to another process, its module and name.
      dtypes: those of the arrays that it takes pointers to, in order.
      backend, arch: Triton's target, "cuda" and "sm_90" or "hip" and "gfx950".
      options: the compiler's.
      constants: the constexpr arguments.
    """

    kernel: Any
    dtypes: tuple[str, ...]
    backend: str
    arch: str
    options: Frozen
    constants: Frozen


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def mark_of(job: Job) -> pathlib.Path:
    """Returns the file, beside Triton's cache, that says that the cache has a kernel. It may err."""
    import triton
    from triton import knobs

    parts = (triton.__version__, job.kernel.cache_key, *job[1:])
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return pathlib.Path(knobs.cache.dir) / "mxjax" / digest


def is_kept(job: Job) -> bool:
    """Whether Triton's cache should have a kernel."""
    return mark_of(job).exists()


def keep(job: Job) -> None:
    """Notes that Triton's cache has a kernel."""
    with contextlib.suppress(OSError):
        mark_of(job).parent.mkdir(parents=True, exist_ok=True)
        mark_of(job).touch()


def prepare(job: Job) -> None:
    """Starts the helper if a kernel is not compiled yet: its imports take seconds."""
    if cores() >= FEWEST_CORES and not is_kept(job):
        _helper()


def compile_in_processes(jobs: Sequence[Job]) -> dict[Job, threading.Event]:
    """Begins to compile kernels in other processes where that pays.

    Returns:
      For each kernel that is compiled elsewhere, an event that is set when that has ended, well or not.
    """
    jobs = [job for job in jobs if not is_kept(job) and _name_of(job.kernel) is not None]
    helper = _helper() if cores() >= FEWEST_CORES and len(jobs) >= FEWEST_KERNELS else None
    return {} if helper is None else helper.compile(jobs)


class _Helper:
    """The process that forks those that compile."""

    def __init__(self):
        from triton import knobs

        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "TRITON_CACHE_DIR": str(knobs.cache.dir),
            "JAX_PLATFORMS": "cpu",  # leaves the GPU alone
            "OPENBLAS_NUM_THREADS": "1",  # threads would not survive a fork
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mxjax.kernels.workers"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._requests, self._replies = _both(self._process)
        self._lock = threading.Lock()
        atexit.register(self._end)

    def compile(self, jobs: Sequence[Job]) -> dict[Job, threading.Event]:
        """Hands kernels to the process; see `compile_in_processes`."""
        ended = {job: threading.Event() for job in jobs}
        threading.Thread(target=self._send, args=(list(jobs), ended), daemon=True).start()
        return ended

    def _send(self, jobs: list[Job], ended: dict[Job, threading.Event]) -> None:
        try:
            with self._lock, contextlib.suppress(OSError, ValueError):
                named = [job._replace(kernel=_name_of(job.kernel)) for job in jobs]
                pickle.dump(named, self._requests)
                self._requests.flush()
                for _ in jobs:
                    place = self._replies.read(_PLACE.size)
                    if len(place) < _PLACE.size:  # the process is gone
                        break
                    ended[jobs[_PLACE.unpack(place)[0]]].set()
        finally:
            for event in ended.values():
                event.set()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


_PLACE = struct.Struct("<I")


def _both(process: subprocess.Popen) -> tuple[IO[bytes], IO[bytes]]:
    """Returns the standard input and output of a process."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


@functools.cache
def _helper() -> _Helper | None:
    """Returns the process of this one, or None where none can be started."""
    if not hasattr(os, "fork") or not sys.executable:
        return None
    try:
        return _Helper()
    except OSError:
        return None


def _name_of(kernel) -> tuple[str, str] | None:
    """Returns the module and the name by which another process finds a kernel, or None."""
    module, name = kernel.fn.__module__, kernel.fn.__qualname__
    found = getattr(sys.modules.get(module), name, None) is kernel and module != "__main__"
    return (module, name) if found else None


def serve(compile_kernel: Callable[[Job], Any]) -> None:
    """Reads lists of kernels from standard input and compiles them, each in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller ends this process
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no reply
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        try:
            jobs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        running: dict[int, int] = {}
        for place, job in enumerate(jobs):
            if len(running) == min(cores(), MOST_PROCESSES):
                _reply(replies, running)
            running[_fork(compile_kernel, job)] = place
        while running:
            _reply(replies, running)


def _reply(replies: int, running: dict[int, int]) -> None:
    """Waits for one of the running processes, and writes the place of its kernel."""
    process, _ = os.wait()
    os.write(replies, _PLACE.pack(running.pop(process)))


def _fork(compile_kernel: Callable[[Job], Any], job: Job) -> int:
    """Returns the id of a new process that compiles a kernel."""
    process = os.fork()
    if process:
        return process
    with contextlib.suppress(BaseException):
        module, name = job.kernel
        compile_kernel(job._replace(kernel=getattr(importlib.import_module(module), name)))
    os._exit(0)


if __name__ == "__main__":
    # What the kernels need, before the first list arrives.
    from mxjax.kernels.lowering import compile_kernel
    from mxjax.kernels.matmul import fp8_matmul as fp8_matmul
    from mxjax.kernels.quantize import launches as launches

    serve(compile_kernel)
