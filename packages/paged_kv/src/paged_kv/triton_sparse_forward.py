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
from .triton_forward import add_sink, extremes, finished, fwd_step, minus, row_parts


@triton.jit
def block_rows(r, tile, length, tokens, PAGE: tl.constexpr, REPEAT: tl.constexpr, BLOCK_M: tl.constexpr):
    """First row of a tile of query block r, and the row behind the block's last."""
    start = r * PAGE - length % PAGE
    end = tl.minimum(start + PAGE, tokens)
    return tl.maximum(start, 0) * REPEAT + tile * BLOCK_M, tl.maximum(end, 0) * REPEAT


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
def _fwd_entries(
    acc, m, l, q, k_desc, v_desc, pages_ptr, places_ptr, batch, group, start, end, low, high, scale_log2,
    OWN: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Entries [start, end) of a list, all of them pages of the past, or all OWN."""
    TILES: tl.constexpr = PAGE // BLOCK_N
    first = start * TILES
    last = end * TILES
    if first < last:  # see triton_backward.py
        for tile in tl.range(first, last, num_stages=STAGES):
            place = tl.load(places_ptr + tile // TILES)
            inner = (tile % TILES) * BLOCK_N
            absent = tl.where(place < 0, float("inf"), 0.0)
            keys = tl.arange(0, BLOCK_N)
            if MASK:
                keys += tl.load(pages_ptr + tile // TILES) * PAGE + inner
            if OWN:
                acc, m, l = fwd_step(acc, m, l, q, k_desc, v_desc, batch, place + inner, group, absent, keys, low, high,
                                      0, scale_log2, BLOCK_N, DIM, MASK, False)  # fmt: skip
            else:
                acc, m, l = fwd_step(acc, m, l, q, k_desc, v_desc, place, inner, group, absent, keys, low, high, 0,
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
    PARTS: tl.constexpr, POINTERS: tl.constexpr, FIRST_ROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (Q * row tiles of a block, G, B), for ROWS rows of each query block from FIRST_ROW on.

    CARRY: start from an earlier segment's state. OWN: the own block comes last, and then the SINKS. STRADDLE: some page
    is part past, part own.

    A state is what the registers held, so that the result does not depend on how the past was cut: sums at `out_ptr`,
    the largest scores at `lse_ptr`, and behind those, [B, H, C] later, the divisors."""
    ROW_TILES: tl.constexpr = (ROWS + BLOCK_M - 1) // BLOCK_M
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
    first_row += FIRST_ROW
    documents = documents_ptr + batch * tokens
    offsets, stats, query, valid, low = row_parts(first_row, end_row, batch, group, tokens, documents, length, window,
                                                  REPEAT, HEADS, HEAD_DIM, DIM, BLOCK_M, PARTS, WINDOW,
                                                  DOCUMENTS)  # fmt: skip
    high = minus(query, -length - 1)
    inside = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    divisors = tl.num_programs(2).to(tl.int64) * HEADS * tokens
    low_min, low_max = extremes(low)
    q = ()
    m = ()
    l = ()
    acc = ()
    for i in tl.static_range(PARTS):
        q += (tl.load(q_ptr + offsets[i], mask=inside, other=0.0),)  # type: ignore[assignment]
        top = tl.full([BLOCK_M // PARTS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M // PARTS], tl.float32)
        value = tl.zeros([BLOCK_M // PARTS, DIM], tl.float32)
        if CARRY:
            top = tl.load(carry_stats_ptr + stats[i])
            total = tl.load(carry_stats_ptr + divisors + stats[i])
            value = tl.load(carry_ptr + offsets[i], mask=inside, other=0.0)
        m += (top,)  # type: ignore[assignment]
        l += (total,)  # type: ignore[assignment]
        acc += (value,)  # type: ignore[assignment]

    start = tl.load(bounds)
    end = tl.load(bounds + 1)
    if WINDOW or DOCUMENTS:
        hidden, partial = listed_before(pages, entries, low_min, low_max, PAGE)
        middle = tl.minimum(tl.maximum(partial, start), end)
        acc, m, l = _fwd_entries(acc, m, l, q, k_pages, v_pages, pages, places, batch, group, tl.maximum(start, hidden),
                                 middle, low, high, scale_log2, False, PAGE, BLOCK_N, DIM, True, STAGES)  # fmt: skip
        start = middle
    acc, m, l = _fwd_entries(acc, m, l, q, k_pages, v_pages, pages, places, batch, group, start, end, low, high,
                             scale_log2, False, PAGE, BLOCK_N, DIM, False, STAGES)  # fmt: skip

    # The places are worked out again, from a value the compiler cannot know to be the same: held in registers through
    # the loop above they would spill.
    first_row += tl.load(lengths_ptr + batch, volatile=True) - length
    offsets, stats, query, valid, low = row_parts(first_row, end_row, batch, group, tokens, documents, length, window,
                                                  REPEAT, HEADS, HEAD_DIM, DIM, BLOCK_M, PARTS, WINDOW,
                                                  DOCUMENTS)  # fmt: skip
    high = minus(query, -length - 1)
    whole = length // PAGE
    if STRADDLE:
        column = whole - first_page
        here = (tl.load(bounds + 4) > 0) & (column >= 0) & (column < columns)
        slot = tl.load(table_ptr + batch.to(tl.int64) * columns + column, mask=here, other=-1)
        before = ()
        for i in tl.static_range(PARTS):
            before += (tl.zeros_like(high[i]) + length,)  # type: ignore[assignment]
        for i in tl.range(0, tl.where(slot >= 0, TILES, 0), num_stages=1):
            keys = whole * PAGE + i * BLOCK_N + tl.arange(0, BLOCK_N)
            acc, m, l = fwd_step(acc, m, l, q, k_pages, v_pages, slot, i * BLOCK_N, group, 0.0, keys, low,
                                 before, length, scale_log2, BLOCK_N, DIM, True, True)  # fmt: skip
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
        own_low = ()
        for i in tl.static_range(PARTS):
            own_low += (tl.maximum(low[i], length),)  # type: ignore[assignment]
        for i in tl.range(first, last, num_stages=1):
            page = tl.where(i < TILES, whole, whole + r)
            keys = page * PAGE + (i % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
            row = page * PAGE + (i % TILES) * BLOCK_N - length
            acc, m, l = fwd_step(acc, m, l, q, k_own, v_own, batch, row, group, 0.0, keys, own_low, high, 0, scale_log2,
                                 BLOCK_N, DIM, True, False)  # fmt: skip

    for i in tl.static_range(PARTS):
        top = m[i]
        total = l[i]
        value = acc[i]
        if SINKS:
            head = group * REPEAT + (first_row + i * (BLOCK_M // PARTS) + tl.arange(0, BLOCK_M // PARTS)) % REPEAT
            value, top, total = add_sink(value, top, total, sinks_ptr + head)
        if OWN:
            value, top = finished(value, top, total)
        else:
            tl.store(lse_ptr + divisors + stats[i], total, mask=valid[i])
        tl.store(out_ptr + offsets[i], value.to(out_ptr.dtype.element_ty), mask=valid[i][:, None] & inside)
        tl.store(lse_ptr + stats[i], top, mask=valid[i])
