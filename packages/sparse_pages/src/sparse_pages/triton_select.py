"""Scores and lists on a GPU, the same bits as the plain code's: exact.py says what is computed, select.py what chosen.

Vectors become integers of at most 22 bits, cut into three signed digits of 8 bits, which the matrix units multiply and
add without rounding; a float64 puts the digits' products together, again without rounding. The best pages are found by
building the least key that is among them bit by bit, and written in order of page: nothing is sorted.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · R = H / G · F features ·
K pages selected · Q query blocks
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

SCORES_BYTES = 2**26  # of scores at once
_TILE = 4096  # pages a program looks at together
_SCORED = 64  # pages a program scores together
_MEAN_ELEMENTS = 2**15  # of a page's keys that one program adds
_ROUND = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: what is added to it and taken off again is a whole number


@triton.jit
def _whole(x):
    """The nearest integer, halves to even, of a float64 below 2^51."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _power_of_two(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _store_digits(
    x, there, scale_at, digits_ptr, scale_ptr, FEATURES: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Round vectors [rows, WIDTH] to digits at `scale_at`; the scale of a vector, if it is finite."""
    features = tl.arange(0, WIDTH)
    inside = there[:, None] & (features < FEATURES)[None, :]
    finite = tl.max(tl.where((x == x) & (tl.abs(x) != float("inf")), 0, 1), 1) == 0
    x = tl.where(finite[:, None], x, 0.0)
    exponent = ((tl.max(tl.abs(x), 1).to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    exponent = tl.minimum(tl.maximum(exponent, LEAST), MOST)
    value = _whole(x * _power_of_two(BITS - exponent)[:, None])
    for i in tl.static_range(3):
        rest = tl.floor((value + 128.0) / 256.0)  # a digit lies in [-128, 128)
        digit = value - rest * 256.0
        places = (scale_at * 3 + 2 - i)[:, None] * FEATURES + features[None, :]
        tl.store(digits_ptr + places, digit.to(tl.int8), mask=inside)
        value = rest
    return tl.where(finite, _power_of_two(exponent - BITS), float("nan"))


@triton.jit
def _summed(x_ptr, row, rows, batch, batch_stride, group, GROUPS: tl.constexpr, REPEAT: tl.constexpr,
            FEATURES: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The sum of the R vectors of a KV head, in float64, one after the other in the dtype of the computation."""
    features = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (features < FEATURES)[None, :]
    places = (row.to(tl.int64) * GROUPS + group)[:, None] * REPEAT * FEATURES + features[None, :]
    source = x_ptr + batch * batch_stride + places
    x = tl.load(source, mask=inside, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    for i in tl.static_range(1, REPEAT):
        x += tl.load(source + i * FEATURES, mask=inside, other=0.0).to(x.dtype)
    return x.to(tl.float64)


@triton.jit(do_not_specialize=["tokens", "pages", "q_tiles"])
def _digits_kernel(
    q_ptr, k_ptr, real_ptr, digits_ptr, scale_ptr, tokens, pages, q_stride, k_stride, q_tiles,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, FEATURES: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the R vectors of a query's KV head, and round the sums to digits, and so the pages' vectors. Grid: (tiles of
    C, then of N, G, B).

    Shapes: q [B, C, G, R, F]; k [B, N, G, F]; real [B, C]; digits [B * G * C, then B * G * N, 3, F] int8; scale one a
        vector, float64: 0 for what is not real, NaN for a vector with an element that is not finite
    """
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    if tl.program_id(0) < q_tiles:
        row = tl.program_id(0) * BLOCK + lanes
        x = _summed(q_ptr, row, tokens, batch, q_stride, group, GROUPS, REPEAT, FEATURES, WIDTH)
        at = (batch * GROUPS + group) * tokens + row
        scale = _store_digits(x, row < tokens, at, digits_ptr, scale_ptr, FEATURES, BITS, LEAST, MOST, WIDTH)
        if REAL:
            scale = tl.where(tl.load(real_ptr + batch * tokens + row, mask=row < tokens, other=0) != 0, scale, 0.0)
        tl.store(scale_ptr + at, scale, mask=row < tokens)
    else:
        row = (tl.program_id(0) - q_tiles) * BLOCK + lanes
        x = _summed(k_ptr, row, pages, batch, k_stride, group, GROUPS, 1, FEATURES, WIDTH)
        at = tl.num_programs(2).to(tl.int64) * GROUPS * tokens + (batch * GROUPS + group) * pages + row
        scale = _store_digits(x, row < pages, at, digits_ptr, scale_ptr, FEATURES, BITS, LEAST, MOST, WIDTH)
        tl.store(scale_ptr + at, scale, mask=row < pages)


@triton.jit(do_not_specialize=["room", "first"])
def _mean_kernel(
    k_ptr, features_ptr, stride, room, first, GROUPS: tl.constexpr, FEATURES: tl.constexpr, PAGE: tl.constexpr,
    STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The mean key of each page of P = 2^STEPS keys, added by halving as exact.ordered_sum does. Grid: (N, G, B).

    Shapes: k [B, N * P, G, D], `stride` from one sequence to the next; features [B, room, G, D], from page `first` on
    """
    batch = tl.program_id(2).to(tl.int64)
    features = tl.arange(0, WIDTH)
    row = tl.program_id(0).to(tl.int64) * PAGE + tl.arange(0, PAGE)
    places = (row * GROUPS + tl.program_id(1))[:, None] * FEATURES + features[None, :]
    x = tl.load(k_ptr + batch * stride + places, mask=(features < FEATURES)[None, :], other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    for i in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, [2, PAGE >> (i + 1), WIDTH]), 0)
    x = tl.reshape(x, [WIDTH]) * (1.0 / PAGE)
    target = ((batch * room + first + tl.program_id(0)) * GROUPS + tl.program_id(1)) * FEATURES
    tl.store(features_ptr + target + features, x, mask=features < FEATURES)


@triton.jit
def _load_digits(ptr, vectors, there, feature, FEATURES: tl.constexpr, WIDTH: tl.constexpr):
    """The three digits of some vectors' features, the most significant first."""
    f = feature + tl.arange(0, WIDTH)
    ptrs = ptr + vectors[:, None] * 3 * FEATURES + f[None, :]
    inside = there[:, None] & (f < FEATURES)[None, :]
    high = tl.load(ptrs, mask=inside, other=0)
    middle = tl.load(ptrs + FEATURES, mask=inside, other=0)
    low = tl.load(ptrs + 2 * FEATURES, mask=inside, other=0)
    return high, middle, low


@triton.jit(do_not_specialize=["tokens", "pages", "blocks", "shares"])
def _scores_kernel(
    digits_ptr, scale_ptr, out_ptr, tokens, pages, blocks, shares,
    FEATURES: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The largest dot product of each page with the queries of each block. Grid: (Q, shares of the pages, B * G)."""
    HELD: tl.constexpr = PAGE <= BLOCK_Q and FEATURES <= WIDTH  # the block's digits are loaded once
    block = tl.program_id(0)
    which = tl.program_id(2).to(tl.int64)
    first_page = tl.num_programs(2).to(tl.int64) * tokens + which * pages  # pages lie behind all queries
    in_page = tl.arange(0, BLOCK_Q)
    counted = (in_page < PAGE) & (block * PAGE + in_page < tokens)
    if HELD:
        q0, q1, q2 = _load_digits(digits_ptr, which * tokens + block * PAGE + in_page, counted, 0, FEATURES, WIDTH)
    for tile in range(tl.program_id(1), tl.cdiv(pages, BLOCK_K), shares):
        n = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        there = n < pages
        best = tl.full([BLOCK_K], float("-inf"), tl.float64)
        broken = tl.zeros([BLOCK_Q], tl.int32)
        for start in tl.static_range(0, PAGE, BLOCK_Q):
            c = block * PAGE + start + in_page
            counted = (start + in_page < PAGE) & (c < tokens)
            scale = tl.load(scale_ptr + which * tokens + c, mask=counted, other=0.0)
            total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float64)
            for feature in tl.static_range(0, FEATURES, WIDTH):
                if not HELD:
                    q0, q1, q2 = _load_digits(digits_ptr, which * tokens + c, counted, feature, FEATURES, WIDTH)
                k0, k1, k2 = _load_digits(digits_ptr, first_page + n, there, feature, FEATURES, WIDTH)
                total += tl.dot(q0, k0.T, out_dtype=tl.int32).to(tl.float64) * 4294967296.0
                part = tl.dot(q0, k1.T, out_dtype=tl.int32)
                total += tl.dot(q1, k0.T, part, out_dtype=tl.int32).to(tl.float64) * 16777216.0
                part = tl.dot(q0, k2.T, out_dtype=tl.int32)
                part = tl.dot(q1, k1.T, part, out_dtype=tl.int32)
                total += tl.dot(q2, k0.T, part, out_dtype=tl.int32).to(tl.float64) * 65536.0
                part = tl.dot(q1, k2.T, out_dtype=tl.int32)
                total += tl.dot(q2, k1.T, part, out_dtype=tl.int32).to(tl.float64) * 256.0
                total += tl.dot(q2, k2.T, out_dtype=tl.int32).to(tl.float64)
            value = tl.where((scale > 0.0)[:, None], total * scale[:, None], float("-inf"))
            best = tl.maximum(best, tl.max(value, 0))
            broken = tl.maximum(broken, (scale != scale).to(tl.int32))
        best = best * tl.load(scale_ptr + first_page + n, mask=there, other=0.0)
        best = tl.where(tl.max(broken, 0) > 0, float("nan"), best)
        tl.store(out_ptr + (which * blocks + block) * pages + n, best, mask=there)


@triton.jit
def _keys(source, page, first, block, pages, first_page, step, recent, sinks, SUMMED: tl.constexpr):
    """Whole numbers in the order of the scores, 0 for pages that may not be chosen. `step`: from head to head."""
    n = page - first_page
    there = (n >= 0) & (n < pages)
    total = tl.load(source + n, mask=there, other=0.0)
    for i in tl.static_range(1, SUMMED):
        total += tl.load(source + i * step + n, mask=there, other=0.0)
    score = total.to(tl.float32)
    score = tl.where(score == float("inf"), 3.4028234663852886e38, score)
    score = tl.where((score == float("-inf")) | (score != score), -3.4028234663852886e38, score) + 0.0
    score = tl.where(score == 0.0, 0.0, score)  # zero has one sign
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | -2147483648)
    candidate = there & (page >= first + sinks) & (page <= block - recent)
    return tl.where(candidate, key, 0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["blocks", "pages", "first_page", "first_block", "top_k", "recent", "sinks"])
def _lists_kernel(
    scores_ptr, keys_ptr, first_pages_ptr, ids_ptr, blocks, pages, first_page, first_block, top_k, recent, sinks,
    GROUPS: tl.constexpr, LISTS: tl.constexpr, FIRST: tl.constexpr, HELD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sinks, the recent window and the `top_k` largest keys, the earlier of equal ones, in order. Grid: (Q, S, B).

    Shapes: scores [B, G, Q, N] of pages `first_page`, ...; first_pages [B, Q]; keys [B, S, Q, all pages] int32, not
        used where a program holds them (HELD: a tile is all pages)
    """
    row = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    list_of = (batch * LISTS + tl.program_id(1)) * blocks + row
    block = first_block + row
    keys = keys_ptr + list_of * (first_block + blocks)
    scores = scores_ptr + ((batch * GROUPS + tl.program_id(1)) * blocks + row) * pages
    step = blocks.to(tl.int64) * pages
    SUMMED: tl.constexpr = GROUPS if LISTS == 1 else 1
    first = 0
    if FIRST:
        first = tl.minimum(tl.load(first_pages_ptr + batch * blocks + row).to(tl.int32), block)
    lanes = tl.arange(0, BLOCK)
    held = _keys(scores, lanes, first, block, pages, first_page, step, recent, sinks, SUMMED)
    if not HELD:
        tl.store(keys + lanes, held.to(tl.int32, bitcast=True), mask=lanes <= block)
        for start in range(BLOCK, block + 1, BLOCK):
            key = _keys(scores, start + lanes, first, block, pages, first_page, step, recent, sinks, SUMMED)
            tl.store(keys + start + lanes, key.to(tl.int32, bitcast=True), mask=start + lanes <= block)
        tl.debug_barrier()
    # The least key among the best, bit by bit; 0 where there are fewer candidates than places.
    least = tl.full([1], 0, tl.uint32)
    bit = tl.full([1], 2147483648, tl.uint32)
    for _ in range(0, 32):
        trial = least | bit
        count = tl.zeros([1], tl.int32)
        for start in range(0, block + 1, BLOCK):
            key = held if HELD else _keys_at(keys, start + lanes, block)
            count += tl.sum((key >= trial).to(tl.int32), 0)
        least = tl.where(count >= top_k, trial, least)
        bit = bit >> 1
    above = tl.zeros([1], tl.int32)
    for start in range(0, block + 1, BLOCK):
        key = held if HELD else _keys_at(keys, start + lanes, block)
        above += tl.sum((key > least).to(tl.int32), 0)
    places = top_k - above  # for keys that equal the least

    width = sinks + recent + top_k
    ids = ids_ptr + list_of * width
    written = tl.zeros([1], tl.int32)
    equals = tl.zeros([1], tl.int32)
    for start in range(0, block + 1, BLOCK):
        page = start + lanes
        key = held if HELD else _keys_at(keys, page, block)
        equal = (key == least) & (key > 0)
        rank = equals + tl.cumsum(equal.to(tl.int32), 0) - 1
        always = (page >= first) & (page <= block) & ((page < first + sinks) | (page > block - recent))
        chosen = always | (key > least) | (equal & (rank < places))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(ids + place, page, mask=chosen)
        equals += tl.sum(equal.to(tl.int32), 0)
        written += tl.sum(chosen.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        place = start + lanes
        tl.store(ids + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= written) & (place < width))


@triton.jit
def _keys_at(keys_ptr, page, block):
    return tl.load(keys_ptr + page, mask=page <= block, other=0).to(tl.uint32, bitcast=True)


def mean_keys(keys: Tensor, page_tokens: int, features: Tensor, first: int) -> bool:
    """The mean key of every page of P keys, into features from page `first` on; False for what the kernel cannot add.

    Shapes: keys [B, C, G, D], C a multiple of P; features [B, room, G, D] float32 (float64 for float64)
    """
    batch, tokens, groups, dim = keys.shape
    width = triton.next_power_of_2(dim)
    fits = page_tokens & (page_tokens - 1) == 0 and page_tokens * width <= _MEAN_ELEMENTS
    if not fits or not features.is_cuda == keys.is_cuda or not keys[0].is_contiguous():
        return False
    with on_device(keys):
        _mean_kernel[(tokens // page_tokens, groups, batch)](
            keys, features, keys.stride(0), features.shape[1], first, GROUPS=groups, FEATURES=dim, PAGE=page_tokens,
            STEPS=page_tokens.bit_length() - 1, WIDTH=width, num_warps=8,
        )  # fmt: skip
    return True


def scores(
    queries: Tensor, pages: Tensor, page_tokens: int, bits: int, bounds: tuple[int, int], real: Tensor | None
) -> Tensor:
    """exact.largest_dot of every block: queries are summed over the heads of a KV head first.

    Shapes: queries [B, C, H, F]; pages [B, N, G, F]; real [B, C] bool: which queries count
    Returns: [B, G, Q, N] float64
    """
    batch, tokens, heads, features = queries.shape
    count, groups = pages.shape[1:3]
    blocks = triton.cdiv(tokens, page_tokens)
    queries, pages = (x if x[0].is_contiguous() else x.contiguous() for x in (queries, pages))
    vectors = batch * groups * (tokens + count)
    made = torch.empty(vectors * 3 * features, dtype=torch.int8, device=queries.device)
    scale = torch.empty(vectors, dtype=torch.float64, device=queries.device)
    out = torch.empty(batch, groups, blocks, count, dtype=torch.float64, device=queries.device)
    whole_width = triton.next_power_of_2(features)
    rows = max(1, min(32, 4096 // whole_width))
    q_tiles = triton.cdiv(tokens, rows)
    block_q = max(16, min(128, triton.next_power_of_2(page_tokens)))
    width = max(32, min(128, whole_width))
    held = page_tokens <= block_q and features <= width  # else all digits are loaded in the loop
    block_k = _SCORED if held else 32
    shares = min(triton.cdiv(count, block_k), max(1, 2048 // (blocks * batch * groups)))
    with on_device(queries):
        _digits_kernel[(q_tiles + triton.cdiv(count, rows), groups, batch)](
            queries, pages, scale if real is None else real.contiguous().view(torch.int8), made, scale, tokens, count,
            queries.stride(0), pages.stride(0), q_tiles, GROUPS=groups, REPEAT=heads // groups, FEATURES=features,
            BITS=bits, LEAST=bounds[0], MOST=bounds[1], REAL=real is not None, BLOCK=rows, WIDTH=whole_width,
            num_warps=8,
        )  # fmt: skip
        _scores_kernel[(blocks, shares, batch * groups)](
            made, scale, out, tokens, count, blocks, shares, FEATURES=features, PAGE=page_tokens,
            BLOCK_Q=block_q, BLOCK_K=block_k, WIDTH=width, num_warps=8 if block_q == 128 else 4,
            num_stages=2 if held else 1,
        )  # fmt: skip
    return out


def lists(
    scored: Tensor, first_pages: Tensor | None, per_head: bool, *, first_page: int, first_block: int, top_k: int,
    recent: int, sinks: int,
) -> Tensor:  # fmt: skip
    """Shapes: scored [B, G, Q, N] float64, of pages `first_page`, …; first_pages [B, Q] → [B, G or 1, Q, all] int32."""
    batch, groups, blocks, pages = scored.shape
    count, all_pages = groups if per_head else 1, first_block + blocks
    ids = torch.empty(batch, count, blocks, sinks + recent + top_k, dtype=torch.int32, device=scored.device)
    block = max(16, min(_TILE, triton.next_power_of_2(all_pages)))
    held = all_pages <= block
    keys = ids if held else ids.new_empty(batch, count, blocks, all_pages)
    with on_device(scored):
        _lists_kernel[(blocks, count, batch)](
            scored, keys, ids if first_pages is None else first_pages.contiguous(), ids, blocks, pages, first_page,
            first_block, top_k, recent, sinks, GROUPS=groups, LISTS=count, FIRST=first_pages is not None, HELD=held,
            BLOCK=block, num_warps=8,
        )  # fmt: skip
    return ids


def on_device(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Launches go to x's device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
