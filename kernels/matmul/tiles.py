"""Tiles of a GEMM: candidates for each target, and the choice among them, by measurement or by estimate.

A measured table is a JSON file for each architecture, which names the fastest candidate for each GEMM that
was timed. Without a table, and for GEMMs that it lacks, tiles are chosen by estimate. All processes of a job
need the same table, because they must compile the same program.
"""

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mxjax.kernels.launch import ceil_div
from mxjax.runtime.devices import INTERPRETER, Target

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


AITER = TileName(0, 0, 0, 0, 0)
"""Stands in a table for AMD's GEMM."""

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


class Tiles(NamedTuple):
    """The tile of a GEMM that one program computes.

    Attributes:
      m, n, k: elements of a tile.
      warps, stages: warps and pipeline stages of a program.
      cost: estimated time of one tile; on gfx950 relative to a tile of 256x256. Tiles without an estimate
        are used only where a measurement chose them.
      resident: programs that one compute unit runs at a time.
      exact: whether the tile must divide m, n and k, because its masked form spills registers.
      alone: whether a wave takes all registers of its SIMD.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    cost: float = math.inf
    resident: int = 1
    exact: bool = False
    alone: bool = False

    @property
    def name(self) -> TileName:
        """The fields that identify a candidate."""
        return TileName(self.m, self.n, self.k, self.warps, self.stages)

    def fits(self, m: int, n: int, k: int) -> bool:
        """Whether a GEMM of these sizes can take them."""
        return not (self.exact and (m % self.m or n % self.n or k % self.k))


TILES = {
    # 256x256 with eight waves puts two waves on each SIMD, of which one multiplies while the other loads.
    # ROCm/aiter's gfx950-GEMM-AFP4WFP4.json uses the same for large shapes. Smaller tiles load more for each
    # product; the costs are estimated from those loads.
    "gfx950": (
        Tiles(256, 256, 256, warps=8, stages=2, cost=1.0, exact=True),
        Tiles(256, 128, 256, warps=4, stages=2, cost=0.6, exact=True),
        Tiles(128, 256, 256, warps=4, stages=2, cost=0.6, exact=True),
        Tiles(128, 128, 256, warps=4, stages=2, cost=0.33, resident=2),
        Tiles(64, 64, 256, warps=2, stages=2, cost=0.12, resident=4),
    ),
    "sm_100": (
        Tiles(256, 128, 256, warps=8, stages=3, cost=0.5, resident=2),
        Tiles(128, 128, 256, warps=4, stages=3, cost=0.28, resident=2),
    ),
    "interpreter": (Tiles(128, 128, 256, warps=4, stages=1, cost=1.0),),
    "other": (Tiles(128, 128, 128, warps=8, stages=3, cost=1.0),),
}
MORE_TILES = {
    "gfx950": (
        Tiles(256, 128, 256, warps=8, stages=2, exact=True),
        Tiles(128, 256, 256, warps=8, stages=2, exact=True),
        Tiles(128, 128, 256, warps=8, stages=2),
        Tiles(128, 128, 256, warps=4, stages=3),
        Tiles(128, 64, 256, warps=4, stages=2),
        Tiles(64, 128, 256, warps=4, stages=2),
        # Each wave computes 128x128, which reads a third less from LDS.
        Tiles(256, 256, 256, warps=4, stages=2, exact=True, alone=True),
        # Steps of 128 along k load each word of scales twice.
        *(
            Tiles(m, n, 128, warps=warps, stages=stages, exact=True)
            for m, n, warps in (
                (256, 256, 8),
                (256, 128, 4),
                (256, 128, 8),
                (128, 256, 4),
                (128, 256, 8),
                (128, 128, 4),
                (128, 128, 8),
            )
            for stages in (3, 4)
        ),
    ),
    "sm_100": (
        Tiles(256, 128, 256, warps=8, stages=2),
        Tiles(128, 256, 256, warps=8, stages=2),
        Tiles(128, 128, 256, warps=4, stages=4),
    ),
    "interpreter": (Tiles(64, 64, 256, warps=4, stages=1),),
    "other": (
        Tiles(128, 128, 128, warps=4, stages=3),
        Tiles(128, 256, 128, warps=8, stages=3),
        Tiles(256, 128, 128, warps=8, stages=3),
    ),
}
"""Tiles that nobody has timed yet; `tune_gemm` times them beside the others."""
# Numbers of compute units or streaming multiprocessors.
UNITS = {"gfx950": 256, "sm_100": 148}
# Options of the compiler's backend.
OPTIONS: dict[str, dict[str, object]] = {
    "gfx950": {
        # v_mfma_scale_f32_16x16x128: with 32x32x64 the largest tile spills.
        "matrix_instr_nonkdim": 16,
        "waves_per_eu": 2,
        # LLVM would reserve half of a wave's 256 registers for accumulation, and copy to and from them.
        "llvm_fn_attrs": "amdgpu-agpr-alloc=0",
    }
}
ALONE = {"waves_per_eu": 1, "llvm_fn_attrs": ""}
"""What differs in the options of tiles whose waves take all registers of their SIMD."""


def candidates(target: Target | None) -> tuple[Tiles, ...]:
    """Returns all tiles for a target."""
    kind = table_of(target)
    return TILES[kind] + MORE_TILES.get(kind, ())


def options_of(tiles: Tiles, target: Target | None) -> dict[str, object]:
    """Returns the options of the compiler's backend for a tile."""
    return OPTIONS.get(table_of(target), {}) | (ALONE if tiles.alone else {})


def choose_tiles(m: int, n: int, k: int, batch: int, target: Target | None) -> Tiles:
    """Returns the fastest tiles, as measured on this architecture or else as estimated.

    The estimate is rounds of programs times the cost of a tile.

    Raises:
      ValueError: the table of measured tiles cannot be used.
    """
    kind = table_of(target)
    measured = current_table((target or INTERPRETER).arch).get(Gemm(m, n, k, batch))
    if measured not in (None, AITER):
        for tiles in candidates(target):
            if tiles.name == measured and tiles.fits(m, n, k):
                return tiles
        raise unknown_tile((target or INTERPRETER).arch, measured)
    units = UNITS.get(kind, 1)

    def time(tiles: Tiles) -> float:
        programs = ceil_div(m, tiles.m) * ceil_div(n, tiles.n) * batch
        return math.ceil(programs / (units * tiles.resident)) * tiles.resident * tiles.cost

    return min((t for t in TILES[kind] if t.fits(m, n, k)), key=time)


def is_aiter_faster(m: int, n: int, k: int, batch: int, target: Target | None) -> bool:
    """Whether AMD's GEMM was measured to be the fastest on this architecture."""
    return current_table((target or INTERPRETER).arch).get(Gemm(m, n, k, batch)) == AITER


def table_of(target: Target | None) -> str:
    """Returns a target's key in the tables; None is the interpreter, which alone can run without a target."""
    if target is None or target.backend == "interpreter":
        return "interpreter"
    if target.backend == "cuda":
        return "sm_100" if target.compute_capability in (100, 103) else "other"
    return "gfx950" if target.arch == "gfx950" else "other"
