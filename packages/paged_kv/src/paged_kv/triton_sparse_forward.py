"""The forward kernel over listed pages: past and own pages of one query block, with a running softmax in registers.

One program owns a tile of rows of one query block and one KV head; rows are (query, head of the group) pairs,
query-major, so that all heads of a group share a page that is loaded. Pages that every row sees whole take the unmasked
path: whole pages of the past, then whole pages of the own block. Two pages at most need a mask for causality alone: the
block's own, and one that is part past, part own. A window or documents mask the pages at their edge and skip those
before it.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · R = H / G · D head dim ·
K pages selected · Q query blocks · S lists a sequence
Source: FlashAttention-2 (arXiv 2307.08691), PagedAttention (arXiv 2309.06180); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_boxes import _key_boxes


@triton.jit
def block_rows(r, tile, length, tokens, PAGE: tl.constexpr, REPEAT: tl.constexpr, BLOCK_M: tl.constexpr):
    """First row of a tile of query block r, and the row behind the block's last."""
    start = r * PAGE - length % PAGE
    end = tl.minimum(start + PAGE, tokens)
    return tl.maximum(start, 0) * REPEAT + tile * BLOCK_M, tl.maximum(end, 0) * REPEAT


@triton.jit
def row_places(
    first_row, end_row, batch, group, tokens, REPEAT: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Where a tile's rows lie in [B, C, H, D] and in [B, H, C], their queries, and which of them are the block's.

    Rows behind the chunk's end repeat the last query: they read what is there and are not stored.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    query = tl.minimum(rows // REPEAT, tokens - 1)
    head = group * REPEAT + rows % REPEAT
    places = ((batch * tokens).to(tl.int64) + query) * HEADS + head
    offsets = places[:, None] * HEAD_DIM + tl.arange(0, DIM)[None, :]
    stats = (batch * HEADS + head).to(tl.int64) * tokens + query
    return offsets, stats, query, rows < end_row


@triton.jit
def first_seen(query, documents_ptr, length, window, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Position of the first key that each query sees, as far as windows and documents say."""
    low = tl.zeros_like(query)
    if WINDOW:
        low = tl.maximum(low, length + query - window + 1)
    if DOCUMENTS:
        low = tl.maximum(low, tl.load(documents_ptr + query))
    return low


@triton.jit
def listed_before(pages_ptr, entries, low_min, low_max, PAGE: tl.constexpr):
    """Entries of a list of which no row sees a key, and entries of which some row does not see all."""
    hidden = 0
    partial = 0
    for start in range(0, entries, 128):
        i = start + tl.arange(0, 128)
        page = tl.load(pages_ptr + i, mask=i < entries, other=2**30)
        page = tl.minimum(page, 2**31 // PAGE - 2)
        hidden += tl.sum(((page + 1) * PAGE <= low_min).to(tl.int32), 0)
        partial += tl.sum((page * PAGE < low_max).to(tl.int32), 0)
    return hidden, partial


@triton.jit
def _fwd_step(
    acc, m, l, q, k_desc, v_desc, slot, row, group, absent, keys, low, high, limit, scale_log2,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running softmax. Scores are in base 2; `absent` is infinite for a page not there.

    MASK: row i sees keys [low[i], high[i]) only. RAGGED: memory at and behind position `limit` was never written.
    """
    k = k_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    s = tl.dot(q, k.T, input_precision="ieee")
    if MASK:
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        s = tl.where(seen, s * scale_log2, float("-inf"))
        top = tl.max(s, 1)
    else:
        top = tl.max(s, 1) * scale_log2
    m_new = tl.maximum(m, top - absent)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    if MASK:
        p = tl.math.exp2(s - (shift + absent)[:, None])
    else:
        p = tl.math.exp2(s * scale_log2 - (shift + absent)[:, None])
    alpha = tl.math.exp2(m - shift)
    l = l * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v = v_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    if RAGGED:
        v = tl.where((keys < limit)[:, None], v, 0.0)  # 0 * NaN would be NaN
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, m_new, l


@triton.jit
def _fwd_entries(
    acc, m, l, q, k_desc, v_desc, pages_ptr, places_ptr, batch, group, start, end, low, high, scale_log2,
    OWN: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Entries [start, end) of a list, all of them pages of the past, or all OWN."""
    TILES: tl.constexpr = PAGE // BLOCK_N
    for tile in tl.range(start * TILES, end * TILES, num_stages=STAGES):
        place = tl.load(places_ptr + tile // TILES)
        inner = (tile % TILES) * BLOCK_N
        absent = tl.where(place < 0, float("inf"), 0.0)
        keys = tl.arange(0, BLOCK_N)
        if MASK:
            keys += tl.load(pages_ptr + tile // TILES) * PAGE + inner
        if OWN:
            acc, m, l = _fwd_step(acc, m, l, q, k_desc, v_desc, batch, place + inner, group, absent, keys, low, high,
                                  0, scale_log2, BLOCK_N, DIM, MASK, False)  # fmt: skip
        else:
            acc, m, l = _fwd_step(acc, m, l, q, k_desc, v_desc, place, inner, group, absent, keys, low, high, 0,
                                  scale_log2, BLOCK_N, DIM, MASK, False)  # fmt: skip
    return acc, m, l


@triton.jit(do_not_specialize=["tokens", "columns", "first_page", "blocks", "entries", "window"])
def _sparse_attention_fwd_kernel(
    q_ptr, k_own, v_own, k_pages, v_pages, table_ptr, pages_ptr, places_ptr, bounds_ptr, lengths_ptr, documents_ptr,
    sinks_ptr, carry_ptr, carry_stats_ptr, out_ptr, lse_ptr,
    tokens, columns, first_page, blocks, entries, window, scale_log2,
    LISTS: tl.constexpr, GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    CARRY: tl.constexpr, OWN: tl.constexpr, SINKS: tl.constexpr, STRADDLE: tl.constexpr, STAGES: tl.constexpr,
    POINTERS: tl.constexpr,
):  # fmt: skip
    """Grid: (Q * row tiles of a block, G, B). CARRY: start from an earlier segment's state. OWN: the own block comes
    last, and then the SINKS. STRADDLE: some page is part past, part own.

    A state is what the registers held, so that the result does not depend on how the past was cut: sums at `out_ptr`,
    the largest scores at `lse_ptr`, and behind those, [B, H, C] later, the divisors."""
    ROW_TILES: tl.constexpr = (PAGE * REPEAT + BLOCK_M - 1) // BLOCK_M
    TILES: tl.constexpr = PAGE // BLOCK_N
    HEADS: tl.constexpr = GROUPS * REPEAT
    r = tl.program_id(0) // ROW_TILES
    tile = tl.program_id(0) % ROW_TILES
    group = tl.program_id(1)
    batch = tl.program_id(2)
    list_of = (batch * LISTS + (group if LISTS > 1 else 0)).to(tl.int64) * blocks + r
    pages = pages_ptr + list_of * entries
    places = places_ptr + list_of * entries
    bounds = bounds_ptr + list_of * 6
    length = tl.load(lengths_ptr + batch)

    k_own, v_own = _key_boxes(k_own, v_own, tokens, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    k_pages, v_pages = _key_boxes(k_pages, v_pages, PAGE, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    first_row, end_row = block_rows(r, tile, length, tokens, PAGE, REPEAT, BLOCK_M)
    offsets, stats, query, valid = row_places(first_row, end_row, batch, group, tokens, REPEAT, HEADS, HEAD_DIM, DIM,
                                              BLOCK_M)  # fmt: skip
    inside = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + offsets, mask=inside, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    divisors = tl.num_programs(2).to(tl.int64) * HEADS * tokens
    if CARRY:
        m = tl.load(carry_stats_ptr + stats)
        l = tl.load(carry_stats_ptr + divisors + stats)
        acc = tl.load(carry_ptr + offsets, mask=inside, other=0.0)

    start = tl.load(bounds)
    end = tl.load(bounds + 1)
    low = first_seen(query, documents_ptr + batch * tokens, length, window, WINDOW, DOCUMENTS)
    high = length + query + 1
    if WINDOW or DOCUMENTS:
        hidden, partial = listed_before(pages, entries, tl.min(low, 0), tl.max(low, 0), PAGE)
        middle = tl.minimum(tl.maximum(partial, start), end)
        acc, m, l = _fwd_entries(acc, m, l, q, k_pages, v_pages, pages, places, batch, group, tl.maximum(start, hidden),
                                 middle, low, high, scale_log2, False, PAGE, BLOCK_N, DIM, True, STAGES)  # fmt: skip
        start = middle
    acc, m, l = _fwd_entries(acc, m, l, q, k_pages, v_pages, pages, places, batch, group, start, end, low, high,
                             scale_log2, False, PAGE, BLOCK_N, DIM, False, STAGES)  # fmt: skip

    # The places are worked out again, from a value the compiler cannot know to be the same: held in registers through
    # the loop above they would spill.
    first_row += tl.load(lengths_ptr + batch, volatile=True) - length
    offsets, stats, query, valid = row_places(first_row, end_row, batch, group, tokens, REPEAT, HEADS, HEAD_DIM, DIM,
                                              BLOCK_M)  # fmt: skip
    whole = length // PAGE
    if STRADDLE:
        column = whole - first_page
        here = (tl.load(bounds + 4) > 0) & (column >= 0) & (column < columns)
        slot = tl.load(table_ptr + batch.to(tl.int64) * columns + column, mask=here, other=-1)
        for i in tl.range(0, tl.where(slot >= 0, TILES, 0), num_stages=1):
            keys = whole * PAGE + i * BLOCK_N + tl.arange(0, BLOCK_N)
            acc, m, l = _fwd_step(acc, m, l, q, k_pages, v_pages, slot, i * BLOCK_N, group, 0.0, keys, low,
                                  tl.zeros_like(high) + length, length, scale_log2, BLOCK_N, DIM, True,
                                  True)  # fmt: skip
    if OWN:
        start = tl.load(bounds + 2)
        end = tl.load(bounds + 3)
        if WINDOW or DOCUMENTS:
            middle = tl.minimum(tl.maximum(partial, start), tl.maximum(end, start))
            acc, m, l = _fwd_entries(acc, m, l, q, k_own, v_own, pages, places, batch, group, tl.maximum(start, hidden),
                                     middle, low, high, scale_log2, True, PAGE, BLOCK_N, DIM, True, STAGES)  # fmt: skip
            start = middle
        acc, m, l = _fwd_entries(acc, m, l, q, k_own, v_own, pages, places, batch, group, start, end, low, high,
                                 scale_log2, True, PAGE, BLOCK_N, DIM, False, STAGES)  # fmt: skip
        # The page that is part past, unless it is the block's own; the block's own. Rows before the chunk read as 0.
        first = tl.where((tl.load(bounds + 4) > 0) & (r > 0), 0, TILES) if STRADDLE else TILES
        last = tl.where(tl.load(bounds + 5) > 0, 2 * TILES, TILES)
        for i in tl.range(first, last, num_stages=1):
            page = tl.where(i < TILES, whole, whole + r)
            keys = page * PAGE + (i % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
            row = page * PAGE + (i % TILES) * BLOCK_N - length
            acc, m, l = _fwd_step(acc, m, l, q, k_own, v_own, batch, row, group, 0.0, keys,
                                  tl.maximum(low, length), high, 0, scale_log2, BLOCK_N, DIM, True, False)  # fmt: skip

    if SINKS:  # one more logit, whose value is zero
        head = group * REPEAT + (first_row + tl.arange(0, BLOCK_M)) % REPEAT
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.math.exp2(m - top)
        l = l * shrink + tl.math.exp2(sink - top)
        acc = acc * shrink[:, None]
        m = top
    if OWN:
        unseen = l == 0.0
        acc = acc / tl.where(unseen, 1.0, l)[:, None]
        m = tl.where(unseen, float("-inf"), (m + tl.math.log2(tl.where(unseen, 1.0, l))) * 0.6931471805599453)
    else:
        tl.store(lse_ptr + divisors + stats, l, mask=valid)
    tl.store(out_ptr + offsets, acc.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside)
    tl.store(lse_ptr + stats, m, mask=valid)
