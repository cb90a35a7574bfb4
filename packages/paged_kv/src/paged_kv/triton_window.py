"""The backward for small windows, where launches take microseconds and latency is what bounds them.

A tile of neighbouring queries of one KV head sees `window + queries - 1` keys. A program of dQ reads them all at once,
wherever they lie (pages or own block), so that there is no loop, and only the tiles of keys at either edge of the
window are masked. What the gradients of keys need of a row (LSE, delta) is made by dQ on its way. A program of dK, dV
owns a tile of keys and takes the queries that see one of them, head by head, masked where window or diagonal cut.
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
def _window_dq(
    q_ptrs, dout_ptrs, out_ptrs, lse, row_low, behind, k_own, v_own, k_pages, v_pages, table_ptr, base, length, first,
    columns, tokens, batch, group, scale_log2, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, STARTS: tl.constexpr,
    WIDTHS: tl.constexpr, EDGES: tl.constexpr, DOCUMENTS: tl.constexpr, PAST: tl.constexpr,
):  # fmt: skip
    """dQ before scaling, and delta = rowsum(dout * out).

    Keys are those at [base, base + sum(WIDTHS)), of which row r sees [row_low[r], behind[r] + WINDOW).
    """
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
    lse_rows_ptr, delta_rows_ptr, dq_ptr, one_length, tokens, padded, columns, first, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, QUERIES: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    EDGES: tl.constexpr, DOCUMENTS: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * G, B). Leaves LSE in base 2 and delta = rowsum(dout * out), head by head, [B * H, padded].

    Rows that see nothing, and those behind the end, get LSE = +inf: their probabilities are zero from then on.
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
    place = (batch * HEADS + group * REPEAT + rows % REPEAT).to(tl.int64) * padded + rows // REPEAT
    tl.store(lse_rows_ptr + place, tl.where(valid, lse, float("inf")), mask=rows < padded * REPEAT)
    tl.store(delta_rows_ptr + place, tl.where(valid, delta, 0.0), mask=rows < padded * REPEAT)
    tl.store(dq_ptr + offsets, (dq * scale).to(dq_ptr.dtype.element_ty), mask=valid[:, None] & inside)


@triton.jit
def _window_queries(
    dk, dv, k, v, key, from_block, to_block, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr, delta_ptr,
    length, tokens, padded, scale_log2, GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, DIAGONAL: tl.constexpr, EDGE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add what blocks [from_block, to_block) of BLOCK_M queries give to the keys' dK and dV, all heads of the group.

    DIAGONAL: some queries come before a key. EDGE: some keys lie before a query's window.
    """
    for step in tl.range(0, (to_block - from_block) * REPEAT, num_stages=STAGES):
        first_query = (from_block + step // REPEAT) * BLOCK_M
        head = group * REPEAT + step % REPEAT
        q = q_rows.load([batch, first_query, head, 0]).reshape(BLOCK_M, DIM)
        dout = dout_rows.load([batch, first_query, head, 0]).reshape(BLOCK_M, DIM)
        row = (batch * GROUPS * REPEAT + head).to(tl.int64) * padded + first_query + tl.arange(0, BLOCK_M)
        lse = tl.load(lse_ptr + row)
        delta = tl.load(delta_ptr + row)
        s = tl.dot(k, q.T, input_precision="ieee")
        dp = tl.dot(v, dout.T, input_precision="ieee")
        p = tl.math.exp2(s * scale_log2 - lse[None, :])
        column = tl.arange(0, BLOCK_M)[None, :]
        if DIAGONAL:
            p = tl.where(column >= (key - first_query)[:, None], p, 0.0)
        if EDGE:
            p = tl.where(column < (key - first_query + WINDOW)[:, None], p, 0.0)
        if DOCUMENTS:
            query = first_query + tl.arange(0, BLOCK_M)
            document = tl.load(documents_ptr + batch * tokens + query, mask=query < tokens, other=0)
            p = tl.where(document[None, :] <= length + key[:, None], p, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _window_key_tile(
    k, v, place, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr, delta_ptr, length, tokens, padded,
    scale_log2, GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK before scaling and dV of the keys at [place, place + BLOCK_N), from all queries that see one of them."""
    dk = tl.zeros([BLOCK_N, DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], tl.float32)
    key = place + tl.arange(0, BLOCK_N)
    start = tl.maximum(place, 0) // BLOCK_M
    end = tl.maximum(tl.cdiv(tl.minimum(place + BLOCK_N - 1 + WINDOW, tokens), BLOCK_M), start)
    middle = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(place + BLOCK_N - 1, 0), BLOCK_M), start), end)
    rest = tl.minimum(tl.maximum(tl.maximum(place + WINDOW, 0) // BLOCK_M, middle), end)
    BOTH: tl.constexpr = WINDOW <= BLOCK_M + BLOCK_N - 2  # no room for a tile between the diagonal and the edge
    dk, dv = _window_queries(dk, dv, k, v, key, start, middle, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr,
                             delta_ptr, length, tokens, padded, scale_log2, GROUPS, REPEAT, DIM, BLOCK_M, WINDOW,
                             DOCUMENTS, True, BOTH, STAGES)  # fmt: skip
    dk, dv = _window_queries(dk, dv, k, v, key, middle, rest, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr,
                             delta_ptr, length, tokens, padded, scale_log2, GROUPS, REPEAT, DIM, BLOCK_M, WINDOW,
                             DOCUMENTS, False, False, STAGES)  # fmt: skip
    return _window_queries(dk, dv, k, v, key, rest, end, batch, group, q_rows, dout_rows, documents_ptr, lse_ptr,
                           delta_ptr, length, tokens, padded, scale_log2, GROUPS, REPEAT, DIM, BLOCK_M, WINDOW,
                           DOCUMENTS, BOTH, True, STAGES)  # fmt: skip


@triton.jit(do_not_specialize=["batch_first", "one_length", "tokens", "columns", "first", "past_tiles"])
def _window_dkdv_kernel(
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, slots_ptr, grad_slots_ptr, lengths_ptr, documents_ptr,
    lse_ptr, delta_ptr, dk_pages_ptr, dv_pages_ptr, dk_own_ptr, dv_own_ptr,
    batch_first, one_length, tokens, padded, columns, first, past_tiles, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
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
                                  length, tokens, padded, scale_log2, GROUPS, REPEAT, DIM, BLOCK_M, BLOCK_N, WINDOW,
                                  DOCUMENTS, STAGES)  # fmt: skip
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
                                  length, tokens, padded, scale_log2, GROUPS, REPEAT, DIM, BLOCK_M, BLOCK_N, WINDOW,
                                  DOCUMENTS, STAGES)  # fmt: skip
        offsets = grad_row[:, None] * HEAD_DIM + dims
        _put_rows(dk_pages_ptr, offsets, exists, dk * scale, True, ATOMIC)
        _put_rows(dv_pages_ptr, offsets, exists, dv, True, ATOMIC)
