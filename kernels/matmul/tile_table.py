"""Measured tiles: a JSON file for each architecture, written by `tune_gemm` and read when tiles are chosen.

A table names, for each GEMM that was timed, the fastest of the candidates in `tiles`. Without a table, and
for GEMMs that it lacks, tiles are chosen by estimate. All processes of a job need the same table, because
they must compile the same program.
"""

import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "MXJAX_TILES"
"""The environment variable that names another table than the user's; empty for none."""
FORMAT = 1


class Gemm(NamedTuple):
    """The sizes of out [batch, m, n] = lhs [batch, m, k] @ rhs [batch, n, k].T"""

    m: int
    n: int
    k: int
    batch: int


class TileName(NamedTuple):
    """The size and compiler settings of a tile, by which a table names a candidate."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


Table = Mapping[Gemm, TileName]


def default_path(arch: str) -> Path | None:
    """Returns where the user's table for an architecture is; None for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = cache if cache.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return folder / "mxjax" / f"tiles-{arch}.json"


@functools.cache
def current_table(arch: str) -> Table:
    """Returns the table that this process uses for an architecture, empty if there is none; read once.

    Raises:
      ValueError: the file is damaged, or for another architecture.
      FileNotFoundError: MXJAX_TILES names no file.
    """
    named = os.environ.get(VARIABLE)
    if named == "":
        return {}
    path = default_path(arch) if named is None else Path(named)
    if path is None or (named is None and not path.exists()):
        return {}
    return read_table(path, arch)


def read_table(path: Path, arch: str) -> Table:
    """Returns the table in a file.

    Raises:
      ValueError: the file is damaged, or for another architecture.
    """
    try:
        content = json.loads(path.read_text())
        kind, own = content["format"], content["arch"]
        gemms = {
            Gemm(*_integers(entry["gemm"], 4)): TileName(*_integers(entry["tile"], 5))
            for entry in content["gemms"]
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _refused(path, f"is damaged ({type(error).__name__}: {error})") from error
    if kind != FORMAT:
        raise _refused(path, f"has format {kind!r}, not {FORMAT}")
    if own != arch:
        raise _refused(path, f"is for {own!r}, not {arch}")
    return gemms


def write_table(path: Path, arch: str, about: Mapping[str, Any], gemms: Iterable[dict[str, Any]]) -> None:
    """Writes a table.

    Args:
      about: device and versions, for the reader.
      gemms: for each GEMM "gemm", "tile" and what else is known of it.
    """
    content = {"format": FORMAT, "arch": arch, "about": dict(about), "gemms": list(gemms)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def unknown_tile(arch: str, tile: TileName) -> ValueError:
    """Returns the error for a table that names a tile which mxjax cannot use."""
    path = os.environ.get(VARIABLE) or default_path(arch)
    return _refused(Path(path or ""), f"names tile {tuple(tile)}, which is no candidate of this version")


def _integers(values: Any, count: int) -> list[int]:
    if not isinstance(values, list) or len(values) != count or not all(type(v) is int for v in values):
        raise ValueError(f"{count} integers are needed, got {values!r}")
    return values


def _refused(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"tile table {path} {reason}; delete it, or write it anew with "
        f"python -m mxjax.kernels.selftest.tune_gemm, or set {VARIABLE}= to do without"
    )
