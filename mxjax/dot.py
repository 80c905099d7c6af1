"""`dot`: a linear layer's matrix product whose three GEMMs run in the precision that a policy names."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from mxjax.gemm import (
    Implementation,
    as_backward_sees,
    choose_implementation,
    explicit_sharding,
    fold,
    run_gemm,
)
from mxjax.policy import Policy
from mxjax.recipes import as_policy

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
) -> Float[Array, "*batch _"]:
    """Returns `x @ w`, with each of the three GEMMs (forward and gradients) in the policy's precision.

    Equivalent, for one GEMM and up to the order of float32 sums, to

        lhs, rhs = (rotate(pad(t), axis=contracted) for t in (x, w))      # if the policy rotates
        dequantize(quantize(lhs, axis=-1)) @ dequantize(quantize(rhs, axis=0))

    where the axis that a GEMM contracts (see `mxjax.policy`) is the one that is blocked and rotated,
    filled up with zeros where the block or the rotation does not divide it, which changes nothing.
    Wgrad contracts the tokens: all leading axes of x, flattened.

    Args:
      x: activations, float32, bfloat16 or float16.
      w: weights [d_in, d_out], any of these; quantized from this dtype, so give it the float32 master
        weights.
      policy: a `Policy` or the name of one.
      key: needed by policies that draw random bits. The same key draws the same bits: fold in the step
        and the layer.
      implementation: "reference" (float32 products of dequantized operands, the definition), "xla"
        (bfloat16 products, which hold the values exactly, accumulated in float32), or None for the
        fastest that runs here.
      preferred_element_type: dtype of the result; default, `jnp.result_type(x, w)`, which for bfloat16
        activations and float32 weights is float32.

    Gradients have the dtypes of x and w, products accumulate in float32. There is no second derivative.

    Special values: a block with NaN or infinity makes the results that it enters NaN.
    Sharding: works on meshes with Auto and with Explicit axes and gives the values of one device; with
      Explicit axes the gradients have the shardings of x and w.
    Raises:
      ValueError: shapes that do not match, an unknown policy or implementation, or a policy that draws
        random bits without a key.
      TypeError: x, w or the result's dtype is not floating point.
      NotImplementedError: an implementation that does not run here; a second derivative.
    Source: arXiv 2605.09825, section 3; arXiv 2502.20586, algorithm 3.
    """
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"dot needs x [..., d_in] and w [d_in, d_out], got {x.shape} and {w.shape}")
    contract_last = (((x.ndim - 1,), (0,)), ((), ()))
    return dot_general(
        x,
        w,
        contract_last,
        None,
        preferred_element_type,
        policy=policy,
        key=key,
        implementation=implementation,
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
) -> Float[Array, "..."]:
    """Returns `jax.lax.dot_general` of lhs (as x) and rhs (as w), quantized by a policy as in `dot`.

    Any contracting and batch axes; several contracting axes are flattened, in the order given, into
    the one that is blocked. The result has batch, lhs's free, then rhs's free axes.

    Args:
      precision: passed to the products; it matters only where a policy keeps operands in float32.
      Others: as `dot` and `jax.lax.dot_general`.
    Raises: as `dot`.
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    policy = as_policy(policy)
    _check(lhs, rhs, preferred_element_type, policy, key)
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if [[lhs.shape[i] for i in axes] for axes in (lhs_contract, lhs_batch)] != [
        [rhs.shape[i] for i in axes] for axes in (rhs_contract, rhs_batch)
    ]:
        raise ValueError(f"dot_general: {lhs.shape} and {rhs.shape} do not match along {dimension_numbers}")
    lhs_free = _remaining_axes(lhs, lhs_contract, lhs_batch)
    rhs_free = _remaining_axes(rhs, rhs_contract, rhs_batch)
    x = _group_axes(lhs, lhs_batch, lhs_free, lhs_contract)
    w = _group_axes(rhs, rhs_batch, rhs_contract, rhs_free)
    dtype = jnp.result_type(lhs, rhs) if preferred_element_type is None else jnp.dtype(preferred_element_type)
    y: jax.Array = _matmul(policy, choose_implementation(implementation), dtype, precision, x, w, key)
    shape = [lhs.shape[i] for i in (*lhs_batch, *lhs_free)] + [rhs.shape[i] for i in rhs_free]
    return y.reshape(shape)


def make_dot_general(
    policy: Policy | str,
    *,
    key: jax.Array | Callable[[], jax.Array] | None = None,
    implementation: Implementation | None = None,
) -> Callable[..., jax.Array]:
    """Returns a `dot_general` for `flax.nnx.Linear(dot_general=...)` and `flax.linen.Dense(dot_general=...)`.

    Args:
      key: for policies that draw random bits: a key, which draws the same bits at every call, or a
        function that returns one at each call, such as `lambda: self.make_rng("mxjax")` in Linen. In NNX,
        where a captured stream is not lifted into nnx.jit, call `mxjax.dot(x, self.kernel[...], ...,
        key=self.rngs.mxjax())` in a layer of your own instead.
      Others: as `dot`.

    A layer's own `dtype=bfloat16` rounds its weights to bfloat16 before they arrive here.
    """

    policy = as_policy(policy)
    _check_key(policy, key)

    def dot_general_with_policy(
        lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, out_sharding=None
    ):
        if out_sharding is not None:
            raise NotImplementedError("out_sharding: use jax.lax.with_sharding_constraint on the result")
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            policy=policy,
            key=key() if callable(key) else key,
            implementation=implementation,
        )

    return dot_general_with_policy


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _matmul(policy: Policy, implementation, dtype, precision, x, w, key) -> jax.Array:
    """Returns x [*b, m, k] @ w [*b, k, n], by the policy's Fprop."""
    return run_gemm(implementation, dtype, precision, policy.fprop, x, -1, w, -2, fold(key, 0))


def _matmul_fwd(policy, implementation, dtype, precision, x, w, key):
    x = lax.optimization_barrier(x)  # several passes read it: computing it again in each costs more
    return _matmul(policy, implementation, dtype, precision, x, w, key), (x, w, key)


def _matmul_bwd(policy, implementation, dtype, precision, residuals, dy):
    x, w, key = residuals
    dy = lax.optimization_barrier(dy)
    x_seen = as_backward_sees(x, policy.wgrad.lhs, policy.fprop.lhs, -1, fold(key, 0, 0))
    w_seen = as_backward_sees(w, policy.dgrad.rhs, policy.fprop.rhs, -2, fold(key, 0, 1))
    run = functools.partial(run_gemm, implementation)
    dx_like, dw_like = explicit_sharding(x), explicit_sharding(w)
    dx = run(x.dtype, precision, policy.dgrad, dy, -1, w_seen, -1, fold(key, 1), sharding=dx_like)
    dw = run(w.dtype, precision, policy.wgrad, x_seen, -2, dy, -2, fold(key, 2), sharding=dw_like)
    return dx, dw, None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _check(lhs, rhs, dtype, policy: Policy, key) -> None:
    for name, x in (("lhs (x)", lhs), ("rhs (w)", rhs)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"mxjax.dot needs floating-point operands, but {name} is {x.dtype}; cast it first"
            )
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"mxjax.dot gives floating-point results, not {jnp.dtype(dtype)}")
    _check_key(policy, key)


def _check_key(policy: Policy, key) -> None:
    if policy.needs_key and key is None:
        drawing = ", ".join(name for name, gemm in policy.gemms.items() if gemm.needs_key)
        raise ValueError(
            f"the policy draws random bits in {drawing} and needs key=; "
            "pass jax.random.key(0), folded with the step and the layer"
        )


def _remaining_axes(x, contract, batch) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i not in (*contract, *batch))


def _group_axes(x, batch, *groups):
    """Returns x transposed and reshaped to one axis a group, behind one for the batch axes, if any."""
    x = x.transpose(*batch, *(i for group in groups for i in group))
    shape = [math.prod(x.shape[: len(batch)])] if batch else []
    start = len(batch)
    for group in groups:
        shape.append(math.prod(x.shape[start : start + len(group)]))
        start += len(group)
    return x.reshape(shape)
