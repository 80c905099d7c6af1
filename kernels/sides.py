"""How the quantizer kernel is launched: what is wanted of a tensor, as constants, tiles and programs."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mxjax.formats import E2M1
from mxjax.kernels.launch import MOST_PROGRAMS, Target, ceil_div
from mxjax.policy import Operand, Rotation
from mxjax.scales import rule_carry

Form = Literal["packed", "bf16", "e4m3", "e5m2"]

BLOCK = 32
LARGEST_ROTATION = 64
WORDS = {"packed": 1, "e4m3": 2, "e5m2": 2, "bf16": 4}  # of 32 bits, a group of 8 elements


@dataclasses.dataclass(frozen=True)
class Side:
    """How one of the two operands that a tensor becomes is quantized, and what it is written as.

    `form`: "packed" (two E2M1 a byte), "bf16" (the dequantized values), "e4m3" or "e5m2" (the elements times
    2**(scale byte - reference), with a reference given at the call).
    """

    operand: Operand
    rotation: Rotation | None = None
    form: Form = "packed"

    def __post_init__(self):
        o = self.operand
        if o.format != "mxfp4" or o.block_shape not in (None, 32, (1, 32), (32, 32)):
            raise NotImplementedError(f"the quantizer kernel takes mxfp4 in blocks of 32 or 32x32, not {o}")
        if self.rotation and self.rotation.size > LARGEST_ROTATION:
            raise NotImplementedError(f"the quantizer kernel rotates by H{LARGEST_ROTATION} at most")

    @property
    def reads_scalars(self) -> bool:
        """Whether the kernel reads random bits' key and place, or an FP8 form's reference."""
        return self.operand.rounding == "stochastic" or self.form in ("e4m3", "e5m2")

    @property
    def reads_signs(self) -> bool:
        """Whether the rotation has signs."""
        return self.rotation is not None and self.rotation.signs != "none"

    def length(self, axis: int) -> int:
        """Returns the length of the blocked axis, filled up to whole blocks and runs of the rotation."""
        multiple = max(BLOCK, self.rotation.size if self.rotation else 1)
        return ceil_div(axis, multiple) * multiple


class Launch(NamedTuple):
    """How the kernel is launched: outputs of both sides, wanted or not; programs; constants but strides."""

    out: list[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    num_warps: int
    constants: dict[str, Any]


def launch_of(
    rows: Side | None,
    columns: Side | None,
    target: Target | None,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    whole: tuple[int, int] | None = None,
) -> Launch:
    """Returns how x [vmapped, batch, r, c] of `shape` and `dtype` is quantized for the sides wanted.

    whole: rows and columns of the tensor that x is a part of; default, x itself.
    """
    v, b, r, c = shape
    tile = _tile(target, rows, columns, r, c * jnp.dtype(dtype).itemsize)
    constants: dict[str, Any] = {"BATCH": b, "R": r, "C": c}
    constants |= {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns, "GROUP": tile.group}
    constants["CONVERT"] = conversion(target)
    constants["R_ALL"], constants["C_ALL"] = whole or (r, c)
    out = []
    for name, side, length, other in (("ROW", rows, c, r), ("COLUMN", columns, r, c)):
        if side is None:
            out += [jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.uint8)]
            values = _ABSENT
        else:
            n = side.length(length)
            out.append(jax.ShapeDtypeStruct((v, b, other, n // 8 * WORDS[side.form]), jnp.int32))
            out.append(jax.ShapeDtypeStruct((v, b, other, n // BLOCK), jnp.uint8))
            values = side_constants(side, n)
        constants |= {f"{name}_{k}": value for k, value in values.items()}
    tiles = (ceil_div(r, tile.rows), ceil_div(c, tile.columns))
    return Launch(out, (*(tiles if columns else tiles[::-1]), v * b), tile.warps, constants)


_ABSENT: Mapping[str, object] = {
    "FORM": "",
    "LENGTH": 0,
    "ROTATION": 1,
    "SIGNS": False,
    "CARRY": 0,
    "SQUARE": False,
    "STOCHASTIC": False,
    "PRESCALE": 1,
    "FACTOR": 1.0,
}


def side_constants(side: Side, length: int) -> dict[str, object]:
    """Returns the constants of the kernel for one side whose blocked axis is `length` long when filled up."""
    size = side.rotation.size if side.rotation else 1
    return {
        "FORM": side.form,
        "LENGTH": length,
        "ROTATION": size,
        "FACTOR": float(np.float32(size**-0.5)),
        "SIGNS": side.reads_signs,
        "CARRY": rule_carry(side.operand.scale_rule, E2M1),
        "SQUARE": side.operand.block_shape == (32, 32),
        "STOCHASTIC": side.operand.rounding == "stochastic",
        "PRESCALE": side.operand.prescale or 1,
    }


def conversion(target: Target | None) -> str:
    """Returns how the kernel encodes elements on a target: by which instructions, or "software"."""
    if target is None or target.backend == "interpreter":
        return "software"
    if target.arch == "gfx950":
        return "gfx950"
    if target.backend != "cuda" or not target.has_fp8:
        return "software"
    capability = target.compute_capability or 0
    return "sm_100" if capability >= 100 else "sm_90" if capability >= 90 else "sm_89"


class Tile(NamedTuple):
    """A program's part of a tensor, its warps, and the elements along a blocked axis that a thread holds."""

    rows: int
    columns: int
    warps: int
    group: Literal[8, 32]


def _tile(target: Target | None, rows: Side | None, columns: Side | None, r: int, row_bytes: int) -> Tile:
    """Returns the fastest tile measured on an H200, or by what is compiled for gfx950: 64 elements a thread.

    There half as many where rows do not start at multiples of 16 bytes: loads by elements take registers.
    """
    if target is None or target.backend == "interpreter":
        return Tile(64, 64, 1, 8)
    if target.backend == "hip":
        return Tile(64 if row_bytes % 16 else 128, 64, 2, 8)
    if rows and columns is None and rows.operand.block_shape != (BLOCK, BLOCK) and r <= 16 * MOST_PROGRAMS:
        return Tile(16, 512, 4, 32)  # wide, so that the scale bytes of a row are written 16 at a time
    rotated = any(side and side.rotation for side in (rows, columns))
    return Tile(128, 64, 4, 32 if rows is None or rotated else 8)
