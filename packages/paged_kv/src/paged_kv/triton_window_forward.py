"""The forward for small windows, where launches take microseconds and latency is what bounds them.

A program holds all keys that some neighbouring queries see, in few wide tiles, and goes through the heads of the group,
a few at a time: all scores of a row are there at once, so that its softmax is a plain one, and there are few products
to wait for. Only scores at the window's edges are masked. Places count from the chunk's first token: negative ones are
past.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim · W window
Source: FlashAttention-2 (arXiv 2307.08691), attention sinks as in GPT-OSS (arXiv 2508.10925); oracle: reference.py
"""

import triton
import triton.language as tl

from .triton_window_keys import _own_keys, _seen, _window_keys


@triton.jit
def _window_fwd(
    q_rows, out_rows, lse_ptr, sinks_ptr, k, v, exists, low, first_query, group, tokens, batch, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr, QUERIES: tl.constexpr,
    WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    """Outputs and LSE of a group's heads; LIMITED: keys may be missing, or lie before a row's `low`."""
    TILES: tl.constexpr = len(WIDTHS)
    row = tl.arange(0, QUERIES * SHARE)
    behind = row // SHARE
    for step in tl.range(0, REPEAT // SHARE, num_stages=STAGES):
        head = group * REPEAT + step * SHARE
        q = q_rows.load([batch, first_query, head, 0]).reshape(QUERIES * SHARE, DIM)
        scores = ()
        top = tl.full([QUERIES * SHARE], float("-inf"), tl.float32)
        for i in tl.static_range(TILES):
            s = tl.dot(q, k[i].T, input_precision="ieee")
            s = _seen(s, float("-inf"), behind, low, exists[i], WINDOW, QUERIES, STARTS[i], WIDTHS[i], LIMITED)
            top = tl.maximum(top, tl.max(s, 1))
            scores += (s,)  # type: ignore[assignment]
        top = top * scale_log2
        if SINKS:  # one more logit, whose value is zero
            sink = tl.load(sinks_ptr + head + row % SHARE).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(top, sink)
        shift = tl.where(top == float("-inf"), 0.0, top)
        l = tl.math.exp2(sink - shift) if SINKS else tl.zeros([QUERIES * SHARE], tl.float32)
        acc = tl.zeros([QUERIES * SHARE, DIM], tl.float32)
        for i in tl.static_range(TILES):
            p = tl.math.exp2(scores[i] * scale_log2 - shift[:, None])
            l += tl.sum(p, 1)
            acc = tl.dot(p.to(q.dtype), v[i], acc, input_precision="ieee")
        unseen = l == 0.0
        out = acc * (1.0 / tl.where(unseen, 1.0, l))[:, None]
        lse = tl.where(unseen, float("-inf"), (shift + tl.math.log2(tl.where(unseen, 1.0, l))) * 0.6931471805599453)
        out_rows.store([batch, first_query, head, 0], out.to(q.dtype).reshape(1, QUERIES, SHARE, DIM))
        query = first_query + behind
        stats = (batch * (GROUPS * REPEAT) + head + row % SHARE).to(tl.int64) * tokens + query
        tl.store(lse_ptr + stats, lse, mask=query < tokens)


@triton.jit(do_not_specialize=["one_length", "tokens", "columns", "first"])
def _window_fwd_kernel(
    q_rows, k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, sinks_ptr, out_rows, lse_ptr,
    one_length, tokens, columns, first, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    SHARE: tl.constexpr, QUERIES: tl.constexpr, WINDOW: tl.constexpr, STARTS: tl.constexpr, WIDTHS: tl.constexpr,
    DOCUMENTS: tl.constexpr, UNIFORM: tl.constexpr, SINKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (query tiles * G, B), groups innermost: programs that run together read neighbouring memory.

    `scale_log2` is above zero: times it, what is hidden stays -inf.
    """
    group = tl.program_id(0) % GROUPS
    first_query = tl.program_id(0) // GROUPS * QUERIES
    batch = tl.program_id(1)
    if DOCUMENTS or first_query < WINDOW:
        k, v, exists, low = _window_keys(
            k_own, v_own, k_pages, v_pages, slots_ptr, lengths_ptr, documents_ptr, one_length, first_query, columns,
            first, tokens, batch, group, GROUPS, HEAD_DIM, DIM, PAGE, SHARE, QUERIES, WINDOW, STARTS, WIDTHS, DOCUMENTS,
            UNIFORM)  # fmt: skip
        _window_fwd(q_rows, out_rows, lse_ptr, sinks_ptr, k, v, exists, low, first_query, group, tokens, batch,
                    scale_log2, GROUPS, REPEAT, DIM, SHARE, QUERIES, WINDOW, STARTS, WIDTHS, SINKS, STAGES,
                    True)  # fmt: skip
    else:
        k, v = _own_keys(k_own, v_own, first_query, tokens, batch, group, GROUPS, HEAD_DIM, DIM, WINDOW, STARTS, WIDTHS)
        _window_fwd(q_rows, out_rows, lse_ptr, sinks_ptr, k, v, k, 0, first_query, group, tokens, batch, scale_log2,
                    GROUPS, REPEAT, DIM, SHARE, QUERIES, WINDOW, STARTS, WIDTHS, SINKS, STAGES, False)  # fmt: skip
