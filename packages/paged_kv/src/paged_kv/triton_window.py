"""Kernels for windows of a few tiles, where launches take microseconds and memory is what bounds them.

A tile of neighbouring queries of one KV head sees `window + queries - 1` keys. A program of the forward and of dQ reads
them all at once, wherever they lie (pages or own block), so that there is no loop: the scores of a row are together in
registers, its softmax is a plain one, and only the tiles of keys at either edge of the window are masked. What the
backward needs of a row (LSE, delta) is made by dQ on its way and read by dK, dV, whose programs own a tile of keys.
Places of keys and queries count from the chunk's first token: negative ones are past.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim · W window
    M = C * R rows of a KV head, row r being query `r // R` and head `group * R + r % R`
Source: FlashAttention-2 (arXiv 2307.08691), attention sinks as in GPT-OSS (arXiv 2508.10925); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_backward import _put_rows
from .triton_forward import _row_places


@triton.jit
def _page_rows(
    table_ptr, position, first, columns, group, exists, GROUPS: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Rows of [slots * P * G] where positions of the past lie by a table of slots, and which of them are there."""
    column = (position - first) // PAGE
    exists = exists & (position >= first) & (column < columns)
    slot = tl.load(table_ptr + column, mask=exists, other=-1)
    exists = exists & (slot >= 0)
    return (tl.maximum(slot, 0).to(tl.int64) * PAGE + position % PAGE) * GROUPS + group, exists


@triton.jit
def _window_keys(
    k_own, v_own, k_pages, v_pages, table_ptr, place, length, first, columns, tokens, batch, group,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """Keys and values at places of a window, zeros where there are none, and which exist. PAST: some may be past."""
    dims = tl.arange(0, DIM)[None, :]
    inside = dims < HEAD_DIM
    exists = place < tokens
    if PAST:
        exists = exists & (place >= 0)
    own = ((batch * tokens).to(tl.int64) + place) * GROUPS + group
    k_ptrs = k_own + own[:, None] * HEAD_DIM + dims
    v_ptrs = v_own + own[:, None] * HEAD_DIM + dims
    if PAST:
        past = (place < 0) & (length + place >= 0)
        row, past = _page_rows(table_ptr, tl.maximum(length + place, 0), first, columns, group, past, GROUPS, PAGE)
        k_ptrs = tl.where(past[:, None], k_pages + row[:, None] * HEAD_DIM + dims, k_ptrs)
        v_ptrs = tl.where(past[:, None], v_pages + row[:, None] * HEAD_DIM + dims, v_ptrs)
        exists = exists | past
    k = tl.load(k_ptrs, mask=exists[:, None] & inside, other=0.0)
    v = tl.load(v_ptrs, mask=exists[:, None] & inside, other=0.0)
    return k, v, exists


@triton.jit
def _window_tiles(
    k_own, v_own, k_pages, v_pages, table_ptr, base, length, first, columns, tokens, batch, group,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, STARTS: tl.constexpr,
    WIDTHS: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """All keys and values from `base` on, in tiles of WIDTHS. Their loads are under way together."""
    k_tiles = ()
    v_tiles = ()
    exists = ()
    for i in tl.static_range(len(WIDTHS)):
        place = base + STARTS[i] + tl.arange(0, WIDTHS[i])
        k, v, there = _window_keys(k_own, v_own, k_pages, v_pages, table_ptr, place, length, first, columns, tokens,
                                   batch, group, GROUPS, HEAD_DIM, DIM, PAGE, PAST)  # fmt: skip
        k_tiles += (k,)  # type: ignore[assignment]
        v_tiles += (v,)  # type: ignore[assignment]
        exists += (there,)  # type: ignore[assignment]
    return k_tiles, v_tiles, exists


@triton.jit
def _hide(
    x, other, exists, row_low, behind, WINDOW: tl.constexpr, QUERIES: tl.constexpr, START: tl.constexpr,
    WIDTH: tl.constexpr, EVERYWHERE: tl.constexpr,
):  # fmt: skip
    """`other` where a row does not see the key. Without EVERYWHERE only the window's edges are looked at."""
    place = START + tl.arange(0, WIDTH)
    if EVERYWHERE or START < QUERIES - 1:
        x = tl.where(place[None, :] >= row_low[:, None], x, other)
    if EVERYWHERE or START + WIDTH > WINDOW:
        x = tl.where(place[None, :] < behind[:, None] + WINDOW, x, other)
    if EVERYWHERE:
        x = tl.where(exists[None, :], x, other)
    return x


@triton.jit
def _window_fwd(
    q_ptrs, row_low, behind, k_own, v_own, k_pages, v_pages, table_ptr, base, length, first, columns, tokens, batch,
    group, scale_log2, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    EDGES: tl.constexpr, DOCUMENTS: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """Softmax over the keys at [base, base + sum(WIDTHS)), of which row r sees [row_low[r], behind[r] + WINDOW).

    Returns: the sum of weighted values, the largest score and the sum of weights of each row. Scores are in base 2.
    """
    k_tiles, v_tiles, exists = _window_tiles(k_own, v_own, k_pages, v_pages, table_ptr, base, length, first, columns,
                                             tokens, batch, group, GROUPS, HEAD_DIM, DIM, PAGE, STARTS, WIDTHS,
                                             PAST)  # fmt: skip
    inside = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    scores = ()
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        s = tl.dot(q, k_tiles[i].T, input_precision="ieee")
        if PAST or DOCUMENTS or EDGES[i]:
            s = _hide(s * scale_log2, float("-inf"), exists[i], row_low, behind, WINDOW, QUERIES, STARTS[i], WIDTHS[i],
                      PAST or DOCUMENTS)  # fmt: skip
            top = tl.maximum(top, tl.max(s, 1))
        else:
            top = tl.maximum(top, tl.max(s, 1) * scale_log2)
        scores += (s,)  # type: ignore[assignment]
    shift = tl.where(top == float("-inf"), 0.0, top)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        if PAST or DOCUMENTS or EDGES[i]:
            p = tl.math.exp2(scores[i] - shift[:, None])
        else:
            p = tl.math.exp2(scores[i] * scale_log2 - shift[:, None])
        l += tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v_tiles[i], acc, input_precision="ieee")
    return acc, top, l


@triton.jit(do_not_specialize=["one_length", "tokens", "columns", "first"])
def _window_fwd_kernel(
    q_ptr, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, sinks_ptr, out_ptr, lse_ptr,
    one_length, tokens, columns, first, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    EDGES: tl.constexpr, DOCUMENTS: tl.constexpr, UNIFORM: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * G, B), groups innermost: programs that run together read neighbouring memory."""
    tile_m = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    batch = tl.program_id(1)
    HEADS: tl.constexpr = GROUPS * REPEAT
    offsets, stats, query, valid = _row_places(tile_m, batch, group, tokens, REPEAT, HEADS, HEAD_DIM, DIM, BLOCK_M)
    inside = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    first_query = tile_m * BLOCK_M // REPEAT
    base = first_query - WINDOW + 1
    length = one_length
    if not UNIFORM:
        length = tl.load(lengths_ptr + batch)
    table = slots_ptr + batch.to(tl.int64) * columns
    behind = query - first_query
    row_low = behind
    if DOCUMENTS:
        row_low = tl.maximum(row_low, tl.load(documents_ptr + batch * tokens + query) - length - base)
    sink = 0.0
    if SINKS:
        sink = tl.load(sinks_ptr + group * REPEAT + (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % REPEAT)
        sink = sink.to(tl.float32) * 1.4426950408889634
    if base >= 0:
        acc, m, l = _window_fwd(q_ptr + offsets, row_low, behind, k_own, v_own, k_pages, v_pages, table, base, length,
                                first, columns, tokens, batch, group, scale_log2, GROUPS, HEAD_DIM, DIM, PAGE, BLOCK_M,
                                WINDOW, QUERIES, STARTS, WIDTHS, EDGES, DOCUMENTS, False)  # fmt: skip
    else:
        acc, m, l = _window_fwd(q_ptr + offsets, row_low, behind, k_own, v_own, k_pages, v_pages, table, base, length,
                                first, columns, tokens, batch, group, scale_log2, GROUPS, HEAD_DIM, DIM, PAGE, BLOCK_M,
                                WINDOW, QUERIES, STARTS, WIDTHS, EDGES, DOCUMENTS, True)  # fmt: skip
    if SINKS:  # one more logit, whose value is zero
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.math.exp2(m - top)
        l = l * shrink + tl.math.exp2(sink - top)
        acc = acc * shrink[:, None]
        m = top
    unseen = l == 0.0
    out = acc * (1.0 / tl.where(unseen, 1.0, l))[:, None]
    lse = tl.where(unseen, float("-inf"), (m + tl.math.log2(tl.where(unseen, 1.0, l))) * 0.6931471805599453)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside)
    tl.store(lse_ptr + stats, lse, mask=valid)


@triton.jit
def _window_dq(
    q_ptrs, dout_ptrs, out_ptrs, lse, row_low, behind, k_own, v_own, k_pages, v_pages, table_ptr, base, length, first,
    columns, tokens, batch, group, scale_log2, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, STARTS: tl.constexpr,
    WIDTHS: tl.constexpr, EDGES: tl.constexpr, DOCUMENTS: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """dQ before scaling, and delta = rowsum(dout * out); the arguments mean what they mean in `_window_fwd`."""
    k_tiles, v_tiles, exists = _window_tiles(k_own, v_own, k_pages, v_pages, table_ptr, base, length, first, columns,
                                             tokens, batch, group, GROUPS, HEAD_DIM, DIM, PAGE, STARTS, WIDTHS,
                                             PAST)  # fmt: skip
    inside = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    q = tl.load(q_ptrs, mask=inside, other=0.0)
    dout = tl.load(dout_ptrs, mask=inside, other=0.0)
    out = tl.load(out_ptrs, mask=inside, other=0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    dq = tl.zeros([BLOCK_M, DIM], tl.float32)
    for i in tl.static_range(len(WIDTHS)):
        s = tl.dot(q, k_tiles[i].T, input_precision="ieee")
        dp = tl.dot(dout, v_tiles[i].T, input_precision="ieee")
        ds = tl.math.exp2(s * scale_log2 - lse[:, None]) * (dp - delta[:, None])
        if PAST or DOCUMENTS or EDGES[i]:
            ds = _hide(ds, 0.0, exists[i], row_low, behind, WINDOW, QUERIES, STARTS[i], WIDTHS[i],
                       PAST or DOCUMENTS)  # fmt: skip
        dq = tl.dot(ds.to(q.dtype), k_tiles[i], dq, input_precision="ieee")
    return dq, delta


@triton.jit(do_not_specialize=["one_length", "tokens", "columns", "first"])
def _window_dq_kernel(
    q_ptr, dout_ptr, out_ptr, lse_ptr, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr,
    lse_rows_ptr, delta_rows_ptr, dq_ptr, one_length, tokens, columns, first, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    EDGES: tl.constexpr, DOCUMENTS: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * G, B). Leaves LSE in base 2 and delta = rowsum(dout * out) by rows, [B * G, M].

    Rows that see nothing get LSE = +inf: their probabilities are zero from then on.
    """
    tile_m = tl.program_id(0) // GROUPS
    group = tl.program_id(0) % GROUPS
    batch = tl.program_id(1)
    HEADS: tl.constexpr = GROUPS * REPEAT
    offsets, stats, query, valid = _row_places(tile_m, batch, group, tokens, REPEAT, HEADS, HEAD_DIM, DIM, BLOCK_M)
    inside = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    lse = tl.load(lse_ptr + stats)
    first_query = tile_m * BLOCK_M // REPEAT
    base = first_query - WINDOW + 1
    length = one_length
    if not UNIFORM:
        length = tl.load(lengths_ptr + batch)
    table = slots_ptr + batch.to(tl.int64) * columns
    behind = query - first_query
    row_low = behind
    if DOCUMENTS:
        row_low = tl.maximum(row_low, tl.load(documents_ptr + batch * tokens + query) - length - base)
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    if base >= 0:
        dq, delta = _window_dq(q_ptr + offsets, dout_ptr + offsets, out_ptr + offsets, lse, row_low, behind, k_own,
                               v_own, k_pages, v_pages, table, base, length, first, columns, tokens, batch, group,
                               scale_log2, GROUPS, HEAD_DIM, DIM, PAGE, BLOCK_M, WINDOW, QUERIES, STARTS, WIDTHS,
                               EDGES, DOCUMENTS, False)  # fmt: skip
    else:
        dq, delta = _window_dq(q_ptr + offsets, dout_ptr + offsets, out_ptr + offsets, lse, row_low, behind, k_own,
                               v_own, k_pages, v_pages, table, base, length, first, columns, tokens, batch, group,
                               scale_log2, GROUPS, HEAD_DIM, DIM, PAGE, BLOCK_M, WINDOW, QUERIES, STARTS, WIDTHS,
                               EDGES, DOCUMENTS, True)  # fmt: skip
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    place = (batch * GROUPS + group).to(tl.int64) * tokens * REPEAT + rows
    tl.store(lse_rows_ptr + place, lse, mask=valid)
    tl.store(delta_rows_ptr + place, delta, mask=valid)
    tl.store(dq_ptr + offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=valid[:, None] & inside)


@triton.jit
def _window_key_tile(
    k, v, place, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr, delta_ptr, length, tokens, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK before scaling and dV of the keys at [place, place + BLOCK_N), from all queries that see one of them."""
    HEADS: tl.constexpr = GROUPS * REPEAT
    key = place + tl.arange(0, BLOCK_N)
    first_query = tl.maximum(place, 0)
    last_query = tl.minimum(place + BLOCK_N - 1 + WINDOW, tokens)
    steps = tl.cdiv((last_query - first_query) * REPEAT, BLOCK_M)
    block = (batch * GROUPS + group).to(tl.int64) * tokens * REPEAT
    dims = tl.arange(0, DIM)
    dk = tl.zeros([BLOCK_N, DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        rows = first_query * REPEAT + step * BLOCK_M + tl.arange(0, BLOCK_M)
        query = rows // REPEAT
        there = query < tokens
        if TMA:  # a tile is whole queries of this group, a box of [B, C, H, D]
            q = q_rows.load([batch, first_query + step * (BLOCK_M // REPEAT), group * REPEAT, 0])
            q = q.reshape(BLOCK_M, DIM)
            dout = dout_rows.load([batch, first_query + step * (BLOCK_M // REPEAT), group * REPEAT, 0])
            dout = dout.reshape(BLOCK_M, DIM)
        else:
            row = (batch * tokens).to(tl.int64) + tl.minimum(query, tokens - 1)
            row = row * HEADS + group * REPEAT + rows % REPEAT
            offsets = row[:, None] * HEAD_DIM + dims[None, :]
            q = tl.load(q_rows + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            dout = tl.load(dout_rows + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        lse = tl.load(lse_ptr + block + rows, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + block + rows, mask=there, other=0.0)
        s = tl.dot(k, q.T, input_precision="ieee")
        p = tl.math.exp2(s * scale_log2 - lse[None, :])
        behind = query[None, :] - key[:, None]
        seen = (behind >= 0) & (behind < WINDOW)
        if DOCUMENTS:
            document = tl.load(documents_ptr + batch * tokens + query, mask=there, other=0)
            seen = seen & (document[None, :] <= length + key[:, None])
        p = tl.where(seen, p, 0.0)
        dp = tl.dot(v, dout.T, input_precision="ieee")
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["batch_first", "one_length", "tokens", "columns", "first", "past_tiles"])
def _window_dkdv_kernel(
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, slots_ptr, grad_slots_ptr, lengths_ptr, documents_ptr,
    lse_ptr, delta_ptr, dk_pages_ptr, dv_pages_ptr, dk_own_ptr, dv_own_ptr,
    batch_first, one_length, tokens, columns, first, past_tiles, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, TMA: tl.constexpr,
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
    keys = place + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, DIM)[None, :]
    inside = dims < HEAD_DIM
    own = ((batch * tokens).to(tl.int64) + keys) * GROUPS + group
    if tile >= past_tiles:
        exists = (keys < tokens)[:, None] & inside
        offsets = own[:, None] * HEAD_DIM + dims
        k = tl.load(k_own + offsets, mask=exists, other=0.0)
        v = tl.load(v_own + offsets, mask=exists, other=0.0)
        dk, dv = _window_key_tile(k, v, place, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr, delta_ptr,
                                  length, tokens, scale_log2, GROUPS, REPEAT, HEAD_DIM, DIM, BLOCK_M, BLOCK_N, WINDOW,
                                  DOCUMENTS, TMA, STAGES)  # fmt: skip
        _put_rows(dk_own_ptr, offsets, exists, dk * scale, False, ATOMIC)
        _put_rows(dv_own_ptr, offsets, exists, dv, False, ATOMIC)
    elif PAST:
        position = tl.maximum(length + keys, 0)
        exists = (length + keys >= 0) & (keys > -WINDOW)  # what no query sees is neither read nor added to
        table = batch.to(tl.int64) * columns
        grad_row, exists = _page_rows(grad_slots_ptr + table, position, first, columns, group, exists, GROUPS, PAGE)
        row, exists = _page_rows(slots_ptr + table, position, first, columns, group, exists, GROUPS, PAGE)
        exists = exists[:, None] & inside
        offsets = row[:, None] * HEAD_DIM + dims
        k = tl.load(k_pages + offsets, mask=exists, other=0.0)
        v = tl.load(v_pages + offsets, mask=exists, other=0.0)
        dk, dv = _window_key_tile(k, v, place, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr, delta_ptr,
                                  length, tokens, scale_log2, GROUPS, REPEAT, HEAD_DIM, DIM, BLOCK_M, BLOCK_N, WINDOW,
                                  DOCUMENTS, TMA, STAGES)  # fmt: skip
        offsets = grad_row[:, None] * HEAD_DIM + dims
        _put_rows(dk_pages_ptr, offsets, exists, dk * scale, True, ATOMIC)
        _put_rows(dv_pages_ptr, offsets, exists, dv, True, ATOMIC)
