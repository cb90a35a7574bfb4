"""The backward kernels over listed pages: dQ reads each query block's list; dK and dV the inverse, page to blocks.

A program owns a tile of one page's keys and a part of the page's readers, sums over their rows in registers and adds to
the gradient page once. A page with more readers than one part holds leaves a partial sum for each part but the first,
and a second kernel adds those to the page in order: no atomics, the same bits on every run, and no page that all others
wait for.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · R = H / G · D head dim ·
K pages selected · Q query blocks · S lists a sequence · Z columns: a segment's pages, then the own block's
Source: FlashAttention-2 (arXiv 2307.08691); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_backward import dq_step, in_registers, load_stats
from .triton_boxes import _key_boxes, _row_boxes
from .triton_forward import first_visible
from .triton_sparse_forward import block_rows, listed_before


@triton.jit
def _reader_tiles(
    dk, dv, k, v, q_rows, dout_rows, stats_ptr, readers_ptr, block_of_rows, start, end, key, documents_ptr,
    length, tokens, window, scale_log2, PAGE: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add the rows of readers [start, end) to a key tile's gradients. `key`: the keys' positions."""
    ROW_TILES: tl.constexpr = (PAGE * REPEAT + BLOCK_M - 1) // BLOCK_M
    first = start * ROW_TILES
    last = end * ROW_TILES
    if first < last:  # see triton_backward.py
        for tile in tl.range(first, last, num_stages=STAGES):
            r = tl.load(readers_ptr + tile // ROW_TILES)
            first_row, end_row = block_rows(r, tile % ROW_TILES, length, tokens, PAGE, REPEAT, BLOCK_M)
            rows = first_row + tl.arange(0, BLOCK_M)
            q = q_rows.load([block_of_rows, first_row, 0]).reshape(BLOCK_M, DIM)
            dout = dout_rows.load([block_of_rows, first_row, 0]).reshape(BLOCK_M, DIM)
            lse, delta = load_stats(stats_ptr, rows, end_row, RAGGED)
            s = tl.dot(k, q.T, input_precision="ieee")
            p = tl.math.exp2(s * scale_log2 - lse[None, :])
            if CAUSAL or WINDOW or DOCUMENTS:
                query = tl.minimum(rows // REPEAT, tokens - 1)
                low = first_visible(query, documents_ptr, length, window, WINDOW, DOCUMENTS)
                seen = (key[:, None] >= low[None, :]) & (key[:, None] <= length + query[None, :])
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(v, dout.T, input_precision="ieee")
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _add_rows(ptr, offsets, mask, value):
    value += tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptr + offsets, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _page_tile(
    k_desc, v_desc, slot, row, token, page, sub, part, readers, share, parts_ptr, batch, group, dk_ptr, dv_ptr,
    q_rows, dout_rows, stats_ptr, readers_ptr, documents_ptr, length, tokens, padded, window, scale,
    scale_log2, GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    RAGGED: tl.constexpr, PAST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of a page's keys from one part of its readers.

    The keys are read at `slot, row`. The first part is added at row `token` of the gradient, others are stored at
    `parts_ptr`. In the own block the first reader may be the page's own block: the only one that needs a causal mask.
    """
    lanes = tl.arange(0, BLOCK_N)
    key = page * PAGE + sub * BLOCK_N + lanes
    k = k_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    v = v_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    block = batch * GROUPS + group
    stats = stats_ptr + block.to(tl.int64) * padded * 2
    documents = documents_ptr + batch * tokens
    start = part * share
    end = tl.minimum(start + share, readers)
    dk = tl.zeros([BLOCK_N, DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], tl.float32)
    if not PAST:
        middle = start + (tl.load(readers_ptr + start) + length // PAGE == page).to(tl.int32)
        dk, dv = _reader_tiles(dk, dv, k, v, q_rows, dout_rows, stats, readers_ptr, block, start, middle, key,
                               documents, length, tokens, window, scale_log2, PAGE, REPEAT, DIM, BLOCK_M, WINDOW,
                               DOCUMENTS, True, RAGGED, 1)  # fmt: skip
        start = middle
    dk, dv = _reader_tiles(dk, dv, k, v, q_rows, dout_rows, stats, readers_ptr, block, start, end, key, documents,
                           length, tokens, window, scale_log2, PAGE, REPEAT, DIM, BLOCK_M, WINDOW, DOCUMENTS, False,
                           RAGGED, STAGES)  # fmt: skip
    dk = dk * scale
    dims = tl.arange(0, DIM)
    if part > 0:
        places = (sub * BLOCK_N + lanes)[:, None] * HEAD_DIM + dims[None, :]
        inside = (lanes >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(parts_ptr + places, dk, mask=inside)
        tl.store(parts_ptr + PAGE * HEAD_DIM + places, dv, mask=inside)
    else:
        # Keys at and behind the past's end hold anything; what the own block's first page has before it is not its.
        kept = (key < length) if PAST else (key >= length) & (key < length + tokens)
        mask = kept[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = ((token + lanes) * GROUPS + group)[:, None] * HEAD_DIM + dims[None, :]
        _add_rows(dk_ptr, offsets, mask, dk)
        _add_rows(dv_ptr, offsets, mask, dv)


@triton.jit(
    do_not_specialize=[
        "batch_first", "tokens", "padded", "columns", "first_page", "total", "listed", "most_items", "most_parts",
        "share", "window", "all_lists",
    ]
)  # fmt: skip
def _sparse_attention_dkdv_kernel(
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, table_ptr, grad_table_ptr, lengths_ptr, documents_ptr,
    readers_ptr, items_ptr, counts_ptr, ends_ptr, stats_ptr, dk_pages_ptr, dv_pages_ptr, dk_own_ptr,
    dv_own_ptr, parts_ptr,
    batch_first, tokens, padded, columns, first_page, total, listed, most_items, most_parts, share, window, all_lists,
    scale, scale_log2,
    LISTS: tl.constexpr, GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    RAGGED: tl.constexpr, PAST: tl.constexpr, OWN: tl.constexpr, STAGES: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Grid: (most items * key tiles of a page, G, sequences from `batch_first` on).

    RAGGED: some block's rows do not fill its row tiles. parts [B * G, most parts, 2, P, D] float32.
    """
    TILES: tl.constexpr = PAGE // BLOCK_N
    item = tl.program_id(0) // TILES
    sub = tl.program_id(0) % TILES
    group = tl.program_id(1)
    batch = batch_first + tl.program_id(2)
    which = (batch * LISTS + (group if LISTS > 1 else 0)).to(tl.int64)
    step = all_lists.to(tl.int64) * total  # from one kind of count to the next
    q_rows, dout_rows = _row_boxes(q_rows, dout_rows, tokens * REPEAT, HEAD_DIM, DIM, BLOCK_M, POINTERS)
    k_own, v_own = _key_boxes(k_own, v_own, tokens, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    k_pages, v_pages = _key_boxes(k_pages, v_pages, PAGE, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    length = tl.load(lengths_ptr + batch)
    last = ends_ptr + step + which * total + total - 1
    whole_items = tl.load(last)
    if item < whole_items + tl.load(last + step):
        z = tl.load(items_ptr + which * most_items + item)
        here = which * total + z
        readers = tl.load(counts_ptr + here)
        first_reader = tl.load(ends_ptr + here) - readers
        part = tl.load(counts_ptr + step + here)  # the rest, behind the whole ones
        if item < whole_items:
            part = item - (tl.load(ends_ptr + step + here) - part)
        more = tl.load(ends_ptr + 3 * step + here) - tl.load(counts_ptr + 3 * step + here)
        partial = more + part - 1
        parts = parts_ptr + ((batch * GROUPS + group).to(tl.int64) * most_parts + partial) * 2 * PAGE * HEAD_DIM
        list_readers = readers_ptr + which * listed + first_reader
        if PAST:
            if z < columns:
                entry = batch.to(tl.int64) * columns + z
                row = sub * BLOCK_N
                token = tl.load(grad_table_ptr + entry).to(tl.int64) * PAGE + row
                _page_tile(k_pages, v_pages, tl.load(table_ptr + entry), row, token, first_page + z, sub, part, readers,
                           share, parts, batch, group, dk_pages_ptr, dv_pages_ptr, q_rows, dout_rows, stats_ptr,
                           list_readers, documents_ptr, length, tokens, padded, window, scale, scale_log2,
                           GROUPS, REPEAT, HEAD_DIM, DIM, PAGE, BLOCK_M, BLOCK_N, WINDOW, DOCUMENTS, RAGGED, True,
                           STAGES)  # fmt: skip
        if OWN:
            if z >= columns:
                page = length // PAGE + z - columns
                row = page * PAGE + sub * BLOCK_N - length
                token = (batch * tokens).to(tl.int64) + row
                _page_tile(k_own, v_own, batch, row, token, page, sub, part, readers, share, parts, batch, group,
                           dk_own_ptr, dv_own_ptr, q_rows, dout_rows, stats_ptr, list_readers, documents_ptr,
                           length, tokens, padded, window, scale, scale_log2, GROUPS, REPEAT, HEAD_DIM, DIM, PAGE,
                           BLOCK_M, BLOCK_N, WINDOW, DOCUMENTS, RAGGED, False, STAGES)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "batch_first", "tokens", "columns", "first_page", "total", "most_split", "most_parts", "all_lists",
    ]
)  # fmt: skip
def _add_parts_kernel(
    parts_ptr, split_ptr, counts_ptr, ends_ptr, grad_table_ptr, lengths_ptr, dk_pages_ptr, dv_pages_ptr, dk_own_ptr,
    dv_own_ptr, batch_first, tokens, columns, first_page, total, most_split, most_parts, all_lists,
    LISTS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a split page's partial sums to it, in order. Grid: (most split * blocks of a page, G, sequences)."""
    TILES: tl.constexpr = PAGE // BLOCK
    number = tl.program_id(0) // TILES
    group = tl.program_id(1)
    batch = batch_first + tl.program_id(2)
    which = (batch * LISTS + (group if LISTS > 1 else 0)).to(tl.int64)
    step = all_lists.to(tl.int64) * total
    if number < tl.load(ends_ptr + 4 * step + which * total + total - 1):
        z = tl.load(split_ptr + which * most_split + number)
        here = which * total + z
        count = tl.load(counts_ptr + 3 * step + here)
        first = tl.load(ends_ptr + 3 * step + here) - count
        lanes = (tl.program_id(0) % TILES) * BLOCK + tl.arange(0, BLOCK)
        dims = tl.arange(0, DIM)
        inside = (lanes >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
        source = ((batch * GROUPS + group).to(tl.int64) * most_parts + first) * 2 * PAGE * HEAD_DIM
        offsets = lanes[:, None] * HEAD_DIM + dims[None, :]
        dk = tl.zeros([BLOCK, DIM], tl.float32)
        dv = tl.zeros([BLOCK, DIM], tl.float32)
        for _ in range(0, count):
            dk += tl.load(parts_ptr + source + offsets, mask=inside, other=0.0)
            dv += tl.load(parts_ptr + source + PAGE * HEAD_DIM + offsets, mask=inside, other=0.0)
            source += 2 * PAGE * HEAD_DIM
        length = tl.load(lengths_ptr + batch)
        if z < columns:
            slot = tl.load(grad_table_ptr + batch.to(tl.int64) * columns + z)
            target = ((slot.to(tl.int64) * PAGE + lanes) * GROUPS + group)[:, None] * HEAD_DIM + dims[None, :]
            mask = ((first_page + z) * PAGE + lanes < length)[:, None] & inside
            _add_rows(dk_pages_ptr, target, mask, dk)
            _add_rows(dv_pages_ptr, target, mask, dv)
        else:
            row = (length // PAGE + z - columns) * PAGE - length + lanes
            target = (((batch * tokens).to(tl.int64) + row) * GROUPS + group)[:, None] * HEAD_DIM + dims[None, :]
            mask = ((row >= 0) & (row < tokens))[:, None] & inside
            _add_rows(dk_own_ptr, target, mask, dk)
            _add_rows(dv_own_ptr, target, mask, dv)


@triton.jit
def _dq_entries(
    dq, q, dout, lse, delta, k_desc, v_desc, pages_ptr, places_ptr, batch, group, start, end, low, high, scale_log2,
    OWN: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Entries [start, end) of a list, as in the forward."""
    TILES: tl.constexpr = PAGE // BLOCK_N
    for tile in tl.range(start * TILES, end * TILES, num_stages=STAGES):
        place = tl.load(places_ptr + tile // TILES)
        inner = (tile % TILES) * BLOCK_N
        absent = tl.where(place < 0, float("inf"), 0.0)
        keys = tl.arange(0, BLOCK_N)
        if MASK:
            keys += tl.load(pages_ptr + tile // TILES) * PAGE + inner
        if OWN:
            dq = dq_step(dq, q, dout, lse, delta, k_desc, v_desc, batch, place + inner, group, absent, keys, low, high,
                          0, scale_log2, BLOCK_N, DIM, MASK, False)  # fmt: skip
        else:
            dq = dq_step(dq, q, dout, lse, delta, k_desc, v_desc, place, inner, group, absent, keys, low, high, 0,
                          scale_log2, BLOCK_N, DIM, MASK, False)  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["tokens", "padded", "columns", "first_page", "blocks", "entries", "window"])
def _sparse_attention_dq_kernel(
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, table_ptr, pages_ptr, places_ptr, bounds_ptr, lengths_ptr,
    documents_ptr, stats_ptr, carry_ptr, dq_ptr,
    tokens, padded, columns, first_page, blocks, entries, window, scale, scale_log2,
    LISTS: tl.constexpr, GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    CARRY: tl.constexpr, OWN: tl.constexpr, STRADDLE: tl.constexpr, STAGES: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Grid: (Q * row tiles of a block, G, B), as the forward's. CARRY: go on from the sums that earlier segments left;
    they are scaled once OWN has come."""
    ROW_TILES: tl.constexpr = (PAGE * REPEAT + BLOCK_M - 1) // BLOCK_M
    TILES: tl.constexpr = PAGE // BLOCK_N
    HEADS: tl.constexpr = GROUPS * REPEAT
    r = tl.program_id(0) // ROW_TILES
    group = tl.program_id(1)
    batch = tl.program_id(2)
    list_of = (batch * LISTS + (group if LISTS > 1 else 0)).to(tl.int64) * blocks + r
    pages = pages_ptr + list_of * entries
    places = places_ptr + list_of * entries
    bounds = bounds_ptr + list_of * 6
    length = tl.load(lengths_ptr + batch)

    q_rows, dout_rows = _row_boxes(q_rows, dout_rows, tokens * REPEAT, HEAD_DIM, DIM, BLOCK_M, POINTERS)
    k_own, v_own = _key_boxes(k_own, v_own, tokens, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    k_pages, v_pages = _key_boxes(k_pages, v_pages, PAGE, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    first_row, end_row = block_rows(r, tl.program_id(0) % ROW_TILES, length, tokens, PAGE, REPEAT, BLOCK_M)
    rows = first_row + tl.arange(0, BLOCK_M)
    query = tl.minimum(rows // REPEAT, tokens - 1)
    block = batch * GROUPS + group
    q = q_rows.load([block, first_row, 0]).reshape(BLOCK_M, DIM)
    dout = dout_rows.load([block, first_row, 0]).reshape(BLOCK_M, DIM)
    q = in_registers(q, rows < end_row, DIM)
    dout = in_registers(dout, rows < end_row, DIM)
    lse, delta = load_stats(stats_ptr + block.to(tl.int64) * padded * 2, rows, end_row, True)
    dq = tl.zeros([BLOCK_M, DIM], tl.float32)
    if CARRY:
        head = group * REPEAT + rows % REPEAT
        dims = tl.arange(0, DIM)
        mask = (rows < end_row)[:, None] & (dims < HEAD_DIM)[None, :]
        offsets = (((batch * tokens).to(tl.int64) + query) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
        dq = tl.load(carry_ptr + offsets, mask=mask, other=0.0)

    start = tl.load(bounds)
    end = tl.load(bounds + 1)
    low = first_visible(query, documents_ptr + batch * tokens, length, window, WINDOW, DOCUMENTS)
    high = length + query + 1
    if WINDOW or DOCUMENTS:
        hidden, partial = listed_before(pages, entries, tl.min(low, 0), tl.max(low, 0), PAGE)
        middle = tl.minimum(tl.maximum(partial, start), end)
        dq = _dq_entries(dq, q, dout, lse, delta, k_pages, v_pages, pages, places, batch, group,
                         tl.maximum(start, hidden), middle, low, high, scale_log2, False, PAGE, BLOCK_N, DIM, True,
                         STAGES)  # fmt: skip
        start = middle
    dq = _dq_entries(dq, q, dout, lse, delta, k_pages, v_pages, pages, places, batch, group, start, end, low, high,
                     scale_log2, False, PAGE, BLOCK_N, DIM, False, STAGES)  # fmt: skip
    whole = length // PAGE
    if STRADDLE:
        column = whole - first_page
        here = (tl.load(bounds + 4) > 0) & (column >= 0) & (column < columns)
        slot = tl.load(table_ptr + batch.to(tl.int64) * columns + column, mask=here, other=-1)
        for i in tl.range(0, tl.where(slot >= 0, TILES, 0), num_stages=1):
            keys = whole * PAGE + i * BLOCK_N + tl.arange(0, BLOCK_N)
            dq = dq_step(dq, q, dout, lse, delta, k_pages, v_pages, slot, i * BLOCK_N, group, 0.0, keys, low,
                          tl.zeros_like(high) + length, length, scale_log2, BLOCK_N, DIM, True, True)  # fmt: skip
    if OWN:
        start = tl.load(bounds + 2)
        end = tl.load(bounds + 3)
        if WINDOW or DOCUMENTS:
            middle = tl.minimum(tl.maximum(partial, start), tl.maximum(end, start))
            dq = _dq_entries(dq, q, dout, lse, delta, k_own, v_own, pages, places, batch, group,
                             tl.maximum(start, hidden), middle, low, high, scale_log2, True, PAGE, BLOCK_N, DIM, True,
                             STAGES)  # fmt: skip
            start = middle
        dq = _dq_entries(dq, q, dout, lse, delta, k_own, v_own, pages, places, batch, group, start, end, low, high,
                         scale_log2, True, PAGE, BLOCK_N, DIM, False, STAGES)  # fmt: skip
        first = tl.where((tl.load(bounds + 4) > 0) & (r > 0), 0, TILES) if STRADDLE else TILES
        last = tl.where(tl.load(bounds + 5) > 0, 2 * TILES, TILES)
        for i in tl.range(first, last, num_stages=1):
            page = tl.where(i < TILES, whole, whole + r)
            keys = page * PAGE + (i % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
            dq = dq_step(dq, q, dout, lse, delta, k_own, v_own, batch, page * PAGE + (i % TILES) * BLOCK_N - length,
                          group, 0.0, keys, tl.maximum(low, length), high, 0, scale_log2, BLOCK_N, DIM, True,
                          False)  # fmt: skip

    head = group * REPEAT + rows % REPEAT
    dims = tl.arange(0, DIM)
    mask = (rows < end_row)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (((batch * tokens).to(tl.int64) + query) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    if OWN:
        dq = dq * scale
    tl.store(dq_ptr + offsets, dq.to(dq_ptr.dtype.element_ty), mask=mask)
