"""The ahead-of-time builds of the quantizer kernel."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mxjax.devices import Target
from mxjax.gemm_input import GemmInput
from mxjax.kernels import shapes
from mxjax.kernels.aot.builds import Argument, Build, Expected
from mxjax.kernels.quantize.kernel import SCALARS, Form, quantize_kernel
from mxjax.kernels.quantize.launches import LARGEST_ROTATION, launch_of
from mxjax.kernels.quantize.quantizer import FORM_DTYPES
from mxjax.operand import Operand
from mxjax.policy import Rotation


class Side(NamedTuple):
    """The quantization of a tensor along one of its axes, and the form that a build writes."""

    operand: Operand
    rotation: Rotation | None = None
    form: Form = "packed"

    def along(self, axis: int) -> GemmInput:
        """Returns it as the input of a GEMM that contracts `axis`."""
        return GemmInput(axis, self.operand, self.rotation)


def builds(target: Target) -> list[Build]:
    """Returns builds for a training step of Llama 3.1 8B, for the quantizer's other options, and of edges."""
    wanted = [
        _build((tensor.rows, tensor.columns), _dtype(tensor), sides, target)
        for tokens in shapes.TOKENS
        for tensor in shapes.tensors(tokens)
        for sides in _step_sides(tensor)
    ]
    [tensor] = [t for t in shapes.tensors(shapes.TOKENS[0]) if t.name == "attention.qkv.activation"]
    wanted += [_build((tensor.rows, tensor.columns), "bfloat16", sides, target) for sides in _OTHER_SIDES]
    edges = [(tensor.rows, tensor.columns) for tensor in shapes.EDGE_TENSORS] + [_BATCH]
    wanted += [_build(shape, dtype, sides, target) for shape in edges for dtype, sides in _EDGE_SIDES]
    if target.arch == "sm_90":  # edges of Hopper's kernel
        wanted += [_build((200, 136), "bfloat16", sides, target) for sides in _PAIRS]
    if target.arch == "gfx950":  # small enough for the emulator
        wanted += [_build(shape, dtype, sides, target) for shape in _SMALL for dtype, sides in _ALL_SIDES]
    return list({build.name: build for build in wanted}.values())


_PLAIN = Side(Operand())
_H16 = Side(Operand(), Rotation(16))
_STOCHASTIC = Side(Operand(rounding="stochastic"))
_SQUARE = Side(Operand(block_shape=(32, 32)))
_Sides = tuple[Side | None, Side | None]
_PAIRS: list[_Sides] = [(_PLAIN, _PLAIN), (_PLAIN, _H16), (None, _H16)]
_BATCH = (3, 40, 70)
_SMALL = [(128, 128), (65, 97)]
_EDGE_SIDES: list[tuple[str, _Sides]] = [
    ("bfloat16", (_PLAIN, _H16)),
    ("float32", (_PLAIN, _H16)),
    ("float16", (Side(Operand(scale_rule="even"), Rotation(64, "fixed"), "bf16"), None)),
    ("bfloat16", (None, Side(Operand(scale_rule="rceil", rounding="stochastic"), Rotation(32, "redrawn")))),
    ("float32", (Side(Operand(prescale=0.75, block_shape=(32, 32))), _SQUARE)),
]

_OTHER_SIDES: list[_Sides] = [
    *[(_PLAIN, None), (_H16, None), (None, _PLAIN), (None, _H16)],
    *[(_PLAIN, _STOCHASTIC), (_STOCHASTIC, _STOCHASTIC), (_SQUARE, _SQUARE)],
    (_PLAIN, Side(Operand(), Rotation(16, "redrawn"))),
    (Side(Operand(), form="bf16"), Side(Operand(), Rotation(16), "bf16")),
]
"""Sides that other policies and implementations take."""
_ALL_SIDES: list[tuple[str, _Sides]] = [
    ("float32", (_PLAIN, _PLAIN)),
    ("float32", (_H16, _H16)),
    *(("bfloat16", sides) for sides in [(_H16, _H16), *_OTHER_SIDES]),
]
"""Dtypes and sides of a training step and of other policies."""


def _dtype(tensor: shapes.TensorShape) -> str:
    return "float32" if tensor.name.endswith("weight") else "bfloat16"


def _step_sides(tensor: shapes.TensorShape) -> list[_Sides]:
    """Returns the rows and columns of a tensor under wgrad_hadamard and under full_hadamard."""
    return [(_PLAIN, _PLAIN if tensor.name.endswith("weight") else _H16), (_H16, _H16)]


def _build(shape: tuple[int, ...], dtype: str, sides: _Sides, target: Target) -> Build:
    *batch, r, c = shape
    b = math.prod(batch)
    form = next(side.form for side in sides if side)
    pair = sides[0] and sides[0].along(-1), sides[1] and sides[1].along(-2)
    launch = launch_of(pair, form, target, (1, b, r, c), dtype)
    constants = launch.constants
    arguments = {"x": Argument((1, b, r, c), dtype, meaning="the tensor, row-major")}
    if launch.kernel is quantize_kernel:
        constants = {**constants, "SCALARS_STRIDE": 0, "SIGNS_STRIDE": 0}
        arguments["scalars"] = Argument((1, SCALARS), "uint32", meaning=_SCALARS_MEANING)
        arguments["signs"] = Argument((1, 2, LARGEST_ROTATION), "float32", meaning=_SIGNS_MEANING)
    outputs = iter(launch.out)
    for name, side in zip(("row", "column"), sides, strict=True):
        words, scales = next(outputs), next(outputs)
        arguments[f"{name}_words"] = _output(words, side, _WORDS_MEANINGS, _view(side, words.shape))
        arguments[f"{name}_scales"] = _output(scales, side, _SCALES_MEANINGS)
    size = "x".join(map(str, shape))
    rows, columns = map(_expected_side, sides)
    return Build(
        name=f"quantize_{size}_{dtype}_rows_{_label(sides[0])}_columns_{_label(sides[1])}",
        kernel=launch.kernel,
        signature=arguments,
        constants=constants,
        grid=launch.grid,
        expected=Expected(
            "quantizer", {"shape": [b, r, c], "dtype": dtype, "rows": rows, "columns": columns}
        ),
        num_warps=launch.num_warps,
    )


_SCALARS_MEANING = (
    "0, 1: Philox key words of the rows' random bits; 2, 3: of the columns'; 4 to 6: batch, row and column "
    "of the whole tensor at which x begins, here 0"
)
_SIGNS_MEANING = "1 or -1 for each element of a run along [0] the rows, [1] the columns; repeated to 64"
_WORDS_MEANINGS = {
    "packed": "E2M1, two a byte along the blocked axis, element 2 i in the low nibble; "
    "[1, batch, other axis, blocked axis padded with zeros]",
    "bf16": "the dequantized elements, before the division by a prescale; "
    "[1, batch, other axis, blocked axis padded with zeros]",
}
_SCALES_MEANINGS = dict.fromkeys(
    _WORDS_MEANINGS, "E8M0 bytes; [1, batch, other axis, blocks along the blocked axis]"
)


def _output(
    array: jax.ShapeDtypeStruct,
    side: Side | None,
    meanings: dict[str, str],
    view: tuple[tuple[int, ...], str] | None = None,
) -> Argument:
    if side is None:
        return Argument(array.shape, array.dtype.name, "unused", "not wanted, not written")
    return Argument(array.shape, array.dtype.name, "output", meanings[side.form], view)


def _view(side: Side | None, words: tuple[int, ...]) -> tuple[tuple[int, ...], str] | None:
    """Returns the shape and dtype of the elements in int32 words."""
    if side is None:
        return None
    dtype = jnp.dtype(FORM_DTYPES[side.form])
    return (*words[:-1], words[-1] * 4 // dtype.itemsize), dtype.name


def _expected_side(side: Side | None) -> dict[str, Any] | None:
    """Returns a side as `mxjax.kernels.aot.expected` takes it."""
    if side is None:
        return None
    o = side.operand
    return {
        "form": side.form,
        "rotation": side.rotation.size if side.rotation else 1,
        "signs": side.rotation.signs if side.rotation else "none",
        "scale_rule": o.scale_rule,
        "rounding": o.rounding,
        "block_shape": o.block_shape,
        "prescale": o.prescale,
    }


def _label(side: Side | None) -> str:
    """Returns a side in a file's name: its form, and what is not default."""
    if side is None:
        return "none"
    o, rotation = side.operand, side.rotation
    parts = [side.form, f"h{rotation.size}" if rotation else "", rotation.signs if rotation else ""]
    parts += [o.scale_rule, "sr" if o.rounding == "stochastic" else "", str(o.prescale or "")]
    parts.append("32x32" if o.block_shape == (32, 32) else "")
    return "-".join(x for x in parts if x not in ("", "floor", "none"))
