"""The backward for small windows, where launches take microseconds and latency is what bounds them.

A program of dQ holds all keys that some neighbouring queries see and goes through the heads of the group, a few at a
time, as the forward does. What the gradients of keys need of a row (LSE, delta) is made by dQ on its way. A program of
dK, dV owns a tile of keys and takes the queries that see one of them, two heads at a time. Places of keys and queries
count from the chunk's first token: negative ones are past.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim · W window
Source: FlashAttention-2 (arXiv 2307.08691), attention sinks as in GPT-OSS (arXiv 2508.10925); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_backward import _put_rows
from .triton_window_keys import _page_rows, _seen, _window_keys


@triton.jit
def _window_dq(
    q_rows, dout_rows, out_rows, dq_rows, lse_ptr, lse_rows_ptr, delta_rows_ptr, k, v, exists, low, first_query, group,
    heads, tokens, padded, batch, scale, scale_log2, GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr,
    SHARE: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    TOGETHER: tl.constexpr, STAGES: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """dQ of the first `heads` of a group; LIMITED: keys may be missing, or lie before a row's `low`."""
    TILES: tl.constexpr = len(WIDTHS)
    row = tl.arange(0, QUERIES * SHARE)
    behind = row // SHARE
    query = first_query + behind
    for step in tl.range(0, heads // SHARE, num_stages=STAGES):
        head = group * REPEAT + step * SHARE
        q = q_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        dout = dout_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        out = out_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        line = batch * (GROUPS * REPEAT) + head + row % SHARE
        lse = tl.load(lse_ptr + line.to(tl.int64) * tokens + query, mask=query < tokens, other=float("-inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
        dq = tl.zeros([QUERIES * SHARE, DIM], tl.float32)
        for i in tl.static_range(TILES):
            s = tl.dot(q, k[i].T, input_precision="ieee")
            dp = tl.dot(dout, v[i].T, input_precision="ieee")
            s = _seen(s, float("-inf"), behind, low, exists[i], WINDOW, QUERIES, STARTS[i], WIDTHS[i], LIMITED)
            ds = tl.math.exp2(s * scale_log2 - lse[:, None]) * (dp - delta[:, None])
            dq = tl.dot(ds.to(q.dtype), k[i], dq, input_precision="ieee")
        place = ((line // TOGETHER).to(tl.int64) * padded + query) * TOGETHER + line % TOGETHER
        tl.store(lse_rows_ptr + place, lse, mask=query < padded)
        tl.store(delta_rows_ptr + place, delta, mask=query < padded)
        dq_rows.store([batch, first_query, head, 0], (dq * scale).to(q.dtype).reshape(1, QUERIES, SHARE, DIM))


@triton.jit(do_not_specialize=["one_length", "tokens", "padded", "columns", "first"])
def _window_dq_kernel(
    q_rows, dout_rows, out_rows, dq_rows, lse_ptr, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr,
    documents_ptr, lse_rows_ptr, delta_rows_ptr, one_length, tokens, padded, columns, first, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SHARE: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    TOGETHER: tl.constexpr, DOCUMENTS: tl.constexpr, UNIFORM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid and keys as _window_fwd_kernel. Leaves LSE in base 2 and delta = rowsum(dout * out), each
    [B * H / TOGETHER, padded, TOGETHER]: what a step of dK, dV reads lies in a row.

    Rows that see nothing, and those behind the end, get LSE = +inf: their probabilities are zero from then on.
    """
    group = tl.program_id(0) % GROUPS
    first_query = tl.program_id(0) // GROUPS * QUERIES
    batch = tl.program_id(1)
    k, v, exists, low, limited = _window_keys(
        k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, one_length, first_query, columns, first,
        tokens, batch, group, GROUPS, REPEAT, HEAD_DIM, DIM, PAGE, SHARE, QUERIES, WINDOW, STARTS, WIDTHS, DOCUMENTS,
        UNIFORM)  # fmt: skip
    _window_dq(q_rows, dout_rows, out_rows, dq_rows, lse_ptr, lse_rows_ptr, delta_rows_ptr, k, v, exists, low,
               first_query, group, limited, tokens, padded, batch, scale, scale_log2, GROUPS, REPEAT, DIM, SHARE,
               QUERIES, WINDOW, STARTS, WIDTHS, TOGETHER, STAGES, True)  # fmt: skip
    if not DOCUMENTS:
        _window_dq(q_rows, dout_rows, out_rows, dq_rows, lse_ptr, lse_rows_ptr, delta_rows_ptr, k, v, exists, low,
                   first_query, group, REPEAT - limited, tokens, padded, batch, scale, scale_log2, GROUPS, REPEAT, DIM,
                   SHARE, QUERIES, WINDOW, STARTS, WIDTHS, TOGETHER, STAGES, False)  # fmt: skip


@triton.jit
def _window_queries(
    k, v, key, from_block, to_block, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr, delta_ptr, length, tokens,
    padded, scale_log2, GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK before scaling and dV that blocks [from_block, to_block) of QUERIES queries give to the keys, all heads of
    the group, SHARE a step."""
    STEPS: tl.constexpr = REPEAT // SHARE
    dk = tl.zeros([BLOCK_N, DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], tl.float32)
    row = tl.arange(0, QUERIES * SHARE)
    for step in tl.range(0, (to_block - from_block) * STEPS, num_stages=STAGES):
        first_query = (from_block + step // STEPS) * QUERIES
        head = group * REPEAT + step % STEPS * SHARE
        q = q_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        dout = dout_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        query = first_query + row // SHARE
        place = (batch * (GROUPS * REPEAT) + head).to(tl.int64) * padded + first_query * SHARE + row
        lse = tl.load(lse_ptr + place)
        delta = tl.load(delta_ptr + place)
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
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, slots_ptr, grad_slots_ptr, lengths_ptr, documents_ptr, lse_ptr,
    delta_ptr, dk_pages_ptr, dv_pages_ptr, dk_own_ptr, dv_own_ptr,
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
    dk, dv = _window_queries(k, v, key, start, end, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr, delta_ptr,
                             length, tokens, padded, scale_log2, GROUPS, REPEAT, DIM, SHARE, QUERIES, BLOCK_N, WINDOW,
                             DOCUMENTS, STAGES)  # fmt: skip
    dk = dk * scale
    offsets = grad_row[:, None] * HEAD_DIM + dims
    if past:
        _put_rows(dk_pages_ptr, offsets, inside, dk, True, ATOMIC)
        _put_rows(dv_pages_ptr, offsets, inside, dv, True, ATOMIC)
    else:
        _put_rows(dk_own_ptr, offsets, inside, dk, False, ATOMIC)
        _put_rows(dv_own_ptr, offsets, inside, dv, False, ATOMIC)
