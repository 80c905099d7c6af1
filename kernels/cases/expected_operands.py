"""Expected results of the kernels that quantize and that draw random words, as `expected` has them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import mxjax
from mxjax.kernels.cases.expected import Arrays, decode
from mxjax.numerics.formats import BLOCK

SIGNS = 128
"""Signs that the quantizer kernel takes of each side; shorter runs repeat."""

InputOptions = Mapping[str, Any]
"""Options of one operand of the quantizer: `form`, `rotation` (1 is none), `signs`, and mxjax.quantize's
`scale_rule`, `rounding`, `block_shape` and `prescale`."""


def quantizer_inputs(
    *, shape: list[int], dtype: str, rows: InputOptions | None, columns: InputOptions | None
) -> Arrays:
    """Draws x [1, batch, rows, columns] with ties, both zeros, infinities and NaN, and what the sides draw.

    x has tiny blocks too, whose scale byte is 0, except where it is rotated: XLA flushes subnormals on CPUs.
    """
    rng, whole = np.random.default_rng(0), (1, *shape)
    normal = rng.standard_normal(whole)
    numbers = np.where(rng.random((*whole[:-1], 1)) < 0.5, np.round(4 * normal) / 4, normal)
    numbers *= np.exp2(rng.integers(-8, 8, (*whole[:-1], 1)))
    sides = (rows, columns)
    if dtype != "float16" and not any(side and side["rotation"] > 1 for side in sides):
        numbers[..., :BLOCK] *= 2.0**-134
    chance = rng.random(whole)
    x = np.select([chance < 0.001, chance < 0.002], [np.nan, np.inf], numbers).astype(dtype)
    return {"x": x, "scalars": _scalars(sides)}


def _scalars(sides: tuple[InputOptions | None, InputOptions | None]) -> np.ndarray:
    """Returns the keys and signs of rows and columns, uint32 [1, 15], at the start of the whole tensor."""
    scalars = np.zeros((1, 15), np.uint32)
    for i, side in enumerate(sides):
        if side and side["rounding"] == "stochastic":
            scalars[0, 6 * i : 6 * i + 2] = jax.random.bits(_random_key(i), (2,), np.uint32)
        if side and side["signs"] != "none":
            signs = np.tile(_random_signs(i, side), SIGNS // side["rotation"])
            scalars[0, 6 * i + 2 : 6 * i + 6] = np.packbits(signs < 0).view(">u4")
    return scalars


def _random_key(side: int) -> jax.Array:
    return jax.random.key(side)


def _random_signs(i: int, side: InputOptions) -> jax.Array:
    return mxjax.random_signs(jax.random.key(2 + i), side["rotation"])


def quantizer_outputs(
    inputs: Arrays, *, rows: InputOptions | None, columns: InputOptions | None, **_: object
) -> Arrays:
    """Computes the words and scale bytes of the sides that are wanted, the blocked axis last.

    The sides' random bits and signs are those of `quantizer_inputs`; x may be any.
    """
    outputs = {}
    for i, (name, side) in enumerate((("row", rows), ("column", columns))):
        if side:
            words, scales = _quantize(inputs["x"], i, side)
            outputs |= {f"{name}_words": words, f"{name}_scales": scales}
    return outputs


def _quantize(x: np.ndarray, i: int, side: InputOptions) -> tuple[np.ndarray, np.ndarray]:
    """Returns the words and scale bytes of x by rows (i is 0) or by columns (1)."""
    axis = (-1, -2)[i]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % max(BLOCK, side["rotation"]))
    padded: np.ndarray | jax.Array = np.pad(x, widths)
    if side["rotation"] > 1:
        signs = _random_signs(i, side) if side["signs"] != "none" else None
        padded = mxjax.rotate(jnp.asarray(padded), side["rotation"], axis=axis, signs=signs)
    block_shape = side["block_shape"]
    q = mxjax.quantize(
        np.asarray(padded).astype(np.float32),
        axis=axis,
        scale_rule=side["scale_rule"],
        rounding=side["rounding"],
        block_shape=tuple(block_shape) if isinstance(block_shape, list) else block_shape,
        prescale=side["prescale"],
        key=_random_key(i) if side["rounding"] == "stochastic" else None,
    )
    words, scales = np.asarray(mxjax.pack(q)), np.asarray(q.scales).view(np.uint8)
    if axis == -2:
        words, scales = words.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    if scales.shape[-2] != words.shape[-2]:  # blocks of 32x32
        scales = np.repeat(scales, BLOCK, axis=-2)[..., : words.shape[-2], :]
    if side["form"] == "bf16":  # not divided by the prescale
        words = decode(words, scales).astype(ml_dtypes.bfloat16)
    return words, scales


def normed_inputs(*, rows: InputOptions, columns: InputOptions, **options: Any) -> Arrays:
    """Draws a norm's operands, and what the sides draw."""
    return _normed(**options) | {"scalars": _scalars((rows, columns))}


def _normed(*, shape: list[int], **_: object) -> Arrays:
    """Draws small integers and powers of two, so that products are exact."""
    rng, (r, c) = np.random.default_rng(0), shape
    x, scale = rng.integers(-8, 9, (1, r, c)), rng.integers(1, 5, (1, c))
    factors = np.exp2(rng.integers(-3, 4, (1, r))).astype(np.float32)
    return {"x": x.astype(ml_dtypes.bfloat16), "factors": factors, "scale": scale.astype(ml_dtypes.bfloat16)}


def normed_outputs(inputs: Arrays, *, rows: InputOptions, columns: InputOptions, **_: object) -> Arrays:
    """Computes the words and scale bytes of a norm's result along rows and columns."""
    x, factors, scale = (inputs[name].astype(np.float64) for name in ("x", "factors", "scale"))
    return _quantized_both(x * factors[..., None] * scale[:, None, :], rows, columns)


def gated_inputs(*, rows: InputOptions, columns: InputOptions, **options: Any) -> Arrays:
    """Draws SwiGLU's operands, and what the sides draw."""
    return _gated(**options) | {"scalars": _scalars((rows, columns))}


def _gated(*, shape: list[int], of_gradient: bool, **_: object) -> Arrays:
    """Draws a product and a gradient whose values are small integers, but for the gate, which is 0 or large.

    There the logistic function is 0.5, 0 or 1, so that values do not depend on how it is computed.
    """
    rng, (r, c) = np.random.default_rng(0), shape
    gate = rng.choice([-256, 0, 32, 64, 256], (1, r, c))
    integers = rng.integers(-8, 9, (2, 1, r, c))
    arrays = {"product": np.concatenate([gate, integers[0]], axis=-1).astype(ml_dtypes.bfloat16)}
    arrays |= {"row_factors": np.exp2(rng.integers(0, 3, (1, r))).astype(np.float32)}
    arrays |= {"column_factors": np.exp2(rng.integers(0, 3, (1, 2 * c))).astype(np.float32)}
    if of_gradient:
        arrays["gradient"] = integers[1].astype(ml_dtypes.bfloat16)
        arrays["gradient_row_factors"] = np.exp2(rng.integers(-9, 3, (1, r))).astype(np.float32)
        arrays["gradient_column_factors"] = np.exp2(rng.integers(-9, 3, (1, c))).astype(np.float32)
    return arrays


def gated_outputs(
    inputs: Arrays, *, of_gradient: bool, rows: InputOptions, columns: InputOptions, **_: object
) -> Arrays:
    """Computes the words and scale bytes of SwiGLU's result, or of its gradient, along rows and columns."""

    def value(name: str, prefix: str = "") -> np.ndarray:
        factors = inputs[f"{prefix}row_factors"][..., None] * inputs[f"{prefix}column_factors"][:, None, :]
        return inputs[name].astype(np.float64) * factors

    values = _gated_values(value("product"), value("gradient", "gradient_") if of_gradient else None)
    return _quantized_both(values, rows, columns)


def _gated_values(product: np.ndarray, gradient: np.ndarray | None) -> np.ndarray:
    """Returns SwiGLU's result, or with the gradient of that the product's."""
    gate, up = np.split(product, 2, axis=-1)
    with np.errstate(over="ignore"):
        logistic = 1 / (1 + np.exp(-gate))
    if gradient is None:
        return gate * logistic * up
    of_gate = gradient * up * logistic * (1 + gate * (1 - logistic))
    return np.concatenate([of_gate, gradient * gate * logistic], axis=-1)


def _quantized_both(x: np.ndarray, rows: InputOptions, columns: InputOptions) -> Arrays:
    """Returns the words and scale bytes of x rounded to bfloat16, along rows and columns."""
    outputs = {}
    for i, (name, side) in enumerate((("row", rows), ("column", columns))):
        outputs[f"{name}_words"], outputs[f"{name}_scales"] = _quantize(x.astype(ml_dtypes.bfloat16), i, side)
    return outputs


def cast_inputs(*, shape: list[int], dtype: str, largest: list[float], **_: object) -> Arrays:
    """Draws x [1, rows, columns], and each side's factor, which makes `largest` of its largest magnitude."""
    x = np.random.default_rng(0).standard_normal((1, *shape)).astype(dtype)
    amax = np.max(np.abs(x.astype(np.float32)))
    rows, columns = (np.array([value], np.float32) / amax for value in largest)
    return {"x": x, "row_factor": rows, "column_factor": columns}


def cast_outputs(
    inputs: Arrays, *, largest: list[float], tile: list[int] | None = None, **_: object
) -> Arrays:
    """Computes the FP8 elements of rows, and of columns with the rows of x last; the maxima of tiles."""
    outputs = {}
    for name, value in zip(("row", "column"), largest, strict=True):
        dtype = ml_dtypes.float8_e4m3fn if value == 448 else ml_dtypes.float8_e5m2
        y = (inputs["x"].astype(np.float32) * inputs[f"{name}_factor"][:, None, None]).astype(dtype)
        outputs[f"{name}_words"] = y if name == "row" else y.swapaxes(-1, -2)
    if tile is not None:
        magnitudes, (r, c) = np.abs(inputs["x"].astype(np.float32)), tile
        starts = [np.arange(0, n, step) for n, step in zip(magnitudes.shape[1:], (r, c), strict=True)]
        of_rows = np.maximum.reduceat(magnitudes, starts[0], axis=1)
        outputs["maxima"] = np.maximum.reduceat(of_rows, starts[1], axis=2).view(np.int32)
    return outputs


def cast_logits_inputs(*, shape: list[int], largest: list[float]) -> Arrays:
    """Draws logits [1, rows, vocabulary] and targets, with the logits' normalizers."""
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((1, *shape), np.float32), rng.integers(0, shape[1], (1, shape[0]))
    normalizers = np.log(np.sum(np.exp(logits), axis=-1))
    factors = (np.array([value], np.float32) for value in largest)
    arrays = logits, normalizers, targets.astype(np.int32), *factors
    return dict(zip(("logits", "normalizers", "targets", "row_factor", "column_factor"), arrays, strict=True))


def cast_logits_outputs(inputs: Arrays, *, largest: list[float], **_: object) -> Arrays:
    """Computes the FP8 elements of the softmax, less one at the targets."""
    x = np.exp(inputs["logits"] - inputs["normalizers"][..., None])
    x -= np.arange(x.shape[-1]) == inputs["targets"][..., None]
    return cast_outputs(inputs | {"x": x}, largest=largest)


def cast_computed_inputs(*, kind: str, shape: list[int], largest: list[float], **_: object) -> Arrays:
    """Draws as `_normed` or `_gated`, with one power of two for a product, and the scales."""
    if kind == "normed":
        arrays = _normed(shape=shape)
    else:
        drawn = _gated(shape=shape, of_gradient=kind == "gradient")
        arrays = {"product": drawn["product"], "factor": np.array([2], np.float32)}
        if kind == "gradient":
            arrays |= {"gradient": drawn["gradient"], "gradient_factor": np.array([2**-7], np.float32)}
    amax = np.max(np.abs(_computed_values(arrays, kind).astype(np.float32)))
    rows, columns = (np.array([value], np.float32) / amax for value in largest)
    return arrays | {"row_factor": rows, "column_factor": columns}


def cast_computed_outputs(
    inputs: Arrays, *, kind: str, largest: list[float], tile: list[int], **_: object
) -> Arrays:
    """Computes the FP8 elements of a norm, or of SwiGLU or its gradient, and the maxima of tiles."""
    values = _computed_values(inputs, kind)
    parts = np.split(values, 2, axis=-1) if kind == "gradient" else [values]
    each = [cast_outputs(inputs | {"x": part}, largest=largest, tile=tile) for part in parts]
    return {
        name: np.concatenate([outputs[name] for outputs in each], axis=-2 if name == "column_words" else -1)
        for name in each[0]
    }


def _computed_values(inputs: Arrays, kind: str) -> np.ndarray:
    """Returns RMSNorm, SwiGLU or its gradient of the inputs, in bfloat16, which the kernels cast to FP8."""
    if kind == "normed":
        x, factors, scale = (inputs[name].astype(np.float64) for name in ("x", "factors", "scale"))
        return (x * factors[..., None] * scale[:, None, :]).astype(ml_dtypes.bfloat16)
    values = {name: inputs[name].astype(np.float64) for name in ("product", "gradient") if name in inputs}
    gradient = values["gradient"] * inputs["gradient_factor"][0] if kind == "gradient" else None
    return _gated_values(values["product"] * inputs["factor"][0], gradient).astype(ml_dtypes.bfloat16)


def draw_inputs(**_: object) -> Arrays:
    """Returns the data of a key."""
    return {"key": np.array([0x9E3779B9, 0xBB67AE85], np.uint32)}


def draw_outputs(inputs: Arrays, *, signs: list[int]) -> Arrays:
    """Returns the words that `jax.random` draws for the operands of the three GEMMs of `mxjax.dot`."""
    words = np.empty((3, 2, 6), np.uint32)
    for i, n in enumerate(signs):
        of_lhs, of_rhs, of_signs = (
            jax.random.fold_in(jax.random.fold_in(jax.random.wrap_key_data(inputs["key"]), i), k)
            for k in range(3)
        )
        negative = np.resize(np.asarray(mxjax.random_signs(of_signs, n)) < 0, SIGNS)
        words[i, :, :2] = [jax.random.bits(key, (2,), jnp.uint32) for key in (of_lhs, of_rhs)]
        words[i, :, 2:] = np.packbits(negative).view(">u4")
    return {"words": words}
