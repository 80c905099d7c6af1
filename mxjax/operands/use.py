"""`OperandUse`: a tensor as one GEMM takes it, rotated and quantized along the contracted axis."""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, UInt32

from mxjax.numerics.array import MXArray, dequantize
from mxjax.numerics.blocks import pad
from mxjax.numerics.formats import BLOCK
from mxjax.numerics.hadamard import rotate
from mxjax.numerics.operand import Operand
from mxjax.numerics.philox import KeyWords
from mxjax.numerics.quantize import quantize_unpacked
from mxjax.numerics.rotations import apply_matrix, permutation, rotation_matrix
from mxjax.operands.split import Quantiles, split, whole_rest
from mxjax.policy.policy import Rotation
from mxjax.runtime.primitives import first_order_only

Form = Literal["packed", "bf16", "fp8"]


class OperandUse(NamedTuple):
    """One tensor's use by one GEMM: a policy's `Operand` with the axis, the rotation and the random bits.

    It does not contain the tensor. A tensor has two uses, because two GEMMs read it: x [tokens, d_in] is
    contracted along -1 in the Fprop and along -2 in the Wgrad.

    Attributes:
      axis: axis that the GEMM contracts, -1 or -2; the tensor is rotated and quantized along it.
      operand: format, blocks and rounding.
      rotation: rotation before quantization, or None.
      signs: the rotation's signs, or None for all +1.
      key: JAX key of the random bits, or what was drawn from it, or None.
      words: two words of `key`, then `signs` as four words if they are redrawn, for kernels; None where no
        kernel drew them (`mxjax.products.draws`).
      form: elements of the `KernelOperand` that the GEMM multiplies: packed, in bfloat16 or in FP8; None if
        it multiplies an `MXArray`.
      order: JAX key of the rotation's permutation, or None for the given order.
      reads: the Fprop's use of the same tensor if this GEMM reads the values that the Fprop quantized
        (source "dequantized"); None if it reads the tensor itself.
      scale: the tensor's factor from `mxjax.numerics.delayed.Scales`, where scaling is "delayed".
      bounds: the tensor's quantiles, where `split` needs them and a kernel found them.
    """

    axis: int
    operand: Operand = Operand()
    rotation: Rotation | None = None
    signs: Float32[Array, " size"] | None = None
    key: jax.Array | KeyWords | None = None
    words: UInt32[Array, "6"] | None = None
    form: Form | None = None
    order: jax.Array | None = None
    reads: "OperandUse | None" = None
    scale: Float32[Array, ""] | None = None
    bounds: Quantiles | None = None

    @property
    def rotation_size(self) -> int:
        """The size of the rotation, or 1."""
        return self.rotation.size if self.rotation else 1

    @property
    def has_signs(self) -> bool:
        """Whether the rotation has signs."""
        return self.rotation is not None and self.rotation.signs != "none"

    @property
    def is_plain(self) -> bool:
        """Whether kernels compute its rotation, if it has one."""
        return self.rotation is None or self.rotation.is_hadamard

    @property
    def is_small(self) -> bool:
        """Whether its operand takes a byte an element or less, so that it is kept in place of the tensor."""
        return self.form in ("packed", "fp8")

    @property
    def has_places(self) -> bool:
        """Whether random bits count rows by places of their own, which kernels do not."""
        return isinstance(self.key, KeyWords) and self.key.places is not None

    @property
    def options(self) -> "OperandUse":
        """The quantization alone, without arrays: hashable, and the same for all calls of a kernel."""
        return OperandUse(self.axis, self.operand, self.rotation)

    def padded(self, length: int) -> int:
        """Returns the contracted axis's length, padded to whole MX blocks and runs of the rotation."""
        multiple = max(BLOCK, self.rotation_size)
        return -(-length // multiple) * multiple


def quantize_use(x: Float[Array, "..."], use: OperandUse) -> MXArray:
    """Returns x rotated and quantized as the GEMM takes it, with the elements in float32."""
    return quantize_unpacked(quantized_part(x, use), use.operand, use.axis, use.key, use.scale)


def quantized_part(x: Float[Array, "..."], use: OperandUse) -> Float[Array, "..."]:
    """Returns the part of x that is quantized, rotated; see `mxjax.operands.split`."""
    return rotate_use(split(x, use.operand, use.bounds).part, use)


def rotate_use(x: Float[Array, "..."], use: OperandUse) -> Float[Array, "..."]:
    """Returns x rotated as the GEMM takes it, padded with zeros to a multiple of the rotation's size."""
    x, use = to_plain(x, use)
    if use.rotation is None:
        return x
    size = use.rotation.size
    return rotate(pad(x, use.axis % x.ndim, size), size, axis=use.axis, signs=use.signs)


def to_plain(x: Float[Array, "..."], use: OperandUse) -> tuple[Float[Array, "..."], OperandUse]:
    """Returns x after the permutation and the matrix that kernels do not know, and the use that remains."""
    rotation = use.rotation
    if rotation is None or rotation.is_hadamard:
        return x, use
    if use.order is not None:
        places = permutation(use.order, x.shape[use.axis])
        x = jnp.take(x, places, axis=use.axis, unique_indices=True, mode="clip")
    if rotation.kind == "hadamard" and rotation.size > 1:
        return x, use._replace(rotation=dataclasses.replace(rotation, order="given"), order=None)
    if rotation.size > 1:
        x = pad(x, use.axis % x.ndim, rotation.size)
        x = apply_matrix(x, rotation_matrix(rotation.kind, rotation.size), use.axis, use.signs)
    return x, use._replace(rotation=None, signs=None, order=None)


def rotate_use_back(x: Float[Array, "..."], use: OperandUse, length: int) -> Float[Array, "..."]:
    """Inverts `rotate_use` of a tensor whose axis had this length."""
    axis, rotation = use.axis, use.rotation
    if rotation is None:
        return lax.slice_in_dim(x, 0, length, axis=axis)
    if rotation.kind == "hadamard":
        x = rotate(x, rotation.size, axis=axis) if rotation.size > 1 else x
    else:
        x = apply_matrix(x, rotation_matrix(rotation.kind, rotation.size).T, axis)
    if use.signs is not None:
        padded = x.shape[axis]
        signs = jnp.broadcast_to(use.signs, (padded // rotation.size, rotation.size))
        x = x * signs.reshape([1] * (x.ndim + axis) + [padded] + [1] * (-1 - axis))
    x = lax.slice_in_dim(x, 0, length, axis=axis)
    if use.order is None:
        return x
    places = jnp.argsort(permutation(use.order, length))
    return jnp.take(x, places, axis=axis, unique_indices=True, mode="clip")


def dequantize_use(x: Float[Array, "..."], use: OperandUse) -> Float[Array, "..."]:
    """Returns the values of x that a GEMM multiplies, rotated, with the rest that is multiplied apart.

    The result is not to be differentiated; gradients pass by `mxjax.products.gradients`.
    """
    values, rest = dequantize(quantize_use(first_order_only(x), use)), split(x, use.operand, use.bounds).rest
    if rest is not None:
        values = values + rotate_use(whole_rest(rest, x.shape[-2], use.operand), use)
    if use.bounds is not None and use.rotation is None:
        return values
    return lax.optimization_barrier(values)  # a rotation's stages would each compute it again
