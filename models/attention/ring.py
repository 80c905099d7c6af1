"""Attention of sequences that the devices of a `context` group share, one row each: "ring attention".

Keys and values pass around the ring of a sequence's devices, each transfer beside the products of the step
before. To share causal work evenly, queries, keys and values change places first: of 2 `parts` chunks, device
i gets chunks i and 2 `parts` - 1 - i. In the first step each device attends to its own chunks; in every other
it multiplies two pairs of whole chunks. Partial results are merged by the logarithms of their sums of
exp(scores). The backward pass recomputes the weights from the sums of whole sequences; gradients of keys and
values go around with them.

Shapes in names as in `models.attention.context`; C = S / 2 counts the tokens of a chunk. Inside
`jax.shard_map`, a device's tensors begin with an axis of its two chunks. Source: arXiv 2310.01889.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, Shaped

from models.attention.partial import Results, attend_part, part_gradients, piece_of, takes_part
from models.sharding import spec, sum_over_rows
from mxjax.runtime.remat import tag_attention


def ring_attention(
    q: Float[Array, "rows S N H"],
    k: Float[Array, "rows S G H"],
    v: Float[Array, "rows S G H"],
    first_key: Int32[Array, "rows S"] | None,
    sinks_N: Float[Array, " N"] | None,
    parts: int,
) -> Float[Array, "rows S N H"]:
    """Returns `models.attention.causal.causal_attention` of sequences in `parts` rows each, one row a device.

    Args:
      first_key: position in its sequence of the first key that each query sees, from
        `models.attention.documents.first_keys`; it never decreases. None is 0.
      sinks_N: as in `causal_attention`.
      parts: rows of a sequence.
    """
    return _ring(parts, q, k, v, first_key, sinks_N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(parts, q, k, v, first_key, sinks_N):
    return _ring_fwd(parts, q, k, v, first_key, sinks_N)[0]


def _ring_fwd(parts, q, k, v, first_key, sinks_N):
    run = _on_devices(_forward, parts, (*_QKV, _FIRST_KEY, _SINKS), (_QUERIES, _LSE))
    kept = tag_attention(run(q, k, v, first_key, sinks_N))
    [out] = _on_devices(lambda ring, x: (ring.to_row(x),), parts, (_QUERIES,), (_QUERIES,))(kept[0])
    return out, (q, k, v, first_key, sinks_N, *kept)


def _ring_bwd(parts, residuals, dout):
    arguments = (*_QKV, _FIRST_KEY, _SINKS, _QUERIES, _LSE, _QUERIES)
    dq, dk, dv, d_sinks = _on_devices(_backward, parts, arguments, (*_QKV, _SINKS))(*residuals, dout)
    return dq, dk, dv, None, d_sinks


_ring.defvjp(_ring_fwd, _ring_bwd)

_QUERIES = ("rows", None, "heads", None)
_QKV = (_QUERIES, _QUERIES, _QUERIES)
_FIRST_KEY, _SINKS = ("rows", None), ("heads",)
_LSE = ("rows", None, "heads")
"""Logical axes. Kept results are in the order of a device's chunks, not of its row."""


def _on_devices(run: Callable[..., Any], parts: int, arguments, results) -> Callable[..., Any]:
    """Returns `run(ring, *shards)` on the shards of arrays with these logical axes."""

    def of_device(*shards):
        return run(Ring(parts, jax.lax.axis_index("context") % parts), *shards)

    return jax.shard_map(
        of_device, in_specs=tuple(map(spec, arguments)), out_specs=tuple(map(spec, results)), check_vma=False
    )


class Ring(NamedTuple):
    """The devices of a sequence, as one of them sees them, inside `jax.shard_map`."""

    parts: int
    device: Int[Array, ""]

    def to_chunks(self, x: Shaped[Array, "1 S *rest"]) -> Shaped[Array, "2 C *rest"]:
        """Returns the chunks that this device works on, from the row that it holds."""
        even, odd = jnp.split(x[0], 2)
        even, odd = (self._send(half, self._places(i)) for i, half in enumerate((even, odd)))
        return jnp.where(self.device % 2 == 0, jnp.stack([even, odd]), jnp.stack([odd, even]))

    def to_row(self, chunks: Shaped[Array, "1 S *rest"]) -> Shaped[Array, "1 S *rest"]:
        """Returns the row that this device holds, from its joined chunks: the inverse of `to_chunks`."""
        chunks = chunks.reshape(2, -1, *chunks.shape[2:])
        halves = jnp.where(self.device % 2 == 0, chunks, chunks[::-1])
        back = [[(place, i) for i, place in self._places(half)] for half in (0, 1)]
        return jnp.concatenate([self._send(halves[i], back[i]) for i in (0, 1)])[None]

    def rotate[T](self, tree: T) -> T:
        """Returns the arrays of the device before this one."""
        pairs = [(i, (i + 1) % self.parts) for i in range(self.parts)]
        return jax.tree.map(lambda x: self._send(x, pairs), tree)

    def starts(self, device: Int[Array, ""], length: int) -> Int[Array, "2"]:
        """Returns the positions of the first tokens of a device's chunks."""
        return jnp.stack([device, 2 * self.parts - 1 - device]) * length

    def step(
        self, i: int, first_key: Int32[Array, "2 C"] | None
    ) -> tuple["_Step", Int32[Array, "2 C"] | None]:
        """Returns the i-th step, and the first key of its pair that each query sees; None is 0."""
        device = (self.device - i) % self.parts
        step = _Step(device < self.device)
        if first_key is None:
            return step, None
        C = first_key.shape[1]
        low = step.of_queries(first_key) - step.of_keys(self.starts(device, C))[:, None]
        return step, jnp.clip(low, 0, C)

    def _places(self, half: int) -> list[tuple[int, int]]:
        """Returns the device of each row, and that which works on the row's first or second half."""
        chunks = [(i, 2 * i + half) for i in range(self.parts)]
        return [(i, chunk if chunk < self.parts else 2 * self.parts - 1 - chunk) for i, chunk in chunks]

    def _send(self, x: Array, pairs: list[tuple[int, int]]) -> Array:
        if all(i == j for i, j in pairs):  # which XLA would not leave out
            return x
        groups = range(0, jax.lax.axis_size("context"), self.parts)
        return jax.lax.ppermute(x, "context", [(g + i, g + j) for g in groups for i, j in pairs])


class _Step(NamedTuple):
    """Two pairs of chunks, which a device multiplies when it has the keys and values of another.

    Its second chunk of queries sees the other's first chunk. Besides, its first chunk sees the first chunk of
    an `earlier` device, or its second chunk the second one of a later device.
    """

    earlier: Bool[Array, ""]

    def of_queries(self, chunks):
        """Returns this device's chunk of each pair."""
        return jnp.stack([chunks[1], self._second(chunks)])

    def of_keys(self, chunks):
        """Returns the other device's chunk of each pair."""
        return jnp.stack([chunks[0], self._second(chunks)])

    def to_queries(self, pairs, fill: float = 0.0):
        """Returns for each pair its part for this device's two chunks, `fill` for the other."""
        return self._to_chunks(pairs, fill, 1)

    def to_keys(self, pairs):
        """Returns for each pair its part for the other device's two chunks, zero for the other."""
        return self._to_chunks(pairs, 0.0, 0)

    def _second(self, chunks):
        return jnp.where(self.earlier, chunks[0], chunks[1])

    def _to_chunks(self, pairs, fill: float, first: int):
        chunk = jnp.arange(2).reshape(2, *(1 for _ in pairs.shape[1:]))
        places = first, jnp.where(self.earlier, 0, 1)
        return [
            jnp.where(chunk == place, pair[None], fill) for place, pair in zip(places, pairs, strict=True)
        ]


def _forward(ring: Ring, q, k, v, first_key, sinks_N):
    """Returns attention and its logarithms of sums of exp(scores) [1, S, N], both in the chunks' order."""
    dtype = q.dtype
    q, k, v, first_key = jax.tree.map(ring.to_chunks, (q, k, v, first_key))
    out, lse = _own(functools.partial(attend_part, sinks_N=sinks_N), ring, q, k, v, first_key)
    for i in range(1, ring.parts):
        k, v = ring.rotate((k, v))
        step, low = ring.step(i, first_key)
        pairs, pairs_lse = attend_part(step.of_queries(q), step.of_keys(k), step.of_keys(v), low)
        new = [lse, *step.to_queries(pairs_lse, -jnp.inf)]
        lse = jax.nn.logsumexp(jnp.stack(new), axis=0)
        shares = [jnp.exp(x - lse)[..., None] for x in new]
        out = out * shares[0] + pairs[0] * shares[1] + pairs[1] * shares[2]
    return _joined(out.astype(dtype)), _joined(lse)


def _backward(ring: Ring, q, k, v, first_key, sinks_N, out, lse, dout):
    """Returns the gradients of q, k, v and the sinks."""
    dtypes = q.dtype, k.dtype, v.dtype
    q, k, v, first_key, dout = jax.tree.map(ring.to_chunks, (q, k, v, first_key, dout))
    out = out.reshape(dout.shape)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    of_queries = Results(out, lse.reshape(delta.shape), dout, delta)
    dq, *dkv = _own(part_gradients, ring, q, k, v, first_key, of_queries)
    of_others = [jnp.zeros_like(d) for d in dkv]  # of the keys and values that are here
    for i in range(1, ring.parts):
        k, v = ring.rotate((k, v))
        of_others = ring.rotate(of_others) if i > 1 else of_others
        step, low = ring.step(i, first_key)
        rows = jax.tree.map(step.of_queries, (q, of_queries))
        dq_pairs, *dkv_pairs = part_gradients(rows[0], step.of_keys(k), step.of_keys(v), low, rows[1])
        dq += sum(step.to_queries(dq_pairs))
        of_others = [d + sum(step.to_keys(pairs)) for d, pairs in zip(of_others, dkv_pairs, strict=True)]
    dkv = [d + more for d, more in zip(dkv, ring.rotate(of_others), strict=True)]
    gradients = zip((dq, *dkv), dtypes, strict=True)
    d_sinks = None
    if sinks_N is not None:
        d_sinks = -jnp.sum(jnp.exp(sinks_N.astype(jnp.float32) - of_queries.lse) * delta, axis=(0, 1))
        d_sinks = sum_over_rows(d_sinks).astype(sinks_N.dtype)
    return (*(ring.to_row(_joined(d.astype(dtype))) for d, dtype in gradients), d_sinks)


def _joined(chunks: Shaped[Array, "2 C *rest"]) -> Shaped[Array, "1 S *rest"]:
    return chunks.reshape(1, -1, *chunks.shape[2:])


def _own(run: Callable[..., Any], ring: Ring, q, k, v, first_key, *rows):
    """Returns `run(..., is_causal=True)` of a device's two chunks as one sequence, again in chunks."""
    C, low = q.shape[1], None
    if first_key is not None:
        before = first_key[..., None] - ring.starts(ring.device, C)
        low = jnp.sum(jnp.clip(before, 0, C), axis=-1)  # its own keys that a query does not see

    def whole(x):
        return x.reshape(1, 2 * C, *x.shape[2:])

    found = run(*jax.tree.map(whole, (q, k, v, low, *rows)), is_causal=True)
    return [x.reshape(2, C, *x.shape[2:]) for x in found]


def ring_bytes(q: jax.ShapeDtypeStruct, kv_heads: int) -> int:
    """Returns the bytes that `ring_attention` needs at once on a device besides its arguments.

    They are the scores of a piece, weights and their gradients, and chunks of queries, keys, values and
    gradients in both precisions.

    Args:
      q: a device's queries [rows, S, N, H].
      kv_heads: a device's key/value heads.
    """
    _, S, N, H = q.shape
    chunks = jax.ShapeDtypeStruct((2, S // 2, N, H), q.dtype)  # which kernels may not take, but rows
    scores = 0 if takes_part(chunks) else 12 * N * piece_of(S) * S
    return scores + S * H * (12 * N + 32 * kv_heads)
