"""The backward for small windows, where launches take microseconds and latency is what bounds them.

A program of dQ holds all keys that some neighbouring queries see and goes through the heads of the group, a few at a
time, as the forward does. HELD: registers hold all weights of a row and their gradients, whose product sums to delta,
and the output is not read. What the gradients of keys need of a row (LSE, delta) is left behind. A program of dK, dV
owns a tile of keys and takes the queries that see one of them, two heads at a time. Places of keys and queries count
from the chunk's first token: negative ones are past.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim · W window
Source: FlashAttention-2 (arXiv 2307.08691), attention sinks as in GPT-OSS (arXiv 2508.10925); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_backward import _put_rows
from .triton_window_keys import _own_keys, _page_rows, _seen, _window_keys


@triton.jit
def _window_weights(
    q, dout, k, v, lse, behind, low, exists, scale_log2, WINDOW: tl.constexpr, QUERIES: tl.constexpr,
    START: tl.constexpr, WIDTH: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """A tile's weights and their gradients."""
    s = tl.dot(q, k.T, input_precision="ieee")
    dp = tl.dot(dout, v.T, input_precision="ieee")
    s = _seen(s, float("-inf"), behind, low, exists, WINDOW, QUERIES, START, WIDTH, LIMITED)
    return tl.math.exp2(s * scale_log2 - lse[:, None]), dp


@triton.jit
def _window_dq(
    q_rows, dout_rows, out_rows, dq_rows, lse_ptr, stats_ptr, k, v, exists, low, first_query, group, tokens, padded,
    batch, scale, scale_log2, GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr, TOGETHER: tl.constexpr,
    HELD: tl.constexpr, STAGES: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """dQ of a group's heads; LIMITED: keys may be missing, or lie before a row's `low`."""
    TILES: tl.constexpr = len(WIDTHS)
    row = tl.arange(0, QUERIES * SHARE)
    behind = row // SHARE
    query = first_query + behind
    for step in tl.range(0, REPEAT // SHARE, num_stages=STAGES):
        head = group * REPEAT + step * SHARE
        q = q_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        dout = dout_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        delta = tl.zeros([QUERIES * SHARE], tl.float32)
        if not HELD:
            out = out_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
            delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        line = batch * (GROUPS * REPEAT) + head + row % SHARE
        lse = tl.load(lse_ptr + line.to(tl.int64) * tokens + query, mask=query < tokens, other=float("-inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
        dq = tl.zeros([QUERIES * SHARE, DIM], tl.float32)
        if HELD:
            weights = ()
            dps = ()
            for i in tl.static_range(TILES):
                p, dp = _window_weights(q, dout, k[i], v[i], lse, behind, low, exists[i], scale_log2, WINDOW, QUERIES,
                                        STARTS[i], WIDTHS[i], LIMITED)  # fmt: skip
                delta += tl.sum(p * dp, 1)
                weights += (p,)  # type: ignore[assignment]
                dps += (dp,)  # type: ignore[assignment]
            for i in tl.static_range(TILES):
                dq = tl.dot((weights[i] * (dps[i] - delta[:, None])).to(q.dtype), k[i], dq, input_precision="ieee")
        else:
            for i in tl.static_range(TILES):
                p, dp = _window_weights(q, dout, k[i], v[i], lse, behind, low, exists[i], scale_log2, WINDOW, QUERIES,
                                        STARTS[i], WIDTHS[i], LIMITED)  # fmt: skip
                dq = tl.dot((p * (dp - delta[:, None])).to(q.dtype), k[i], dq, input_precision="ieee")
        place = ((line // TOGETHER).to(tl.int64) * padded + query) * TOGETHER + line % TOGETHER
        tl.store(stats_ptr + place * 2, lse, mask=query < padded)
        tl.store(stats_ptr + place * 2 + 1, delta, mask=query < padded)
        dq_rows.store([batch, first_query, head, 0], (dq * scale).to(q.dtype).reshape(1, QUERIES, SHARE, DIM))


@triton.jit(do_not_specialize=["one_length", "tokens", "padded", "columns", "first"])
def _window_dq_kernel(
    q_rows, dout_rows, out_rows, dq_rows, lse_ptr, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr,
    documents_ptr, stats_ptr, one_length, tokens, padded, columns, first, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SHARE: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    TOGETHER: tl.constexpr, HELD: tl.constexpr, DOCUMENTS: tl.constexpr, UNIFORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid and keys as _window_fwd_kernel. Leaves LSE in base 2 and delta = rowsum(dout * out) in pairs,
    [B * H / TOGETHER, padded, TOGETHER, 2]: what a step of dK, dV reads lies in a row.

    Rows that see nothing, and those behind the end, get LSE = +inf: their probabilities are zero from then on.
    """
    group = tl.program_id(0) % GROUPS
    first_query = tl.program_id(0) // GROUPS * QUERIES
    batch = tl.program_id(1)
    if DOCUMENTS or first_query < WINDOW:
        k, v, exists, low = _window_keys(
            k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, one_length, first_query, columns,
            first, tokens, batch, group, GROUPS, HEAD_DIM, DIM, PAGE, SHARE, QUERIES, WINDOW, STARTS, WIDTHS, DOCUMENTS,
            UNIFORM)  # fmt: skip
        # One stage where the other branch has more: shared memory for the copies of both would not fit.
        _window_dq(q_rows, dout_rows, out_rows, dq_rows, lse_ptr, stats_ptr, k, v, exists, low, first_query, group,
                   tokens, padded, batch, scale, scale_log2, GROUPS, REPEAT, DIM, SHARE, QUERIES, WINDOW, STARTS,
                   WIDTHS, TOGETHER, HELD, STAGES if DOCUMENTS else 1, True)  # fmt: skip
    else:
        k, v = _own_keys(k_own, v_own, first_query, tokens, batch, group, GROUPS, HEAD_DIM, DIM, WINDOW, STARTS, WIDTHS)
        _window_dq(q_rows, dout_rows, out_rows, dq_rows, lse_ptr, stats_ptr, k, v, k, 0, first_query, group, tokens,
                   padded, batch, scale, scale_log2, GROUPS, REPEAT, DIM, SHARE, QUERIES, WINDOW, STARTS, WIDTHS,
                   TOGETHER, HELD, STAGES, False)  # fmt: skip


@triton.jit
def _window_queries(
    k, v, key, from_block, to_block, batch, group, q_rows, dout_rows, documents_ptr, stats_ptr, length, tokens, padded,
    scale_log2, GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK before scaling and dV that blocks [from_block, to_block) of QUERIES queries give to the keys, all heads of
    the group, SHARE a step."""
    STEPS: tl.constexpr = REPEAT // SHARE
    dk = tl.zeros([BLOCK_N, DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], tl.float32)
    row = tl.arange(0, QUERIES * SHARE)
    # Programs whose keys see the same queries take them at the same time, so that one fetch from memory serves all.
    blocks = tl.maximum(to_block - from_block, 1)
    ahead = (blocks - from_block % blocks) % blocks
    for step in tl.range(0, (to_block - from_block) * STEPS, num_stages=STAGES):
        turn = step // STEPS + ahead
        first_query = (from_block + tl.where(turn >= blocks, turn - blocks, turn)) * QUERIES
        head = group * REPEAT + step % STEPS * SHARE
        q = q_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        dout = dout_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        query = first_query + row // SHARE
        place = (batch * (GROUPS * REPEAT) + head).to(tl.int64) * padded + first_query * SHARE + row
        lse, delta = tl.split(tl.load(stats_ptr + place[:, None] * 2 + tl.arange(0, 2)[None, :]))
        s = tl.dot(k, q.T, input_precision="ieee")
        dp = tl.dot(v, dout.T, input_precision="ieee")
        p = tl.math.exp2(s * scale_log2 - lse[None, :])
        seen = (key[:, None] <= query[None, :]) & (key[:, None] > query[None, :] - WINDOW)
        if DOCUMENTS:
            document = tl.load(documents_ptr + batch * tokens + query, mask=query < tokens, other=0)
            seen = seen & (document[None, :] <= length + key[:, None])
        p = tl.where(seen, p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["batch_first", "one_length", "tokens", "padded", "columns", "first", "past_tiles"])
def _window_dkdv_kernel(
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, slots_ptr, grad_slots_ptr, lengths_ptr, documents_ptr, stats_ptr,
    dk_pages_ptr, dv_pages_ptr, dk_own_ptr, dv_own_ptr,
    batch_first, one_length, tokens, padded, columns, first, past_tiles, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SHARE: tl.constexpr, QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    UNIFORM: tl.constexpr, PAST: tl.constexpr, ATOMIC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: ((key tiles of the past, then of the own block) * G, sequences from `batch_first` on).

    Tiles count from the chunk's first token, so that none is part past, part own; one of the past may lie in two pages.
    """
    tile = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    batch = batch_first + tl.program_id(1)
    length = one_length
    if not UNIFORM:
        length = tl.load(lengths_ptr + batch)
    place = (tile - past_tiles) * BLOCK_N
    key = place + tl.arange(0, BLOCK_N)
    past = tile < past_tiles
    exists = key < tokens
    row = ((batch * tokens).to(tl.int64) + key) * GROUPS + group
    grad_row = row
    if PAST:
        if past:
            position = tl.maximum(length + key, 0)
            exists = (length + key >= 0) & (key > -WINDOW)  # what no query sees is neither read nor added to
            table = batch.to(tl.int64) * columns
            grad_row, exists = _page_rows(grad_slots_ptr + table, position, first, columns, group, exists, GROUPS, PAGE)
            row, exists = _page_rows(slots_ptr + table, position, first, columns, group, exists, GROUPS, PAGE)
    dims = tl.arange(0, DIM)[None, :]
    inside = exists[:, None] & (dims < HEAD_DIM)
    offsets = row[:, None] * HEAD_DIM + dims
    k = tl.load(tl.where(past, k_pages, k_own) + offsets, mask=inside, other=0.0)
    v = tl.load(tl.where(past, v_pages, v_own) + offsets, mask=inside, other=0.0)
    start = tl.maximum(place, 0) // QUERIES
    end = tl.maximum(tl.cdiv(tl.minimum(place + BLOCK_N - 1 + WINDOW, tokens), QUERIES), start)
    dk, dv = _window_queries(k, v, key, start, end, batch, group, q_rows, dout_rows, documents_ptr, stats_ptr, length,
                             tokens, padded, scale_log2, GROUPS, REPEAT, DIM, SHARE, QUERIES, BLOCK_N, WINDOW,
                             DOCUMENTS, STAGES)  # fmt: skip
    dk = dk * scale
    offsets = grad_row[:, None] * HEAD_DIM + dims
    if past:
        _put_rows(dk_pages_ptr, offsets, inside, dk, True, ATOMIC)
        _put_rows(dv_pages_ptr, offsets, inside, dv, True, ATOMIC)
    else:
        _put_rows(dk_own_ptr, offsets, inside, dk, False, ATOMIC)
        _put_rows(dv_own_ptr, offsets, inside, dv, False, ATOMIC)
