"""Measures of a linear layer's tensors and GEMMs: errors, bias, outliers, histograms, energy of the mean."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from mxjax.numerics.array import dequantize
from mxjax.numerics.blocks import block_max, magnitude_bits
from mxjax.numerics.formats import BLOCK
from mxjax.operands.use import OperandUse, quantize_use, quantized_part, rotate_use
from mxjax.policy import Gemm, Policy, Rotation
from mxjax.products.draws import uses_of
from mxjax.products.implementations import Implementation
from mxjax.runtime.keys import fold
from mxjax.stats import DotErrors, gemms

OUTLIER = 6.0
"""An element is an outlier beyond this many root mean squares of its tensor."""
MANTISSA_BINS = 16
_WHAT_IF = Rotation(16)  # measured where the policy does not rotate


class Shape(NamedTuple):
    """How far a tensor is from one that MX represents well.

    Attributes:
      kurtosis: fourth moment over the squared second, both about the mean; 3 for normal numbers.
      outliers: fraction of elements beyond OUTLIER root mean squares.
      crest: mean over blocks of 32 along the contracted axis of the largest magnitude over the block's root
        mean square; at most sqrt(32). Blocks of zeros do not count.
    """

    kurtosis: Float32[Array, ""]
    outliers: Float32[Array, ""]
    crest: Float32[Array, ""]


class OperandMeasures(NamedTuple):
    """The shape of one operand of a GEMM, and the scales that it takes.

    Attributes:
      before: as it is.
      after: after the GEMM's rotation, or after H16 if it has none.
      scales: number of blocks by E8M0 byte; zeros for formats without such scales.
      mantissas: number of nonzero blocks by the mantissa of their largest magnitude, in parts of [1, 2).
    """

    before: Shape
    after: Shape
    scales: Float32[Array, "256"]
    mantissas: Float32[Array, " bins"]


class LayerMeasures(NamedTuple):
    """The measures of one linear layer.

    Attributes:
      errors: errors of operands and products; see `mxjax.stats.gemms`.
      operands: of Fprop (x, w), Dgrad (dy, w) and Wgrad (x, dy).
      x_mean, dy_mean: share of the energy of x and dy in their mean over tokens, a matrix of rank one.
    """

    errors: DotErrors
    operands: tuple[tuple[OperandMeasures, OperandMeasures], ...]
    x_mean: Float32[Array, ""]
    dy_mean: Float32[Array, ""]


def measure_layer(
    x: Float[Array, "*batch d_in"],
    w: Float[Array, "d_in d_out"],
    dy: Float[Array, "*batch d_out"],
    policy: Policy,
    key: jax.Array | None,
    implementation: Implementation | None,
) -> LayerMeasures:
    """Returns the measures of `dot(x, w, policy=...)` with the output gradient dy."""
    x, w, dy = (t.astype(jnp.float32) for t in (x, w, dy))
    x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    errors = gemms(x, w, dy, policy=policy, key=key, implementation=implementation)
    sides = (((x, -1), (w, -2)), ((dy, -1), (w, -1)), ((x, -2), (dy, -2)))
    operands = []
    for i, (gemm, (lhs, rhs)) in enumerate(zip(policy.gemms.values(), sides, strict=True)):
        uses = uses_of(gemm, lhs[1], rhs[1], fold(key, i))
        tensors = zip((lhs[0], rhs[0]), uses, strict=True)
        operands.append(tuple(measure_operand(t, use) for t, use in tensors))
    return LayerMeasures(errors, tuple(operands), mean_energy(x), mean_energy(dy))


def measure_operand(t: Float32[Array, "rows columns"], use: OperandUse) -> OperandMeasures:
    """Returns the measures of a tensor as one GEMM takes it."""
    rotated = rotate_use(t, use if use.rotation else use._replace(rotation=_WHAT_IF))
    taken = quantized_part(t, use)
    q = quantize_use(t, use)
    scales, mantissas = jnp.zeros(256), jnp.zeros(MANTISSA_BINS)
    if q.scales is not None and q.scales.dtype == jnp.float8_e8m0fnu:
        byte = lax.bitcast_convert_type(q.scales, jnp.uint8)
        scales = jnp.bincount(byte.ravel(), length=256).astype(jnp.float32)
        bits = magnitude_bits(block_max(taken, q.block_shape, q.axis)).ravel()
        part = (bits & 0x7F_FFFF) // (2**23 // MANTISSA_BINS)
        mantissas = jnp.bincount(part, (bits > 0).astype(jnp.float32), length=MANTISSA_BINS)
    return OperandMeasures(shape_of(t, use.axis), shape_of(rotated, use.axis), scales, mantissas)


def shape_of(t: Float32[Array, "rows columns"], axis: int) -> Shape:
    """Returns the shape of a tensor whose blocks lie along `axis`."""
    centred = t - jnp.mean(t)
    second, fourth = jnp.mean(centred**2), jnp.mean(centred**4)
    rms = jnp.sqrt(jnp.mean(t * t))
    whole = t.shape[axis] // BLOCK * BLOCK  # a short last block has another crest
    blocks = jnp.moveaxis(lax.slice_in_dim(t, 0, whole, axis=axis % 2), axis, -1).reshape(-1, BLOCK)
    block_rms = jnp.sqrt(jnp.mean(blocks * blocks, axis=1))
    crest = jnp.max(jnp.abs(blocks), axis=1) / block_rms
    nonzero = block_rms > 0
    return Shape(
        fourth / second**2,
        jnp.mean(jnp.abs(t) > OUTLIER * rms, dtype=jnp.float32),
        jnp.mean(crest, where=nonzero),
    )


def mean_energy(t: Float32[Array, "tokens width"]) -> Float32[Array, ""]:
    """Returns the share of the energy of t that is in its mean over tokens."""
    return t.shape[0] * jnp.sum(jnp.mean(t, axis=0) ** 2) / jnp.sum(t * t)


def weight_gradient(
    x: Float32[Array, "tokens d_in"], dy: Float32[Array, "tokens d_out"], gemm: Gemm, key: jax.Array
) -> Float32[Array, "d_in d_out"]:
    """Returns x.T @ dy as `gemm` computes it, in float32: Wgrad of the implementation "reference"."""
    left, right = (
        dequantize(quantize_use(t, use)) for t, use in zip((x, dy), uses_of(gemm, -2, -2, key), strict=True)
    )
    return jnp.matmul(left.T, right, precision=lax.Precision.HIGHEST)
