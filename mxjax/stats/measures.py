"""Errors of quantization against float32, for a tensor and for each GEMM of a `dot`; its residuals."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from mxjax.numerics.array import MXArray, dequantize
from mxjax.numerics.delayed import Scales
from mxjax.numerics.formats import get_format
from mxjax.operands.use import dequantize_use, quantize_use, quantized_part
from mxjax.policy.policy import OPERANDS, Policy
from mxjax.products.dot import dot
from mxjax.products.draws import uses_of
from mxjax.products.implementations import Implementation, implementations_of
from mxjax.products.linear import Options, forward
from mxjax.recipes import as_policy
from mxjax.runtime.arguments import check_arrays, check_tensor
from mxjax.runtime.keys import fold
from mxjax.runtime.mesh import varying_as
from mxjax.runtime.tables import table


class Error(NamedTuple):
    """The error of an approximation of a float32 tensor, as scalars.

    Attributes:
      sqnr_db: signal to quantization noise, 10 log10(sum x^2 / sum (x - approximation)^2), in dB.
      relative_error: ||x - approximation|| / ||x||.
      cosine: cosine of the angle between x and the approximation.
      projection: <approximation, x> / <x, x>. Noise that is independent of x leaves it at 1; a bias does not.
    """

    sqnr_db: Float32[Array, ""]
    relative_error: Float32[Array, ""]
    cosine: Float32[Array, ""]
    projection: Float32[Array, ""]


class QuantizationError(NamedTuple):
    """The fields of `Error`, and two fractions of all elements.

    Attributes:
      clipped: fraction of elements whose magnitude exceeds the largest that their block can represent.
      flushed: fraction of elements that are nonzero but became zero.
    """

    sqnr_db: Float32[Array, ""]
    relative_error: Float32[Array, ""]
    cosine: Float32[Array, ""]
    projection: Float32[Array, ""]
    clipped: Float32[Array, ""]
    flushed: Float32[Array, ""]


class GemmError(NamedTuple):
    """The errors of one GEMM's product and of its (rotated) operands. `print` shows a table."""

    product: Error
    lhs: QuantizationError
    rhs: QuantizationError

    def __str__(self) -> str:
        return _table(self._asdict()) or repr(self)


class DotErrors(NamedTuple):
    """The errors of the GEMMs that compute y, dx and dw. `print` shows a table."""

    fprop: GemmError
    dgrad: GemmError
    wgrad: GemmError

    def __str__(self) -> str:
        rows = {}
        for name, errors in self._asdict().items():
            parts = zip(("product", *OPERANDS[name]), errors, strict=True)
            rows |= {f"{name} {part}": error for part, error in parts}
        return _table(rows) or repr(self)


def _table(rows: Mapping[str, Error | QuantizationError]) -> str:
    """Returns errors as a table; an empty text if they are no scalars, for example traced or stacked."""
    fields = QuantizationError._fields
    cells = []
    try:
        for name, errors in rows.items():
            sqnr_db, *others = map(float, errors)
            blank = [""] * (len(fields) - len(errors))
            cells.append([name, f"{sqnr_db:.1f}", *(f"{x:.4f}" for x in others), *blank])
    except (TypeError, ValueError):
        return ""
    names = (field.replace("_", " ") for field in fields[1:])
    return table(" | ".join(["", "SQNR, dB", *names]), cells, padded=True)


def error(x: Float[Array, "*shape"], approximation: Float[Array, "*shape"]) -> Error:
    """Returns the error of `approximation` against x.

    Special values: infinite dB if exact. For an all-zero x the cosine and the projection are NaN; the others
    are NaN if the approximation is all zero too, else -infinite dB and an infinite relative error.

    Raises:
      ValueError: the two have different shapes.
    """
    check_arrays("error", x=x, approximation=approximation)
    if x.shape != approximation.shape:
        raise ValueError(
            f"error needs x and its approximation in one shape, got {x.shape} and {approximation.shape}"
        )
    x, a = x.astype(jnp.float32), approximation.astype(jnp.float32)
    signal, noise, norm = jnp.sum(x * x), jnp.sum((x - a) ** 2), jnp.sum(a * a)
    product = jnp.sum(x * a)
    return Error(
        10 * jnp.log10(signal / noise),
        jnp.sqrt(noise / signal),
        product / jnp.sqrt(signal * norm),
        product / signal,
    )


def quantization(x: Float[Array, "*shape"], q: MXArray) -> QuantizationError:
    """Returns the error of q, a quantization of x such as `mxjax.quantize(x)`."""
    check_arrays("quantization", x=x)
    if not isinstance(q, MXArray):
        raise TypeError(f"quantization needs q to be an mxjax.MXArray, not {type(q).__name__}")
    x, value = x.astype(jnp.float32), dequantize(q)
    element = get_format(q.format).element
    at_limit = jnp.abs(q.elements.astype(jnp.float32)) == (element.max if element else jnp.inf)
    return QuantizationError(
        *error(x, value),
        clipped=jnp.mean(at_limit & (jnp.abs(x) > (1 + 1e-6) * jnp.abs(value)), dtype=jnp.float32),
        flushed=jnp.mean((x != 0) & (value == 0), dtype=jnp.float32),
    )


def gemms(
    x: Float[Array, "*batch d_in"],
    w: Float[Array, "d_in d_out"],
    dy: Float[Array, "*batch d_out"],
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> DotErrors:
    """Returns the errors of the three GEMMs of `dot(x, w, policy=...)`, for the output gradient dy.

    Raises:
      ValueError: dy has not the shape of the product. Others: see `dot`.
      TypeError: an argument is no array or not floating point.
    """
    policy = as_policy(policy)
    check_arrays("gemms", x=x, w=w, dy=dy)
    for tensor in (x, w, dy):
        check_tensor("gemms", tensor)
    if dy.shape != (shape := (*x.shape[:-1], *w.shape[1:])):
        raise ValueError(f"gemms needs dy with the shape of x @ w, {shape}, got {dy.shape}")
    # Under `jax.shard_map`, each device measures its own shard: no gradient is summed.
    x, w, dy = (varying_as(a.astype(jnp.float32), x, w, dy) for a in (x, w, dy))
    x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))

    def products(policy, implementation):
        def product(x, w):
            return dot(x, w, policy=policy, key=key, implementation=implementation)

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    exact, quantized = products("fp32", "reference"), products(policy, implementation)
    left, right = uses_of(policy.fprop, -1, -2, fold(key, 0))
    x_read = x if policy.wgrad.lhs.source == "original" else dequantize_use(x, left)
    w_read = w if policy.dgrad.rhs.source == "original" else dequantize_use(w, right)
    tensors = (((x, -1), (w, -2)), ((dy, -1), (w_read, -1)), ((x_read, -2), (dy, -2)))
    errors = []
    for i, gemm in enumerate(policy.gemms.values()):
        (lhs, lhs_axis), (rhs, rhs_axis) = tensors[i]
        uses = uses_of(gemm, lhs_axis, rhs_axis, fold(key, i))
        operands = [
            quantization(quantized_part(t, use), quantize_use(t, use))
            for t, use in zip((lhs, rhs), uses, strict=True)
        ]
        errors.append(GemmError(error(exact[i], quantized[i]), *operands))
    return DotErrors(*errors)


def residual_bytes(
    x: jax.ShapeDtypeStruct | jax.Array | np.ndarray,
    w: jax.ShapeDtypeStruct | jax.Array | np.ndarray,
    *,
    policy: Policy | str,
    implementation: Implementation | None = None,
) -> dict[str, int]:
    """Returns the bytes that `dot(x, w, ...)` keeps for its backward pass, by tensor ("x", "w").

    Packed operands take 17/32 byte per element, FP8 operands one, and those of formats with E4M3 scales, by
    kernel, two. Else the tensor itself is kept, which costs nothing for weights: they stay in memory anyway.

    Args:
      x, w: arrays [..., d_in] and [d_in, d_out], or their shapes and dtypes.
      Others: see `dot`.
    """
    resolved = as_policy(policy)
    x = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0)) if resolved.needs_key else None
    options = Options(resolved, implementations_of(resolved, implementation), (x.dtype,) * 3)

    def kept(x, w, key):
        scales = Scales(*[jnp.float32(1)] * 3) if resolved.delayed else None
        x_, x_packed, w_, w_packed, *_ = forward(options, x, w, key, scales, keep=True)[1].with_weight(w)
        return {"x": jax.tree.leaves((x_, x_packed)), "w": jax.tree.leaves((w_, w_packed))}

    arrays = jax.eval_shape(kept, x, jax.ShapeDtypeStruct(w.shape, w.dtype), key)
    return {name: sum(a.size * a.dtype.itemsize for a in group) for name, group in arrays.items()}
