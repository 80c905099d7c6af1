"""What a `dot` keeps for its backward pass."""

import math

import jax
import numpy as np

from mxjax.policy.policy import Policy
from mxjax.products.implementations import Implementation, implementations_of
from mxjax.products.linear import Options, forward
from mxjax.recipes import as_policy


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
        residuals = forward(options, x, w, key, keep=True)[1].with_weight(w)
        x_, x_packed, w_, w_packed, _ = residuals
        return {"x": jax.tree.leaves((x_, x_packed)), "w": jax.tree.leaves((w_, w_packed))}

    arrays = jax.eval_shape(kept, x, jax.ShapeDtypeStruct(w.shape, w.dtype), key)
    return {name: sum(a.size * a.dtype.itemsize for a in group) for name, group in arrays.items()}
