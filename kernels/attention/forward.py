"""Forward kernel of attention: a tile of queries passes over the keys that it sees, in order.

Query i sees the keys from `first_key[i]` to i. As `first_key` never decreases, a block of queries sees one
run of keys, and blocks outside it are skipped. If not CAUSAL, the keys are another part of the sequence,
which queries see to its end: then S is a multiple of the blocks, and the lse of a query that sees none is
minus infinity.

The scores stay in registers. The softmax is kept up to date as the keys come ("online"): a running maximum, a
running sum, and a result that is rescaled whenever the maximum grows. Queries past the end repeat the last
row of memory and are not stored; the causal mask alone hides keys past the end from the others.

Source of the algorithm: FlashAttention-2, arXiv 2307.08691.
"""

import triton
import triton.language as tl

from mxjax.kernels.launch import order_on_dies

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def forward_kernel(
    q, k, v, first_key, sinks, out, lse, B: tl.constexpr, S: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    H: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, XCDS: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_Q queries of one head: out [B, S, G, R, H] and lse [B, G, R, S].

    q is [B, S, G, R, H]; k and v are [B, S, G, H]. BLOCK_K divides BLOCK_Q. first_key [B, S] is read if
    MASKED; if SINKS, sinks [B, G, R], a logit of each head that takes weight and has no value.
    """
    TILES: tl.constexpr = (S + BLOCK_Q - 1) // BLOCK_Q
    program = order_on_dies(tl.program_id(0), B * G * R * TILES, XCDS)
    head = program // TILES  # (b G + g) R + r
    first = (TILES - 1 - program % TILES) * BLOCK_Q  # the tiles with most keys begin first
    rows, columns, dims = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K), tl.arange(0, H)
    inside = rows_within(first, rows, S, BLOCK_Q)
    q_offsets = inside[:, None] * (G * R * H) + dims[None, :]
    q += head_start(head // (G * R), head % (G * R), S, G * R * H, H) + first * (G * R * H)
    key_value = head_start(head // (G * R), head % (G * R) // R, S, G * H, H)
    k += key_value
    v += key_value
    q_tile = tl.load(q + q_offsets)
    acc = tl.zeros((BLOCK_Q, H), tl.float32)
    if SINKS:
        total = tl.full((BLOCK_Q,), 1.0, tl.float32)
        largest = tl.zeros((BLOCK_Q,), tl.float32) + tl.load(sinks + head) * LOG2_E
    else:
        total = tl.zeros((BLOCK_Q,), tl.float32)
        largest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    earliest = 0
    if MASKED:
        first_key += (head // (G * R)).to(tl.int64) * S + first
        low = tl.load(first_key + inside)
        earliest = tl.load(first_key) // BLOCK_K * BLOCK_K
        seen_by_all = tl.load(first_key + tl.minimum(BLOCK_Q, S - first) - 1)
    # The masked blocks are not in a loop: with two loops ptxas waits for each wgmma before the next.
    for i in tl.static_range(BLOCK_Q // BLOCK_K if CAUSAL else 0):
        start = first + i * BLOCK_K
        inside = rows_within(start, columns, S, BLOCK_Q)  # a tile of queries may end after S
        k_tile = tl.load(k + start * (G * H) + inside[None, :] * (G * H) + dims[:, None])
        v_tile = tl.load(v + start * (G * H) + inside[:, None] * (G * H) + dims[None, :])
        scores = tl.dot(q_tile, k_tile)
        scores = tl.where((first + rows)[:, None] >= (start + columns)[None, :], scores, float("-inf"))
        if MASKED:
            scores = tl.where((start + columns)[None, :] >= low[:, None], scores, float("-inf"))
        # A query may see none of these keys, and its weights are then exp2(-inf - 0).
        acc, total, largest = _add_values(scores, v_tile, acc, total, largest, H, MASKED)
    for start in tl.range(earliest, first if CAUSAL else S, BLOCK_K):
        k_tile = tl.load(k + start * (G * H) + columns[None, :] * (G * H) + dims[:, None])
        v_tile = tl.load(v + start * (G * H) + columns[:, None] * (G * H) + dims[None, :])
        scores = tl.dot(q_tile, k_tile)
        if MASKED:  # noqa: SIM102, since it is decided at compile time
            if start < seen_by_all:
                scores = tl.where((start + columns)[None, :] >= low[:, None], scores, float("-inf"))
        acc, total, largest = _add_values(scores, v_tile, acc, total, largest, H, not CAUSAL)
    out += head_start(head // (G * R), head % (G * R), S, G * R * H, H) + first * (G * R * H)
    log_total = tl.log2(total if CAUSAL else tl.where(total == 0, 1.0, total))
    result = (acc * tl.exp2(-log_total)[:, None]).to(out.dtype.element_ty)  # without a division
    log_sum = (largest + log_total) * LN_2
    lse += head.to(tl.int64) * S + first
    if S % BLOCK_Q == 0:
        tl.store(out + q_offsets, result)
        tl.store(lse + rows, log_sum)
    else:
        tl.store(out + q_offsets, result, mask=(rows < S - first)[:, None])
        tl.store(lse + rows, log_sum, mask=rows < S - first)


@triton.jit
def _add_values(scores, v_tile, acc, total, largest, H: tl.constexpr, MAY_BE_EMPTY: tl.constexpr):
    """Adds a block of keys to the running softmax."""
    SCALE: tl.constexpr = H**-0.5 * LOG2_E
    new = tl.maximum(largest, tl.max(scores, 1) * SCALE)
    subtracted = tl.where(new == float("-inf"), 0.0, new) if MAY_BE_EMPTY else new
    weights = tl.exp2(scores * SCALE - subtracted[:, None])
    shrink = tl.exp2(largest - subtracted)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
    return acc, total, new


@triton.jit
def head_start(batch, head, S: tl.constexpr, ROW: tl.constexpr, H: tl.constexpr):
    """Returns the offset (int64) of a head's first row in an array of [batch, S, ROW / H heads, H]."""
    return batch.to(tl.int64) * (S * ROW) + head * H


@triton.jit
def rows_within(first, rows, S: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a block's rows relative to `first`; those past S repeat the last."""
    if S % BLOCK != 0:
        rows = tl.minimum(rows, S - 1 - first)
    return rows
