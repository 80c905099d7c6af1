"""Context parallelism: the mesh axis `context` shards sequences.

The tokens of a batch are in rows. Without `context` a row is a sequence. With it the devices of a `context`
group share their sequences: `cut` makes `parts` consecutive rows of each, one for each device, or none if
there is a whole sequence for every device. Rows keep the order of the tokens, so that all products over
tokens, their blocks and their random bits are those of one device. Only RoPE and attention know of it.

In attention each device gathers the keys and values of its sequence; their gradients are summed where they
come from. Shapes in names as in `models.decoder`; S counts the tokens of a row, T those of a sequence.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from models.attention import LONGEST_WHOLE, PIECE, Window, attend_visible
from models.sharding import batch_parts_of, constrain, spec
from mxjax.numerics.formats import BLOCK
from mxjax.runtime.remat import tag_attention


def sequence_parts(sizes: Mapping[str, int], sequences: int, length: int) -> int:
    """Returns into how many rows each of the sequences is cut on a mesh of these sizes.

    Raises:
      ValueError: devices cannot share the sequences evenly, or blocks of Wgrad's tokens would straddle rows.
    """
    devices, own = sizes["context"], sequences // batch_parts_of(sizes)
    if devices == 1 or (own and own % devices == 0):
        return 1
    if not own or devices % own:
        raise ValueError(
            f"--mesh context={devices} needs a divisor or a multiple of {devices} sequences at once in each "
            f"data x fsdp group, got {own}; change --batch-size or --accumulate"
        )
    parts = devices // own
    if length % (BLOCK * parts) or not length:
        above = -(-max(length, 1) // (BLOCK * parts)) * BLOCK * parts
        raise ValueError(
            f"--mesh context={devices} cuts sequences into {parts} parts of whole blocks of {BLOCK} tokens, "
            f"got --seq-len {length}; take {above}"
        )
    return parts


def row_unit(sizes: Mapping[str, int]) -> int:
    """Returns a number of tokens whose multiples every sequence may have; see `sequence_parts`."""
    return BLOCK * sizes["context"] if sizes["context"] > 1 else 1


def cut(x: Shaped[Array, "B T *rest"], parts: int) -> Shaped[Array, "rows S *rest"]:
    """Returns the rows of sequences, on their devices."""
    rows = x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])
    return constrain(rows, "rows", *(None for _ in rows.shape[1:]))


def join(x: Shaped[Array, "rows S *rest"], parts: int) -> Shaped[Array, "B T *rest"]:
    """Returns the sequences of rows: the inverse of `cut`."""
    return x.reshape(x.shape[0] // parts, x.shape[1] * parts, *x.shape[2:])


def positions(rows: int, length: int, parts: int) -> Int[Array, "rows S"]:
    """Returns the position of each token in its sequence."""
    part = jax.lax.broadcasted_iota(jnp.int32, (rows, length), 0) % parts
    return part * length + jax.lax.broadcasted_iota(jnp.int32, (rows, length), 1)


def context_attention(
    q: Float[Array, "rows S N H"],
    k: Float[Array, "rows S G H"],
    v: Float[Array, "rows S G H"],
    window: Window | None,
    sinks_N: Float[Array, " N"] | None,
    parts: int,
) -> Float[Array, "rows S N H"]:
    """Returns `models.attention.causal_attention` of sequences in `parts` rows each, one row a device."""
    first_key = positions(*q.shape[:2], parts)
    if window is None:
        first_key = jnp.zeros_like(first_key)
    else:
        first_key = jnp.where(window > 0, jnp.maximum(first_key - (window - 1), 0), 0)
    sinks = () if sinks_N is None else (sinks_N,)
    of_heads, of_tokens = spec(("rows", None, "heads", None)), spec(("rows", None))
    run = jax.shard_map(
        functools.partial(_gathered_attention, parts=parts),
        in_specs=(of_heads, of_heads, of_heads, of_tokens, *[spec(("heads",)) for _ in sinks]),
        out_specs=of_heads,
        check_vma=False,
    )
    return tag_attention(run(q, k, v, first_key, *sinks))


def _gathered_attention(q_1SNH, k_1SGH, v_1SGH, first_key_1S, *sinks, parts: int):
    """Returns the attention of a device's queries to all keys of their sequence."""
    devices = jax.lax.axis_size("context")
    groups = [list(range(start, start + parts)) for start in range(0, devices, parts)]
    k_1TGH, v_1TGH = (
        jax.lax.all_gather(t, "context", axis=1, tiled=True, axis_index_groups=groups)
        for t in (k_1SGH, v_1SGH)
    )
    S, T = q_1SNH.shape[1], k_1TGH.shape[1]
    start = jax.lax.axis_index("context") % parts * S
    length = _piece(S)

    @jax.checkpoint
    def attend(_, piece):
        q, position, first_key = piece
        key = jnp.arange(T)[None]
        visible_PT = (key <= position[:, None]) & (key >= first_key[:, None])
        return None, attend_visible(q[None], k_1TGH, v_1TGH, visible_PT, *sinks)[0]

    pieces = q_1SNH[0], start + jnp.arange(S), first_key_1S[0]
    _, out = jax.lax.scan(attend, None, jax.tree.map(lambda a: a.reshape(-1, length, *a.shape[1:]), pieces))
    return out.reshape(q_1SNH.shape)


def _piece(S: int) -> int:
    """Returns how many of S queries have their scores at once."""
    return S if S <= LONGEST_WHOLE else next(n for n in range(PIECE, 0, -1) if S % n == 0)


def shared_bytes(q: jax.ShapeDtypeStruct, kv_heads: int, parts: int) -> int:
    """Returns the bytes that `context_attention` needs at once on a device for scores, keys and values.

    Args:
      q: a device's queries [rows, S, N, H].
      kv_heads: a device's key/value heads.
      parts: rows of a sequence.
    """
    _, S, N, H = q.shape
    return 8 * N * _piece(S) * S * parts + 12 * S * parts * kv_heads * H
