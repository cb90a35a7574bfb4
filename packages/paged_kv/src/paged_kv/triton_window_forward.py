"""The forward for small windows: a program owns neighbouring queries, and takes the heads of one KV head in turn.

The keys that its queries see, `window + queries` of them, wherever they lie (pages or own block), are read once and
serve all these heads. Tiles of keys are as wide as the queries are many, so that in the first tile a query sees exactly
those columns that it does not see in the last: the scores of both are put into one tile, and nothing that the window
hides is ever weighed. A row's scores are together in registers, so its softmax is a plain one.
Places of keys and queries count from the chunk's first token: negative ones are past.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
Source: FlashAttention-2 (arXiv 2307.08691), attention sinks as in GPT-OSS (arXiv 2508.10925); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_window import _page_rows


@triton.jit
def _tiles_of_keys(
    k_own, v_own, k_pages, v_pages, table_ptr, first_query, length, first, columns, tokens, batch, group,
    GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, QUERIES: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """The keys and values that queries from `first_query` on see, in tiles 0 to LAST of QUERIES keys, zeros where there
    are none, and which exist. A tile is all past or all own, so only places come out of the branch."""
    dims = tl.arange(0, DIM)[None, :]
    k_tiles = ()
    v_tiles = ()
    exists = ()
    for i in tl.static_range(LAST + 1):
        from_place = first_query + (i - LAST) * QUERIES
        place = from_place + tl.arange(0, QUERIES)
        past = from_place < 0
        if past:
            there = length + place >= 0
            row, there = _page_rows(table_ptr, tl.maximum(length + place, 0), first, columns, group, there, GROUPS,
                                    PAGE)  # fmt: skip
        else:
            there = place < tokens
            row = ((batch * tokens).to(tl.int64) + place) * GROUPS + group
        offsets = row[:, None] * HEAD_DIM + dims
        inside = there[:, None] & (dims < HEAD_DIM)
        k_tiles += (tl.load(tl.where(past, k_pages, k_own) + offsets, mask=inside, other=0.0),)  # type: ignore[assignment]
        v_tiles += (tl.load(tl.where(past, v_pages, v_own) + offsets, mask=inside, other=0.0),)  # type: ignore[assignment]
        exists += (there,)  # type: ignore[assignment]
    return k_tiles, v_tiles, exists


@triton.jit
def _scores(
    q, k, exists, low, TILE: tl.constexpr, QUERIES: tl.constexpr, LIMITED: tl.constexpr
):  # fmt: skip
    """Scores of one tile of keys, -inf where LIMITED and a key is missing or lies before the row's document."""
    s = tl.dot(q, k.T, input_precision="ieee")
    if LIMITED:
        inside = TILE * QUERIES + tl.arange(0, QUERIES)[None, :] >= low[:, None]
        s = tl.where(exists[None, :] & inside, s, float("-inf"))
    return s


@triton.jit
def _window_fwd(
    q_rows, out_rows, lse_ptr, sinks_ptr, k, v, exists, low, first_query, group, heads, tokens, batch, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, QUERIES: tl.constexpr,
    LAST: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Outputs and LSE of the first `heads` of a group; LIMITED: keys may be missing, or lie before a row's `low`."""
    SHARE: tl.constexpr = BLOCK_M // QUERIES
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // SHARE
    near = tl.arange(0, QUERIES)[None, :] > (row // SHARE)[:, None]
    for step in tl.range(0, heads // SHARE, num_stages=STAGES):
        head = group * REPEAT + step * SHARE
        q = q_rows.load([batch, first_query, head, 0]).reshape(BLOCK_M, DIM)
        s_first = _scores(q, k[0], exists[0], low, 0, QUERIES, LIMITED)
        s_last = _scores(q, k[LAST], exists[LAST], low, LAST, QUERIES, LIMITED)
        s = tl.where(near, s_first, s_last)
        top = tl.max(s, 1)
        middle = ()
        for i in tl.static_range(1, LAST):
            x = _scores(q, k[i], exists[i], low, i, QUERIES, LIMITED)
            top = tl.maximum(top, tl.max(x, 1))
            middle += (x,)  # type: ignore[assignment]
        top = top * scale_log2
        if SINKS:  # one more logit, whose value is zero
            sink = tl.load(sinks_ptr + head + row % SHARE).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        shift = tl.where(top == float("-inf"), 0.0, top)
        p = tl.math.exp2(s * scale_log2 - shift[:, None])
        l = tl.sum(p, 1)
        in_first = tl.where(near, p, 0.0)
        acc = tl.dot(in_first.to(q.dtype), v[0], input_precision="ieee")
        acc = tl.dot((p - in_first).to(q.dtype), v[LAST], acc, input_precision="ieee")
        for i in tl.static_range(1, LAST):
            p = tl.math.exp2(middle[i - 1] * scale_log2 - shift[:, None])
            l += tl.sum(p, 1)
            acc = tl.dot(p.to(q.dtype), v[i], acc, input_precision="ieee")
        if SINKS:
            l += tl.math.exp2(sink - shift)
        unseen = l == 0.0
        out = acc * (1.0 / tl.where(unseen, 1.0, l))[:, None]
        lse = tl.where(unseen, float("-inf"), (shift + tl.math.log2(tl.where(unseen, 1.0, l))) * 0.6931471805599453)
        out_rows.store([batch, first_query, head, 0], out.to(q.dtype).reshape(1, QUERIES, SHARE, DIM))
        stats = (batch * (GROUPS * REPEAT) + head + row % SHARE).to(tl.int64) * tokens + query
        tl.store(lse_ptr + stats, lse, mask=query < tokens)


@triton.jit(do_not_specialize=["one_length", "tokens", "columns", "first"])
def _window_fwd_kernel(
    q_rows, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, sinks_ptr, out_rows, lse_ptr,
    one_length, tokens, columns, first, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, QUERIES: tl.constexpr, LAST: tl.constexpr, DOCUMENTS: tl.constexpr,
    UNIFORM: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles * G, B), groups innermost: programs that run together read neighbouring memory.

    `scale_log2` is above zero: times it, what is hidden stays -inf.
    """
    group = tl.program_id(0) % GROUPS
    first_query = tl.program_id(0) // GROUPS * QUERIES
    batch = tl.program_id(1)
    length = one_length
    if not UNIFORM:
        length = tl.load(lengths_ptr + batch)
    low = tl.zeros([BLOCK_M], tl.int32)
    if DOCUMENTS:
        query = tl.minimum(first_query + tl.arange(0, BLOCK_M) // (BLOCK_M // QUERIES), tokens - 1)
        low = tl.load(documents_ptr + batch * tokens + query) - length - (first_query - LAST * QUERIES)
    k, v, exists = _tiles_of_keys(k_own, v_own, k_pages, v_pages, slots_ptr + batch.to(tl.int64) * columns, first_query,
                                 length, first, columns, tokens, batch, group, GROUPS, HEAD_DIM, DIM, PAGE, QUERIES,
                                 LAST)  # fmt: skip
    limited = REPEAT  # heads: all of them where the tile's keys begin in the past, and where there are documents
    if not DOCUMENTS:
        limited = tl.where(first_query < LAST * QUERIES, REPEAT, 0)
    _window_fwd(q_rows, out_rows, lse_ptr, sinks_ptr, k, v, exists, low, first_query, group, limited, tokens, batch,
                scale_log2, GROUPS, REPEAT, DIM, BLOCK_M, QUERIES, LAST, SINKS, STAGES, True)  # fmt: skip
    if not DOCUMENTS:
        _window_fwd(q_rows, out_rows, lse_ptr, sinks_ptr, k, v, exists, low, first_query, group, REPEAT - limited,
                    tokens, batch, scale_log2, GROUPS, REPEAT, DIM, BLOCK_M, QUERIES, LAST, SINKS, STAGES,
                    False)  # fmt: skip
