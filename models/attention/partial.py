"""Attention to a part of a sequence's keys, with the logarithm of each query's sum of exp(scores).

cuDNN computes it where it can, or the kernels of `mxjax.kernels.attention`, else XLA, some queries at a time.
The kernels' results are in bfloat16, XLA's in float32. Shapes in names as in `models.decoder`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from models.attention.causal import PIECE, kernel_on, on_cuda
from mxjax.runtime.devices import Target, current_target


class Results(NamedTuple):
    """Attention to all keys, of which its gradients by a part of them are functions.

    Attributes:
      out, dout: the result and its gradient.
      lse: the logarithms of the sums of exp(scores).
      delta: the sums of out * dout over a head.
    """

    out: Float[Array, "B S N H"]
    lse: Float32[Array, "B S N"]
    dout: Float[Array, "B S N H"]
    delta: Float32[Array, "B S N"]


def attend_part(q, k, v, low, sinks_N=None, *, is_causal: bool = False):
    """Returns attention and the logarithm of each query's sum of exp(scores) [B, S, N], in float32.

    Query i sees keys `low[i]` to i, or to the last if not `is_causal`, and may then see none. None is 0.
    """
    if low is None and sinks_N is None and _by_cudnn(q):
        return attend_part_by_cudnn(q, k, v, is_causal)
    low = jnp.zeros(q.shape[:2], jnp.int32) if low is None else low
    if takes_part(q):
        return attend_part_by_kernel(current_target(), q, k, v, low, sinks_N, is_causal)
    G = k.shape[2]
    sinks_1GR1 = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(1, G, -1, 1)

    def piece(_, part):
        index, q, low = part
        scores = _scores(index, q, k, low, is_causal)
        least = jnp.finfo(jnp.float32).min if sinks_1GR1 is None else sinks_1GR1  # where no key is seen
        largest = jnp.maximum(jnp.max(scores, axis=-1), least)
        weights = jnp.exp(scores - largest[..., None])
        total = jnp.sum(weights, axis=-1)
        if sinks_1GR1 is not None:
            total += jnp.exp(sinks_1GR1 - largest)
        shares = (weights / jnp.where(total == 0, 1, total)[..., None]).astype(v.dtype)
        out = jnp.einsum("BGRST,BTGH->BSGRH", shares, v, **_precision(v))
        return None, (out, jnp.moveaxis(largest + jnp.log(total), -1, 1))

    _, (out, lse) = jax.lax.scan(piece, None, _in_pieces(_grouped(q, 2, G), low))
    return _whole(out).reshape(q.shape), _whole(lse).reshape(q.shape[:3])


def part_gradients(q, k, v, low, results: Results, *, is_causal: bool = False):
    """Returns the gradients of q, k and v in float32; `low` and `is_causal` as in `attend_part`."""
    _, lse, dout, delta = results
    if low is None and _by_cudnn(q):
        return part_gradients_by_cudnn(q, k, v, results, is_causal)
    low = jnp.zeros(q.shape[:2], jnp.int32) if low is None else low
    if takes_part(q):
        return part_gradients_by_kernel(current_target(), q, k, v, low, lse, dout, delta, is_causal)
    G, scale = k.shape[2], q.shape[3] ** -0.5

    def piece(dkv, part):
        dk, dv = dkv
        index, q, low, lse, dout, delta = part
        scores = _scores(index, q, k, low, is_causal)
        weights = jnp.exp(scores - jnp.moveaxis(lse, 1, -1)[..., None])
        d_weights = jnp.einsum("BSGRH,BTGH->BGRST", dout, v, **_precision(v))
        d_scores = (weights * (d_weights - jnp.moveaxis(delta, 1, -1)[..., None]) * scale).astype(q.dtype)
        dv += jnp.einsum("BGRST,BSGRH->BTGH", weights.astype(dout.dtype), dout, **_precision(v))
        dk += jnp.einsum("BGRST,BSGRH->BTGH", d_scores, q, **_precision(v))
        return (dk, dv), jnp.einsum("BGRST,BTGH->BSGRH", d_scores, k, **_precision(v))

    heads = [_grouped(x, 2, G) for x in (q, lse, dout, delta)]
    zero = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(piece, (zero, zero), _in_pieces(heads[0], low, *heads[1:]))
    return _whole(dq).reshape(q.shape), dk, dv


def takes_part(q: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether the kernels compute these queries here, which are then in whole blocks."""
    if kernel_on(current_target(), False, q, is_plain=False) != "ours":
        return False
    from mxjax.kernels.attention.launches import BLOCK_MULTIPLE  # needs Triton

    return q.shape[1] % BLOCK_MULTIPLE == 0


def _by_cudnn(q: jax.Array) -> bool:
    """Returns whether cuDNN computes these queries here, without a mask besides the causal one."""
    return kernel_on(current_target(), on_cuda(), q, is_plain=True) == "cudnn"


def attend_part_by_cudnn(q, k, v, is_causal: bool):
    """Returns `attend_part` by cuDNN's forward kernel."""
    cudnn = _cudnn()
    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    options = {"scale": q.shape[3] ** -0.5, "mask_type": mask, "return_residual": True}
    out, lse = cudnn.dot_product_attention(q, k, v, **options)
    return out.astype(jnp.float32), jnp.moveaxis(lse, 1, -1)


def part_gradients_by_cudnn(q, k, v, results: Results, is_causal: bool):
    """Returns `part_gradients` by cuDNN's backward kernel, which takes the results of all keys as its own."""
    cudnn = _cudnn()
    mask = cudnn.MaskType.CAUSAL if is_causal else cudnn.MaskType.NO_MASK
    lse, absent = jnp.moveaxis(results.lse, -1, 1), jnp.zeros(0, q.dtype)
    given = q, k, v, *(absent,) * 7, lse, results.out.astype(q.dtype)
    layout, version = cudnn.AttentionLayout.BTNH.value, cudnn.check_cudnn_version()
    rest = q.shape[3] ** -0.5, 42, 0.0, (False, False), mask, layout, None, version, False
    found = cudnn._dot_product_attention_bwd_rule(*rest, given, results.dout.astype(q.dtype))
    return tuple(x.astype(jnp.float32) for x in found[:3])


def _cudnn() -> Any:
    """Returns JAX's module of cuDNN's attention: its public function takes no results of other keys."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo


def attend_part_by_kernel(target: Target | None, q, k, v, low, sinks_N, is_causal: bool):
    """Returns `attend_part` by the forward kernel."""
    from mxjax.kernels.attention import launches  # needs Triton

    q, sinks = _grouped(q, 2, k.shape[2]), None
    if sinks_N is not None:
        sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32), (len(q), *sinks_N.shape))
        sinks = _grouped(sinks, 1, k.shape[2])
    out, lse = launches.forward(q, k, v, target, first_key=low, sinks=sinks, causal=is_causal)
    lse = jnp.moveaxis(lse, -1, 1)
    return tuple(x.astype(jnp.float32).reshape(*x.shape[:2], -1, *x.shape[4:]) for x in (out, lse))


def part_gradients_by_kernel(target: Target | None, q, k, v, low, lse, dout, delta, is_causal: bool):
    """Returns `part_gradients` by the backward kernels."""
    from mxjax.kernels.attention import launches

    shape = q.shape
    q, lse, dout, delta = (_grouped(x, 2, k.shape[2]) for x in (q, lse, dout.astype(q.dtype), delta))
    lse, delta = (jnp.moveaxis(x, 1, -1) for x in (lse, delta))
    arguments, mask = (q, k, v, dout, lse, delta, target), {"first_key": low, "causal": is_causal}
    dq = launches.query_gradients(*arguments, **mask)
    found = dq.reshape(shape), *launches.key_gradients(*arguments, **mask)
    return tuple(x.astype(jnp.float32) for x in found)


def _grouped(x: Array, axis: int, groups: int) -> Array:
    """Returns x with its axis of query heads by the key/value head that they read."""
    return x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :])


def _precision(v):
    """Returns the arguments of products in v's precision, with sums in float32."""
    precision = jax.lax.Precision.HIGHEST if v.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return {"precision": precision, "preferred_element_type": jnp.float32}


def _scores(index, q, k, low, is_causal: bool) -> Float32[Array, "B G R S T"]:
    """Returns the scores of a piece of queries; minus infinity where a query does not see a key."""
    scores = jnp.einsum("BSGRH,BTGH->BGRST", q, k, **_precision(k)) * q.shape[-1] ** -0.5
    key = jnp.arange(k.shape[1])[None, None]
    is_seen = key >= low[..., None]
    if is_causal:
        is_seen &= key <= (index * q.shape[1] + jnp.arange(q.shape[1]))[None, :, None]
    return jnp.where(is_seen[:, None, None], scores, -jnp.inf)


def piece_of(S: int) -> int:
    """Returns how many of S queries have their scores at once."""
    return next(n for n in range(min(PIECE, S), 0, -1) if S % n == 0)


def _in_pieces(*arrays):
    """Returns pieces of queries, stacked, with their numbers."""
    S = arrays[0].shape[1]
    size = piece_of(S)
    split = [x.reshape(len(x), S // size, size, *x.shape[2:]).swapaxes(0, 1) for x in arrays]
    return jnp.arange(S // size), *split


def _whole(pieces):
    pieces = pieces.swapaxes(0, 1)
    return pieces.reshape(len(pieces), -1, *pieces.shape[3:])
