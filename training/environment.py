"""The environment of a run: compilation cache, error messages, and the versions and devices to record."""

import contextlib
import errno
import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Iterator

import jax
from rich.filesize import decimal

import mxjax
from training.extras import MissingExtraError


def enable_compilation_cache() -> None:
    """Caches compiled programs in ~/.cache/mxjax, or in JAX_COMPILATION_CACHE_DIR."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "mxjax"
        jax.config.update("jax_compilation_cache_dir", str(cache))


@contextlib.contextmanager
def input_errors() -> Iterator[None]:
    """Ends the program with the message of an error in its input, without a traceback."""
    try:
        yield
    except (ValueError, NotImplementedError, MissingExtraError) as error:
        raise SystemExit(f"{pathlib.Path(sys.argv[0]).name}: error: {error}") from error


@contextlib.contextmanager
def disk_errors(folder: pathlib.Path) -> Iterator[None]:
    """Ends the program with a message when a disk or quota is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise
        free = decimal(shutil.disk_usage(folder).free)
        raise SystemExit(
            f"{pathlib.Path(sys.argv[0]).name}: error: writing to {folder}, where {free} are free: "
            f"{error.strerror}. Make room and continue with --resume"
        ) from error


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
