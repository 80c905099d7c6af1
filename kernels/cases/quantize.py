"""The ahead-of-time builds of the quantizer, and of the kernel that draws a policy's random words."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from mxjax.kernels.cases import shapes
from mxjax.kernels.cases.builds import Argument, Build, Expected
from mxjax.kernels.quantize import draws, fp8, fp8_computed
from mxjax.kernels.quantize.kernel import SCALARS, Form
from mxjax.kernels.quantize.launches import ComputedKind, Pair, computed_launch_of, launch_of, launched_pairs
from mxjax.kernels.quantize.quantizer import FORM_DTYPES
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
    wanted = [
        _build((tensor.rows, tensor.columns), _dtype(tensor), sides, target)
        for tokens in shapes.TOKENS
        for tensor in shapes.tensors(tokens)
        for sides in _step_sides(tensor)
    ]
    [tensor] = [t for t in shapes.tensors(shapes.TOKENS[0]) if t.name == "attention.qkv.activation"]
    wanted += [
        _build((tensor.rows, tensor.columns), "bfloat16", part, target, form)
        for sides, form in _OTHER_SIDES
        for part in _launched(sides, target)
    ]
    edges = [(tensor.rows, tensor.columns) for tensor in shapes.EDGE_TENSORS] + [_BATCH]
    wanted += [
        _build(shape, dtype, sides, target, form) for shape in edges for dtype, sides, form in _EDGE_SIDES
    ]
    if target.arch == "sm_90":  # edges of Hopper's kernel
        wanted += [_build((200, 136), "bfloat16", sides, target) for sides in _PAIRS]
        wanted += [
            computed_build(kind, shape, sides)
            for kind, large in _COMPUTED.items()
            for shape in (large, (200, 160))
            for sides in _COMPUTED_SIDES
        ]
    if target.arch == "gfx950":  # small enough for the emulator
        wanted += [
            _build(shape, dtype, sides, target, form) for shape in _SMALL for dtype, sides, form in _ALL_SIDES
        ]
    if target.backend == "cuda":
        wanted += [
            cast_build(shape, dtype, maxima)
            for shape in ((8192, 4096), (208, 144))
            for dtype in ("bfloat16", "float32")
            for maxima in (False, True)
        ]
        wanted += [
            cast_computed_build(kind, shape) for kind in _COMPUTED for shape in ((4096, 4096), (208, 144))
        ]
    wanted += [_draws(signs) for signs in ((1, 1, 1), (1, 64, 128), (16, 32, 1))]
    return list({build.name: build for build in wanted}.values())


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
_PAIRS: list[_Sides] = [
    (_PLAIN, _PLAIN),
    (_PLAIN, _H16),
    (None, _H16),
    (_STOCHASTIC, _STOCHASTIC),
    (_CEIL, _CEIL_DRAWN),
]
_COMPUTED_SIDES: list[_Sides] = [(_PLAIN, _PLAIN), (_PLAIN, _H16)]
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

_OTHER_SIDES: list[tuple[_Sides, Form]] = [
    ((_PLAIN, None), "packed"),
    ((_H16, None), "packed"),
    ((None, _PLAIN), "packed"),
    ((None, _H16), "packed"),
    ((_PLAIN, _STOCHASTIC), "packed"),
    ((_STOCHASTIC, _STOCHASTIC), "packed"),
    ((_SQUARE, _SQUARE), "packed"),
    ((_PLAIN, (Operand(), Rotation(16, "redrawn"))), "packed"),
    ((_PLAIN, _H128), "packed"),
    ((_H128, _H128), "packed"),
    ((_PLAIN, _H16), "bf16"),
]
"""Sides and forms that other policies and implementations take."""
_ALL_SIDES: list[tuple[str, _Sides, Form]] = [
    ("float32", (_PLAIN, _PLAIN), "packed"),
    ("float32", (_H16, _H16), "packed"),
    ("bfloat16", (_H16, _H16), "packed"),
    *(("bfloat16", sides, form) for sides, form in _OTHER_SIDES),
]
"""Dtypes, sides and forms of a training step and of other policies."""


def _dtype(tensor: shapes.TensorShape) -> str:
    return "float32" if tensor.name.endswith("weight") else "bfloat16"


def _step_sides(tensor: shapes.TensorShape) -> list[_Sides]:
    """Returns the rows and columns of a tensor under wgrad_hadamard and under full_hadamard."""
    return [(_PLAIN, _PLAIN if tensor.name.endswith("weight") else _H16), (_H16, _H16)]


def _launched(sides: _Sides, target: Target) -> list[_Sides]:
    """Returns the sides of each launch."""
    rows, columns = sides
    return [(rows if r else None, columns if c else None) for r, c in launched_pairs(_pair(sides), target)]


def _pair(sides: _Sides) -> Pair:
    rows, columns = sides
    return rows and OperandUse(-1, *rows), columns and OperandUse(-2, *columns)


def _build(shape: tuple[int, ...], dtype: str, sides: _Sides, target: Target, form: Form = "packed") -> Build:
    *batch, r, c = shape
    b = math.prod(batch)
    rows, columns = sides
    launch = launch_of(_pair(sides), form, target, (1, b, r, c), dtype)
    arguments = {
        "x": Argument((1, b, r, c), dtype, meaning="the tensor, row-major"),
        "scalars": Argument((1, SCALARS), "uint32", meaning=_SCALARS_MEANING),
    }
    outputs = iter(launch.out)
    for name, side in zip(("row", "column"), sides, strict=True):
        words, scales = next(outputs), next(outputs)
        wanted = side is not None
        view = _view(words.shape, form) if wanted else None
        arguments[f"{name}_words"] = _output(words, wanted, _WORDS_MEANINGS[form], view)
        arguments[f"{name}_scales"] = _output(scales, wanted, _SCALES_MEANING)
    size = "x".join(map(str, shape))
    options = {"rows": _options(rows, form), "columns": _options(columns, form)}
    return Build(
        name=f"quantize_{size}_{dtype}_rows_{_label(rows, form)}_columns_{_label(columns, form)}",
        kernel=launch.kernel,
        signature=arguments,
        constants={**launch.constants, "SCALARS_STRIDE": 0},
        grid=launch.grid,
        expected=Expected("quantizer", {"shape": [b, r, c], "dtype": dtype, **options}),
        num_warps=launch.num_warps,
    )


def computed_build(kind: ComputedKind, shape: tuple[int, int], sides: _Sides) -> Build:
    """Returns the build of a kernel for a norm's or SwiGLU's result [r, c], or for the gradient [r, 2 c]."""
    r, c = shape
    rows, columns = sides
    launch = computed_launch_of(_pair(sides), kind, (1, r, c))
    arguments = _normed_arguments(r, c) if kind == "normed" else _product_arguments(kind, r, c)
    outputs = iter(launch.out)
    for name in ("row", "column"):
        words, scales = next(outputs), next(outputs)
        view = _view(words.shape, "packed")
        arguments[f"{name}_words"] = _output(words, True, _WORDS_MEANINGS["packed"], view)
        arguments[f"{name}_scales"] = _output(scales, True, _SCALES_MEANING)
    return Build(
        name=f"quantize_{_COMPUTED_NAMES[kind]}_{r}x{c}_columns_{_label(columns, 'packed')}",
        kernel=launch.kernel,
        signature=arguments,
        constants=launch.constants,
        grid=launch.grid,
        expected=Expected(
            "normed" if kind == "normed" else "gated",
            {"shape": [r, c], "rows": _options(rows, "packed"), "columns": _options(columns, "packed")}
            | ({} if kind == "normed" else {"of_gradient": kind == "gradient"}),
        ),
        num_warps=launch.num_warps,
    )


def _normed_arguments(r: int, c: int) -> dict[str, Argument]:
    return {
        "x": Argument((1, r, c), "bfloat16", meaning="the tensor before the norm, row-major"),
        "factors": Argument((1, r), "float32", meaning="1 over the root mean square of each row"),
        "scale": Argument((1, c), "bfloat16", meaning="of its columns"),
    }


def _product_arguments(kind: ComputedKind, r: int, c: int) -> dict[str, Argument]:
    products = ("product", "gradient") if kind == "gradient" else ("product",)
    arguments = {}
    for name, n in zip(products, (2 * c, c), strict=False):
        prefix = "" if name == "product" else "gradient_"
        arguments[name] = Argument((1, r, n), "bfloat16", meaning=_PRODUCT_MEANINGS[name])
        arguments[f"{prefix}row_factors"] = Argument((1, r), "float32", meaning="of its rows")
        arguments[f"{prefix}column_factors"] = Argument((1, n), "float32", meaning="of its columns")
    return arguments


def cast_build(shape: tuple[int, int], dtype: str, maxima: bool = False) -> Build:
    """Returns the build of the kernel that casts a tensor to E4M3 along rows and to E5M2 along columns.

    With `maxima` it also finds the largest magnitudes, as for delayed scales.
    """
    r, c = shape
    meaning = "what its largest magnitude becomes, divided by that"
    arguments = {
        "x": Argument((1, r, c), dtype, meaning="the tensor, row-major"),
        "row_factor": Argument((1,), "float32", meaning=meaning),
        "column_factor": Argument((1,), "float32", meaning=meaning),
    }
    sides = ("float8_e4m3fn", "float8_e5m2")
    for name, element, (n, k) in zip(("row", "column"), sides, ((r, c), (c, r)), strict=True):
        view = (1, n, k), element
        arguments[f"{name}_words"] = Argument((1, n, k // 4), "int32", "output", "elements, row-major", view)
    grid, tile = fp8.grid_of(1, r, c), (fp8.TILE.rows, fp8.TILE.columns)
    arguments["maxima"] = Argument((1,), "int32", "unused", "not wanted, not written")
    if maxima:
        meaning = "bits of each tile's largest magnitude, row-major"
        arguments["maxima"] = Argument(grid[::-1], "int32", "output", meaning)
    return Build(
        name=f"cast_{r}x{c}_{dtype}" + ("_maxima" if maxima else ""),
        kernel=fp8.cast_kernel,
        signature=arguments,
        constants=fp8.constants_of(sides, r, c, maxima),
        grid=grid,
        expected=Expected(
            "cast",
            {"shape": [r, c], "dtype": dtype, "largest": [448.0, 57344.0], "tile": tile if maxima else None},
        ),
        num_warps=fp8.TILE.warps,
    )


def cast_computed_build(kind: ComputedKind, shape: tuple[int, int]) -> Build:
    """Returns the build of a kernel that casts what it computes to E4M3 along rows and E5M2 along columns."""
    r, c = shape
    arguments = {
        "normed": lambda: _normed_arguments(r, c),
        "gated": lambda: _factored_argument("product", "", r, 2 * c),
        "gradient": lambda: (
            _factored_argument("product", "", r, 2 * c) | _factored_argument("gradient", "gradient_", r, c)
        ),
    }[kind]()
    n = 2 * c if kind == "gradient" else c
    cast = cast_build((r, n), "bfloat16", maxima=True)
    arguments |= {name: argument for name, argument in cast.signature.items() if name != "x"}
    along, down, _ = fp8.grid_of(1, r, c)
    grid = (along * (n // c), down, 1)
    arguments["maxima"] = dataclasses.replace(arguments["maxima"], shape=grid[::-1])
    sides = ("float8_e4m3fn", "float8_e5m2")
    options = {"kind": kind, "shape": [r, c], "largest": [448.0, 57344.0]}
    return Build(
        name=f"cast_{_COMPUTED_NAMES[kind]}_{r}x{c}",
        kernel=fp8_computed.KERNELS[kind],
        signature=arguments,
        constants=fp8.constants_of(sides, r, c, True),
        grid=grid,
        expected=Expected("cast_computed", options | {"tile": [fp8.TILE.rows, fp8.TILE.columns]}),
        num_warps=fp8.TILE.warps,
    )


def _factored_argument(name: str, prefix: str, r: int, n: int) -> dict[str, Argument]:
    return {
        name: Argument((1, r, n), "bfloat16", meaning=_PRODUCT_MEANINGS[name]),
        f"{prefix}factor": Argument((1,), "float32", meaning="of all of it"),
    }


def _draws(signs: tuple[int, ...]) -> Build:
    return Build(
        name="draw_" + "_".join(map(str, signs)),
        kernel=draws.draw_kernel,
        signature={
            "key": Argument((2,), "uint32", meaning="data of a Threefry key"),
            "words": Argument((draws.GEMMS, 2, 6), "uint32", "output", _DRAWN_MEANING),
        },
        constants=draws.constants_of(signs),
        grid=(draws.GEMMS,),
        expected=Expected("draw", {"signs": list(signs)}),
        num_warps=1,
    )


_COMPUTED_NAMES = {"normed": "normed", "gated": "gated_result", "gradient": "gated_gradient"}
_PRODUCT_MEANINGS = {
    "product": "gate's columns, then those of the up projection, before the factors are applied",
    "gradient": "that of silu(gate) * up, before its factors are applied",
}
_SCALARS_MEANING = (
    "0, 1: Philox key words of the rows' random bits; 2 to 5: signs of 128 elements along the rows as bits, "
    "1 for negative, the first highest; 6 to 11: the same for the columns; 12 to 14: batch, row and "
    "column of the whole tensor at which x begins, here 0"
)
_DRAWN_MEANING = "for lhs and rhs of each GEMM: two words of the operand's key, its GEMM's signs in four"
_WORDS_MEANINGS = {
    "packed": "E2M1, two a byte along the blocked axis, element 2 i in the low nibble; "
    "[1, batch, other axis, blocked axis padded with zeros]",
    "bf16": "the dequantized elements, before the division by a prescale; "
    "[1, batch, other axis, blocked axis padded with zeros]",
}
_SCALES_MEANING = "E8M0 bytes; [1, batch, other axis, blocks along the blocked axis]"


def _output(
    array: jax.ShapeDtypeStruct,
    wanted: bool,
    meaning: str,
    view: tuple[tuple[int, ...], str] | None = None,
) -> Argument:
    if not wanted:
        return Argument(array.shape, array.dtype.name, "unused", "not wanted, not written")
    return Argument(array.shape, array.dtype.name, "output", meaning, view)


def _view(words: tuple[int, ...], form: Form) -> tuple[tuple[int, ...], str]:
    """Returns the shape and dtype of the elements in int32 words."""
    dtype = jnp.dtype(FORM_DTYPES[form])
    return (*words[:-1], words[-1] * 4 // dtype.itemsize), dtype.name


def _options(side: _Side | None, form: Form) -> dict[str, Any] | None:
    """Returns a side as `mxjax.kernels.cases.expected_operands.InputOptions`."""
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
