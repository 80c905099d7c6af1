"""`dot`: a linear layer's matrix product, each of its three GEMMs in the precision that a policy names."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from mxjax.gemm import multiply
from mxjax.gemm_input import GemmInput, as_backward_sees, first_order_only, fold, gemm_inputs
from mxjax.implementations import ON_PACKED, GemmImplementations, How, Implementation, implementations_of
from mxjax.kmajor import KMajor
from mxjax.policy import Policy
from mxjax.prepare import Prepared, prepare
from mxjax.quantize import MXArray
from mxjax.recipes import as_policy
from mxjax.remat import tag_operand, tag_product
from mxjax.weight_layout import Layout, as_stored, on_auto_axes, varying_as

AnyArray = jax.Array | np.ndarray
DimensionNumbers = tuple  # ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as in jax.lax


def dot(
    x: Shaped[AnyArray, "*batch d_in"],
    w: Shaped[AnyArray, "..."],
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    preferred_element_type: DTypeLike | None = None,
    layout: Layout | None = None,
) -> Float[Array, "*batch _"]:
    """Returns `x @ w`, with each of the three GEMMs (forward and gradients) in the policy's precision.

    Equivalent, for one GEMM and up to the order of float32 sums, to

        lhs, rhs = (rotate(pad(t), axis=contracted) for t in (x, w))      # if the policy rotates
        dequantize(quantize(lhs, axis=-1)) @ dequantize(quantize(rhs, axis=0))

    Each GEMM rotates and quantizes its operands along the axis that it contracts (see `mxjax.policy`). That
    axis is padded with zeros to whole blocks and rotations, which changes no result. Wgrad contracts the
    tokens: all leading axes of x, flattened.

    Args:
      x: activations, float32, bfloat16 or float16.
      w: weights [d_in, d_out], in any of these dtypes. Pass float32 master weights, because weights are
        quantized from the dtype given.
      policy: a `Policy` or its name.
      key: JAX key for policies that draw random bits. The same key draws the same bits: fold in the step and
        the layer.
      implementation: how the MXFP4 products run. All multiply the same values and accumulate in float32.
        "reference": float32, the definition. "xla": bfloat16, which represents the values exactly.
        "fp8_carriers": FP8, or bfloat16 where FP8 cannot represent a row of an operand. "triton",
        "scaled_dot": packed FP4. None: the fastest here.
      preferred_element_type: dtype of the result. By default `jnp.result_type(x, w)`, which is float32 for
        bfloat16 activations and float32 weights.
      layout: on a mesh with Auto axes, how w is sharded where it is stored and where GEMMs read it.

    Gradients have the dtypes of x and w. There is no second derivative.

    Special values: a block with NaN or infinity makes every result that it enters NaN.
    Sharding: meshes with Auto and with Explicit axes give the values of one device. With Explicit axes the
      result is sharded like x's token axes; remaining mesh axes shard d_out as in w. The gradients have the
      shardings of x and w. Under `jax.shard_map` each shard is quantized independently: Wgrad's blocks begin
      at its first token, and tensor scales and random bits are its own. Fold `jax.lax.axis_index` into its
      key.
    Raises:
      ValueError: shapes that do not match, an unknown policy or implementation, or a policy that draws
        random bits without a key.
      TypeError: x, w or the result's dtype is not floating point.
      NotImplementedError: an implementation that does not run here or does not take the policy's formats; a
        second derivative.
    Source: arXiv 2605.09825, section 3; arXiv 2502.20586, algorithm 3.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"dot needs x [..., d_in] and w [d_in, d_out], got {x.shape} and {w.shape}")
    contract_last = (((x.ndim - 1,), (0,)), ((), ()))
    policy = as_policy(policy)
    return _dot_general(
        x, w, contract_last, None, preferred_element_type, policy, key, implementation, layout
    )


def dot_general(
    lhs: Shaped[AnyArray, "..."],
    rhs: Shaped[AnyArray, "..."],
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    policy: Policy | str,
    key: jax.Array | None = None,
    implementation: Implementation | None = None,
    layout: Layout | None = None,
) -> Float[Array, "..."]:
    """Returns `jax.lax.dot_general` of lhs and rhs, quantized by a policy like x and w in `dot`.

    Any contracting and batch axes are allowed. Several contracting axes are flattened in their order and
    quantized as one. The result has the batch axes, lhs's free axes, then rhs's free axes.

    Args:
      precision: precision of the products; it matters only where a policy keeps operands in float32.
      layout: sharding of an rhs with two axes, [contracting, free].
      Others: see `dot` and `jax.lax.dot_general`.
    Raises: see `dot`.
    """
    return _dot_general(
        lhs,
        rhs,
        dimension_numbers,
        precision,
        preferred_element_type,
        as_policy(policy),
        key,
        implementation,
        layout,
    )


def _dot_general(
    lhs,
    rhs,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike,
    preferred_element_type: DTypeLike | None,
    policy: Policy,
    key: jax.Array | None,
    implementation: Implementation | None,
    layout: Layout | None,
) -> jax.Array:
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    _check(lhs, rhs, preferred_element_type, policy, key)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if [[lhs.shape[i] for i in axes] for axes in (lhs_contract, lhs_batch)] != [
        [rhs.shape[i] for i in axes] for axes in (rhs_contract, rhs_batch)
    ]:
        raise ValueError(f"dot_general: {lhs.shape} and {rhs.shape} do not match along {dimension_numbers}")
    lhs_free = _remaining_axes(lhs, lhs_contract, lhs_batch)
    rhs_free = _remaining_axes(rhs, rhs_contract, rhs_batch)
    dtype = _result_dtype(lhs, rhs) if preferred_element_type is None else jnp.dtype(preferred_element_type)
    dtypes = (dtype, lhs.dtype, rhs.dtype)
    gemms = implementations_of(policy, implementation)._replace(layout=layout)
    shape = [lhs.shape[i] for i in (*lhs_batch, *lhs_free)] + [rhs.shape[i] for i in rhs_free]

    def product(lhs, rhs, key):
        # shard_map sums the gradients of replicated operands once they are varying.
        lhs, rhs = varying_as(lhs, rhs, key), varying_as(rhs, lhs, key)
        x = _group_axes(lhs, lhs_batch, lhs_free, lhs_contract)
        w = _group_axes(rhs, rhs_batch, rhs_contract, rhs_free)
        y: jax.Array = _matmul(policy, gemms, dtypes, precision, x, w, key)
        return y.reshape(shape)

    key = key if policy.needs_key else None
    return on_auto_axes(product, lhs, rhs, key, kept=((*lhs_batch, *lhs_free), rhs_free))


def make_dot_general(
    policy: Policy | str,
    *,
    key: jax.Array | Callable[[], jax.Array] | None = None,
    implementation: Implementation | None = None,
) -> Callable[..., jax.Array]:
    """Returns a `dot_general` for `flax.nnx.Linear(dot_general=...)` and `flax.linen.Dense(dot_general=...)`.

    Args:
      key: JAX key for policies that draw random bits, or a function that returns a new key at each call, such
        as `lambda: self.make_rng("mxjax")` in Linen. A single key draws the same bits at every call. NNX does
        not lift a captured stream into nnx.jit: there, call
        `mxjax.dot(x, self.kernel[...], ..., key=self.rngs.mxjax())` in a layer of your own.
      Others: see `dot`.

    A layer with `dtype=bfloat16` rounds its weights to bfloat16 before this function sees them.
    """

    resolved = as_policy(policy)
    _check_key(resolved, key)

    def dot_general_with_policy(
        lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None
    ):
        if out_sharding is not None:
            raise NotImplementedError(
                "make_dot_general takes no out_sharding; use jax.lax.with_sharding_constraint on the result"
            )
        drawn = key() if callable(key) else key
        return _dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            resolved,
            drawn,
            implementation,
            layout=None,
        )

    return dot_general_with_policy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _matmul(
    policy: Policy, gemms: GemmImplementations, dtypes: tuple[DTypeLike, ...], precision, x, w, key
) -> jax.Array:
    """Returns x [*b, m, k] @ w [*b, k, n] by the policy's Fprop; `dtypes` are the result's, x's and w's."""
    return _forward(policy, gemms, dtypes, precision, x, w, key, keep=False)[0]


def _matmul_fwd(policy, gemms, dtypes, precision, x, w, key):
    y, residuals = _forward(policy, gemms, dtypes, precision, x, w, key, keep=True)
    # Keep the argument itself, so that a scan over layers does not copy their weights.
    return y, residuals._replace(w=w) if residuals.w_packed is None else residuals


def _matmul_bwd(policy, gemms, dtypes, precision, residuals, dy):
    return (*_backward(policy, gemms, dtypes, precision, residuals, dy), None)


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


class _Residuals(NamedTuple):
    """Values for the backward pass: packed operands for GEMMs that take them, else the tensors."""

    x: jax.Array | None
    x_packed: Prepared | None
    w: jax.Array | None
    w_packed: Prepared | None
    key: jax.Array | None


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), static_argnames="keep")
def _forward(policy: Policy, gemms: GemmImplementations, dtypes, precision, x, w, key, *, keep: bool):
    """Returns the product and the residuals without w itself; with `keep`, packed ones where possible."""
    x, w = first_order_only(x), first_order_only(w)
    x = lax.optimization_barrier(x)  # several passes read it; XLA would recompute it in each
    dgrad, wgrad, seen_w, seen_x = _backward_inputs(policy, key)
    left, right = gemm_inputs(policy.fprop, -1, -2, fold(key, 0))
    keep_x, keep_w = keep and gemms.wgrad in ON_PACKED, keep and gemms.dgrad in ON_PACKED
    lhs, x_packed = _prepare_two(x, (gemms.fprop, left), (gemms.wgrad, wgrad[0]) if keep_x else None, seen_x)
    rhs, w_packed = _prepare_two(w, (gemms.fprop, right), (gemms.dgrad, dgrad[1]) if keep_w else None, seen_w)
    if w.ndim == 2:  # not attention, whose products grow with the square of the sequence length
        lhs, rhs, x_packed, w_packed = _tagged(lhs), _tagged(rhs), _tagged(x_packed), _tagged(w_packed)
    layout = gemms.layout
    if layout is not None and not isinstance(rhs, MXArray):  # K-major
        layout = layout.transposed
    y = multiply(gemms.fprop, dtypes[0], precision, lhs, rhs, ("e4m3", "e4m3"), layout)
    y = tag_product(y) if w.ndim == 2 else y
    return y.value(dtypes[0]), _Residuals(None if keep_x else x, x_packed, None, w_packed, key)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _backward(policy: Policy, gemms: GemmImplementations, dtypes, precision, residuals: _Residuals, dy):
    """Returns the gradients dx and dw."""
    x, x_packed, w, w_packed, key = residuals
    dy = first_order_only(dy)
    dgrad, wgrad, seen_w, seen_x = _backward_inputs(policy, key)
    if all(how.operand.format == "bf16" and how.rotation is None for how in (dgrad[0], wgrad[1])):
        dy = dy.astype(jnp.bfloat16)  # halves the bytes of float32 logits and converts them once
    dy = lax.optimization_barrier(dy)
    dy_rows, dy_columns = prepare(dy, [(gemms.dgrad, dgrad[0]), (gemms.wgrad, wgrad[1])])
    w = None if w is None else first_order_only(w)
    w_rows = w_packed if w is None else prepare(seen_w(w), [(gemms.dgrad, dgrad[1])])[0]
    x_columns = x_packed if x is None else prepare(seen_x(x), [(gemms.wgrad, wgrad[0])])[0]
    assert w_rows is not None
    assert x_columns is not None
    dx = multiply(gemms.dgrad, dtypes[1], precision, dy_rows, w_rows, ("e5m2", "e4m3"), gemms.layout)
    dw = multiply(gemms.wgrad, dtypes[2], precision, x_columns, dy_columns, ("e4m3", "e5m2"))
    return dx.value(dtypes[1]), as_stored(dw.value(dtypes[2]), gemms.layout)


def residual_bytes(
    x: jax.ShapeDtypeStruct | AnyArray,
    w: jax.ShapeDtypeStruct | AnyArray,
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
    gemms = implementations_of(resolved, implementation)

    def kept(x, w, key):
        _, residuals = _matmul_fwd(resolved, gemms, (x.dtype,) * 3, None, x, w, key)
        x_, x_packed, w_, w_packed, _ = residuals
        return {"x": jax.tree.leaves((x_, x_packed)), "w": jax.tree.leaves((w_, w_packed))}

    arrays = jax.eval_shape(kept, x, jax.ShapeDtypeStruct(w.shape, w.dtype), key)
    return {name: sum(a.size * a.dtype.itemsize for a in group) for name, group in arrays.items()}


def _tagged[T](q: T) -> T:
    """Returns q, tagged for `mxjax.remat` if it is packed."""
    return tag_operand(q) if isinstance(q, KMajor) and q.scales is not None else q


def _prepare_two(
    x: jax.Array, now: tuple[How, GemmInput], later: tuple[How, GemmInput] | None, seen
) -> tuple[Prepared, Prepared | None]:
    """Returns x prepared for the Fprop and, if `later` is given, for a backward GEMM."""
    if later is None:
        return prepare(x, [now])[0], None
    if later[1].operand.source == "original":
        first, second = prepare(x, [now, later])
        return first, second
    return prepare(x, [now])[0], prepare(seen(x), [later])[0]


def _backward_inputs(policy: Policy, key):
    """Returns the inputs of Dgrad (dy, w) and Wgrad (x, dy), and functions that map w and x to those read."""
    dgrad = gemm_inputs(policy.dgrad, -1, -1, fold(key, 1))
    wgrad = gemm_inputs(policy.wgrad, -2, -2, fold(key, 2))

    def seen_w(w):
        return as_backward_sees(w, policy.dgrad.rhs, policy.fprop.rhs, -2, fold(key, 0, 1))

    def seen_x(x):
        return as_backward_sees(x, policy.wgrad.lhs, policy.fprop.lhs, -1, fold(key, 0, 0))

    return dgrad, wgrad, seen_w, seen_x


def _check(lhs, rhs, dtype, policy: Policy, key) -> None:
    for name, x in (("lhs (x)", lhs), ("rhs (w)", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"mxjax.dot needs floating-point operands, but {name} is {x.dtype}; cast it first"
            )
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"mxjax.dot needs a floating-point preferred_element_type, got {jnp.dtype(dtype)}")
    _check_key(policy, key)


def _check_key(policy: Policy, key) -> None:
    if policy.needs_key and key is None:
        drawing = ", ".join(name for name, gemm in policy.gemms.items() if gemm.needs_key)
        raise ValueError(
            f"the policy draws random bits in {drawing} and needs key=; "
            "pass jax.random.key(0), folded with the step and the layer"
        )


def _result_dtype(lhs: jax.Array, rhs: jax.Array) -> DTypeLike:
    """Returns JAX's standard promotion of both dtypes, even where a program forbids implicit promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(lhs, rhs)


def _remaining_axes(x, contract, batch) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i not in (*contract, *batch))


def _group_axes(x, batch, *groups):
    """Returns x with each group of axes merged into one, after one for the batch axes, if any."""
    x = x.transpose(*batch, *(i for group in groups for i in group))
    shape = [math.prod(x.shape[: len(batch)])] if batch else []
    start = len(batch)
    for group in groups:
        shape.append(math.prod(x.shape[start : start + len(group)]))
        start += len(group)
    return x.reshape(shape)
