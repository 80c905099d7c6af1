"""Rotary position embedding, with Llama 3.1's scaling of the angles.

Shapes in names as in `models.llama`. Sources: "RoFormer", arXiv 2104.09864; "The Llama 3 Herd of Models",
arXiv 2407.21783, section 3.2.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from models.configs import LlamaConfig


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
