"""The quantizer kernel as a JAX function: one tensor in, the K-major operands of one or two GEMMs out."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from mxjax.formats import E2M1
from mxjax.kernels import shapes
from mxjax.kernels.aot import Argument, Build
from mxjax.kernels.launch import Target, ceil_div, current_target, triton_call
from mxjax.kernels.quantize import SCALARS, quantize_kernel
from mxjax.policy import Operand, Rotation
from mxjax.scales import rule_carry

Form = Literal["packed", "bf16", "e4m3", "e5m2"]

BLOCK = 32
LARGEST_ROTATION = 64
LONGEST = 2**24
_WORDS = {"packed": 1, "e4m3": 2, "e5m2": 2, "bf16": 4}  # of 32 bits, a group of 8 elements
_DTYPES = {"packed": jnp.uint8, "e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "bf16": jnp.bfloat16}


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

    def length(self, axis: int) -> int:
        """Returns the length of the blocked axis, filled up to whole blocks and runs of the rotation."""
        multiple = max(BLOCK, self.rotation.size if self.rotation else 1)
        return ceil_div(axis, multiple) * multiple


class Quantized(NamedTuple):
    """What the kernel writes of one side: K-major, other axis first.

    Attributes:
      elements: [*b, other, length / 2] uint8 if packed, else [*b, other, length].
      scales: [*b, other, length / 32], E8M0 bytes; for FP8 forms 1 where a block does not fit, else 0.
    """

    elements: Shaped[Array, "*b other _"]
    scales: UInt8[Array, "*b other _"]


class Random(NamedTuple):
    """What one side draws or is given: key words, signs, and the reference of an FP8 form."""

    key: Shaped[Array, "2"] | None = None
    signs: Float32[Array, " size"] | None = None
    reference: Int32[Array, ""] | None = None


NOTHING_RANDOM = Random()


def quantize_operands(
    x: Float[Array, "*b r c"],
    rows: Side | None = None,
    columns: Side | None = None,
    *,
    row_random: Random = NOTHING_RANDOM,
    column_random: Random = NOTHING_RANDOM,
) -> tuple[Quantized | None, Quantized | None]:
    """Returns x quantized along its last axis (rows), along the last but one (columns, transposed), or both.

    Element for element what `mxjax.rotate` and `mxjax.quantize` define, in one read of x.

    Raises:
      ValueError: r or c is 2**24 or more.
    """
    batch, (r, c) = x.shape[:-2], x.shape[-2:]
    if max(r, c) >= LONGEST:
        raise ValueError(f"axes must be shorter than {LONGEST}, for 32-bit offsets within a tile: {(r, c)}")
    scalars = jnp.stack([*_scalars(row_random), *_scalars(column_random), *_scalars(NOTHING_RANDOM)[:2]])
    signs = jnp.stack([_signs(row_random), _signs(column_random)])
    run = _quantizer(rows, columns, current_target())
    flat = run(x.reshape(1, -1, r, c), scalars[None], signs[None])
    results: list[Quantized | None] = []
    for side, length, other in ((rows, c, r), (columns, r, c)):
        if side is None:
            results.append(None)
            continue
        words, scales = flat.pop(0), flat.pop(0)
        elements = _from_words(words, side.form).reshape(*batch, other, -1)
        results.append(Quantized(elements, scales.reshape(*batch, other, side.length(length) // BLOCK)))
    return results[0], results[1]


def _scalars(random: Random) -> list[jax.Array]:
    key = jnp.zeros(2, jnp.uint32) if random.key is None else random.key
    reference = jnp.int32(0) if random.reference is None else random.reference
    return [key[0], key[1], lax.bitcast_convert_type(reference, jnp.uint32)]


def _signs(random: Random) -> Float32[Array, "64"]:
    if random.signs is None:
        return jnp.ones(LARGEST_ROTATION, jnp.float32)
    return jnp.tile(random.signs, LARGEST_ROTATION // random.signs.size)


def _from_words(words: Int32[Array, "*b n words"], form: Form) -> Shaped[Array, "*b n _"]:
    """Returns the elements in 32-bit words, which is a matter of types alone."""
    elements = lax.bitcast_convert_type(words, _DTYPES[form])
    return elements.reshape(*words.shape[:-1], -1)


@functools.cache
def _quantizer(rows: Side | None, columns: Side | None, target: Target | None):
    """Returns a function of x [v, b, r, c], scalars [v or 1, 8] and signs [v or 1, 2, 64]; vmap grows v.

    JAX keeps what it traced of the function, hence one for each target.
    """

    @jax.custom_batching.custom_vmap
    def run(x, scalars, signs):
        return _call(rows, columns, target, x, scalars, signs)

    @run.def_vmap
    def _(size, batched, x, scalars, signs):
        x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
        small = []
        for array, mapped in zip((scalars, signs), batched[1:], strict=True):
            if mapped or array.shape[0] > 1:
                array = array if mapped else jnp.broadcast_to(array, (size, *array.shape))
                array = jnp.broadcast_to(array, (*x.shape[:2], *array.shape[2:]))
                array = array.reshape(-1, *array.shape[2:])
            small.append(array)
        results = run(x.reshape(-1, *x.shape[2:]), *small)
        results = [y.reshape(*x.shape[:2], *y.shape[1:]) for y in results]
        return results, [True] * len(results)

    return run


def _call(
    rows: Side | None, columns: Side | None, target: Target | None, x, scalars, signs
) -> list[jax.Array]:
    launch = _launch(rows, columns, target, x.shape, x.dtype)
    results = triton_call(
        quantize_kernel,
        x,
        scalars,
        signs,
        out=launch.out,
        grid=launch.grid,
        num_warps=launch.num_warps,
        **launch.constants,
        SCALARS_STRIDE=SCALARS if scalars.shape[0] > 1 else 0,
        SIGNS_STRIDE=2 * LARGEST_ROTATION if signs.shape[0] > 1 else 0,
    )
    return [y for y, side in zip(results, (rows, rows, columns, columns), strict=True) if side]


class _Launch(NamedTuple):
    """How the kernel is launched: outputs of both sides, wanted or not; programs; constants but strides."""

    out: list[jax.ShapeDtypeStruct]
    grid: tuple[int, ...]
    num_warps: int
    constants: dict[str, Any]


def _launch(
    rows: Side | None, columns: Side | None, target: Target | None, shape: tuple[int, ...], dtype: DTypeLike
) -> _Launch:
    v, b, r, c = shape
    tile_r, tile_c, num_warps = _tile(target, c * jnp.dtype(dtype).itemsize)
    constants: dict[str, Any] = {"BATCH": b, "R": r, "C": c, "BLOCK_R": tile_r, "BLOCK_C": tile_c}
    constants["CONVERT"] = conversion(target)
    out = []
    for name, side, length, other in (("ROW", rows, c, r), ("COLUMN", columns, r, c)):
        if side is None:
            out += [jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.uint8)]
            values = _ABSENT
        else:
            n = side.length(length)
            out.append(jax.ShapeDtypeStruct((v, b, other, n // 8 * _WORDS[side.form]), jnp.int32))
            out.append(jax.ShapeDtypeStruct((v, b, other, n // BLOCK), jnp.uint8))
            values = side_constants(side, n)
        constants |= {f"{name}_{k}": value for k, value in values.items()}
    tiles = (ceil_div(r, tile_r), ceil_div(c, tile_c))
    return _Launch(out, (*(tiles if columns else tiles[::-1]), v * b), num_warps, constants)


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
        "SIGNS": side.rotation is not None and side.rotation.signs != "none",
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
    if target.backend == "cuda":
        return "sm_100" if target.arch.startswith(("sm_10", "sm_12")) else "sm_90"
    return "software"


def _tile(target: Target | None, row_bytes: int) -> tuple[int, int, int]:
    """Returns the rows and columns of a tile and its warps: on GPUs 8 x 8 elements a thread.

    Half as many where rows do not start at multiples of 16 bytes: loads by elements take more registers.
    """
    if target is None or target.backend == "interpreter":
        return 64, 64, 1
    return 64 if row_bytes % 16 else 128, 64, 2 if target.backend == "hip" else 4


def builds(target: Target) -> list[Build]:
    """Returns the builds of what a training step of Llama 3.1 8B quantizes, of other options, of edges."""
    wanted = [
        _build(tensor.rows, tensor.columns, _dtype(tensor), sides, target)
        for tokens in shapes.TOKENS
        for tensor in shapes.tensors(tokens)
        for sides in _step_sides(tensor)
    ]
    [tensor] = [t for t in shapes.tensors(shapes.TOKENS[0]) if t.name == "attention.qkv.activation"]
    wanted += [
        _build(tensor.rows, tensor.columns, "bfloat16", sides, target) for sides in _other_sides(target)
    ]
    wanted += [
        _build(tensor.rows, tensor.columns, dtype, sides, target)
        for tensor in shapes.EDGE_TENSORS
        for dtype, sides in _EDGE_SIDES
    ]
    return list({build.name: build for build in wanted}.values())


_PLAIN = Side(Operand())
_H16 = Side(Operand(), Rotation(16))
_STOCHASTIC = Side(Operand(rounding="stochastic"))
_SQUARE = Side(Operand(block_shape=(32, 32)))
_Sides = tuple[Side | None, Side | None]
_EDGE_SIDES: list[tuple[str, _Sides]] = [
    ("bfloat16", (_PLAIN, _H16)),
    ("float32", (_PLAIN, _H16)),
    ("float16", (Side(Operand(scale_rule="even"), Rotation(64, "fixed"), "bf16"), None)),
    ("bfloat16", (None, Side(Operand(scale_rule="rceil", rounding="stochastic"), Rotation(32, "redrawn")))),
    ("float32", (Side(Operand(prescale=0.75, block_shape=(32, 32))), _SQUARE)),
]


def _dtype(tensor: shapes.TensorShape) -> str:
    return "float32" if tensor.name.endswith("weight") else "bfloat16"


def _step_sides(tensor: shapes.TensorShape) -> list[_Sides]:
    """Returns how wgrad_hadamard and full_hadamard take a tensor along its rows and its columns."""
    return [(_PLAIN, _PLAIN if tensor.name.endswith("weight") else _H16), (_H16, _H16)]


def _other_sides(target: Target) -> list[_Sides]:
    """Returns what other policies and implementations take."""
    sides: list[_Sides] = [(_PLAIN, None), (_H16, None), (None, _PLAIN), (None, _H16)]
    sides += [(_PLAIN, _STOCHASTIC), (_STOCHASTIC, _STOCHASTIC), (_SQUARE, _SQUARE)]
    sides.append((_PLAIN, Side(Operand(), Rotation(16, "redrawn"))))
    forms: list[Form] = ["bf16", "e4m3", "e5m2"] if target.arch == "sm_90" else ["bf16"]
    return sides + [(Side(Operand(), form=f), Side(Operand(), Rotation(16), f)) for f in forms]


def _build(r: int, c: int, dtype: str, sides: _Sides, target: Target) -> Build:
    launch = _launch(*sides, target, (1, 1, r, c), dtype)
    outputs = ("row_words", "row_scales", "column_words", "column_scales")
    return Build(
        name=f"quantize_{r}x{c}_{dtype}_rows_{_label(sides[0])}_columns_{_label(sides[1])}",
        kernel=quantize_kernel,
        signature={
            "x": Argument((1, 1, r, c), dtype),
            "scalars": Argument((1, SCALARS), "uint32"),
            "signs": Argument((1, 2, LARGEST_ROTATION), "float32"),
        }
        | {n: Argument(o.shape, o.dtype.name, True) for n, o in zip(outputs, launch.out, strict=True)},
        constants={**launch.constants, "SCALARS_STRIDE": 0, "SIGNS_STRIDE": 0},
        grid=launch.grid,
        num_warps=launch.num_warps,
    )


def _label(side: Side | None) -> str:
    """Returns a side in a file's name: its form, and what is not default."""
    if side is None:
        return "none"
    o, rotation = side.operand, side.rotation
    parts = [side.form, f"h{rotation.size}" if rotation else "", rotation.signs if rotation else ""]
    parts += [o.scale_rule, "sr" if o.rounding == "stochastic" else "", str(o.prescale or "")]
    parts.append("32x32" if o.block_shape == (32, 32) else "")
    return "-".join(x for x in parts if x not in ("", "floor", "none"))
