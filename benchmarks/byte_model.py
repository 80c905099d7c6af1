"""A small transformer over bytes in Linen, and batches of the source of Python's standard library."""

import argparse
import inspect
import json
import pathlib
import textwrap
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen

WIDTH, HEADS, BLOCKS, BATCH, TIME = 128, 4, 2, 16, 64


class Model(linen.Module):
    """A causal transformer over bytes."""

    dot_general: Any = None
    width: int = WIDTH
    time: int = TIME

    @linen.compact
    def __call__(self, tokens):
        place = self.param("place", linen.initializers.normal(0.02), (self.time, self.width))
        x = linen.Embed(256, self.width, name="embed")(tokens) + place
        for i in range(BLOCKS):
            x = Block(self.dot_general, name=f"block{i}")(x)
        return linen.Dense(256, name="head")(linen.LayerNorm()(x))


class Block(linen.Module):
    """Attention and an MLP; its linear layers multiply by `dot_general`."""

    dot_general: Any = None

    @linen.compact
    def __call__(self, x):
        dot = {"dot_general": self.dot_general}
        attend = linen.MultiHeadDotProductAttention(
            HEADS, name="attention", qkv_dot_general=self.dot_general, out_dot_general=self.dot_general
        )
        mask = linen.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + attend(linen.LayerNorm()(x), mask=mask)
        hidden = linen.gelu(linen.Dense(4 * x.shape[-1], name="up", **dot)(linen.LayerNorm()(x)))
        return x + linen.Dense(x.shape[-1], name="down", **dot)(hidden)


def batches_of_source(count: int, time: int = TIME) -> np.ndarray:
    """Returns batches [count, BATCH, time + 1] of bytes, drawn from modules of the standard library."""
    text = b"".join(
        pathlib.Path(inspect.getfile(m)).read_bytes() for m in (argparse, inspect, textwrap, json)
    )
    starts = np.random.default_rng(0).integers(0, len(text) - time - 1, (count, BATCH))
    return np.frombuffer(text, np.uint8)[starts[..., None] + np.arange(time + 1)].astype(np.int32)
