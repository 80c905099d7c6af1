"""The environment of a program: compilation cache, errors in one line, and the versions and devices to
record."""

import contextlib
import errno
import importlib.metadata
import os
import pathlib
import platform
import pwd
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator

import jax
from rich.filesize import decimal

import mxjax
from training.process.start import MissingExtraError, program_name

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Errors of a full disk, a full quota, and a file that may not grow."""
LIMIT = "Raise the limit of file sizes, ulimit -f, and run it again, train.py with --resume"


def in_one_line(error: OSError, folder: pathlib.Path | None = None) -> str:
    """Returns the path of an error and its cause; for a full disk also the free space.

    Args:
      error: the error; writes to open files name no path.
      folder: the path to name if the error names none.
    """
    named = error.filename2 or error.filename  # of two, the second is written
    path = os.fsdecode(named) if isinstance(named, str | bytes) else folder
    if path is None and error.errno == errno.ENOENT and _in_removed_folder():
        return "the current folder was removed. Change to another"
    cause = error.strerror or str(error) or type(error).__name__
    if error.errno in FULL:
        where = f"writing to {path}" if path else "writing"
        if error.errno == errno.EFBIG:
            return f"{where}: {cause}. {LIMIT}"
        free = f", where {free_space(pathlib.Path(path))} are free" if path else ""
        return f"{where}{free}: {cause}. Make room and run it again, train.py with --resume"
    return f"{path}: {cause}" if path else cause


def _in_removed_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def free_space(path: pathlib.Path) -> str:
    """Returns the free space, as text, of the file system that holds a path or its nearest parent."""
    for folder in (path.absolute(), *path.absolute().parents):
        with contextlib.suppress(OSError):
            return decimal(shutil.disk_usage(folder).free)
    return "an unknown number of bytes"


def enable_compilation_cache() -> None:
    """Caches compiled programs in JAX_COMPILATION_CACHE_DIR, or else in mxjax/ in the user's cache folder.

    Without a folder that can be written, a warning says so and nothing is cached.
    """
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if given is not None and (not given or "://" in given):  # none, or a bucket that JAX opens
        return
    cache = pathlib.Path(os.path.expanduser(given)) if given is not None else _user_cache()
    try:
        if cache is None:
            raise OSError("there is no home folder")
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        jax.config.update("jax_compilation_cache_dir", None)
        warning = f"{program_name()}: warning: nothing compiled is cached: {in_one_line(error)}"
        print(warning, "(set JAX_COMPILATION_CACHE_DIR)", file=sys.stderr)
    else:
        jax.config.update("jax_compilation_cache_dir", str(cache))


_TOO_STRICT = {
    "jax_transfer_guard": ("disallow", "disallow_explicit"),
    "jax_numpy_dtype_promotion": ("strict",),
}
"""Settings under which functions of JAX's own, and optax's, raise."""


def start_jax(devices: int | None = None) -> None:
    """Starts JAX's devices, before anything else asks for them.

    Args:
      devices: virtual devices to make of a CPU. Default: the devices that there are.
    Raises:
      ValueError: JAX has none, such as without the driver of its plugin, or its settings forbid what a run
        does; the message names the variable. Or JAX's devices are not the virtual ones.
    """
    for name, values in _TOO_STRICT.items():
        if (value := getattr(jax.config, name)) in values:
            raise ValueError(f"{name.upper()}={value}: functions of JAX and optax do not run so; unset it")
    if devices is not None:
        with contextlib.suppress(RuntimeError):  # JAX has started, in the program that calls
            jax.config.update("jax_num_cpu_devices", devices)
    try:
        found = jax.local_devices()
    except (RuntimeError, AssertionError) as error:  # an AssertionError says nothing
        cause = " ".join(str(error).partition(" (set JAX_PLATFORMS")[0].split())
        if not (given := jax.config.jax_platforms):
            raise ValueError(cause) from error
        cause = cause and f" ({cause})"
        advice = "install the extra cuda or rocm (uv sync --extra cuda), or unset JAX_PLATFORMS"
        raise ValueError(f"JAX_PLATFORMS={given}: JAX has no such devices here{cause}; {advice}") from error
    if devices is not None and (found[0].platform, len(found)) != ("cpu", devices):
        raise ValueError(
            f"--devices {devices} makes virtual devices of a CPU, and JAX has {len(found)} of platform "
            f"{found[0].platform}: set JAX_PLATFORMS=cpu, or leave --devices out; CUDA_VISIBLE_DEVICES or "
            "ROCR_VISIBLE_DEVICES chooses GPUs"
        )


def _user_cache() -> pathlib.Path | None:
    """Returns mxjax's folder in the user's cache folder; None if the user has no home.

    An XDG_CACHE_HOME that is empty or relative is ignored, as the XDG Base Directory Specification 0.8 says.
    """
    named, home = (pathlib.Path(os.environ.get(name, "")) for name in ("XDG_CACHE_HOME", "HOME"))
    if named.is_absolute():
        return named / "mxjax"
    if not home.is_absolute():
        try:
            home = pathlib.Path(pwd.getpwuid(os.getuid()).pw_dir)
        except KeyError:
            return None
    return home / ".cache" / "mxjax"


@contextlib.contextmanager
def input_errors(output: pathlib.Path | None = None) -> Iterator[None]:
    """Ends the program with the message of an error in its input, without a traceback.

    Args:
      output: where the program writes, for errors of a full disk that name no path.
    """
    try:
        yield
    except (ValueError, NotImplementedError, MissingExtraError) as error:
        raise SystemExit(f"{program_name()}: error: {error}") from error
    except OSError as error:
        folder = output if error.errno in FULL else None
        raise SystemExit(f"{program_name()}: error: {in_one_line(error, folder)}") from error


@contextlib.contextmanager
def path_errors(folder: pathlib.Path) -> Iterator[None]:
    """Ends the program with one line about a path that cannot be used; `folder` if the error names none."""
    try:
        yield
    except (ConnectionError, TimeoutError):  # of other processes, not of paths
        raise
    except OSError as error:
        raise SystemExit(f"{program_name()}: error: {in_one_line(error, folder)}") from error


@contextlib.contextmanager
def memory_errors(clean_up: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Ends the program with one line about memory that a device does not have, after `clean_up`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        first = str(error).partition("\n")[0]
        if not first.startswith("RESOURCE_EXHAUSTED"):
            raise
        clean_up()
        advice = "try a smaller --batch-size with --accumulate, a smaller --seq-len, or --remat full"
        raise SystemExit(f"{program_name()}: error: {first.rstrip('.')}; {advice}") from error


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
