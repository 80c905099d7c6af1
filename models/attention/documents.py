"""Documents of packed sequences: where each begins, and which keys its queries see.

A token `end` ends a document and belongs to it. What precedes the first one in a sequence is the rest of a
document that the sequence's start cuts. Shapes in names as in `models.decoder`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Window = Int[Array, ""]
"""The number of tokens that a query sees, itself included; 0 is all."""
FirstKey = Int[Array, "#B S"]
"""The first key that each query sees: it, and every later one up to the query's own."""


class Documents(NamedTuple):
    """The documents that attention keeps apart; hashable.

    Attributes:
      end: id of the token that ends a document.
      restart_positions: whether positions count from each document's first token.
    """

    end: int
    restart_positions: bool = False


def document_starts(
    tokens_BS: Int[Array, "B S"],
    end: int,
    before_B: Int[Array, " B"] | int = 0,
    start: Int[Array, ""] | int = 0,
) -> Int[Array, "B S"]:
    """Returns the position of the first token of each token's document.

    Args:
      end: the token that ends a document.
      before_B: the first position of the document to which the first of the tokens belongs.
      start: position of the first of the tokens.
    """
    position_BS = start + jax.lax.broadcasted_iota(jnp.int32, tokens_BS.shape, 1)
    begins_BS = jnp.where(tokens_BS[:, :-1] == end, position_BS[:, 1:], 0)
    first_B1 = jnp.broadcast_to(jnp.asarray(before_B, jnp.int32), tokens_BS.shape[:1])[:, None]
    return jax.lax.cummax(jnp.concatenate([first_B1, begins_BS], axis=1), axis=1)


def first_keys(
    starts_BS: FirstKey, window: Window | int | None = None, start: Int[Array, ""] | int = 0
) -> FirstKey:
    """Returns the first key that each query sees.

    Args:
      starts_BS: the position of the first token of each query's document; 0 without documents.
      window: hides tokens that are as far away, or farther; None hides none.
      start: position of the first query.
    """
    if window is None:
        return starts_BS
    position_1S = start + jax.lax.broadcasted_iota(jnp.int32, (1, starts_BS.shape[1]), 1)
    return jnp.where(window > 0, jnp.maximum(starts_BS, position_1S - (window - 1)), starts_BS)


def visible_keys(
    position_S: Int[Array, " S"], key_T: Int[Array, " T"], first_key_BS: FirstKey | None = None
) -> Bool[Array, "#B S T"]:
    """Returns which of the keys at positions `key_T` the queries at `position_S` see."""
    key_11T = key_T[None, None, :]
    visible_1ST = key_11T <= position_S[None, :, None]
    return visible_1ST if first_key_BS is None else visible_1ST & (key_11T >= first_key_BS[:, :, None])
