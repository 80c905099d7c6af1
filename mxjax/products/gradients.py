"""The gradient of the Fprop's operands through rotation and quantization.

Rounding is piecewise constant, so its derivative is an estimate, which an `Operand` names:

| gradient | derivative of the quantized value by the value |
| --- | --- |
| straight_through | 1 |
| clipped | 1 where the scaled magnitude is below the format's largest, else 0 |
| dge | min(abs(2 f - 1)**(1/k - 1) / k, 3), k = 5, at the fraction f of the way between two neighbours |

Sources: straight through, arXiv 1308.3432; clipped, arXiv 2505.14669, algorithm 1; dge, the differentiable
gradient estimator of arXiv 2501.17116, section 3.1, and of Azure/MS-AMP.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from mxjax.numerics.formats import get_format
from mxjax.numerics.operand import Operand
from mxjax.numerics.quantize import scaled_values
from mxjax.numerics.rounding import fraction_between
from mxjax.operands.product import Product
from mxjax.operands.use import OperandUse, quantized_part, rotate_use, rotate_use_back
from mxjax.policy.policy import Policy
from mxjax.runtime.devices import current_target
from mxjax.runtime.primitives import first_order_only

DGE_K = 5.0
"""Exponent of `dge`: larger values are closer to the steps of rounding."""
DGE_CAP = 3.0
"""Largest derivative of `dge`, which is infinite half-way between neighbours."""


def derivative(x: Float[Array, "*shape"], operand: Operand, axis: int) -> Float32[Array, "*shape"]:
    """Returns the derivative of x's quantized values, by the operand's estimate, for blocks along `axis`.

    Special values: meaningless in blocks that hold NaN or infinity, whose products are NaN.
    """
    element = get_format(operand.format).element
    if operand.gradient == "straight_through" or element is None:
        return jnp.ones(x.shape, jnp.float32)
    magnitude = jnp.abs(scaled_values(x, operand, axis))
    if operand.gradient == "clipped":
        return (magnitude < element.max).astype(jnp.float32)
    fraction = fraction_between(jnp.minimum(magnitude, element.max), element)
    return jnp.minimum(jnp.abs(2 * fraction - 1) ** (1 / DGE_K - 1) / DGE_K, DGE_CAP)


def changes_gradient(use: OperandUse, wanted: Operand) -> bool:
    """Whether `through_quantization` with these arguments does anything."""
    rotated = use.rotation is not None and wanted.source == "dequantized"
    return rotated or use.operand.gradient != "straight_through"


def gradients_read_tensors(policy: Policy) -> tuple[bool, bool]:
    """Whether the gradients of x and of w read these tensors themselves, so that packed ones do not do."""
    x, w = (
        OperandUse(-1, operand, policy.fprop.rotation) for operand in (policy.fprop.lhs, policy.fprop.rhs)
    )
    return changes_gradient(x, policy.dgrad.rhs), changes_gradient(w, policy.wgrad.lhs)


def through_quantization(
    product: Product, x: Float[Array, "*shape"], use: OperandUse, wanted: Operand, dtype: DTypeLike
) -> Float[Array, "*shape"]:
    """Returns the gradient of x, an operand of the Fprop, from that which a backward GEMM gives.

    Args:
      product: Dgrad's or Wgrad's product. It is the gradient of the rotated x if the GEMM read the values
        that the Fprop's quantization produced, else that of x.
      x: the operand.
      use: the Fprop's use of x.
      wanted: the backward GEMM's operand in the place of the Fprop's other operand, whose `source` counts.
      dtype: dtype of the result, to which float32 is rounded.
    """
    target = current_target()
    if target is not None and (wanted.source == "dequantized" or use.rotation is None):
        from mxjax.kernels.quantize import clipped

        if clipped.takes(x, use, dtype, target):
            return clipped.clipped_gradient(product, first_order_only(x), use, dtype)
    return gradient_by_definition(product.value(jnp.float32), x, use, wanted).astype(dtype)


def gradient_by_definition(
    gradient: Float32[Array, "*rotated"], x: Float[Array, "*shape"], use: OperandUse, wanted: Operand
) -> Float32[Array, "*shape"]:
    """Returns the gradient of x in float32: the definition of `through_quantization`."""
    if wanted.source == "original":
        gradient = rotate_use(gradient, use)
    if use.operand.gradient != "straight_through":
        gradient = gradient * derivative(quantized_part(first_order_only(x), use), use.operand, use.axis)
    return rotate_use_back(gradient, use, x.shape[use.axis])
