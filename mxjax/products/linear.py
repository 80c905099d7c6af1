"""`matmul`: the three GEMMs of one product, as a function of x and w with a gradient of its own.

x is [*batch, m, k] with at most one batch axis, m are the tokens; w is [*batch, k, n]. Everything that is not
an array is in `Options`, which is hashable.

`product_of` is `matmul` as a primitive, so that `jax.vmap` of it is one product, not many small ones. Under
vmap of x alone, the mapped axis joins the tokens, and Wgrad contracts, rotates and rounds all of them. Where
w is mapped too, the mapped axis is a batch axis. Both give the bits of the call without vmap. Where the key
is mapped, each call has random bits of its own, as in a loop.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from mxjax.numerics.array import MXArray, dequantize
from mxjax.numerics.operand import Operand
from mxjax.operands.computed import Computed
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.product import Product
from mxjax.operands.split import multiplies_apart, product_apart
from mxjax.operands.use import OperandUse, inputs_with
from mxjax.policy.policy import Gemm, Policy
from mxjax.products.draws import draw_each, draw_words
from mxjax.products.gradients import changes_gradient, gradients_read_tensors, through_quantization
from mxjax.products.implementations import (
    BY_KERNEL,
    ON_PACKED,
    GemmImplementation,
    GemmImplementations,
    Implementation,
    implementations_of,
)
from mxjax.products.multiply import multiply
from mxjax.products.prepare import Prepared, prepare, seen_by_backward
from mxjax.recipes import as_policy
from mxjax.runtime.keys import fold_each
from mxjax.runtime.mesh import as_stored, varying_as
from mxjax.runtime.primitives import as_primitive, first_order_only
from mxjax.runtime.remat import tag_operand, tag_product


class Options(NamedTuple):
    """The static arguments of a product: policy, implementations and dtypes. Hashable.

    Attributes:
      dtypes: dtypes of the result, of dx and of dw.
      frozen: structure of w if it is an `MXArray`, of which w is then the leaves; it has no gradient.
    """

    policy: Policy
    gemms: GemmImplementations
    dtypes: tuple[DTypeLike, DTypeLike, DTypeLike]
    precision: lax.PrecisionLike = None
    frozen: Any = None  # a PyTreeDef


Tensor = jax.Array | Computed
Weight = jax.Array | tuple[jax.Array, ...]
"""An array, or the leaves of a frozen `MXArray`."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def matmul(options: Options, x: jax.Array, w: Weight, key: jax.Array | None) -> jax.Array:
    """Returns x @ w by the policy's Fprop; its gradients are the policy's Dgrad and Wgrad."""
    return value_of(options, forward(options, x, w, key, keep=False)[0], w)


def _matmul_fwd(options: Options, x, w, key):
    y, residuals = forward(options, x, w, key, keep=True)
    return value_of(options, y, w), residuals


def _matmul_bwd(options: Options, residuals, dy):
    dx, dw = backward(options, residuals, dy)
    return varying_as(dx.value(options.dtypes[1]), dy), dw, None


matmul.defvjp(_matmul_fwd, _matmul_bwd)


class Residuals(NamedTuple):
    """Values for the backward pass: packed operands for GEMMs that take them, else the tensors."""

    x: jax.Array | None
    x_packed: Prepared | None
    w: Weight | None
    w_packed: Prepared | None
    key: jax.Array | None


def forward(options: Options, x: Tensor, w: Weight, key, *, keep: bool) -> tuple[Product, Residuals]:
    """Returns the product and what `backward` reads; with `keep`, packed operands where possible.

    Args:
      x: an array, or `Computed` if the policy's gradients need no more than packed operands of it.
    """
    y, residuals = _forward(options, x, w, key, keep=keep)
    # Keep the argument itself, so that a scan over layers does not copy their weights.
    return y, residuals._replace(w=w) if residuals.w_packed is None else residuals


def value_of(options: Options, y: Product, w: Weight) -> jax.Array:
    """Returns the value of the product by w."""
    # jnp.where of empty arrays forgets over which mesh axes they vary.
    return varying_as(y.value(options.dtypes[0]), *jax.tree.leaves(w))


@functools.partial(jax.jit, static_argnums=0, static_argnames="keep")
def _forward(options: Options, x, w, key, *, keep: bool):
    """Returns the product and the residuals without w itself."""
    policy, gemms, dtypes, precision, frozen = options
    x, w = first_order_only(x), first_order_only(_values(w, frozen))
    x = lax.optimization_barrier(x)  # several passes read it; XLA would recompute it in each
    (left, right), dgrad, wgrad, seen_w, seen_x = policy_inputs(policy, gemms, key)
    needs_x, needs_w = gradients_read_tensors(policy)
    keep_x, keep_w = (
        keep and frozen is None and name in ON_PACKED and not needed
        for name, needed in ((gemms.wgrad, needs_x), (gemms.dgrad, needs_w))
    )
    lhs, x_packed = _prepare_two(x, (gemms.fprop, left), (gemms.wgrad, wgrad[0]) if keep_x else None, seen_x)
    rhs, w_packed = _prepare_two(w, (gemms.fprop, right), (gemms.dgrad, dgrad[1]) if keep_w else None, seen_w)
    if w.ndim == 2:  # not attention, whose products grow with the square of the sequence length
        lhs, rhs, x_packed, w_packed = _tagged(lhs), _tagged(rhs), _tagged(x_packed), _tagged(w_packed)
    layout = gemms.layout
    if layout is not None and not isinstance(rhs, MXArray):  # K-major
        layout = layout.transposed
    steps = _apart(policy.fprop, -1, -2, lambda: (x, w))
    y = multiply(gemms.fprop, _before(steps, dtypes[0]), precision, lhs, rhs, ("e4m3", "e4m3"), layout)
    y = Product(_after(steps, y, dtypes[0])) if steps else y
    y = tag_product(y) if w.ndim == 2 else y
    x = None if keep_x or (frozen is not None and not needs_x) else x
    return y, Residuals(x, x_packed, None, w_packed, key)


@functools.partial(jax.jit, static_argnums=0)
def backward(options: Options, residuals: Residuals, dy: Tensor) -> tuple[Product, jax.Array | None]:
    """Returns the gradients dx and dw; None for dw if w is frozen.

    Args:
      dy: an array, or `Computed` if the policy's gradients need no more than packed operands of it.
    """
    policy, gemms, dtypes, precision, frozen = options
    x, x_packed, w, w_packed, key = residuals
    dy = first_order_only(dy)
    (left, right), dgrad, wgrad, seen_w, seen_x = policy_inputs(policy, gemms, key)
    plain = all(use.operand.format == "bf16" and use.rotation is None for use in (dgrad[0], wgrad[1]))
    if plain and isinstance(dy, jax.Array):
        dy = dy.astype(jnp.bfloat16)  # halves the bytes of float32 logits and converts them once
    dy = lax.optimization_barrier(dy)
    wanted: list[tuple[GemmImplementation, OperandUse]] = [(gemms.dgrad, dgrad[0]), (gemms.wgrad, wgrad[1])]
    dy_rows, *dy_columns = prepare(dy, wanted if frozen is None else wanted[:1])
    w = None if w is None else first_order_only(_values(w, frozen))
    w_rows = w_packed if w is None else prepare(seen_w(w), [(gemms.dgrad, dgrad[1])])[0]
    assert w_rows is not None
    dx_steps = _apart(policy.dgrad, -1, -1, lambda: (dy, seen_w(w)))
    dx_steps += _gradient_steps(x, left, policy.dgrad.rhs)
    dx = multiply(
        gemms.dgrad, _before(dx_steps, dtypes[1]), precision, dy_rows, w_rows, ("e5m2", "e4m3"), gemms.layout
    )
    dx = Product(_after(dx_steps, dx, dtypes[1])) if dx_steps else dx
    if frozen is not None:
        return dx, None
    x_columns = x_packed if x is None else prepare(seen_x(x), [(gemms.wgrad, wgrad[0])])[0]
    assert x_columns is not None
    [dy_columns] = dy_columns
    dw_steps = _apart(policy.wgrad, -2, -2, lambda: (seen_x(x), dy))
    dw_steps += _gradient_steps(w, right, policy.wgrad.lhs)
    dw = multiply(
        gemms.wgrad, _before(dw_steps, dtypes[2]), precision, x_columns, dy_columns, ("e4m3", "e5m2")
    )
    dw = varying_as(_after(dw_steps, dw, dtypes[2]), *jax.tree.leaves(dy))
    return dx, as_stored(dw, gemms.layout)


Step = Callable[[jax.Array], jax.Array]
"""Steps on a product in float32 before it gets its dtype."""


def _apart(gemm: Gemm, lhs_axis: int, rhs_axis: int, tensors: Callable[[], tuple]) -> list[Step]:
    """Returns the step that adds to a GEMM's product what its split operands multiply apart."""
    if not multiplies_apart(gemm):
        return []
    lhs, rhs = tensors()
    return [lambda product: product + product_apart(lhs, lhs_axis, rhs, rhs_axis, gemm)]


def _gradient_steps(t: jax.Array | None, use: OperandUse, wanted: Operand) -> list[Step]:
    """Returns the steps from a backward GEMM's product to the gradient of t, an operand of the Fprop."""
    if not changes_gradient(use, wanted):
        return []
    assert t is not None
    return [lambda product: through_quantization(product, t, use, wanted)]


def _before(steps: list[Step], dtype: DTypeLike) -> DTypeLike:
    """Returns the dtype in which the steps read a product."""
    return jnp.float32 if steps else dtype


def _after(steps: list[Step], product: Product, dtype: DTypeLike) -> jax.Array:
    """Returns the product in dtype after the steps."""
    value = product.value(_before(steps, dtype))
    for step in steps:
        value = step(value)
    return value.astype(dtype)


def residual_bytes(
    x: jax.ShapeDtypeStruct | jax.Array | np.ndarray,
    w: jax.ShapeDtypeStruct | jax.Array | np.ndarray,
    *,
    policy: Policy | str,
    implementation: Implementation | None = None,
) -> dict[str, int]:
    """Returns the bytes that `dot(x, w, ...)` keeps for its backward pass, by tensor ("x", "w").

    Packed operands take 17/32 byte per element. If a GEMM does not take packed operands, the tensor itself is
    kept, which costs nothing for weights: they stay in memory anyway.

    Args:
      x, w: arrays [..., d_in] and [d_in, d_out], or their shapes and dtypes.
      Others: see `dot`.
    """
    resolved = as_policy(policy)
    x = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    key = jax.eval_shape(lambda: jax.random.key(0)) if resolved.needs_key else None
    options = Options(resolved, implementations_of(resolved, implementation), (x.dtype,) * 3)

    def kept(x, w, key):
        _, residuals = _matmul_fwd(options, x, w, key)
        x_, x_packed, w_, w_packed, _ = residuals
        return {"x": jax.tree.leaves((x_, x_packed)), "w": jax.tree.leaves((w_, w_packed))}

    arrays = jax.eval_shape(kept, x, jax.ShapeDtypeStruct(w.shape, w.dtype), key)
    return {name: sum(a.size * a.dtype.itemsize for a in group) for name, group in arrays.items()}


def _values(w: Weight, frozen: Any) -> jax.Array:
    """Returns a weight's values, of a quantized one in a dtype that represents them exactly."""
    if isinstance(w, jax.Array):
        return w
    assert frozen is not None
    q: MXArray = frozen.unflatten(w)
    return dequantize(q, jnp.bfloat16 if q.format == "mxfp4" and q.prescale is None else jnp.float32)


def _tagged[T](q: T) -> T:
    """Returns q, tagged for `mxjax.runtime.remat` if it is packed."""
    return tag_operand(q) if isinstance(q, KernelOperand) and q.scales is not None else q


def _prepare_two(
    x: Tensor,
    now: tuple[GemmImplementation, OperandUse],
    later: tuple[GemmImplementation, OperandUse] | None,
    seen,
) -> tuple[Prepared, Prepared | None]:
    """Returns x prepared for the Fprop and, if `later` is given, for a backward GEMM."""
    if later is None:
        return prepare(x, [now])[0], None
    if later[1].operand.source == "original":
        first, second = prepare(x, [now, later])
        return first, second
    return prepare(x, [now])[0], prepare(seen(x), [later])[0]


def policy_inputs(policy: Policy, implementations: GemmImplementations, key: jax.Array | None):
    """Returns the inputs of Fprop (x, w), Dgrad (dy, w) and Wgrad (x, dy), and two functions.

    They give what Dgrad sees of w, and what Wgrad sees of x.
    """
    gemms = tuple(policy.gemms.values())
    keys = None if key is None else fold_each(key, 0, 3)
    by_kernel = [
        gemm.needs_key and name in BY_KERNEL for gemm, name in zip(gemms, implementations[:3], strict=True)
    ]
    words = draw_words(gemms, key) if any(by_kernel) else None
    drawn = draw_each(gemms, keys)
    fprop, dgrad, wgrad = (
        inputs_with(gemms[i], *axes, drawn[i], None if words is None or not by_kernel[i] else words[i])
        for i, axes in enumerate(((-1, -2), (-1, -1), (-2, -2)))
    )
    left, right = fprop

    def seen_w(w):
        return seen_by_backward(w, policy.dgrad.rhs, right, implementations.fprop)

    def seen_x(x):
        return seen_by_backward(x, policy.wgrad.lhs, left, implementations.fprop)

    return fprop, dgrad, wgrad, seen_w, seen_x


def product_of(options: Options, x: jax.Array, w: Weight | MXArray, key: jax.Array | None) -> jax.Array:
    """Returns `matmul(options, x, w, key)`."""
    if isinstance(w, MXArray):
        leaves, frozen = jax.tree.flatten(w)
        options, w = options._replace(frozen=frozen), tuple(leaves)
    return _matmul(options, x, w, key)


def _batch(options: Options, operands, axes) -> tuple[jax.Array, int]:
    x, w, key = operands
    x_axis, w_axis, _ = axes
    others = jax.tree.leaves(axes[1:])  # without those that are not mapped
    if not others:
        return _join_tokens(options, jnp.moveaxis(x, x_axis, -3), w, key)
    if options.frozen is not None or w_axis is None or len(others) > 1:
        mapped = jax.vmap(lambda x, w, key: matmul(options, x, w, key), axes)
        return mapped(x, w, key), 0
    size = w.shape[w_axis]
    return _stack(options, _mapped_first(x, x_axis, size), _mapped_first(w, w_axis, size), key)


_matmul = as_primitive("mxjax_matmul", matmul, _batch)


def _join_tokens(options: Options, x: jax.Array, w: Any, key: Any) -> tuple[jax.Array, int]:
    """Returns the product of x [*batch, mapped, m, k], and its mapped axis."""
    *batch, mapped, m, k = x.shape
    y = product_of(options, x.reshape(*batch, mapped * m, k), w, key)
    return y.reshape(*batch, mapped, m, y.shape[-1]), len(batch)


def _stack(options: Options, x: jax.Array, w: jax.Array, key: jax.Array | None) -> tuple[jax.Array, int]:
    """Returns the product of x [mapped, *batch, m, k] and w [mapped, *batch, k, n], and its mapped axis."""
    layout = options.gemms.layout
    if layout is not None:
        options = options._replace(gemms=options.gemms._replace(layout=layout.stacked))
    stack = x.shape[:-2]
    x, w = (t.reshape(math.prod(stack), *t.shape[-2:]) for t in (x, w))
    y = product_of(options, x, w, key)
    return y.reshape(*stack, *y.shape[-2:]), 0


def _mapped_first(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
