"""`KernelOperand`: an operand whose contracted axis K is last: packed MXFP4, or bfloat16, or FP8.

`pack_by_definition` and `fp8_by_definition` make one with `jax.numpy`; `mxjax.kernels.quantize` reproduces
them bit for bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Shaped, UInt8

from mxjax.numerics.array import block_values, float4_codes, pack_codes
from mxjax.numerics.blocks import pad
from mxjax.numerics.formats import BLOCK, get_format
from mxjax.numerics.scales import power_of_two
from mxjax.operands.use import OperandUse, quantize_use

RUN = 128
"""Elements along K that share one of `KernelOperand.run_scales`."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scales", "tensor_scale", "run_scales", "amax"],
    meta_fields=["prescale"],
)
@dataclasses.dataclass(frozen=True)
class KernelOperand:
    """An operand as kernels read it, transposed if needed so that the contracted axis K is last.

    Its value is elements * scales / prescale if packed, else elements * tensor_scale / prescale or elements *
    run_scales. K is padded with zeros to a multiple of 32 and of the rotation, except in FP8. A 2-D block's
    scale is repeated in each of its rows.

    Attributes:
      elements: packed, [*batch, n, k / 2] uint8: two E2M1 elements a byte, element 2i in the low nibble.
        Otherwise [*batch, n, k], in bfloat16 or FP8.
      scales: packed, [*batch, n, k / 32] E8M0 bytes: 2**(byte - 127), 255 is NaN. Otherwise None.
      prescale: factor that shrank the elements, or None.
      tensor_scale: float32 scale of the whole tensor, one for all of the batch, or None for one.
      run_scales: float32 scales of runs of RUN elements along K, the last of what is left, or None.
      amax: the tensor's largest magnitude, if a kernel found it while it quantized by a delayed scale.
    """

    elements: UInt8[Array, "*batch n bytes"] | Float[Array, "*batch n k"]
    scales: UInt8[Array, "*batch n blocks"] | None
    prescale: float | None = None
    tensor_scale: Float32[Array, "..."] | None = None
    run_scales: Float32[Array, "*batch runs n"] | None = None
    amax: Float32[Array, "..."] | None = None

    @property
    def packed(self) -> tuple[UInt8[Array, "*batch n bytes"], UInt8[Array, "*batch n blocks"]]:
        """The elements and the scales of a packed operand."""
        assert self.scales is not None
        return self.elements, self.scales

    @property
    def factor(self) -> Float32[Array, "..."] | float | None:
        """The factor still to apply to the product, or None for one."""
        if self.tensor_scale is not None:
            return self.tensor_scale / self.prescale if self.prescale else self.tensor_scale
        return 1 / self.prescale if self.prescale else None


def decode(q: KernelOperand, dtype: DTypeLike = jnp.bfloat16) -> Shaped[Array, "*batch n k"]:
    """Returns elements * scales of a packed operand, without `factor`; exact in bfloat16 and float32."""
    elements, scales = q.packed
    codes = unpack_codes(elements)
    # CPUs flush float32 subnormals such as 2**-127 to zero, so the scale is applied as two factors.
    byte = spread_blocks(scales).astype(jnp.int32)
    half = byte >> 1
    values = code_values(codes) * power_of_two(half - 63) * power_of_two(byte - half - 64)
    return jnp.where(byte == 255, jnp.nan, values).astype(dtype)


def values_of_runs(q: KernelOperand) -> Float32[Array, "*batch n k"]:
    """Returns elements * run_scales."""
    assert q.run_scales is not None
    wide = jnp.repeat(q.run_scales.swapaxes(-1, -2), RUN, axis=-1)[..., : q.elements.shape[-1]]
    return q.elements.astype(jnp.float32) * wide


def unpack_codes(elements: UInt8[Array, "*b bytes"]) -> UInt8[Array, "*b k"]:
    """Returns the 4-bit codes of packed elements, one a byte."""
    twice = jnp.repeat(elements, 2, axis=-1)
    shift = (lax.broadcasted_iota(jnp.uint8, twice.shape, twice.ndim - 1) & 1) * jnp.uint8(4)
    return (twice >> shift) & 0xF


def code_values(codes: UInt8[Array, "*b k"]) -> Float32[Array, "*b k"]:
    """Returns the values of E2M1 codes."""
    code = codes.astype(jnp.int32)
    magnitude = code & 7
    normal = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
    bits = jnp.where(magnitude < 2, magnitude * 0x3F00_0000, normal)
    return lax.bitcast_convert_type(bits | (code & 8) << 28, jnp.float32)


def spread_blocks(scales: Shaped[Array, "*b blocks"]) -> Shaped[Array, "*b k"]:
    """Repeats each block's value for each of its elements."""
    return jnp.repeat(scales, BLOCK, axis=-1)


def pack_by_definition(x: Float[Array, "*b r c"], use: OperandUse) -> KernelOperand:
    """Returns x quantized for a GEMM, padded to whole blocks, transposed to K-major and packed."""
    q = quantize_use(x, use)
    assert q.scales is not None
    codes, scales = float4_codes(q.elements), lax.bitcast_convert_type(q.scales, jnp.uint8)
    rows = q.block_shape[0]
    if rows > 1:  # 2-D blocks: a scale for each of their rows
        other = -3 - use.axis
        scales = jnp.repeat(scales, rows, axis=other)
        scales = lax.slice_in_dim(scales, 0, codes.shape[other], axis=other)
    if use.axis == -2:
        codes, scales = codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    return KernelOperand(pack_codes(pad(codes, codes.ndim - 1, BLOCK), codes.ndim - 1), scales, q.prescale)


def fp8_by_definition(x: Float[Array, "*b r c"], use: OperandUse) -> KernelOperand:
    """Returns x quantized to FP8 with one scale for a GEMM, transposed to K-major."""
    q = quantize_use(x, use)
    elements = q.elements.astype(get_format(q.format).dtype)
    elements = elements if use.axis == -1 else elements.swapaxes(-1, -2)
    return KernelOperand(elements, None, q.prescale, q.tensor_scale)


def bfloat16_by_definition(x: Float[Array, "*b r c"], use: OperandUse) -> KernelOperand:
    """Returns x quantized for a GEMM, padded as kernels pad it, transposed to K-major, in bfloat16."""
    q = quantize_use(x, use)
    of_runs = bool(get_format(q.format).outer_block)
    scale = q.tensor_scale
    values = block_values(dataclasses.replace(q, tensor_scale=None) if of_runs else q).astype(jnp.bfloat16)
    if use.axis == -2:
        values = values.swapaxes(-1, -2)
    values = pad(values, values.ndim - 1, BLOCK)
    if not of_runs:
        return KernelOperand(values, None, q.prescale, scale)
    assert scale is not None
    return KernelOperand(
        values, None, q.prescale, run_scales=scale if use.axis == -2 else scale.swapaxes(-1, -2)
    )
