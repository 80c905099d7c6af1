"""The ahead-of-time builds of the quantizer, and of the kernel that draws a policy's random words."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from mxjax.kernels.cases import shapes
from mxjax.kernels.cases.builds import Build, Expected, build_of
from mxjax.kernels.launch import calls_of
from mxjax.kernels.quantize import draws, fp8
from mxjax.kernels.quantize.fp8 import launch_cast
from mxjax.kernels.quantize.fp8_computed import launch_computed_cast
from mxjax.kernels.quantize.fp8_logits import launch_gradient
from mxjax.kernels.quantize.kernel import SCALARS, Form
from mxjax.kernels.quantize.launches import ComputedKind, Pair, launched_pairs
from mxjax.kernels.quantize.quantizer import FORM_DTYPES, launch_computed, launch_pair, reads_scalars
from mxjax.numerics.formats import BLOCK
from mxjax.numerics.operand import Operand
from mxjax.operands.use import OperandUse
from mxjax.policy.policy import Rotation
from mxjax.runtime.devices import Target

_Side = tuple[Operand, Rotation | None]
"""The quantization of a tensor along one of its axes."""
_Sides = tuple[_Side | None, _Side | None]
"""The wanted sides of a tensor, along its rows (axis -1) and along its columns (axis -2)."""


def builds(target: Target) -> list[Build]:
    """Returns builds for a training step of Llama 3.1 8B, for the quantizer's other options, and of edges.

    The draws are of policies with and without rotations that draw signs.
    """
    wanted = []
    for tensor in (tensor for tokens in shapes.TOKENS for tensor in shapes.tensors(tokens)):
        is_weight = tensor.name.endswith("weight")
        dtype, columns = ("float32", _PLAIN) if is_weight else ("bfloat16", _H16)
        for sides in ((_PLAIN, columns), (_H16, _H16)):  # under wgrad_hadamard, under full_hadamard
            wanted.append(((tensor.rows, tensor.columns), dtype, sides, "packed"))
    [tensor] = [t for t in shapes.tensors(shapes.TOKENS[0]) if t.name == "attention.qkv.activation"]
    wanted += [((tensor.rows, tensor.columns), *options) for options in _OTHER_SIDES]
    edges = [(tensor.rows, tensor.columns) for tensor in shapes.EDGE_TENSORS] + [_BATCH]
    wanted += [(shape, *options) for shape in edges for options in _EDGE_SIDES]
    if target.arch == "sm_90":  # edges of Hopper's kernel
        wanted += [((200, 136), "bfloat16", sides, "packed") for sides in _PAIRS]
    if target.arch == "gfx950":  # small enough for the emulator
        wanted += [(shape, *options) for shape in _SMALL for options in _ALL_SIDES]
    found = [build for each in wanted for build in _builds(*each, target)]
    if target.arch == "sm_90":
        found += [
            computed_build(kind, shape, sides)
            for kind, large in _COMPUTED.items()
            for shape in (large, (200, 160))
            for sides in _COMPUTED_SIDES
        ]
    if target.backend == "cuda":
        found += [
            cast_build(shape, dtype, maxima)
            for shape in ((8192, 4096), (208, 144))
            for dtype in ("bfloat16", "float32")
            for maxima in (False, True)
        ]
        found += [
            cast_computed_build(kind, shape) for kind in _COMPUTED for shape in ((4096, 4096), (208, 144))
        ]
        found += [cast_logits_build(shape) for shape in ((2048, 8192), (208, 144))]
    found += [_draws(signs) for signs in ((1, 1, 1), (1, 64, 128), (16, 32, 1))]
    return list({build.name: build for build in found}.values())


_PLAIN: _Side = (Operand(), None)
_H16: _Side = (Operand(), Rotation(16))
_H128: _Side = (Operand(), Rotation(128, "redrawn"))
_STOCHASTIC: _Side = (Operand(rounding="stochastic"), None)
_SQUARE: _Side = (Operand(block_shape=(BLOCK, BLOCK)), None)
_EVEN: _Side = (Operand(scale_rule="even"), Rotation(64, "fixed"))
_RCEIL: _Side = (Operand(scale_rule="rceil", rounding="stochastic"), Rotation(32, "redrawn"))
_CEIL: _Side = (Operand(scale_rule="rceil"), None)
_CEIL_DRAWN: _Side = (Operand(scale_rule="rceil", rounding="stochastic"), None)
_PRESCALED: _Side = (Operand(prescale=0.75, block_shape=(BLOCK, BLOCK)), None)
_SIGNED: _Side = (Operand(), Rotation(16, "redrawn"))
_COMPUTED_SIDES: list[_Sides] = [
    *((_PLAIN, side) for side in (_PLAIN, _H16, _SIGNED, _STOCHASTIC)),
    ((Operand(scale_rule="even"), None), (Operand(scale_rule="even"), Rotation(16))),
    (_CEIL, _CEIL_DRAWN),
]
_PAIRS: list[_Sides] = [*_COMPUTED_SIDES, (None, _H16), (_STOCHASTIC, _STOCHASTIC)]
_COMPUTED: dict[ComputedKind, tuple[int, int]] = {
    "normed": (8192, 4096),
    "gated": (8192, 14336),
    "gradient": (8192, 14336),
}
_BATCH = (3, 40, 70)
_SMALL = [(128, 128), (65, 97)]
_EDGE_SIDES: list[tuple[str, _Sides, Form]] = [
    ("bfloat16", (_PLAIN, _H16), "packed"),
    ("float32", (_PLAIN, _H16), "packed"),
    ("float16", (_EVEN, None), "bf16"),
    ("bfloat16", (None, _RCEIL), "packed"),
    ("float32", (_PRESCALED, _SQUARE), "packed"),
]

_PACKED_SIDES: list[_Sides] = [
    *((_PLAIN, None), (_H16, None), (None, _PLAIN), (None, _H16)),
    *((_PLAIN, _STOCHASTIC), (_STOCHASTIC, _STOCHASTIC), (_SQUARE, _SQUARE)),
    *((_PLAIN, _SIGNED), (_PLAIN, _H128), (_H128, _H128)),
]
_OTHER_SIDES: list[tuple[str, _Sides, Form]] = [
    *(("bfloat16", sides, "packed") for sides in _PACKED_SIDES),
    ("bfloat16", (_PLAIN, _H16), "bf16"),
]
"""Dtypes, sides and forms that other policies and implementations take."""
_ALL_SIDES: list[tuple[str, _Sides, Form]] = [
    ("float32", (_PLAIN, _PLAIN), "packed"),
    ("float32", (_H16, _H16), "packed"),
    ("bfloat16", (_H16, _H16), "packed"),
    *_OTHER_SIDES,
]
"""Dtypes, sides and forms of a training step and of other policies."""


def _pair(sides: _Sides) -> Pair:
    rows, columns = sides
    return rows and OperandUse(-1, *rows), columns and OperandUse(-2, *columns)


def _builds(shape: tuple[int, ...], dtype: str, sides: _Sides, form: Form, target: Target) -> Iterator[Build]:
    """Yields the builds that quantize a tensor along its sides, perhaps each by a launch of its own."""
    *batch, r, c = shape
    b = math.prod(batch)
    x = jax.ShapeDtypeStruct((1, b, r, c), dtype)
    scalars, *places = (jax.ShapeDtypeStruct(n, "uint32") for n in ((1, SCALARS - 3), (b,), (r,), (c,)))
    pair = _pair(sides)
    calls = calls_of(functools.partial(launch_pair, pair, form, target, (r, c)), x, scalars, *places)
    for call, part in zip(calls, launched_pairs(pair, target), strict=True):
        rows, columns = (side if use else None for side, use in zip(sides, part, strict=True))
        absent = [name for name, use in zip(("row", "column"), part, strict=True) if use is None]
        options = {"rows": _options(rows, form), "columns": _options(columns, form)}
        name = "x".join(map(str, shape))
        yield build_of(
            f"quantize_{name}_{dtype}_rows_{_label(rows, form)}_columns_{_label(columns, form)}",
            call,
            Expected("quantizer", {"shape": [b, r, c], "dtype": dtype, **options}),
            dict.fromkeys(_WORDS, FORM_DTYPES[form]),
            {f"{side}_{what}" for side in absent for what in ("words", "scales")},
        )


_WORDS = ("row_words", "column_words")


def computed_build(kind: ComputedKind, shape: tuple[int, int], sides: _Sides) -> Build:
    """Returns the build of a kernel for a norm's or SwiGLU's result [r, c], or for the gradient [r, 2 c]."""
    r, c = shape
    rows, columns = sides
    arrays = []
    for n in {"normed": (c,), "gated": (2 * c,), "gradient": (2 * c, c)}[kind]:
        of_columns = "bfloat16" if kind == "normed" else "float32"
        types = ((1, r, n), "bfloat16"), ((1, r), "float32"), ((1, n), of_columns)
        arrays += [jax.ShapeDtypeStruct(*each) for each in types]
    if reads_scalars(_pair(sides)[1]):
        arrays += [jax.ShapeDtypeStruct(n, "uint32") for n in ((1, SCALARS - 3), (r,))]
    [call] = calls_of(functools.partial(launch_computed, _pair(sides), kind), *arrays)
    return build_of(
        f"quantize_{_COMPUTED_NAMES[kind]}_{r}x{c}_columns_{_label(columns, 'packed')}",
        call,
        Expected(
            "normed" if kind == "normed" else "gated",
            {"shape": [r, c], "rows": _options(rows, "packed"), "columns": _options(columns, "packed")}
            | ({} if kind == "normed" else {"of_gradient": kind == "gradient"}),
        ),
        dict.fromkeys(_WORDS, FORM_DTYPES["packed"]),
    )


_CAST = ("float8_e4m3fn", "float8_e5m2")
"""Elements of casts along rows and along columns."""


def cast_build(shape: tuple[int, int], dtype: str, maxima: bool = False) -> Build:
    """Returns the build of the kernel that casts a tensor to E4M3 along rows and to E5M2 along columns.

    With `maxima` it also finds the largest magnitudes, as for delayed scales.
    """
    r, c = shape
    x, factor = jax.ShapeDtypeStruct((1, r, c), dtype), jax.ShapeDtypeStruct((1,), "float32")
    launch = functools.partial(launch_cast, _CAST, maxima, sharding=())
    [call] = calls_of(launch, x, factor, factor)
    options = {"shape": [r, c], "dtype": dtype, "largest": [448.0, 57344.0]}
    tile = (fp8.TILE.rows, fp8.TILE.columns) if maxima else None
    return build_of(
        f"cast_{r}x{c}_{dtype}" + ("_maxima" if maxima else ""),
        call,
        Expected("cast", options | {"tile": tile}),
        dict(zip(_WORDS, _CAST, strict=True)),
        () if maxima else ("maxima",),
    )


def cast_computed_build(kind: ComputedKind, shape: tuple[int, int]) -> Build:
    """Returns the build of a kernel that casts what it computes to E4M3 along rows and E5M2 along columns."""
    r, c = shape
    factor = jax.ShapeDtypeStruct((1,), "float32")
    product, gradient, normed = (jax.ShapeDtypeStruct((1, r, n), "bfloat16") for n in (2 * c, c, c))
    arrays = {
        "normed": (normed, jax.ShapeDtypeStruct((1, r), "float32"), jax.ShapeDtypeStruct((1, c), "bfloat16")),
        "gated": (product, factor),
        "gradient": (product, factor, gradient, factor),
    }[kind]
    launch = functools.partial(launch_computed_cast, _CAST, kind)
    [call] = calls_of(lambda *arrays: launch(*arrays, ()), *arrays, factor, factor)
    options = {"kind": kind, "shape": [r, c], "largest": [448.0, 57344.0]}
    return build_of(
        f"cast_{_COMPUTED_NAMES[kind]}_{r}x{c}",
        call,
        Expected("cast_computed", options | {"tile": [fp8.TILE.rows, fp8.TILE.columns]}),
        dict(zip(_WORDS, _CAST, strict=True)),
    )


def cast_logits_build(shape: tuple[int, int]) -> Build:
    """Returns the build of the kernel that casts the gradient of logits to E4M3 and to E5M2."""
    r, c = shape
    logits, factor = jax.ShapeDtypeStruct((1, r, c), "float32"), jax.ShapeDtypeStruct((1,), "float32")
    normalizers, targets = (jax.ShapeDtypeStruct((1, r), dtype) for dtype in ("float32", "int32"))
    [call] = calls_of(functools.partial(launch_gradient, _CAST), logits, normalizers, targets, factor, factor)
    return build_of(
        f"cast_logits_{r}x{c}",
        call,
        Expected("cast_logits", {"shape": [r, c], "largest": [448.0, 57344.0]}, tolerance=1),
        dict(zip(_WORDS, _CAST, strict=True)),
        ("maxima",),
    )


def _draws(signs: tuple[int, ...]) -> Build:
    [call] = calls_of(functools.partial(draws.launch, signs=signs), jax.ShapeDtypeStruct((2,), "uint32"))
    return build_of("draw_" + "_".join(map(str, signs)), call, Expected("draw", {"signs": list(signs)}))


_COMPUTED_NAMES = {"normed": "normed", "gated": "gated_result", "gradient": "gated_gradient"}


def _options(side: _Side | None, form: Form) -> dict[str, Any] | None:
    if side is None:
        return None
    o, rotation = side
    return {
        "form": form,
        "rotation": rotation.size if rotation else 1,
        "signs": rotation.signs if rotation else "none",
        "scale_rule": o.scale_rule,
        "rounding": o.rounding,
        "block_shape": o.block_shape,
        "prescale": o.prescale,
    }


def _label(side: _Side | None, form: Form) -> str:
    """Returns a side in a file's name: its form, and what is not default."""
    if side is None:
        return "none"
    o, rotation = side
    parts = [form, f"h{rotation.size}" if rotation else "", rotation.signs if rotation else ""]
    parts += [o.scale_rule, "sr" if o.rounding == "stochastic" else "", str(o.prescale or "")]
    parts.append("32x32" if o.is_square else "")
    return "-".join(x for x in parts if x not in ("", "floor", "none"))
