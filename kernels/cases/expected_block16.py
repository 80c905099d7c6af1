"""Expected results of the kernels that quantize blocks of 16, as `expected` has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mxjax
from mxjax.kernels.cases.expected import Arrays
from mxjax.numerics.blocks import pad
from mxjax.numerics.philox import key_words
from mxjax.operands.kernel_operand import bfloat16_by_definition
from mxjax.operands.use import OperandUse, rotate_use
from mxjax.products.draws import uses_of

_USES = {"activation": ("fprop.lhs", "wgrad.lhs"), "gradient": ("dgrad.lhs", "wgrad.rhs")}
_USES["weight"] = ("dgrad.rhs", "fprop.rhs")
SIGNS = 128


def uses_of_tensor(recipe: str, tensor: str) -> list[OperandUse]:
    """Returns a recipe's uses of an activation, a gradient or a weight along rows and along columns.

    A use in another format than E2M1 with E4M3 or UE5M3 scales is left out.
    """
    policy, found = mxjax.get_policy(recipe), []
    for axis, place in zip((-1, -2), _USES[tensor], strict=True):
        gemm, side = place.split(".")
        uses = uses_of(policy.gemms[gemm], axis, axis, jax.random.key(len(found)))
        use = getattr(uses, side)._replace(reads=None)
        if use.operand.is_block16:
            found.append(use)
    return found


def block16_inputs(*, shape: list[int], dtype: str, recipe: str, tensor: str) -> Arrays:
    """Draws x [1, 1, rows, columns], with the largest magnitudes and what the uses draw."""
    rng = np.random.default_rng(0)
    rows = np.exp2(rng.integers(-8, 8, (shape[0], 1)))
    x = (rng.standard_normal(shape) * rows).astype(dtype)
    uses = {use.axis: use for use in uses_of_tensor(recipe, tensor)}
    maxima = np.zeros((1, 2), np.int32)
    scalars = np.zeros((1, 20), np.uint32)
    for i, axis in enumerate((-1, -2)):
        if axis in uses:
            maxima[0, i] = _bits(rotate_use(jnp.asarray(x), uses[axis])).max()
            scalars[0, 8 * i : 8 * i + 8] = _words(uses[axis])
    scalars[0, 16] = np.float32(1).view(np.uint32)
    return {"x": x[None, None], "maxima": maxima, "scalars": scalars}


def _bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.int32) & 0x7FFF_FFFF


def _words(use: OperandUse) -> np.ndarray:
    """Returns two words of the key, two of a second draw, and the signs as bits."""
    words, o = np.zeros(8, np.uint32), use.operand
    if o.rounding == "stochastic":
        words[:2] = key_words(use.key)
    if o.eden or (o.four_over_six and o.rounding == "stochastic"):
        words[2:4] = key_words(use.key, 1 if o.eden else 2)
    if use.signs is not None:
        words[4:] = np.packbits(np.resize(np.asarray(use.signs) < 0, SIGNS)).view(">u4")
    return words


def block16_outputs(inputs: Arrays, *, recipe: str, tensor: str, **_: object) -> Arrays:
    """Computes the values of the sides without their tensor scales, and those scales."""
    x, outputs = jnp.asarray(inputs["x"][0, 0]), {}
    for use in uses_of_tensor(recipe, tensor):
        # Kernels rotate the zeros beyond the edge too, which gives them signs.
        length = use.padded(x.shape[use.axis])
        q = bfloat16_by_definition(pad(x, use.axis % 2, length), use)
        name = "row" if use.axis == -1 else "column"
        outputs[f"{name}_words"] = np.asarray(q.elements)[None, None]
        if q.run_scales is not None:
            outputs[f"{name}_units"] = np.asarray(q.run_scales)[None, None]
        else:
            unit = 1 if q.tensor_scale is None else np.squeeze(q.tensor_scale)
            outputs[f"{name}_units"] = np.full(1, unit, np.float32)
    return outputs


def largest_inputs(*, tile: list[int], axis: int, **options: Any) -> Arrays:
    """Draws the inputs of `block16_inputs` but the maxima."""
    del tile, axis
    inputs = block16_inputs(**options)
    del inputs["maxima"]
    return inputs


def largest_outputs(
    inputs: Arrays, *, recipe: str, tensor: str, tile: list[int], axis: int, **_: object
) -> Arrays:
    """Computes the bits of each tile's largest magnitude, before and after the rotation along an axis."""
    x = jnp.asarray(inputs["x"][0, 0])
    uses = {use.axis: use for use in uses_of_tensor(recipe, tensor)}
    rotated = rotate_use(x, uses[axis]) if axis in uses else x
    return {"plain": _maxima(x, tile), "rotated": _maxima(rotated, tile)}


def _maxima(x: jax.Array, tile: list[int]) -> np.ndarray:
    rows, columns = tile
    bits = _bits(x)
    bits = np.pad(bits, ((0, -bits.shape[0] % rows), (0, -bits.shape[1] % columns)))
    return bits.reshape(1, 1, bits.shape[0] // rows, rows, -1, columns).max(axis=(3, 5))
