"""Blocks of the attention kernels: candidates for each target and head size, the one that runs first.

`benchmarks.kernels.attention` times all candidates.
"""

from typing import NamedTuple

from mxjax.runtime.devices import Target

HEAD_SIZES = (64, 128)


class Blocks(NamedTuple):
    """The tile that one program of a kernel computes, with its compiler settings.

    Attributes:
      queries, keys: rows of a tile. One divides the other: in `key_gradients` the queries divide the keys, in
        the other kernels the keys divide the queries.
      warps, stages: warps and pipeline stages of a program.
    """

    queries: int
    keys: int
    warps: int
    stages: int


class Kernels(NamedTuple):
    """Candidates of each kernel, the default first."""

    forward: tuple[Blocks, ...]
    key_gradients: tuple[Blocks, ...]
    query_gradients: tuple[Blocks, ...]


_HOPPER_64 = Kernels(
    forward=(
        Blocks(64, 64, warps=4, stages=3),
        Blocks(128, 64, warps=4, stages=3),
        Blocks(128, 128, warps=8, stages=2),
        Blocks(128, 64, warps=8, stages=3),
    ),
    key_gradients=(
        Blocks(64, 64, warps=4, stages=2),
        Blocks(64, 128, warps=8, stages=2),
        Blocks(64, 128, warps=8, stages=3),
        Blocks(32, 128, warps=4, stages=3),
    ),
    query_gradients=(
        Blocks(64, 64, warps=4, stages=3),
        Blocks(128, 64, warps=8, stages=2),
        Blocks(128, 64, warps=8, stages=3),
        Blocks(128, 128, warps=8, stages=2),
        Blocks(128, 32, warps=4, stages=3),
    ),
)
_HOPPER_128 = Kernels(
    forward=(
        Blocks(128, 64, warps=8, stages=3),
        Blocks(128, 128, warps=8, stages=2),
        Blocks(128, 64, warps=8, stages=2),
        Blocks(64, 64, warps=4, stages=2),
        Blocks(64, 64, warps=4, stages=3),
    ),
    key_gradients=(
        Blocks(64, 128, warps=8, stages=2),
        Blocks(32, 128, warps=8, stages=3),
        Blocks(32, 128, warps=8, stages=2),
        Blocks(64, 64, warps=4, stages=2),
        Blocks(32, 64, warps=4, stages=2),
        Blocks(32, 64, warps=4, stages=3),
    ),
    query_gradients=(
        Blocks(128, 64, warps=8, stages=3),
        Blocks(128, 64, warps=8, stages=2),
        Blocks(128, 32, warps=8, stages=3),
        Blocks(128, 128, warps=8, stages=2),
        Blocks(64, 64, warps=4, stages=2),
        Blocks(64, 32, warps=4, stages=3),
        Blocks(64, 32, warps=4, stages=2),
    ),
)
_GFX950_64 = Kernels(
    forward=(
        Blocks(128, 64, warps=4, stages=2),
        Blocks(128, 128, warps=4, stages=2),
        Blocks(128, 64, warps=8, stages=2),
        Blocks(64, 64, warps=4, stages=2),
    ),
    key_gradients=(
        Blocks(32, 128, warps=4, stages=2),
        Blocks(64, 128, warps=4, stages=2),
        Blocks(64, 64, warps=4, stages=2),
    ),
    query_gradients=(
        Blocks(128, 64, warps=4, stages=2),
        Blocks(128, 64, warps=8, stages=2),
        Blocks(128, 128, warps=4, stages=2),
        Blocks(64, 64, warps=4, stages=2),
    ),
)
_GFX950_128 = Kernels(
    forward=(
        Blocks(128, 64, warps=4, stages=2),
        Blocks(128, 64, warps=8, stages=2),
        Blocks(64, 64, warps=4, stages=2),
    ),
    key_gradients=(
        Blocks(32, 128, warps=4, stages=2),
        Blocks(32, 64, warps=4, stages=2),
    ),
    query_gradients=(
        Blocks(128, 64, warps=4, stages=2),
        Blocks(128, 32, warps=4, stages=2),
        Blocks(64, 64, warps=4, stages=2),
    ),
)
_WIDE, _HIGH = Blocks(64, 32, warps=4, stages=1), Blocks(32, 64, warps=4, stages=1)
_SMALL = Kernels((_WIDE,), (_HIGH,), (_WIDE,))
TABLE = {
    ("interpreter", 64): _SMALL,
    ("interpreter", 128): _SMALL,
    ("gfx950", 64): _GFX950_64,
    ("gfx950", 128): _GFX950_128,
    ("other", 64): _HOPPER_64,
    ("other", 128): _HOPPER_128,
}
# Options of the compiler's backend. Nothing fixes the bits of attention: products and sums are fused, and
# exponentials below the least normal number are 0.
OPTIONS: dict[str, dict[str, object]] = {
    "gfx950": {"enable_fp_fusion": True, "allow_flush_denorm": True},
    "other": {"enable_fp_fusion": True},
}


def candidates(target: Target | None, head_size: int) -> Kernels:
    """Returns the candidates for a target and a head size of HEAD_SIZES."""
    return TABLE[table_of(target), head_size]


def table_of(target: Target | None) -> str:
    """Returns a target's key in the tables; None is the interpreter, which alone can run without a target."""
    if target is None or target.backend == "interpreter":
        return "interpreter"
    return "gfx950" if target.backend == "hip" else "other"
