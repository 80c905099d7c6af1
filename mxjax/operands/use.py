"""`OperandUse`: a tensor as one GEMM takes it, rotated and quantized along the contracted axis."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from mxjax.numerics.array import MXArray, dequantize
from mxjax.numerics.blocks import pad
from mxjax.numerics.formats import BLOCK
from mxjax.numerics.hadamard import random_signs, rotate
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import KeyWords
from mxjax.numerics.quantize import quantize_unpacked
from mxjax.operands.split import split
from mxjax.policy.policy import Gemm, Rotation
from mxjax.runtime.primitives import first_order_only


class Drawn(NamedTuple):
    """Random words of a GEMM's two operands, and the signs of its rotation if they are redrawn."""

    lhs: KeyWords | None = None
    rhs: KeyWords | None = None
    signs: Float32[Array, " size"] | None = None


class OperandUse(NamedTuple):
    """One tensor's use by one GEMM: a policy's `Operand` with the axis, the rotation and the random bits.

    It does not contain the tensor. A tensor has two inputs, because two GEMMs read it: x [tokens, d_in] is
    contracted along -1 in the Fprop and along -2 in the Wgrad.

    Attributes:
      axis: axis that the GEMM contracts, -1 or -2; the tensor is rotated and quantized along it.
      operand: how the tensor is quantized.
      rotation: Hadamard rotation before quantization, or None.
      signs: the rotation's signs, or None for all +1.
      key: JAX key of the random bits, or what was drawn from it, or None.
      words: two words of `key`, then `signs` as four words if they are redrawn, for kernels; None where no
        kernel drew them (`mxjax.products.draws`).
    """

    axis: int
    operand: Operand = Operand()
    rotation: Rotation | None = None
    signs: Float32[Array, " size"] | None = None
    key: jax.Array | KeyWords | None = None
    words: UInt32[Array, "6"] | None = None

    @property
    def rotation_size(self) -> int:
        """The size of the rotation, or 1."""
        return self.rotation.size if self.rotation else 1

    @property
    def has_signs(self) -> bool:
        """Whether the rotation has signs."""
        return self.rotation is not None and self.rotation.signs != "none"

    @property
    def options(self) -> "OperandUse":
        """The input without its arrays, which is hashable."""
        return self._replace(signs=None, key=None, words=None)

    def padded(self, length: int) -> int:
        """Returns the contracted axis's length, padded to whole MX blocks and runs of the rotation."""
        multiple = max(BLOCK, self.rotation_size)
        return -(-length // multiple) * multiple


def inputs_with(
    gemm: Gemm, lhs_axis: int, rhs_axis: int, drawn: Drawn, words: UInt32[Array, "2 6"] | None = None
) -> tuple[OperandUse, OperandUse]:
    """Returns the inputs of a GEMM's two operands, with what was drawn for it and, for kernels, `words`."""
    signs = fixed_signs(gemm.rotation) if drawn.signs is None else drawn.signs
    lhs_words, rhs_words = (None, None) if words is None else words
    return (
        OperandUse(lhs_axis, gemm.lhs, gemm.rotation, signs, drawn.lhs, lhs_words),
        OperandUse(rhs_axis, gemm.rhs, gemm.rotation, signs, drawn.rhs, rhs_words),
    )


def quantize_use(x: Float[Array, "..."], use: OperandUse) -> MXArray:
    """Returns x rotated and quantized as the GEMM takes it, with the elements in float32."""
    return quantize_unpacked(quantized_part(x, use), use.operand, use.axis, use.key)


def quantized_part(x: Float[Array, "..."], use: OperandUse) -> Float[Array, "..."]:
    """Returns the part of x that is quantized, rotated; see `mxjax.operands.split`."""
    return rotate_use(split(x, use.operand).part, use)


def rotate_use(x: Float[Array, "..."], use: OperandUse) -> Float[Array, "..."]:
    """Returns x rotated as the GEMM takes it, padded with zeros to a multiple of the rotation's size."""
    if use.rotation is None:
        return x
    size = use.rotation.size
    return rotate(pad(x, use.axis % x.ndim, size), size, axis=use.axis, signs=use.signs)


def rotate_use_back(x: Float[Array, "..."], use: OperandUse) -> Float[Array, "..."]:
    """Inverts the rotation of `rotate_input`; the padding stays."""
    if use.rotation is None:
        return x
    x = rotate(x, use.rotation.size, axis=use.axis)
    if use.signs is None:
        return x
    signs = jnp.tile(use.signs, x.shape[use.axis] // use.rotation.size)
    shape = [1] * (x.ndim + use.axis) + [-1] + [1] * (-1 - use.axis)
    return x * signs.reshape(shape)


def as_backward_sees(x: Float[Array, "..."], wanted: Operand, use: OperandUse) -> Float[Array, "..."]:
    """Returns x as a backward GEMM reads it: unchanged, or rotated, quantized and dequantized as `use` says.

    Args:
      use: the Fprop's use of x.
    """
    if wanted.source == "original":
        return x
    seen, rest = dequantize(quantize_use(first_order_only(x), use)), split(x, use.operand).rest
    seen = seen if rest is None else seen + rotate_use(rest, use)
    return lax.optimization_barrier(seen)  # a rotation's stages would each compute it again


def fixed_signs(rotation: Rotation | None) -> Float32[Array, " size"] | None:
    """Returns the signs of a rotation that draws none from a key: None, its own, or those of its seed."""
    if rotation is None or rotation.signs == "none":
        return None
    if rotation.values is not None:
        return jnp.asarray(rotation.values, jnp.float32)
    assert rotation.signs == "fixed"
    # Independent of JAX's default generator.
    return random_signs(jax.random.key(rotation.seed, impl="threefry2x32"), rotation.size)
