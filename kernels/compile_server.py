"""A process that compiles kernels, each in a fork of its own, where Python's lock would take their time.

Triton compiles a kernel partly in Python, of which a process runs one thread at a time: with many cores,
threads compile a training step's kernels hardly faster than four cores could. `training.startup` starts
this process before its own slow imports, so that it is ready when the first kernels are traced:

    python -m mxjax.kernels.compile_server

It reads lists of kernels from standard input, pickled, and compiles them into Triton's cache on disk, where
its caller finds them. When it is done with a kernel, well or not, it writes the kernel's place in its list.
What it does not manage, for whatever reason, its caller compiles itself. It ends with its input or when idle.
"""

import contextlib
import importlib
import os
import pickle
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from mxjax.kernels.compile_client import PLACE, Job

IDLE_SECONDS = 300
MOST_PROCESSES = min(32, 2 * (os.cpu_count() or 1))


KERNELS = "attention.launches", "matmul.fp8_matmul", "quantize.draws", "quantize.launches"
"""Modules that import all kernels of a training step."""


def serve(compile_kernel: Callable[..., Any]) -> None:
    """Reads lists of kernels from standard input and compiles them, each in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    replies = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no reply
    while select.select([0], [], [], IDLE_SECONDS)[0]:
        try:
            jobs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        running: dict[int, int] = {}
        for place, job in enumerate(jobs):
            if len(running) == MOST_PROCESSES:
                _reply(replies, running)
            running[_fork(compile_kernel, job, replies)] = place
        while running:
            _reply(replies, running)


def _reply(replies: int, running: dict[int, int]) -> None:
    """Waits for one of the running processes, and writes the place of its kernel."""
    process, _ = os.wait()
    os.write(replies, PLACE.pack(running.pop(process)))


def _fork(compile_kernel: Callable[..., Any], job: Job, replies: int) -> int:
    """Returns the id of a new process that compiles a kernel."""
    process = os.fork()
    if process:
        return process
    os.close(replies)  # so that they end with the server
    with contextlib.suppress(BaseException):
        (module, name), *rest = job
        compile_kernel(getattr(importlib.import_module(module), name), *rest)
    os._exit(0)


def main() -> None:
    """Imports all that kernels need, and serves."""
    from mxjax.kernels.lowering import compile_kernel

    for module in KERNELS:
        importlib.import_module(f"mxjax.kernels.{module}")
    serve(compile_kernel)


if __name__ == "__main__":
    main()
