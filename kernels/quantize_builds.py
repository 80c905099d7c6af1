"""The ahead-of-time builds of the quantizer kernel."""

from mxjax.kernels import shapes
from mxjax.kernels.aot import Argument, Build
from mxjax.kernels.launch import Target
from mxjax.kernels.quantize import SCALARS, quantize_kernel
from mxjax.kernels.sides import LARGEST_ROTATION, Form, Side, launch_of
from mxjax.policy import Operand, Rotation


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
    launch = launch_of(*sides, target, (1, 1, r, c), dtype)
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
