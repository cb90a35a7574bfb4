"""The forward kernel: past pages and the own causal block in one pass, with a running softmax in registers.

One program owns a tile of rows of one KV head. Rows are (query, head of the group) pairs, query-major: row r is query
`r // R` and head `group * R + r % R`, so that any grouping fills the tile and neighbouring rows share a mask. Keys come
in tiles that never cross a page. A tile that every row sees whole takes the unmasked path; tiles at an edge (window,
document, end of the past, diagonal) are masked. Several segments pass the state on through a float32 output and LSE.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
Source: FlashAttention-2 (arXiv 2307.08691), PagedAttention (arXiv 2309.06180); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_boxes import _key_boxes


@triton.jit
def first_visible(positions, documents_ptr, length, window, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Position of the first key that each query (given by its place in the chunk) sees."""
    low = tl.zeros_like(positions)
    if WINDOW:
        low = tl.maximum(low, length + positions - window + 1)
    if DOCUMENTS:
        low = tl.maximum(low, tl.load(documents_ptr + positions))
    return low


@triton.jit
def tile_range(low_min, low_max, full, end, BLOCK_N: tl.constexpr):
    """Split the key tiles [0, end) into a masked head, a middle that all rows see whole, and a masked rest.

    Shapes: low_min, low_max: the smallest and largest first key of the rows; full: tiles before it lie before every
        row's last key. All relative to tile 0.
    Returns: (start, middle, rest): masked [start, middle), unmasked [middle, rest), masked [rest, end)
    """
    start = tl.minimum(tl.maximum(low_min, 0) // BLOCK_N, end)
    rest = tl.maximum(full, start)
    middle = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(low_max, 0), BLOCK_N), start), rest)
    return start, middle, rest


@triton.jit
def locate(table_ptr, tile, TILES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slot and row of a key tile. TILES a page; 0: the own block, where `table_ptr` is the sequence itself."""
    if TILES == 0:
        slot = table_ptr
        row = tile * BLOCK_N
    else:
        slot = tl.load(table_ptr + tile // TILES)
        row = (tile % TILES) * BLOCK_N
    return slot, row


@triton.jit
def _softmax(s, factor, m, l, absent):
    """One step of the running softmax: weights, the factor for what came before, and the new state. In base 2."""
    m_new = tl.maximum(m, tl.max(s, 1) * factor - absent)
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.math.exp2(s * factor - (shift + absent)[:, None])
    alpha = tl.math.exp2(m - shift)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def _values(
    v_desc, slot, row, group, keys, limit, BLOCK_N: tl.constexpr, DIM: tl.constexpr, RAGGED: tl.constexpr
):  # fmt: skip
    v = v_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    if RAGGED:
        v = tl.where((keys < limit)[:, None], v, 0.0)  # 0 * NaN would be NaN
    return v


@triton.jit
def fwd_step(
    acc, m, l, q, k_desc, v_desc, slot, row, group, absent, keys, low, high, limit, scale_log2,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running softmax. A page that is not there reads as zeros; an infinite `absent` takes
    its keys out.

    Rows come in parts, which the chip works on side by side: the next part's scores beside a softmax, and the sum of
    weighted values beside the next softmax.
    MASK: row r sees keys [low[r], high[r]) only. RAGGED: memory at and behind `limit` was never written.
    """
    PARTS: tl.constexpr = len(q)
    k = k_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    weights = ()
    scaled = ()
    tops = ()
    sums = ()
    for i in tl.static_range(PARTS):
        s = tl.dot(q[i], k.T, input_precision="ieee")
        # Waited for here, values let a softmax run beside the scores before it and beside the sum behind it.
        if PARTS > 1 and i == PARTS - 1:
            v = _values(v_desc, slot, row, group, keys, limit, BLOCK_N, DIM, RAGGED)
        if MASK:
            seen = (keys[None, :] >= low[i][:, None]) & (keys[None, :] < high[i][:, None])
            s = tl.where(seen, s * scale_log2, float("-inf"))
        p, alpha, top, total = _softmax(s, 1.0 if MASK else scale_log2, m[i], l[i], absent)
        weights += (p,)  # type: ignore[assignment]
        scaled += (acc[i] * alpha[:, None],)  # type: ignore[assignment]
        tops += (top,)  # type: ignore[assignment]
        sums += (total,)  # type: ignore[assignment]
    if PARTS == 1:
        v = _values(v_desc, slot, row, group, keys, limit, BLOCK_N, DIM, RAGGED)
    values = ()
    for i in tl.static_range(PARTS):
        value = tl.dot(weights[i].to(v.dtype), v, scaled[i], input_precision="ieee")
        values += (value,)
    return values, tops, sums


@triton.jit
def _fwd_tiles(
    acc, m, l, q, k_desc, v_desc, table_ptr, group, start, end, low, high, limit, scale_log2,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, RAGGED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add key tiles [start, end) to the running softmax."""
    if start < end:  # see triton_backward.py
        for tile in tl.range(start, end, num_stages=STAGES):
            slot, row = locate(table_ptr, tile, TILES, BLOCK_N)
            absent = tl.where(slot < 0, float("inf"), 0.0)
            keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            acc, m, l = fwd_step(acc, m, l, q, k_desc, v_desc, slot, row, group, absent, keys, low, high, limit,
                                 scale_log2, BLOCK_N, DIM, MASK, RAGGED)  # fmt: skip
    return acc, m, l


@triton.jit
def _fwd_edge_tiles(
    acc, m, l, q, k_desc, v_desc, table_ptr, group, start, end, low, high, limit, scale_log2,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, RAGGED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add masked key tiles, one part of the rows after the other: two at once and their masks spill."""
    values = ()
    tops = ()
    sums = ()
    for i in tl.static_range(len(q)):
        value, top, total = _fwd_tiles((acc[i],), (m[i],), (l[i],), (q[i],), k_desc, v_desc, table_ptr, group, start,
                                       end, (low[i],), (high[i],), limit, scale_log2, TILES, BLOCK_N, DIM, True,
                                       RAGGED, STAGES)  # fmt: skip
        values += value
        tops += top
        sums += total
    return values, tops, sums


@triton.jit
def _fwd_tiles_ahead(
    acc, m, l, q, k_desc, v_desc, table_ptr, group, start, end, scale_log2,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As `_fwd_tiles` without masks, for rows in one part: a tile's softmax runs beside the sum of the tile before.

    Weights become 16-bit numbers only when that sum is done: it still reads the registers of those before.
    """
    if start < end:
        slot, row = locate(table_ptr, start, TILES, BLOCK_N)
        k = k_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
        s = tl.dot(q, k.T, input_precision="ieee")
        for tile in tl.range(start + 1, end, num_stages=STAGES):
            slot_next, row_next = locate(table_ptr, tile, TILES, BLOCK_N)
            absent = tl.where(slot < 0, float("inf"), 0.0)
            p, alpha, m, l = _softmax(s, scale_log2, m, l, absent)
            k = k_desc.load([slot_next, group, row_next, 0]).reshape(BLOCK_N, DIM)
            s = tl.dot(q, k.T, input_precision="ieee")
            v = v_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            slot = slot_next
            row = row_next
        p, alpha, m, l = _softmax(s, scale_log2, m, l, tl.where(slot < 0, float("inf"), 0.0))
        v = v_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, m, l


@triton.jit
def _fwd_whole_tiles(
    acc, m, l, q, k_desc, v_desc, table_ptr, group, start, end, low, high, limit, scale_log2,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Add key tiles that all rows see whole."""
    if AHEAD:
        tl.static_assert(len(q) == 1, "scores ahead are for rows in one part")
        value, top, total = _fwd_tiles_ahead(acc[0], m[0], l[0], q[0], k_desc, v_desc, table_ptr, group, start, end,
                                             scale_log2, TILES, BLOCK_N, DIM, STAGES)  # fmt: skip
        acc = (value,)
        m = (top,)
        l = (total,)
    else:
        acc, m, l = _fwd_tiles(acc, m, l, q, k_desc, v_desc, table_ptr, group, start, end, low, high, limit,
                               scale_log2, TILES, BLOCK_N, DIM, False, False, STAGES)  # fmt: skip
    return acc, m, l


@triton.jit
def add_sink(acc, m, l, sinks_ptr):
    """One more logit, whose value is zero."""
    sink = tl.load(sinks_ptr).to(tl.float32) * 1.4426950408889634
    top = tl.maximum(m, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    shrink = tl.math.exp2(m - top)
    return acc * shrink[:, None], top, l * shrink + tl.math.exp2(sink - top)


@triton.jit
def finished(acc, m, l):
    """Output and LSE of a state: 0 and -inf where nothing was seen."""
    unseen = l == 0.0
    l = tl.where(unseen, 1.0, l)
    return acc / l[:, None], tl.where(unseen, float("-inf"), (m + tl.math.log2(l)) * 0.6931471805599453)


@triton.jit
def minus(places, start):
    """The places of all parts, relative to `start`."""
    moved = ()
    for i in tl.static_range(len(places)):
        moved += (places[i] - start,)  # type: ignore[assignment]
    return moved


@triton.jit
def extremes(values):
    """The smallest and the largest of all parts."""
    smallest = tl.min(values[0], 0)
    largest = tl.max(values[0], 0)
    for i in tl.static_range(1, len(values)):
        smallest = tl.minimum(smallest, tl.min(values[i], 0))
        largest = tl.maximum(largest, tl.max(values[i], 0))
    return smallest, largest


@triton.jit
def row_parts(
    first_row, end_row, batch, group, tokens, documents_ptr, length, window, REPEAT: tl.constexpr, HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Of each part of a tile of rows: where they lie in [B, C, H, D] and in [B, H, C], their queries, which of them
    exist, and the first key that each sees.

    Rows from `end_row` on are not this tile's; behind the chunk's end they repeat the last query: they read what is
    there and are not stored.
    """
    offsets = ()
    stats = ()
    queries = ()
    valid = ()
    low = ()
    for i in tl.static_range(PARTS):
        rows = first_row + i * (BLOCK_M // PARTS) + tl.arange(0, BLOCK_M // PARTS)
        query = tl.minimum(rows // REPEAT, tokens - 1)
        head = group * REPEAT + rows % REPEAT
        places = ((batch * tokens).to(tl.int64) + query) * HEADS + head
        offsets += (places[:, None] * HEAD_DIM + tl.arange(0, DIM)[None, :],)  # type: ignore[assignment]
        stats += ((batch * HEADS + head).to(tl.int64) * tokens + query,)  # type: ignore[assignment]
        queries += (query,)  # type: ignore[assignment]
        valid += (rows < end_row,)  # type: ignore[assignment]
        low += (first_visible(query, documents_ptr, length, window, WINDOW, DOCUMENTS),)  # type: ignore[assignment]
    return offsets, stats, queries, valid, low


@triton.jit(do_not_specialize=["tokens", "columns", "first", "window", "splits"])
def _paged_attention_fwd_kernel(
    q_ptr, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr,
    sinks_ptr, carry_ptr, carry_lse_ptr, out_ptr, lse_ptr,
    tokens, columns, first, window, splits, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    CARRY: tl.constexpr, OWN: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, SINKS: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles, G, B * splits). CARRY: start from an earlier segment's state. OWN: the own block comes last,
    and then the SINKS.

    SPLIT: program i of `splits` takes its share of the keys and writes a partial result of its own, `out[i]`, `lse[i]`.
    """
    # Later rows have more of the own block to see; they go first, so that the longest program does not start last.
    tile_m = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    batch = tl.program_id(2)
    share = 0
    if SPLIT:
        batch = tl.program_id(2) // splits
        share = tl.program_id(2) % splits
    HEADS: tl.constexpr = GROUPS * REPEAT
    TILES: tl.constexpr = PAGE // BLOCK_N
    OWN_STAGES: tl.constexpr = STAGES if STAGES == 1 else STAGES - 1  # no slot to look up first
    LOWER: tl.constexpr = WINDOW or DOCUMENTS

    k_own, v_own = _key_boxes(k_own, v_own, tokens, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    k_pages, v_pages = _key_boxes(k_pages, v_pages, PAGE, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    inside = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
    length = tl.load(lengths_ptr + batch)
    documents = documents_ptr + batch * tokens
    offsets, stats, query, valid, low = row_parts(tile_m * BLOCK_M, tokens * REPEAT, batch, group, tokens, documents,
                                                  length, window, REPEAT, HEADS, HEAD_DIM, DIM, BLOCK_M, PARTS, WINDOW,
                                                  DOCUMENTS)  # fmt: skip
    low_min, low_max = extremes(low)
    q = ()
    m = ()
    l = ()
    acc = ()
    high = ()
    # The past. Everything is relative to the segment's first key.
    table = slots_ptr + batch.to(tl.int64) * columns
    limit = tl.maximum(tl.minimum(length - first, columns * PAGE), 0)
    for i in tl.static_range(PARTS):
        q += (tl.load(q_ptr + offsets[i], mask=inside, other=0.0),)  # type: ignore[assignment]
        top = tl.full([BLOCK_M // PARTS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M // PARTS], tl.float32)
        value = tl.zeros([BLOCK_M // PARTS, DIM], tl.float32)
        if CARRY:
            if not SPLIT or share == 0:
                top = tl.load(carry_lse_ptr + stats[i]) * 1.4426950408889634
                total = tl.where(top == float("-inf"), 0.0, 1.0)
                value = tl.load(carry_ptr + offsets[i], mask=inside, other=0.0)
        m += (top,)  # type: ignore[assignment]
        l += (total,)  # type: ignore[assignment]
        acc += (value,)  # type: ignore[assignment]
        high += (tl.zeros_like(query[i]) + limit,)  # type: ignore[assignment]

    end = tl.cdiv(limit, BLOCK_N)
    start, middle, rest = tile_range(low_min - first, low_max - first, limit // BLOCK_N, end, BLOCK_N)
    low = minus(low, first)
    if LOWER:
        acc, m, l = _fwd_edge_tiles(acc, m, l, q, k_pages, v_pages, table, group, start, middle, low, high, limit,
                                    scale_log2, TILES, BLOCK_N, DIM, False, STAGES)  # fmt: skip
    from_tile = middle
    to_tile = rest
    if SPLIT:
        from_tile = middle + (rest - middle) * share // splits
        to_tile = middle + (rest - middle) * (share + 1) // splits
    acc, m, l = _fwd_whole_tiles(acc, m, l, q, k_pages, v_pages, table, group, from_tile, to_tile, low, high, limit,
                                 scale_log2, TILES, BLOCK_N, DIM, STAGES, AHEAD)  # fmt: skip
    if not SPLIT or share == splits - 1:
        acc, m, l = _fwd_edge_tiles(acc, m, l, q, k_pages, v_pages, table, group, rest, end, low, high, limit,
                                    scale_log2, TILES, BLOCK_N, DIM, True, 1)  # fmt: skip

    # The places are worked out again, from a value the compiler cannot know to be the same: held in registers through
    # the loop above they would spill.
    tile_m += tl.load(lengths_ptr + batch, volatile=True) - length
    offsets, stats, query, valid, low = row_parts(tile_m * BLOCK_M, tokens * REPEAT, batch, group, tokens, documents,
                                                  length, window, REPEAT, HEADS, HEAD_DIM, DIM, BLOCK_M, PARTS, WINDOW,
                                                  DOCUMENTS)  # fmt: skip
    if OWN:
        if not SPLIT or share == splits - 1:
            first_query = tile_m * BLOCK_M // REPEAT
            last_query = tl.minimum((tile_m * BLOCK_M + BLOCK_M - 1) // REPEAT, tokens - 1)
            end = tl.cdiv(last_query + 1, BLOCK_N)
            full = (first_query + 1) // BLOCK_N
            start, middle, rest = tile_range(low_min - length, low_max - length, full, end, BLOCK_N)
            low = minus(low, length)
            high = minus(query, -1)
            if LOWER:
                acc, m, l = _fwd_edge_tiles(acc, m, l, q, k_own, v_own, batch, group, start, middle, low, high, tokens,
                                            scale_log2, 0, BLOCK_N, DIM, False, OWN_STAGES)  # fmt: skip
            acc, m, l = _fwd_whole_tiles(acc, m, l, q, k_own, v_own, batch, group, middle, rest, low, high, tokens,
                                         scale_log2, 0, BLOCK_N, DIM, OWN_STAGES, AHEAD)  # fmt: skip
            acc, m, l = _fwd_edge_tiles(acc, m, l, q, k_own, v_own, batch, group, rest, end, low, high, tokens,
                                        scale_log2, 0, BLOCK_N, DIM, False, 1)  # fmt: skip

    part = 0
    if SPLIT:
        part = (share * (tl.num_programs(2) // splits)).to(tl.int64) * HEADS * tokens
    for i in tl.static_range(PARTS):
        top = m[i]
        total = l[i]
        value = acc[i]
        if SINKS:
            if not SPLIT or share == splits - 1:
                row = tile_m * BLOCK_M + i * (BLOCK_M // PARTS) + tl.arange(0, BLOCK_M // PARTS)
                value, top, total = add_sink(value, top, total, sinks_ptr + group * REPEAT + row % REPEAT)
        value, top = finished(value, top, total)
        tl.store(
            out_ptr + part * HEAD_DIM + offsets[i], value.to(out_ptr.dtype.element_ty), mask=valid[i][:, None] & inside
        )
        tl.store(lse_ptr + part + stats[i], top, mask=valid[i])
