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


def _blocks(*each: tuple[int, int, int, int]) -> tuple[Blocks, ...]:
    return tuple(Blocks(*one) for one in each)


_HOPPER_64 = Kernels(
    forward=_blocks((64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 3)),
    key_gradients=_blocks((64, 64, 4, 2), (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 4, 3)),
    query_gradients=_blocks(
        (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 4, 3)
    ),
)
_HOPPER_128 = Kernels(
    forward=_blocks((128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
    key_gradients=_blocks(
        (64, 128, 8, 2), (32, 128, 8, 3), (32, 128, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 3)
    ),
    query_gradients=_blocks(
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (128, 32, 8, 3),
        (128, 128, 8, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 3),
        (64, 32, 4, 2),
    ),
)
_GFX950_64 = Kernels(
    forward=_blocks((128, 64, 4, 2), (128, 128, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2)),
    key_gradients=_blocks((32, 128, 4, 2), (64, 128, 4, 2), (64, 64, 4, 2)),
    query_gradients=_blocks((128, 64, 4, 2), (128, 64, 8, 2), (128, 128, 4, 2), (64, 64, 4, 2)),
)
_GFX950_128 = Kernels(
    forward=_blocks((128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2)),
    key_gradients=_blocks((32, 128, 4, 2), (32, 64, 4, 2)),
    query_gradients=_blocks((128, 64, 4, 2), (128, 32, 4, 2), (64, 64, 4, 2)),
)
_SMALL = Kernels(_blocks((64, 32, 4, 1)), _blocks((32, 64, 4, 1)), _blocks((64, 32, 4, 1)))
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
