"""Operands as GEMMs on packed MXFP4 want them: K-major elements, and one scale byte for each 32 along K.

A tensor becomes one or two operands in one go, because a GPU kernel makes both from one read. Elsewhere they
are made by the definitions in `mxjax.quantize`, bit for bit the same.
"""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from mxjax.blocks import pad
from mxjax.devices import on_gpu
from mxjax.operands import Use, quantize_operand
from mxjax.policy import Operand
from mxjax.quantize import float4_codes, pack_codes

BLOCK = 32
"""Elements along K that share a scale byte."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["elements", "scales"],
    meta_fields=["prescale"],
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """An MXFP4 operand of a GEMM. Its value is elements * scales / prescale.

    Attributes:
      elements: [*batch, n, k / 2], two E2M1 elements a byte, element 2i in the low nibble; k is the
        contracted axis, filled up with zeros to a multiple of the block and of the rotation.
      scales: [*batch, n, k / 32], E8M0 bytes: 2**(byte - 127), 255 is NaN.
      prescale: the factor the elements were shrunk by, or None.
    """

    elements: UInt8[Array, "*batch n bytes"]
    scales: UInt8[Array, "*batch n blocks"]
    prescale: float | None = None

    @property
    def factor(self) -> float | None:
        """What remains to multiply the product by, or None for one."""
        return 1 / self.prescale if self.prescale else None


class Values(NamedTuple):
    """An MXFP4 operand of a GEMM, dequantized: [*batch, n, k] bfloat16, but for the factor."""

    elements: Float[Array, "*batch n k"]
    factor: float | None


def packable(operand: Operand) -> bool:
    """Returns whether `Packed` holds such an operand: MXFP4 in blocks of 32 or of 32 x 32."""
    return operand.format == "mxfp4" and operand.block_shape in (None, BLOCK, (1, BLOCK), (BLOCK, BLOCK))


def pack_operands(x: Float[Array, "*b r c"], *uses: Use | None) -> tuple[Packed | None, ...]:
    """Returns x packed for each use, all in one read where a kernel can: at most one use of either axis."""
    wanted = [use for use in uses if use is not None]
    run = _kernel(x, wanted)
    if run is None:
        return tuple(None if use is None else pack_by_definition(x, use) for use in uses)
    made = run(x, {use.axis: (use, "packed") for use in wanted})
    packed = {axis: Packed(q.elements, q.scales) for axis, q in made.items()}
    return tuple(use and dataclasses.replace(packed[use.axis], prescale=use.operand.prescale) for use in uses)


def value_operands(x: Float[Array, "*b r c"], *uses: Use | None) -> tuple[Values | None, ...] | None:
    """Returns x dequantized to bfloat16 for each use, by the kernel on a GPU; None where there is none."""
    wanted = [use for use in uses if use is not None]
    run = _kernel(x, wanted)
    if run is None or not all(packable(use.operand) for use in wanted):
        return None
    made = run(x, {use.axis: (use, "bf16") for use in wanted})
    return tuple(
        use and Values(made[use.axis].elements, 1 / use.operand.prescale if use.operand.prescale else None)
        for use in uses
    )


def decode(q: Packed, dtype: DTypeLike = jnp.bfloat16) -> Shaped[Array, "*batch n k"]:
    """Returns elements * scales, exactly (bfloat16 and float32 hold them), without the factor."""
    codes = unpack_codes(q.elements)
    # 2**-127, subnormal in float32, is applied as two factors: CPUs flush subnormals to zero.
    byte = spread_blocks(q.scales).astype(jnp.int32)
    half = byte >> 1
    values = code_values(codes) * power_of_two(half - 63) * power_of_two(byte - half - 64)
    return jnp.where(byte == 255, jnp.nan, values).astype(dtype)


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
    """Returns one value an element, from one a block."""
    return jnp.repeat(scales, BLOCK, axis=-1)


def power_of_two(exponent: Int32[Array, "*b"]) -> Float32[Array, "*b"]:
    """Returns 2**exponent for exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def pack_by_definition(x: Float[Array, "*b r c"], use: Use) -> Packed:
    """The definition: quantized along its axis, filled up to whole blocks, and transposed to K-major."""
    q = quantize_operand(x, use)
    assert q.scales is not None
    codes, scales = float4_codes(q.elements), lax.bitcast_convert_type(q.scales, jnp.uint8)
    rows = q.block_shape[0]
    if rows > 1:  # 2-D blocks: a scale for each of their rows
        other = -3 - use.axis
        scales = jnp.repeat(scales, rows, axis=other)
        scales = lax.slice_in_dim(scales, 0, codes.shape[other], axis=other)
    if use.axis == -2:
        codes, scales = codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)
    return Packed(pack_codes(pad(codes, codes.ndim - 1, BLOCK), codes.ndim - 1), scales, q.prescale)


def _kernel(x: jax.Array, uses: list[Use]) -> Callable | None:
    """Returns the function that runs the quantizer kernel, or None where it does not run."""
    if kernel_target() is None:
        return None
    from mxjax.kernels.quantize import quantizer as kernel

    fits = x.size > 0 and max(x.shape[-2:]) < kernel.LONGEST
    fits &= all(use.rotation is None or use.rotation.size <= kernel.LARGEST_ROTATION for use in uses)
    return functools.partial(_run_kernel, kernel) if fits else None


def kernel_target():
    """Returns the `mxjax.kernels.launch.Target` that Triton kernels run on, or None where they do not run."""
    launch = sys.modules.get("mxjax.kernels.launch")
    if launch is None:
        if not on_gpu() or importlib.util.find_spec("triton") is None:
            return None
        launch = importlib.import_module("mxjax.kernels.launch")
    return launch.current_target()


def _run_kernel(kernel, x: jax.Array, uses: dict[int, tuple[Use, str]]) -> dict:
    sides, random = {}, {}
    for axis, (use, form) in uses.items():
        sides[axis] = kernel.Side(use.operand, use.rotation, form)
        key = None
        if use.operand.rounding == "stochastic" and use.key is not None:
            key = jax.random.bits(use.key, (2,), jnp.uint32)
        random[axis] = kernel.Random(key, use.signs)
    none = kernel.Random()
    rows, columns = kernel.quantize_operands(
        x,
        sides.get(-1),
        sides.get(-2),
        row_random=random.get(-1, none),
        column_random=random.get(-2, none),
    )
    return {axis: q for axis, q in ((-1, rows), (-2, columns)) if q is not None}
