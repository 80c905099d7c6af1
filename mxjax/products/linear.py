"""`linear`: x @ w with a gradient of its own, by three GEMMs.

    Fprop   y  = x @ w         contracts d_in
    Dgrad   dx = dy @ w.T      contracts d_out
    Wgrad   dw = x.T @ dy      contracts tokens

x is [*batch, m, k] with at most one batch axis, m are the tokens; w is [*batch, k, n]. Each GEMM takes its
operands rotated and quantized along the axis that it contracts. So `forward` and `backward` have three steps:

1. `uses_of_policy` makes the policy and the key into six `OperandUse`, one for each operand above.
2. `prepare` quantizes a tensor for its uses: x and w by blocks along d_in, dy by blocks along d_out and along
   the tokens. Where operands are no larger than x (packed, FP8, bfloat16), `forward` also prepares what
   `backward` takes of x and w, from the same read, and keeps that in place of x.
3. `multiply` runs a GEMM and returns a `Product`, whose factors its reader applies. What a policy splits off,
   and gradients through rotation and quantization, are float32 steps between the product and its dtype.

`linear` is a JAX primitive, so that `jax.vmap` of it is one product, not many small ones. Under vmap of x
alone, the mapped axis joins the tokens, and Wgrad contracts, rotates and rounds all of them. Where w is
mapped too, the mapped axis is a batch axis. Both give the bits of the call without vmap. Where the key is
mapped, each call has random bits of its own, as in a loop.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from mxjax.numerics.array import MXArray, dequantize
from mxjax.numerics.delayed import Scales, largest_magnitude
from mxjax.numerics.operand import Operand
from mxjax.operands.carriers import Carrier
from mxjax.operands.computed import Computed
from mxjax.operands.kernel_operand import KernelOperand
from mxjax.operands.product import Product
from mxjax.operands.split import adds_one_row, multiplies_apart, product_apart
from mxjax.operands.use import OperandUse
from mxjax.policy.policy import Gemm, Policy
from mxjax.products.draws import GemmUses, PolicyUses, uses_of_policy
from mxjax.products.gradients import changes_gradient, gradients_read_tensors, through_quantization
from mxjax.products.implementations import GemmImplementations
from mxjax.products.multiply import multiply
from mxjax.products.prepare import Prepared, as_read, once, prepare, prepare_seen, takes_seen, with_bounds
from mxjax.runtime.devices import current_target, on_gpu, platform
from mxjax.runtime.mesh import Layout, as_stored, maximum_as, varying_as
from mxjax.runtime.primitives import as_primitive, first_order_only
from mxjax.runtime.remat import tag_operand, tag_product


class Options(NamedTuple):
    """The static arguments of a product. Hashable.

    Attributes:
      dtypes: dtypes of the result, of dx and of dw.
      layout: layout of w.
      frozen: structure of w if it is an `MXArray`, of which w is then the leaves; it has no gradient.
    """

    policy: Policy
    gemms: GemmImplementations
    dtypes: tuple[DTypeLike, DTypeLike, DTypeLike]
    precision: lax.PrecisionLike = None
    layout: Layout | None = None
    frozen: Any = None  # a PyTreeDef


Tensor = jax.Array | Computed
Weight = jax.Array | tuple[jax.Array, ...]
"""An array, or the leaves of a frozen `MXArray`."""


class Residuals(NamedTuple):
    """Values for the backward pass: packed operands for GEMMs that take them, else the tensors."""

    x: Tensor | None
    x_packed: Prepared | None
    w: Weight | None
    w_packed: Prepared | None
    key: jax.Array | None
    scales: Scales | None = None
    amax: tuple[jax.Array, jax.Array] | None = None  # of x and w, with delayed scales

    def with_weight(self, w: Weight) -> "Residuals":
        """Returns the residuals of `forward` with w, unless its packed operand is kept.

        w is the caller's argument itself, not a result of `forward`, which a scan over layers would store
        for each layer.
        """
        return self._replace(w=w) if self.w_packed is None else self


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear(
    options: Options, x: jax.Array, w: Weight, key: jax.Array | None, scales: Scales | None
) -> jax.Array:
    """Returns x @ w by the policy's Fprop; its gradients are the policy's Dgrad and Wgrad.

    The gradients of `scales` are the largest magnitudes of x, w and dy.
    """
    return value_of(options, forward(options, x, w, key, scales, keep=False)[0], w)


def _linear_fwd(options: Options, x, w, key, scales):
    y, residuals = forward(options, x, w, key, scales, keep=True)
    return value_of(options, y, w), residuals.with_weight(w)


def _linear_bwd(options: Options, residuals, dy):
    dx, dw, amax = backward(options, residuals, dy)
    return varying_as(dx.value(options.dtypes[1]), dy), dw, None, amax


_linear.defvjp(_linear_fwd, _linear_bwd)


@functools.partial(jax.jit, static_argnums=0, static_argnames="keep")
def forward(
    options: Options, x: Tensor, w: Weight, key, scales: Scales | None = None, *, keep: bool
) -> tuple[Product, Residuals]:
    """Returns y, and what `backward` reads besides w; with `keep`, packed operands where possible.

    Args:
      x: an array, or `Computed` if the policy's gradients need no more than packed operands of it.
    """
    policy, frozen = options.policy, options.frozen
    x, values = first_order_only(x), first_order_only(_weight_values(w, frozen))
    uses = uses_of_policy(policy, options.gemms, key, scales)
    x = once(x, [uses.fprop.lhs, uses.wgrad.lhs])
    x_is_read, w_is_read = gradients_read_tensors(policy)
    keep = keep and frozen is None
    # What is multiplied apart reads the tensors themselves, too.
    may_drop_x = keep and not (x_is_read or multiplies_apart(policy.wgrad))
    keep_w = keep and not (w_is_read or multiplies_apart(policy.dgrad)) and uses.dgrad.rhs.is_small
    w_uses = [uses.fprop.rhs, uses.dgrad.rhs]
    lhs, x_packed = _prepare_x(x, uses, may_drop_x)
    rhs, w_packed = prepare(values, w_uses) if keep_w else (*prepare(values, w_uses[:1]), None)
    is_layer = values.ndim == 2  # not attention, whose products grow with the square of the sequence length
    if is_layer:
        lhs, rhs = _tagged(lhs), _tagged(rhs)
        x_packed, w_packed = _tagged(x_packed), _tagged(w_packed)
    y = _gemm(options, "fprop", lhs, rhs, _rests(policy.fprop, uses.fprop, x, values))
    x_kept = None if x_packed is not None or (frozen is not None and not x_is_read) else x
    amax = None
    if scales is not None:
        amax = largest(x, (lhs, x_packed)), largest(values, (rhs, w_packed))
    residuals = Residuals(x_kept, x_packed, None, w_packed, key, scales, amax)
    return tag_product(y) if is_layer else y, residuals


def _prepare_x(x: Tensor, uses: PolicyUses, may_drop: bool) -> tuple[Prepared, Prepared | None]:
    """Returns x for the Fprop, and what the Wgrad reads in its place, if x may be dropped for as many bytes.

    That is the Wgrad's operand, or the Fprop's from which it is made.
    """
    fprop, wgrad = uses.fprop.lhs, uses.wgrad.lhs
    if may_drop and (wgrad.is_small or _in_place_of(x, wgrad)):
        lhs, kept = prepare(x, [fprop, wgrad])
        return lhs, kept
    [lhs] = prepare(x, [fprop])
    return lhs, lhs if may_drop and _is_bfloat16(x) and takes_seen(x, wgrad) else None


def _in_place_of(x: Tensor, use: OperandUse) -> bool:
    """Whether x as a use takes it, in bfloat16, is kept in place of x: as many bytes, from one read of x."""
    original = use.reads is None and use.operand.split == "none" and use.operand.is_block16
    return original and use.form == "bf16" and _is_bfloat16(x)


def _is_bfloat16(x: Tensor) -> TypeGuard[jax.Array]:
    return isinstance(x, jax.Array) and x.dtype == jnp.bfloat16


@functools.partial(jax.jit, static_argnums=0)
def backward(
    options: Options, residuals: Residuals, dy: Tensor
) -> tuple[Product, jax.Array | None, Scales | None]:
    """Returns the gradients dx and dw, None for dw if w is frozen, and the largest magnitudes for `scales`.

    Args:
      dy: an array, or `Computed` if the policy's gradients need no more than packed operands of it.
    """
    policy, gemms, dtypes, frozen = options.policy, options.gemms, options.dtypes, options.frozen
    x, x_packed, w, w_packed, key, scales, _ = residuals
    dy = first_order_only(dy)
    uses = uses_of_policy(policy, gemms, key, scales)
    dy_uses = [uses.dgrad.lhs, uses.wgrad.rhs]
    plain = all(use.operand.format == "bf16" and use.rotation is None for use in dy_uses)
    if plain and isinstance(dy, jax.Array):
        dy = dy.astype(jnp.bfloat16)  # halves the bytes of float32 logits and converts them once
    dy = once(dy, dy_uses)
    at_once = frozen is None and not (platform() == "cpu" and current_target() is None)
    dy_rows, *dy_columns = prepare(dy, dy_uses if at_once else dy_uses[:1])
    amax = _largest_of_all(policy, residuals, dy, (dy_rows, *dy_columns))
    if w is not None:
        w = first_order_only(_weight_values(w, frozen))
        [w_packed] = prepare(w, [uses.dgrad.rhs])
    assert w_packed is not None
    steps = _rests(policy.dgrad, uses.dgrad, dy, w)
    steps += _through_fprop(x, uses.fprop.lhs, policy.dgrad.rhs, dtypes[1])
    dx = _gemm(options, "dgrad", dy_rows, w_packed, steps)
    if frozen is not None:
        return dx, None, amax
    if not at_once:  # XLA for CPUs would keep the operands of both GEMMs in memory
        _, dy, x, x_packed = lax.optimization_barrier((dx.raw, dy, x, x_packed))
        dy_columns = prepare(dy, dy_uses[1:])
    if x is not None:
        [x_packed] = prepare(x, [uses.wgrad.lhs])
    elif uses.wgrad.lhs.form == "bf16" and uses.wgrad.lhs.reads is not None:
        assert isinstance(x_packed, KernelOperand)
        x_packed = prepare_seen(x_packed, uses.wgrad.lhs)
    assert x_packed is not None
    [dy_columns] = dy_columns
    steps = _rests(policy.wgrad, uses.wgrad, x, dy)
    steps += _through_fprop(w, uses.fprop.rhs, policy.wgrad.lhs, dtypes[2])
    dw = _gemm(options, "wgrad", x_packed, dy_columns, steps)
    return dx, as_stored(varying_as(dw.value(dtypes[2]), *jax.tree.leaves(dy)), options.layout), amax


def largest(x: Tensor, prepared: Sequence[Prepared | None]) -> jax.Array:
    """Returns the largest magnitude of a tensor, which the kernel that prepared it may have found."""
    found = [q.amax for q in prepared if isinstance(q, KernelOperand) and q.amax is not None]
    return found[0] if found else largest_magnitude(x if isinstance(x, jax.Array) else x.value())


def _largest_of_all(
    policy: Policy, residuals: Residuals, dy: Tensor, prepared: Sequence[Prepared]
) -> Scales | None:
    """Returns the largest magnitudes of x, w and dy over all devices, zero without a delayed scale."""
    if residuals.amax is None or residuals.scales is None:
        return None
    each = zip(Scales._fields, (*residuals.amax, largest(dy, prepared)), residuals.scales, strict=True)
    return Scales(
        *(
            maximum_as(amax, scale) if name in policy.delayed else jnp.zeros_like(scale)
            for name, amax, scale in each
        )
    )


def value_of(options: Options, y: Product, w: Weight) -> jax.Array:
    """Returns the value of the product by w."""
    # jnp.where of empty arrays forgets over which mesh axes they vary.
    return varying_as(y.value(options.dtypes[0]), *jax.tree.leaves(w))


Step = Callable[[Product], jax.Array]
"""A step on a product, in float32 but for a row that is added to it, before it gets its dtype."""

CARRIERS: dict[str, tuple[Carrier, Carrier]] = {
    "fprop": ("e4m3", "e4m3"),
    "dgrad": ("e5m2", "e4m3"),
    "wgrad": ("e4m3", "e5m2"),
}
"""The FP8 carriers of lhs and rhs: E5M2 for dy, whose blocks span more binades."""


def _gemm(options: Options, name: str, lhs: Prepared, rhs: Prepared, steps: Sequence[Step]) -> Product:
    """Returns one GEMM's product, after the steps.

    The layout is that of w, which the Fprop and the Dgrad read as rhs, the Fprop transposed if K-major.
    """
    policy, gemms, dtypes, precision, layout, _ = options
    i = ("fprop", "dgrad", "wgrad").index(name)
    if name == "wgrad":
        layout = None
    elif layout is not None and name == "fprop" and isinstance(rhs, KernelOperand):
        layout = layout.transposed
    # What reads a product can add a row to it, as it applies its factors: a GPU's GEMM may round it before.
    adds_row = len(steps) == 1 and adds_one_row((policy.fprop, policy.dgrad, policy.wgrad)[i])
    in_float32 = steps and not (adds_row and on_gpu() and isinstance(lhs, KernelOperand))
    dtype = jnp.float32 if in_float32 else dtypes[i]
    product = multiply(lhs, rhs, gemms[i], dtype, precision, CARRIERS[name], layout)
    if not steps:
        return product
    for step in steps:
        product = Product(step(product))
    return Product(product.value(dtypes[i]))


def _rests(gemm: Gemm, uses: GemmUses, lhs: Any, rhs: Any) -> list[Step]:
    """Returns the step that adds to a GEMM's product what its split operands multiply apart."""
    if not multiplies_apart(gemm):
        return []
    lhs, rhs = as_read(lhs, uses.lhs), as_read(rhs, uses.rhs)
    bounds = with_bounds(lhs, uses.lhs).bounds, with_bounds(rhs, uses.rhs).bounds
    axes = uses.lhs.axis, uses.rhs.axis
    return [lambda y: y.value(jnp.float32) + product_apart(lhs, axes[0], rhs, axes[1], gemm, bounds)]


def _through_fprop(t: Any, use: OperandUse, wanted: Operand, dtype: DTypeLike) -> list[Step]:
    """Returns the step from a backward GEMM's product to the gradient of t, an operand of the Fprop."""
    if not changes_gradient(use, wanted):
        return []
    assert t is not None
    return [lambda product: through_quantization(product, t, use, wanted, dtype)]


def _weight_values(w: Weight, frozen: Any) -> jax.Array:
    """Returns a weight's values, of a quantized one in a dtype that represents them exactly."""
    if isinstance(w, jax.Array):
        return w
    assert frozen is not None
    q: MXArray = frozen.unflatten(w)
    return dequantize(q, jnp.bfloat16 if q.format == "mxfp4" and q.prescale is None else jnp.float32)


def _tagged[T](q: T) -> T:
    """Returns q, tagged for `mxjax.runtime.remat` if it is packed."""
    return tag_operand(q) if isinstance(q, KernelOperand) and q.scales is not None else q


def _batch(options: Options, operands, axes) -> tuple[jax.Array, int]:
    x, w, key, scales = operands
    x_axis, w_axis, *_ = axes
    others = jax.tree.leaves(axes[1:])  # without those that are not mapped
    if not others:
        return _join_tokens(options, jnp.moveaxis(x, x_axis, -3), w, key, scales)
    if options.frozen is not None or w_axis is None or len(others) > 1:
        mapped = jax.vmap(lambda *each: _linear(options, *each), axes)
        return mapped(*operands), 0
    size = w.shape[w_axis]
    return _stack(options, _mapped_first(x, x_axis, size), _mapped_first(w, w_axis, size), key, scales)


linear = as_primitive("mxjax_linear", _linear, _batch)
"""`_linear` as a primitive, of the same arguments."""


def _join_tokens(
    options: Options, x: jax.Array, w: Any, key: Any, scales: Scales | None
) -> tuple[jax.Array, int]:
    """Returns the product of x [*batch, mapped, m, k], and its mapped axis."""
    *batch, mapped, m, k = x.shape
    y = linear(options, x.reshape(*batch, mapped * m, k), w, key, scales)
    return y.reshape(*batch, mapped, m, y.shape[-1]), len(batch)


def _stack(
    options: Options, x: jax.Array, w: jax.Array, key: jax.Array | None, scales: Scales | None
) -> tuple[jax.Array, int]:
    """Returns the product of x [mapped, *batch, m, k] and w [mapped, *batch, k, n], and its mapped axis."""
    if options.layout is not None:
        options = options._replace(layout=options.layout.stacked)
    stack = x.shape[:-2]
    x, w = (t.reshape(math.prod(stack), *t.shape[-2:]) for t in (x, w))
    y = linear(options, x, w, key, scales)
    return y.reshape(*stack, *y.shape[-2:]), 0


def _mapped_first(x: jax.Array, axis: int | None, size: int) -> jax.Array:
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
