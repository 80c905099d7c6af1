"""Backward kernels of attention: one sums the gradients of keys and values, one those of queries.

Both recompute the scores, and weights = exp(scores - lse). With d_weights = dout @ v.T and
delta = sum(dout * out), d_scores = weights * (d_weights - delta). Each gradient is summed by one program in a
fixed order, without atomics: the same inputs give the same bits. Rows past the end repeat the last row of
memory; a query past the end has an infinite lse, and so weights of 0. `first_key` and CAUSAL are as in the
forward kernel, `queries_end[j]` is the first query after those that see key j, and lse may be of more keys.

Source of the algorithm: FlashAttention-2, arXiv 2307.08691.
"""

import triton
import triton.language as tl

from mxjax.kernels.attention.forward import LOG2_E, head_start, rows_within
from mxjax.kernels.launch import order_on_dies


@triton.jit
def key_gradients_kernel(
    q, k, v, dout, lse, delta, first_key, queries_end, dk, dv, B: tl.constexpr, S: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    XCDS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_K rows of dk and dv [B, S, G, H], over all R query heads; BLOCK_Q divides BLOCK_K.

    q and dout are [B, S, G, R, H], lse and delta [B, G, R, S]. first_key and queries_end [B, S] are read if
    MASKED.
    """
    TILES: tl.constexpr = (S + BLOCK_K - 1) // BLOCK_K
    program = order_on_dies(tl.program_id(0), B * G * TILES, XCDS)
    head = program // TILES  # b G + g
    first = program % TILES * BLOCK_K  # the keys that most queries see come first
    rows, columns, dims = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, H)
    inside = rows_within(first, columns, S, BLOCK_K)
    offsets = inside[:, None] * (G * H) + dims[None, :]
    place = head_start(head // G, head % G, S, G * H, H) + first * (G * H)
    k_tile = tl.load(k + place + offsets)
    v_tile = tl.load(v + place + offsets)
    dk_sum = tl.zeros((BLOCK_K, H), tl.float32)
    dv_sum = tl.zeros((BLOCK_K, H), tl.float32)
    SCALE: tl.constexpr = H**-0.5 * LOG2_E
    begin = first if CAUSAL else 0  # of the queries that see the keys
    end = S
    if MASKED:
        first_key += (head // G).to(tl.int64) * S + begin
        end = tl.load(queries_end + (head // G).to(tl.int64) * S + tl.minimum(first + BLOCK_K, S) - 1)
    BLOCKS = tl.cdiv(end - begin, BLOCK_Q)
    q += head_start(head // G, head % G * R, S, G * R * H, H) + begin * (G * R * H)
    dout += head_start(head // G, head % G * R, S, G * R * H, H) + begin * (G * R * H)
    lse += (head * R).to(tl.int64) * S + begin
    delta += (head * R).to(tl.int64) * S + begin
    for i in tl.range(0, R * BLOCKS):
        r, start = i // BLOCKS, i % BLOCKS * BLOCK_Q  # relative to the first query
        within = rows_within(begin + start, rows, S, BLOCK_Q)
        q_offsets = r * H + start * (G * R * H) + within[:, None] * (G * R * H) + dims[None, :]
        q_tile = tl.load(q + q_offsets)
        dout_tile = tl.load(dout + q_offsets)
        if S % BLOCK_Q == 0:
            log_sum = tl.load(lse + r * S + start + rows)
            correction = tl.load(delta + r * S + start + rows)
        else:
            is_query = rows < S - begin - start
            log_sum = tl.load(lse + r * S + start + rows, mask=is_query, other=float("inf"))
            correction = tl.load(delta + r * S + start + rows, mask=is_query, other=0.0)
        # Scores and weights are transposed, [BLOCK_K, BLOCK_Q].
        scores = tl.dot(k_tile, q_tile.T) * SCALE
        weights = tl.exp2(scores - (log_sum * LOG2_E)[None, :])
        if CAUSAL:
            weights = tl.where((start + rows)[None, :] >= columns[:, None], weights, 0.0)
        if MASKED:
            low = tl.load(first_key + start + within) - first
            weights = tl.where(columns[:, None] >= low[None, :], weights, 0.0)
        d_weights = tl.dot(v_tile, dout_tile.T)
        dv_sum = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_sum)
        d_scores = weights * (d_weights - correction[None, :])
        dk_sum = tl.dot(d_scores.to(q_tile.dtype), q_tile, dk_sum)
    dk_sum = (dk_sum * H**-0.5).to(dk.dtype.element_ty)
    dv_sum = dv_sum.to(dv.dtype.element_ty)
    if S % BLOCK_K == 0:
        tl.store(dk + place + offsets, dk_sum)
        tl.store(dv + place + offsets, dv_sum)
    else:
        tl.store(dk + place + offsets, dk_sum, mask=(columns < S - first)[:, None])
        tl.store(dv + place + offsets, dv_sum, mask=(columns < S - first)[:, None])


@triton.jit
def query_gradients_kernel(
    q, k, v, dout, lse, delta, first_key, dq, B: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    R: tl.constexpr, H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, XCDS: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_Q rows of dq [B, S, G, R, H] of one head; BLOCK_K divides BLOCK_Q."""
    TILES: tl.constexpr = (S + BLOCK_Q - 1) // BLOCK_Q
    program = order_on_dies(tl.program_id(0), B * G * R * TILES, XCDS)
    head = program // TILES  # (b G + g) R + r
    first = (TILES - 1 - program % TILES) * BLOCK_Q  # the tiles with most keys begin first
    rows, columns, dims = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, H)
    inside = rows_within(first, rows, S, BLOCK_Q)
    offsets = inside[:, None] * (G * R * H) + dims[None, :]
    place = head_start(head // (G * R), head % (G * R), S, G * R * H, H) + first * (G * R * H)
    key_value = head_start(head // (G * R), head % (G * R) // R, S, G * H, H)
    statistics = head.to(tl.int64) * S + first
    q_tile = tl.load(q + place + offsets)
    dout_tile = tl.load(dout + place + offsets)
    log_sum = tl.load(lse + statistics + inside) * LOG2_E
    correction = tl.load(delta + statistics + inside)
    k += key_value
    v += key_value
    SCALE: tl.constexpr = H**-0.5 * LOG2_E
    dq_sum = tl.zeros((BLOCK_Q, H), tl.float32)
    earliest = 0
    if MASKED:
        first_key += (head // (G * R)).to(tl.int64) * S + first
        low = tl.load(first_key + inside)
        earliest = tl.load(first_key) // BLOCK_K * BLOCK_K
        seen_by_all = tl.load(first_key + tl.minimum(BLOCK_Q, S - first) - 1)
    # As in the forward kernel, only the blocks without a mask are in a loop.
    for i in tl.static_range(BLOCK_Q // BLOCK_K if CAUSAL else 0):
        start = first + i * BLOCK_K
        kept = rows_within(start, columns, S, BLOCK_Q)[:, None] * (G * H) + dims[None, :]
        k_tile = tl.load(k + start * (G * H) + kept)
        v_tile = tl.load(v + start * (G * H) + kept)
        weights = tl.exp2(tl.dot(q_tile, k_tile.T) * SCALE - log_sum[:, None])
        weights = tl.where((first + rows)[:, None] >= (start + columns)[None, :], weights, 0.0)
        if MASKED:
            weights = tl.where((start + columns)[None, :] >= low[:, None], weights, 0.0)
        d_scores = weights * (tl.dot(dout_tile, v_tile.T) - correction[:, None])
        dq_sum = tl.dot(d_scores.to(k_tile.dtype), k_tile, dq_sum)
    for start in tl.range(earliest, first if CAUSAL else S, BLOCK_K):
        kept = columns[:, None] * (G * H) + dims[None, :]
        k_tile = tl.load(k + start * (G * H) + kept)
        v_tile = tl.load(v + start * (G * H) + kept)
        weights = tl.exp2(tl.dot(q_tile, k_tile.T) * SCALE - log_sum[:, None])
        if MASKED:  # noqa: SIM102, since it is decided at compile time
            if start < seen_by_all:
                weights = tl.where((start + columns)[None, :] >= low[:, None], weights, 0.0)
        d_scores = weights * (tl.dot(dout_tile, v_tile.T) - correction[:, None])
        dq_sum = tl.dot(d_scores.to(k_tile.dtype), k_tile, dq_sum)
    dq_sum = (dq_sum * H**-0.5).to(dq.dtype.element_ty)
    if S % BLOCK_Q == 0:
        tl.store(dq + place + offsets, dq_sum)
    else:
        tl.store(dq + place + offsets, dq_sum, mask=(rows < S - first)[:, None])
