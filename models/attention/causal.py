"""Causal attention with rotary position embedding: fused where a kernel runs, else in pieces.

cuDNN runs it on NVIDIA GPUs; our kernels run it there with documents, windows or sinks, and on gfx950. The
result is exact; only the order of summation differs. Shapes in names as in `models.decoder`.

Sources: "RoFormer", arXiv 2104.09864; "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.2; for sinks
transformers 5.23, modeling_gpt_oss.py.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from models.attention.documents import FirstKey, visible_keys
from models.configs import DecoderConfig, Yarn
from mxjax.runtime.devices import Target, current_target, on_gpu
from mxjax.runtime.remat import tag_attention


def rope_angles(position_BS: Int[Array, "B S"], config: DecoderConfig) -> Float32[Array, "B S half"]:
    """Returns the rotation angle of each position and pair of channels, with the configured scaling."""
    frequency = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if (s := config.rope_scaling) is not None:
        turns = s.original_context * frequency / (2 * math.pi)
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = jnp.clip(smooth, 0.0, 1.0)
        frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
    if config.yarn is not None:
        kept = _kept_by_yarn(config.yarn, config.head_dim, config.rope_theta)
        frequency = frequency / config.yarn.factor * (1 - kept) + frequency * kept
    return position_BS.astype(jnp.float32)[..., None] * frequency[None, None]


def _kept_by_yarn(yarn: Yarn, head_dim: int, theta: float) -> np.ndarray:
    """Returns the share of each pair's own frequency, 1 for those that turn often."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_of(yarn.beta_fast), pair_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0  # as transformers does
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low)
    return 1 - np.clip(ramp, 0, 1)


def _rope_factor(config: DecoderConfig) -> float | None:
    """Returns YaRN's factor of rotated queries and keys; None without YaRN."""
    if (yarn := config.yarn) is None:
        return None
    factor = yarn.attention_factor
    return (0.1 * math.log(yarn.factor) + 1 if yarn.factor > 1 else 1.0) if factor is None else factor


class Rope(NamedTuple):
    """The rotation of queries and keys: the angles of their positions, and YaRN's factor or None."""

    angles: Float32[Array, "#B S half"]
    factor: float | Float32[Array, ""] | None

    def in_block(self, rotates: Float32[Array, ""] | None) -> "Rope":
        """Returns the rotation of a block: none where `rotates` is 0; None is 1."""
        if rotates is None:
            return self
        factor = None if self.factor is None else 1 + (self.factor - 1) * rotates
        return Rope(self.angles * rotates, factor)


def rope_of(position_BS: Int[Array, "B S"], config: DecoderConfig) -> Rope:
    """Returns the rotation of tokens at these positions."""
    return Rope(rope_angles(position_BS, config), _rope_factor(config))


def apply_rope(x: Float[Array, "B S N H"], rope: Rope) -> Float[Array, "B S N H"]:
    """Rotates channels i and i + H/2 by the angle of their position ("rotate half"), times the factor."""
    cos, sin = (f(rope.angles)[:, :, None, :] for f in (jnp.cos, jnp.sin))
    if rope.factor is not None:
        cos, sin = cos * rope.factor, sin * rope.factor
    if on_gpu():
        return _rotate_reversed(x, cos, sin)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _rotate_reversed(x, cos, sin) -> Float[Array, "B S N H"]:
    """Returns the same bits, on GPUs in less time: XLA reads reversed halves faster than it concatenates.

    With `models.sharding.joined` the gradient of 4 x 4096 tokens, 40 heads of 64, takes 75 us, not 169, on an
    H200.
    """
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
    sin = jnp.stack([-sin, sin], axis=-2)
    return (halves * cos[..., None, :] + halves[..., ::-1, :] * sin).reshape(x.shape).astype(x.dtype)


LONGEST_WHOLE = 1024
"""Longest sequence whose scores exist all at once."""
PIECE = 512
"""Queries whose scores exist at once in longer sequences."""
_CUDNN_HEAD_DIM = 128
_KERNEL_HEAD_DIMS = (64, 128)

Kernel = Literal["cudnn", "ours", "xla"]
"""cuDNN's fused attention; the kernels of `mxjax.kernels.attention`; XLA, long sequences in pieces."""


def block_windows(config: DecoderConfig, length: int) -> Int[Array, " L"] | None:
    """Returns the window of each block, or None if all see whole sequences of this length."""
    if all(not window or window >= length for window in config.windows):
        return None
    return jnp.asarray(config.windows, jnp.int32)


def causal_attention(
    q_BSNH: Float[Array, "B S N H"],
    k_BSGH: Float[Array, "B S G H"],
    v_BSGH: Float[Array, "B S G H"],
    first_key_BS: FirstKey | None = None,
    sinks_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B S N H"]:
    """Returns softmax(q @ k.T / sqrt(H)) @ v, where each position sees itself and earlier ones.

    Query head n reads key and value head n // (N / G). The softmax is in float32. Without a fused kernel,
    sequences longer than LONGEST_WHOLE are processed PIECE queries at a time, and the backward pass
    recomputes their scores: memory grows with B N PIECE S instead of B N S**2.

    Args:
      first_key_BS: the first key that each query sees, from `documents.first_keys`; None is 0.
      sinks_N: a logit of each head that joins the softmax of every query, and has no value.
    """
    length = q_BSNH.shape[1]
    is_plain = first_key_BS is None and sinks_N is None
    kernel = _kernel(q_BSNH, is_plain)
    if kernel == "cudnn":
        return jax.nn.dot_product_attention(q_BSNH, k_BSGH, v_BSGH, is_causal=True, implementation="cudnn")
    if kernel == "ours":
        from mxjax.kernels.attention.fused import fused_attention  # needs Triton

        first_key = None if first_key_BS is None else jnp.broadcast_to(first_key_BS, q_BSNH.shape[:2])
        return fused_attention(q_BSNH, k_BSGH, v_BSGH, first_key=first_key, sinks=sinks_N)
    if not is_plain:
        return _unfused_attention(q_BSNH, k_BSGH, v_BSGH, first_key_BS, sinks_N)
    if length <= LONGEST_WHOLE:
        out = jax.nn.dot_product_attention(q_BSNH, k_BSGH, v_BSGH, is_causal=True, implementation="xla")
        return tag_attention(out)
    return _unfused_attention(q_BSNH, k_BSGH, v_BSGH, None, None)


def _unfused_attention(q_BSNH, k_BSGH, v_BSGH, first_key_BS, sinks_N) -> Float[Array, "B S N H"]:
    length = q_BSNH.shape[1]
    if length <= LONGEST_WHOLE:
        position_S = jnp.arange(length)
        visible_BSS = visible_keys(position_S, position_S, first_key_BS)
        return tag_attention(attend_visible(q_BSNH, k_BSGH, v_BSGH, visible_BSS, sinks_N))
    quarter = -(-length // (4 * PIECE)) * PIECE
    parts = []
    for start in range(0, length, quarter):
        stop = min(start + quarter, length)
        first_key_BP = None if first_key_BS is None else first_key_BS[:, start:stop]
        tensors = q_BSNH[:, start:stop], k_BSGH[:, :stop], v_BSGH[:, :stop]
        parts.append(_attend_part(start, *tensors, first_key_BP, sinks_N))
    return tag_attention(jnp.concatenate(parts, axis=1))


def attend_visible(
    q_BSNH: Float[Array, "B S N H"],
    k_BTGH: Float[Array, "B T G H"],
    v_BTGH: Float[Array, "B T G H"],
    visible_BST: Bool[Array, "#B S T"],
    sinks_N: Float[Array, " N"] | None = None,
) -> Float[Array, "B S N H"]:
    """Returns attention through XLA; each query sees the keys that `visible_BST` names, and the sinks.

    Sinks are one more key and value of zeros, with the sinks as its bias.
    """
    visible_B1ST = visible_BST[:, None]
    if sinks_N is None:
        return jax.nn.dot_product_attention(q_BSNH, k_BTGH, v_BTGH, mask=visible_B1ST, implementation="xla")
    k_BUGH, v_BUGH = (jnp.pad(t, ((0, 0), (0, 1), (0, 0), (0, 0))) for t in (k_BTGH, v_BTGH))
    visible_B1SU = jnp.pad(visible_B1ST, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=True)
    bias_1N1U = jnp.pad(sinks_N[None, :, None, None], ((0, 0), (0, 0), (0, 0), (k_BTGH.shape[1], 0)))
    return jax.nn.dot_product_attention(q_BSNH, k_BUGH, v_BUGH, bias_1N1U, visible_B1SU, implementation="xla")


def score_bytes(q_BSNH: jax.ShapeDtypeStruct, is_plain: bool = True) -> int:
    """Returns the bytes in float32 that exist at once of the scores and their gradients.

    0 if a fused kernel takes these queries, with a mask or sinks if not `is_plain`. Parts of a single piece
    are no loop, so XLA computes all of them together, and keeps a third tensor of each.
    """
    B, S, N, _ = q_BSNH.shape
    if _kernel(q_BSNH, is_plain) != "xla":
        return 0
    if S <= LONGEST_WHOLE:
        return 8 * B * N * S * S
    if S > 4 * PIECE:
        return 8 * B * N * S * PIECE
    return 12 * B * N * PIECE * sum(min(stop, S) for stop in range(PIECE, S + PIECE, PIECE))


def _attend_part(start: int, q_BPNH, k_BTGH, v_BTGH, first_key_BP, sinks_N) -> Float[Array, "B P N H"]:
    """Returns the attention of the queries from position `start` on, PIECE queries at a time.

    Every piece multiplies all keys of the last piece, and a mask removes the later ones. That is a quarter
    more products than necessary, but one loop with the memory of one piece.
    """
    P, key_T = q_BPNH.shape[1], jnp.arange(k_BTGH.shape[1])
    pieces = -(-P // PIECE)

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, pieces * PIECE - P), *((0, 0),) * (x.ndim - 2)))
        return x.reshape(x.shape[0], pieces, PIECE, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def attend(_, piece):
        index, q, first_key = piece
        position = start + index * PIECE + jnp.arange(PIECE)
        visible = visible_keys(position, key_T, first_key)
        return None, attend_visible(q, k_BTGH, v_BTGH, visible, sinks_N)

    first_keys = None if first_key_BP is None else split(first_key_BP)
    _, out = jax.lax.scan(attend, None, (jnp.arange(pieces), split(q_BPNH), first_keys))
    return out.swapaxes(0, 1).reshape(q_BPNH.shape[0], pieces * PIECE, *q_BPNH.shape[2:])[:, :P]


def kernel_on(
    target: Target | None, cuda: bool, q: jax.Array | jax.ShapeDtypeStruct, is_plain: bool
) -> Kernel:
    """Returns the kernel that computes attention of these queries on a device, or "xla".

    Args:
      target: the target of Triton kernels there; None where they do not run.
      cuda: whether it is an NVIDIA GPU.
      q: queries [B, S, N, H]; their shape and dtype count.
      is_plain: whether attention has neither a mask besides the causal one nor sinks.
    """
    _, length, _, head = q.shape
    fits_cudnn = head % 8 == 0 and head <= _CUDNN_HEAD_DIM and length % 2 == 0
    if cuda and is_plain and fits_cudnn and q.dtype in (jnp.bfloat16, jnp.float16):
        return "cudnn"
    fits = q.dtype == jnp.bfloat16 and head in _KERNEL_HEAD_DIMS and math.prod(q.shape[1:]) < 2**31
    takes = target is not None and (target.arch == "gfx950" or (target.backend == "cuda" and not is_plain))
    return "ours" if fits and takes else "xla"


def _kernel(q: jax.Array | jax.ShapeDtypeStruct, is_plain: bool) -> Kernel:
    return kernel_on(current_target(), on_cuda(), q, is_plain)


def on_cuda() -> bool:
    """Returns whether JAX computes on an NVIDIA GPU and lowers for it."""
    target = current_target()
    if target is not None and target.backend == "hip":
        return False
    device = jax.devices()[0]
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
