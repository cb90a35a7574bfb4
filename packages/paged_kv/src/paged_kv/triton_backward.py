"""The backward kernels: one for dK and dV (a program owns a tile of keys), one for dQ (a program owns a tile of rows).

Both recompute the probabilities from the global log-sum-exp, so that every segment's gradient is exact on its own. The
owner of a key tile sums over all rows in registers and adds to the gradient page once: no atomics, and the same bits
on every run. A third kernel lays the rows out one KV head after the other, which both others read by tensor descriptor.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
    M = C * R rows of a KV head, row r being query `r // R` and head `group * R + r % R`
Source: FlashAttention-2 (arXiv 2307.08691), PagedAttention (arXiv 2309.06180); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_boxes import _key_boxes, _row_boxes
from .triton_forward import first_visible, locate, tile_range


@triton.jit(do_not_specialize=["tokens", "padded"])
def _prepare_bwd_kernel(
    q_ptr, out_ptr, dout_ptr, lse_ptr, q_rows_ptr, dout_rows_ptr, stats_ptr, tokens, padded,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows of q and dout per KV head, and pairs of LSE in base 2 and delta = rowsum(dout * out). Grid: (tiles, G, B).

    Rows that see nothing and rows behind the end get LSE = +inf: their probabilities are zero from then on.
    """
    HEADS: tl.constexpr = GROUPS * REPEAT
    group = tl.program_id(1)
    batch = tl.program_id(2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < tokens * REPEAT
    query = tl.minimum(rows // REPEAT, tokens - 1)
    head = group * REPEAT + rows % REPEAT
    dims = tl.arange(0, DIM)
    inside = valid[:, None] & (dims < HEAD_DIM)[None, :]
    source = (((batch * tokens).to(tl.int64) + query) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    dout = tl.load(dout_ptr + source, mask=inside, other=0.0)
    out = tl.load(out_ptr + source, mask=inside, other=0.0)
    lse = tl.load(lse_ptr + (batch * HEADS + head).to(tl.int64) * tokens + query, mask=valid, other=float("-inf"))

    block = (batch * GROUPS + group).to(tl.int64)
    target = (block * tokens * REPEAT + rows)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(q_rows_ptr + target, tl.load(q_ptr + source, mask=inside, other=0.0), mask=inside)
    tl.store(dout_rows_ptr + target, dout, mask=inside)
    pairs = stats_ptr + (block * padded + rows) * 2
    tl.store(pairs, tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
    tl.store(pairs + 1, tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1))


@triton.jit
def load_stats(stats_ptr, rows, end_row, RAGGED: tl.constexpr):
    """LSE and delta of rows, read as one number of 64 bits a row: half the copies. RAGGED: none are there from
    `end_row` on, which read as LSE = +inf and delta = 0."""
    pairs_ptr = stats_ptr.to(tl.pointer_type(tl.int64)) + rows
    if RAGGED:
        pairs = tl.load(pairs_ptr, mask=rows < end_row, other=0x7F800000)
    else:
        pairs = tl.load(pairs_ptr)
    lse = pairs.to(tl.int32).to(tl.float32, bitcast=True)
    return lse, (pairs >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, q_rows, dout_rows, stats_ptr, block, start, end, low, high, key, documents_ptr, tokens,
    scale_log2, REPEAT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, DOCUMENTS: tl.constexpr,
    MASK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add row tiles [start, end) to a key tile's gradients. MASK: key j is seen by queries [low[j], high[j]) only."""
    # Left without a step, a loop would hand on sums that ptxas takes for unfinished: it then waits for every product.
    if start < end:
        for tile in tl.range(start, end, num_stages=STAGES):
            row = tile * BLOCK_M
            rows = row + tl.arange(0, BLOCK_M)
            q = q_rows.load([block, row, 0]).reshape(BLOCK_M, DIM)
            dout = dout_rows.load([block, row, 0]).reshape(BLOCK_M, DIM)
            lse, delta = load_stats(stats_ptr, rows, 0, False)
            s = tl.dot(k, q.T, input_precision="ieee")
            p = tl.math.exp2(s * scale_log2 - lse[None, :])
            if MASK:
                query = rows // REPEAT
                seen = (query[None, :] >= low[:, None]) & (query[None, :] < high[:, None])
                if DOCUMENTS:
                    document = tl.load(documents_ptr + tl.minimum(query, tokens - 1))
                    seen = seen & (document[None, :] <= key[:, None])
                p = tl.where(seen, p, 0.0)
            dp = tl.dot(v, dout.T, input_precision="ieee")
            dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _put_rows(ptr, offsets, mask, value, ADD: tl.constexpr, ATOMIC: tl.constexpr):
    """Store, or add to what is there: as the only writer of this launch, or atomically."""
    if ATOMIC:
        tl.atomic_add(ptr + offsets, value, mask=mask, sem="relaxed")
    else:
        if ADD:
            value += tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(ptr + offsets, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _key_tile(
    k_desc, v_desc, slot, row, place, count, length, batch, group, share, splits, q_rows, dout_rows, documents_ptr,
    bound_ptr, stats_ptr, dk_ptr, dv_ptr, token, tokens, padded, window, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, PAST: tl.constexpr,
    ATOMIC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys, which stand at `place` relative to the chunk's first token (negative: past).

    `slot, row` say where the tile is read, `token` at which row of the gradient it is added; the first `count` exist.
    """
    lanes = tl.arange(0, BLOCK_N)
    low = place + lanes
    key = length + low
    high = tl.zeros_like(low) + tokens
    # Queries [row_start, row_end) see some key of the tile, [row_full, row_rest) see every key.
    row_start = tl.maximum(place, 0)
    row_full = tl.maximum(place + count - 1, 0)
    row_rest = tokens
    row_end = tokens
    if WINDOW:
        high = tl.minimum(high, low + window)
        row_rest = tl.minimum(row_rest, place + window)
        row_end = tl.minimum(row_end, place + count - 1 + window)
    if DOCUMENTS:
        row_rest = tl.minimum(row_rest, tl.load(bound_ptr))
        row_end = tl.minimum(row_end, tl.load(bound_ptr + 1))
    row_end = tl.where(count > 0, row_end, 0)
    start = row_start * REPEAT // BLOCK_M
    end = tl.maximum(tl.cdiv(row_end * REPEAT, BLOCK_M), start)
    # Rows behind the last query have zero probability anyway: when all queries see the tile, its last rows do too.
    rest = tl.where(row_rest >= tokens, end, tl.maximum(row_rest, 0) * REPEAT // BLOCK_M)
    rest = tl.minimum(tl.maximum(rest, start), end)
    middle = tl.minimum(tl.maximum(tl.cdiv(row_full * REPEAT, BLOCK_M), start), rest)

    k = k_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    v = v_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    block = batch * GROUPS + group
    stats = stats_ptr + block.to(tl.int64) * padded * 2
    documents = documents_ptr + batch * tokens
    dk = tl.zeros([BLOCK_N, DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, DIM], tl.float32)
    from_tile = middle
    to_tile = rest
    if ATOMIC:
        from_tile = middle + (rest - middle) * share // splits
        to_tile = middle + (rest - middle) * (share + 1) // splits
    dk, dv = _dkdv_tiles(dk, dv, k, v, q_rows, dout_rows, stats, block, from_tile, to_tile, low, high, key,
                         documents, tokens, scale_log2, REPEAT, DIM, BLOCK_M, DOCUMENTS, False, STAGES)  # fmt: skip
    if not PAST:
        if not ATOMIC or share == 0:
            dk, dv = _dkdv_tiles(dk, dv, k, v, q_rows, dout_rows, stats, block, start, middle, low, high, key,
                                 documents, tokens, scale_log2, REPEAT, DIM, BLOCK_M, DOCUMENTS, True, 1)  # fmt: skip
    if WINDOW or DOCUMENTS:
        if not ATOMIC or share == splits - 1:
            dk, dv = _dkdv_tiles(dk, dv, k, v, q_rows, dout_rows, stats, block, rest, end, low, high, key,
                                 documents, tokens, scale_log2, REPEAT, DIM, BLOCK_M, DOCUMENTS, True,
                                 STAGES)  # fmt: skip

    # Keys behind the past's end may hold NaN; their rows are garbage and are not stored. The own block's gradient is
    # stored even where no query sees the key: nothing was there before.
    if PAST:
        count = tl.where(start < end, count, 0)
    dims = tl.arange(0, DIM)
    mask = (lanes < count)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = ((token + lanes) * GROUPS + group)[:, None] * HEAD_DIM + dims[None, :]
    _put_rows(dk_ptr, offsets, mask, dk * scale, PAST, ATOMIC)
    _put_rows(dv_ptr, offsets, mask, dv, PAST, ATOMIC)


@triton.jit(
    do_not_specialize=[
        "batch_first", "tokens", "padded", "columns", "first", "window", "past_tiles", "bound_tiles", "splits",
    ]
)  # fmt: skip
def _paged_attention_dkdv_kernel(
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, slots_ptr, grad_slots_ptr, lengths_ptr, documents_ptr,
    bounds_ptr, stats_ptr, dk_pages_ptr, dv_pages_ptr, dk_own_ptr, dv_own_ptr,
    batch_first, tokens, padded, columns, first, window, past_tiles, bound_tiles, splits, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    PAST: tl.constexpr, OWN: tl.constexpr, ATOMIC: tl.constexpr, STAGES: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Grid: (key tiles of the past, then of the own block, G, sequences from `batch_first` on * splits).

    bounds [B, past_tiles + own tiles, 2] (DOCUMENTS only): queries before bounds[..., 0] see every key of the tile,
    as far as documents say, and queries from bounds[..., 1] on see none. ATOMIC: `splits` programs share a tile's rows.
    """
    tile = tl.program_id(0)
    group = tl.program_id(1)
    batch = batch_first + tl.program_id(2)
    share = 0
    if ATOMIC:
        batch = batch_first + tl.program_id(2) // splits
        share = tl.program_id(2) % splits
    TILES: tl.constexpr = PAGE // BLOCK_N
    q_rows, dout_rows = _row_boxes(q_rows, dout_rows, tokens * REPEAT, HEAD_DIM, DIM, BLOCK_M, POINTERS)
    k_own, v_own = _key_boxes(k_own, v_own, tokens, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    k_pages, v_pages = _key_boxes(k_pages, v_pages, PAGE, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    length = tl.load(lengths_ptr + batch)
    bound_ptr = bounds_ptr + (batch * bound_tiles + tile).to(tl.int64) * 2

    if PAST:
        if tile < past_tiles:
            place = first + tile * BLOCK_N - length
            count = tl.minimum(-place, BLOCK_N)
            row = (tile % TILES) * BLOCK_N
            entry = batch.to(tl.int64) * columns + tile // TILES
            slot = tl.load(slots_ptr + entry)
            grad_slot = tl.load(grad_slots_ptr + entry)
            count = tl.where((slot < 0) | (grad_slot < 0), 0, count)
            _key_tile(k_pages, v_pages, slot, row, place, count, length, batch, group, share, splits, q_rows, dout_rows,
                          documents_ptr, bound_ptr, stats_ptr, dk_pages_ptr, dv_pages_ptr,
                          grad_slot.to(tl.int64) * PAGE + row, tokens, padded, window, scale, scale_log2,
                          GROUPS, REPEAT, HEAD_DIM, DIM, BLOCK_M, BLOCK_N, WINDOW, DOCUMENTS, True, ATOMIC,
                          STAGES)  # fmt: skip
    if OWN:
        if tile >= past_tiles:
            place = (tile - past_tiles) * BLOCK_N
            count = tl.minimum(tokens - place, BLOCK_N)
            _key_tile(k_own, v_own, batch, place, place, count, length, batch, group, share, splits, q_rows, dout_rows,
                          documents_ptr, bound_ptr, stats_ptr, dk_own_ptr, dv_own_ptr,
                          (batch * tokens).to(tl.int64) + place, tokens, padded, window, scale, scale_log2,
                          GROUPS, REPEAT, HEAD_DIM, DIM, BLOCK_M, BLOCK_N, WINDOW, DOCUMENTS, False, ATOMIC,
                          STAGES)  # fmt: skip


@triton.jit
def in_registers(x, exists, DIM: tl.constexpr):
    """Rows that a loop multiplies with keys, zero where they do not exist. What comes out of arithmetic is not put into
    shared memory, whose bandwidth is left to the keys; head dim 256 is too wide for that."""
    if DIM <= 128:
        x = tl.where(exists[:, None], x, 0.0)
    return x


@triton.jit
def dq_step(
    dq, q, dout, lse, delta, k_desc, v_desc, slot, row, group, absent, keys, low, high, limit, scale_log2,
    BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to a row tile's dQ; the arguments mean what they mean in the forward."""
    k = k_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    v = v_desc.load([slot, group, row, 0]).reshape(BLOCK_N, DIM)
    if RAGGED:
        k = tl.where((keys < limit)[:, None], k, 0.0)  # 0 * NaN would be NaN
    s = tl.dot(q, k.T, input_precision="ieee")
    p = tl.math.exp2(s * scale_log2 - (lse + absent)[:, None])
    dp = tl.dot(dout, v.T, input_precision="ieee")
    ds = p * (dp - delta[:, None])
    if MASK:
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _dq_tiles(
    dq, q, dout, lse, delta, k_desc, v_desc, table_ptr, group, start, end, low, high, limit, scale_log2,
    TILES: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, MASK: tl.constexpr, RAGGED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add key tiles [start, end) to a row tile's dQ; the arguments mean what they mean in the forward."""
    for tile in tl.range(start, end, num_stages=STAGES):
        slot, row = locate(table_ptr, tile, TILES, BLOCK_N)
        absent = tl.where(slot < 0, float("inf"), 0.0)
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        dq = dq_step(dq, q, dout, lse, delta, k_desc, v_desc, slot, row, group, absent, keys, low, high, limit,
                     scale_log2, BLOCK_N, DIM, MASK, RAGGED)  # fmt: skip
    return dq


@triton.jit(do_not_specialize=["tokens", "padded", "columns", "first", "window", "splits"])
def _paged_attention_dq_kernel(
    q_rows, dout_rows, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, stats_ptr,
    carry_ptr, dq_ptr, tokens, padded, columns, first, window, splits, scale, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    CARRY: tl.constexpr, OWN: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, POINTERS: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles, G, B * splits), as the forward's. CARRY: add to what earlier segments left."""
    tile_m = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    batch = tl.program_id(2)
    share = 0
    if SPLIT:
        batch = tl.program_id(2) // splits
        share = tl.program_id(2) % splits
    HEADS: tl.constexpr = GROUPS * REPEAT
    TILES: tl.constexpr = PAGE // BLOCK_N
    LOWER: tl.constexpr = WINDOW or DOCUMENTS

    q_rows, dout_rows = _row_boxes(q_rows, dout_rows, tokens * REPEAT, HEAD_DIM, DIM, BLOCK_M, POINTERS)
    k_own, v_own = _key_boxes(k_own, v_own, tokens, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    k_pages, v_pages = _key_boxes(k_pages, v_pages, PAGE, GROUPS, HEAD_DIM, DIM, BLOCK_N, POINTERS)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    query = tl.minimum(rows // REPEAT, tokens - 1)
    block = batch * GROUPS + group
    q = q_rows.load([block, tile_m * BLOCK_M, 0]).reshape(BLOCK_M, DIM)
    dout = dout_rows.load([block, tile_m * BLOCK_M, 0]).reshape(BLOCK_M, DIM)
    lse, delta = load_stats(stats_ptr + block.to(tl.int64) * padded * 2, rows, 0, False)
    q = in_registers(q, rows < tokens * REPEAT, DIM)
    dout = in_registers(dout, rows < tokens * REPEAT, DIM)

    length = tl.load(lengths_ptr + batch)
    low = first_visible(query, documents_ptr + batch * tokens, length, window, WINDOW, DOCUMENTS)
    low_min = tl.min(low, 0)
    low_max = tl.max(low, 0)
    dq = tl.zeros([BLOCK_M, DIM], tl.float32)

    table = slots_ptr + batch.to(tl.int64) * columns
    limit = tl.maximum(tl.minimum(length - first, columns * PAGE), 0)
    end = tl.cdiv(limit, BLOCK_N)
    start, middle, rest = tile_range(low_min - first, low_max - first, limit // BLOCK_N, end, BLOCK_N)
    high = tl.zeros_like(rows) + limit
    if LOWER:
        dq = _dq_tiles(dq, q, dout, lse, delta, k_pages, v_pages, table, group, start, middle, low - first, high,
                       limit, scale_log2, TILES, BLOCK_N, DIM, True, False, STAGES)  # fmt: skip
    from_tile = middle
    to_tile = rest
    if SPLIT:
        from_tile = middle + (rest - middle) * share // splits
        to_tile = middle + (rest - middle) * (share + 1) // splits
    dq = _dq_tiles(dq, q, dout, lse, delta, k_pages, v_pages, table, group, from_tile, to_tile, low, high, limit,
                   scale_log2, TILES, BLOCK_N, DIM, False, False, STAGES)  # fmt: skip
    if not SPLIT or share == splits - 1:
        dq = _dq_tiles(dq, q, dout, lse, delta, k_pages, v_pages, table, group, rest, end, low - first, high, limit,
                       scale_log2, TILES, BLOCK_N, DIM, True, True, 1)  # fmt: skip

    if OWN:
        if not SPLIT or share == splits - 1:
            first_query = tile_m * BLOCK_M // REPEAT
            last_query = tl.minimum((tile_m * BLOCK_M + BLOCK_M - 1) // REPEAT, tokens - 1)
            end = tl.cdiv(last_query + 1, BLOCK_N)
            full = (first_query + 1) // BLOCK_N
            start, middle, rest = tile_range(low_min - length, low_max - length, full, end, BLOCK_N)
            low = low - length
            if LOWER:
                dq = _dq_tiles(dq, q, dout, lse, delta, k_own, v_own, batch, group, start, middle, low, query + 1,
                               tokens, scale_log2, 0, BLOCK_N, DIM, True, False, STAGES)  # fmt: skip
            dq = _dq_tiles(dq, q, dout, lse, delta, k_own, v_own, batch, group, middle, rest, low, query + 1,
                           tokens, scale_log2, 0, BLOCK_N, DIM, False, False, STAGES)  # fmt: skip
            dq = _dq_tiles(dq, q, dout, lse, delta, k_own, v_own, batch, group, rest, end, low, query + 1, tokens,
                           scale_log2, 0, BLOCK_N, DIM, True, False, 1)  # fmt: skip

    head = group * REPEAT + rows % REPEAT
    dims = tl.arange(0, DIM)
    mask = (rows < tokens * REPEAT)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = (((batch * tokens).to(tl.int64) + query) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    dq = dq * scale
    if CARRY:
        if not SPLIT or share == 0:
            dq += tl.load(carry_ptr + offsets, mask=mask, other=0.0)
    if SPLIT:
        offsets += (share * (tl.num_programs(2) // splits)).to(tl.int64) * HEADS * tokens * HEAD_DIM
    tl.store(dq_ptr + offsets, dq.to(dq_ptr.dtype.element_ty), mask=mask)
