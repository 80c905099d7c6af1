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
from mxjax.kernels.quantize.hopper_kernel import GROUP, quantize_pairs_kernel
from mxjax.kernels.quantize.kernel import quantize_kernel
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

    @property
    def size(self) -> int:
        """Of the rotation, or 1."""
        return self.rotation.size if self.rotation else 1

    @property
    def is_simple(self) -> bool:
        """Whether it is packed by the rule `floor`, to nearest, in blocks along an axis, without signs."""
        o = self.operand
        usual = self.form == "packed" and o.scale_rule == "floor" and o.rounding == "nearest"
        return usual and not o.prescale and o.block_shape != (BLOCK, BLOCK) and not self.reads_signs

    def length(self, axis: int) -> int:
        """Returns the length of the blocked axis, filled up to whole blocks and runs of the rotation."""
        multiple = max(BLOCK, self.size)
        return ceil_div(axis, multiple) * multiple


class Launch(NamedTuple):
    """Which kernel is launched, and how: outputs of both sides, wanted or not; programs; constants.

    `quantize_kernel` takes strides as well, which its other arrays decide.
    """

    kernel: Any
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
    out = []
    for side, length, other in ((rows, c, r), (columns, r, c)):
        if side is None:
            out += [jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.uint8)]
        else:
            n = side.length(length)
            out.append(jax.ShapeDtypeStruct((v, b, other, n // 8 * WORDS[side.form]), jnp.int32))
            out.append(jax.ShapeDtypeStruct((v, b, other, n // BLOCK), jnp.uint8))
    if _are_pairs(rows, columns, target, c, dtype):
        tile = Tile(128, 128, 4, GROUP.value)
        kernel, constants = quantize_pairs_kernel, _pairs_constants(rows, columns, r, c)
    else:
        tile = _tile(target, rows, columns, r, c * jnp.dtype(dtype).itemsize)
        kernel, constants = quantize_kernel, _constants(rows, columns, b, r, c, whole or (r, c))
        constants |= {"GROUP": tile.group, "CONVERT": conversion(target)}
    constants |= {"BLOCK_R": tile.rows, "BLOCK_C": tile.columns}
    tiles = (ceil_div(r, tile.rows), ceil_div(c, tile.columns))
    return Launch(kernel, out, (*(tiles if columns else tiles[::-1]), v * b), tile.warps, constants)


def _are_pairs(
    rows: Side | None, columns: Side | None, target: Target | None, c: int, dtype: DTypeLike
) -> bool:
    """Returns whether `quantize_pairs_kernel` takes the sides of a tensor with c columns."""
    if conversion(target) != "sm_90" or jnp.dtype(dtype) != jnp.bfloat16 or c % 8:
        return False
    if columns is None or not columns.is_simple or columns.size not in (1, 4, 16):
        return False
    return rows is None or (rows.is_simple and rows.size == 1)


def _pairs_constants(rows: Side | None, columns: Side | None, r: int, c: int) -> dict[str, Any]:
    assert columns is not None
    lengths = {"ROW_LENGTH": rows.length(c) if rows else 0, "COLUMN_LENGTH": columns.length(r)}
    return {"R": r, "C": c, **lengths, "ROTATION": columns.size, "FOLDED": columns.size.bit_length() // 2}


def _constants(
    rows: Side | None, columns: Side | None, b: int, r: int, c: int, whole: tuple[int, int]
) -> dict[str, Any]:
    constants: dict[str, Any] = {"BATCH": b, "R": r, "C": c, "R_ALL": whole[0], "C_ALL": whole[1]}
    for name, side, length in (("ROW", rows, c), ("COLUMN", columns, r)):
        values = _side_constants(side, side.length(length)) if side else _ABSENT
        constants |= {f"{name}_{k}": value for k, value in values.items()}
    return constants


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


def _side_constants(side: Side, length: int) -> dict[str, object]:
    """Returns the constants of the kernel for one side whose blocked axis is `length` long when filled up."""
    return {
        "FORM": side.form,
        "LENGTH": length,
        "ROTATION": side.size,
        "FACTOR": float(np.float32(side.size**-0.5)),
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
    group: int


def _tile(target: Target | None, rows: Side | None, columns: Side | None, r: int, row_bytes: int) -> Tile:
    """Returns the fastest tile measured on an H200, or by what is compiled for gfx950: 64 elements a thread.

    There half as many where rows do not start at multiples of 16 bytes: loads by elements take registers.
    """
    if target is None or target.backend == "interpreter":
        return Tile(64, 64, 1, 8)
    if target.backend == "hip":
        return Tile(64 if row_bytes % 16 else 128, 64, 2, 8)
    if rows and columns is None and rows.operand.block_shape != (BLOCK, BLOCK) and r <= 16 * MOST_PROGRAMS:
        # Wide, so that the scale bytes of a row are written 16 at a time or more.
        lower = rows.rotation and row_bytes >= 2048 and r <= 4 * MOST_PROGRAMS
        return Tile(4, 1024, 2, 32) if lower else Tile(16, 512, 4, 32)
    rotated = any(side and side.rotation for side in (rows, columns))
    return Tile(128, 64, 4, 32 if rows is None or rotated else 8)
