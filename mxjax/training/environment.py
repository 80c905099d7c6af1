"""What surrounds a run: the compilation cache, errors for people, versions and device for the record."""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax

import mxjax


def enable_compilation_cache() -> None:
    """Keeps compiled programs in ~/.cache/mxjax, unless JAX_COMPILATION_CACHE_DIR names another folder."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "mxjax"
        jax.config.update("jax_compilation_cache_dir", str(cache))


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Ends the program with the message alone of an error that says what cannot be done as asked."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise SystemExit(f"{pathlib.Path(sys.argv[0]).name}: error: {error}") from error


class Interruption:
    """Whether SIGINT or SIGTERM has arrived, which then no longer end the program; a second one does.

    A context manager, for the main thread; elsewhere it notices nothing.
    """

    def __init__(self):
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = {s: signal.signal(s, self._notice) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exception) -> None:
        self._restore()

    def _notice(self, number: int, frame: Any) -> None:
        self.requested = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


def facts() -> dict[str, str | int]:
    """Returns the versions and the device that a run's numbers depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "grain", "orbax-checkpoint", "numpy")
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "mxjax": mxjax.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
    }
