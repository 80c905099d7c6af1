"""Causal attention with rotary position embedding: fused where a kernel runs, else in pieces.

cuDNN runs it on NVIDIA GPUs and `mxjax.kernels.attention` on gfx950. The result is exact; only the order of
summation differs. Shapes in names as in `models.llama`.

Sources: "RoFormer", arXiv 2104.09864; "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.2.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from models.configs import LlamaConfig
from mxjax.runtime.devices import current_target
from mxjax.runtime.remat import tag_attention


def rope_angles(length: int, config: LlamaConfig) -> Float32[Array, "S half"]:
    """Returns the rotation angle of each position and pair of channels, with the configured scaling."""
    frequency = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim)
    if (s := config.rope_scaling) is not None:
        turns = s.original_context * frequency / (2 * math.pi)
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = jnp.clip(smooth, 0.0, 1.0)
        frequency = (1 - smooth) * frequency / s.factor + smooth * frequency
    return jnp.arange(length, dtype=jnp.float32)[:, None] * frequency[None, :]


def apply_rope(x: Float[Array, "B S N H"], angles: Float32[Array, "S half"]) -> Float[Array, "B S N H"]:
    """Rotates channels i and i + H/2 by the angle of their position ("rotate half")."""
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


LONGEST_WHOLE = 1024
"""Longest sequence whose scores exist all at once."""
PIECE = 512
"""Queries whose scores exist at once in longer sequences."""
_CUDNN_HEAD_DIM = 128
_GFX950_HEAD_DIMS = (64, 128)


def causal_attention(
    q_BSNH: Float[Array, "B S N H"], k_BSGH: Float[Array, "B S G H"], v_BSGH: Float[Array, "B S G H"]
) -> Float[Array, "B S N H"]:
    """Returns softmax(q @ k.T / sqrt(H)) @ v, where each position sees itself and earlier ones.

    Query head n reads key and value head n // (N / G). The softmax is in float32. Without a fused kernel,
    sequences longer than LONGEST_WHOLE are processed PIECE queries at a time, and the backward pass
    recomputes their scores: memory grows with B N PIECE S instead of B N S**2.
    """
    if _cudnn_takes(q_BSNH):
        return jax.nn.dot_product_attention(q_BSNH, k_BSGH, v_BSGH, is_causal=True, implementation="cudnn")
    if _gfx950_takes(q_BSNH):
        from mxjax.kernels.attention.fused import fused_attention  # needs Triton

        return fused_attention(q_BSNH, k_BSGH, v_BSGH)
    length = q_BSNH.shape[1]
    if length <= LONGEST_WHOLE:
        out = jax.nn.dot_product_attention(q_BSNH, k_BSGH, v_BSGH, is_causal=True, implementation="xla")
        return tag_attention(out)
    quarter = -(-length // (4 * PIECE)) * PIECE
    parts = []
    for start in range(0, length, quarter):
        stop = min(start + quarter, length)
        parts.append(_attend_part(start, q_BSNH[:, start:stop], k_BSGH[:, :stop], v_BSGH[:, :stop]))
    return tag_attention(jnp.concatenate(parts, axis=1))


def score_bytes(q_BSNH: jax.ShapeDtypeStruct) -> int:
    """Returns the bytes in float32 that exist at once of the scores and their gradients.

    0 if a fused kernel takes these queries. Parts of a single piece are no loop, so XLA computes all of them
    together, and keeps a third tensor of each.
    """
    B, S, N, _ = q_BSNH.shape
    if _cudnn_takes(q_BSNH) or _gfx950_takes(q_BSNH):
        return 0
    if S <= LONGEST_WHOLE:
        return 8 * B * N * S * S
    if S > 4 * PIECE:
        return 8 * B * N * S * PIECE
    return 12 * B * N * PIECE * sum(min(stop, S) for stop in range(PIECE, S + PIECE, PIECE))


def _attend_part(start: int, q_BPNH, k_BTGH, v_BTGH) -> Float[Array, "B P N H"]:
    """Returns the attention of the queries from position `start` on, PIECE queries at a time.

    Every piece multiplies all keys of the last piece, and a mask removes the later ones. That is a quarter
    more products than necessary, but one loop with the memory of one piece.
    """
    B, P, N, H = q_BPNH.shape
    pieces = -(-P // PIECE)
    q_BPNH = jnp.pad(q_BPNH, ((0, 0), (0, pieces * PIECE - P), (0, 0), (0, 0)))
    q_piece = q_BPNH.reshape(B, pieces, PIECE, N, H).swapaxes(0, 1)

    @jax.checkpoint
    def attend(_, piece):
        index, q = piece
        position = start + index * PIECE + jnp.arange(PIECE)
        visible = position[:, None] >= jnp.arange(k_BTGH.shape[1])[None, :]
        return None, jax.nn.dot_product_attention(q, k_BTGH, v_BTGH, mask=visible, implementation="xla")

    _, out = jax.lax.scan(attend, None, (jnp.arange(pieces), q_piece))
    return out.swapaxes(0, 1).reshape(B, pieces * PIECE, N, H)[:, :P]


def _cudnn_takes(q: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether cuDNN's fused attention runs here and supports these heads and lengths."""
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= _CUDNN_HEAD_DIM and q.shape[1] % 2 == 0
    return fits and q.dtype in (jnp.bfloat16, jnp.float16) and on_cuda()


def _gfx950_takes(q: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Returns whether the program is for gfx950, with Triton, and the kernels support these heads."""
    target = current_target()
    fits = q.dtype == jnp.bfloat16 and q.shape[-1] in _GFX950_HEAD_DIMS and math.prod(q.shape[1:]) < 2**31
    return fits and target is not None and target.arch == "gfx950"


def on_cuda() -> bool:
    """Returns whether JAX computes on an NVIDIA GPU and lowers for it."""
    target = current_target()
    if target is not None and target.backend == "hip":
        return False
    device = jax.devices()[0]
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
