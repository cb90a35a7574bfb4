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
_ROUND = tl.constexpr(6755399441055744.0)  # 1.5 * 2^52: what is added to it and taken off again is a whole number


@triton.jit
def _whole(x):
    """The nearest integer, halves to even, of a float64 below 2^51."""
    return (x + _ROUND) - _ROUND


@triton.jit
def _power_of_two(exponent):
    return ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit(do_not_specialize=["rows", "batch_stride"])
def _digits_kernel(
    x_ptr, real_ptr, digits_ptr, scale_ptr, rows, batch_stride,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, FEATURES: tl.constexpr, BITS: tl.constexpr, LEAST: tl.constexpr,
    MOST: tl.constexpr, REAL: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add the R vectors of a row's KV head, and round the sum to digits. Grid: (tiles of rows, G, B).

    Shapes: x [B, rows, G, R, F]; real [B, rows]; digits [B, G, rows, 3, F] int8; scale [B, G, rows] float64: 0 for what
        is not real, NaN for a vector with an element that is not finite
    """
    group = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    features = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (features < FEATURES)[None, :]
    source = x_ptr + batch * batch_stride
    places = (row.to(tl.int64) * GROUPS + group)[:, None] * REPEAT * FEATURES + features[None, :]
    x = tl.load(source + places, mask=inside, other=0.0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    for i in tl.static_range(1, REPEAT):
        x += tl.load(source + places + i * FEATURES, mask=inside, other=0.0).to(x.dtype)
    x = x.to(tl.float64)
    finite = tl.max(tl.where((x == x) & (tl.abs(x) != float("inf")), 0, 1), 1) == 0
    x = tl.where(finite[:, None], x, 0.0)
    exponent = ((tl.max(tl.abs(x), 1).to(tl.int64, bitcast=True) >> 52) & 0x7FF) - 1022
    exponent = tl.minimum(tl.maximum(exponent, LEAST), MOST)
    value = _whole(x * _power_of_two(BITS - exponent)[:, None])
    scale = tl.where(finite, _power_of_two(exponent - BITS), float("nan"))
    if REAL:
        real = tl.load(real_ptr + batch * rows + row, mask=row < rows, other=0)
        scale = tl.where(real != 0, scale, 0.0)
    target = (batch * GROUPS + group) * rows + row
    tl.store(scale_ptr + target, scale, mask=row < rows)
    for i in tl.static_range(3):
        rest = tl.floor((value + 128.0) / 256.0)  # a digit lies in [-128, 128)
        digit = value - rest * 256.0
        tl.store(
            digits_ptr + (target * 3 + 2 - i)[:, None] * FEATURES + features[None, :], digit.to(tl.int8), mask=inside
        )
        value = rest


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
    q_ptr, q_scale_ptr, k_ptr, k_scale_ptr, out_ptr, tokens, pages, blocks, shares,
    FEATURES: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The largest dot product of each page with the queries of each block. Grid: (Q, shares of the pages, B * G)."""
    HELD: tl.constexpr = PAGE <= BLOCK_Q and FEATURES <= WIDTH  # the block's digits are loaded once
    block = tl.program_id(0)
    which = tl.program_id(2).to(tl.int64)
    in_page = tl.arange(0, BLOCK_Q)
    counted = (in_page < PAGE) & (block * PAGE + in_page < tokens)
    if HELD:
        q0, q1, q2 = _load_digits(q_ptr, which * tokens + block * PAGE + in_page, counted, 0, FEATURES, WIDTH)
    for tile in range(tl.program_id(1), tl.cdiv(pages, BLOCK_K), shares):
        n = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        there = n < pages
        best = tl.full([BLOCK_K], float("-inf"), tl.float64)
        broken = tl.zeros([BLOCK_Q], tl.int32)
        for start in tl.static_range(0, PAGE, BLOCK_Q):
            c = block * PAGE + start + in_page
            counted = (start + in_page < PAGE) & (c < tokens)
            scale = tl.load(q_scale_ptr + which * tokens + c, mask=counted, other=0.0)
            total = tl.zeros([BLOCK_Q, BLOCK_K], tl.float64)
            for feature in tl.static_range(0, FEATURES, WIDTH):
                if not HELD:
                    q0, q1, q2 = _load_digits(q_ptr, which * tokens + c, counted, feature, FEATURES, WIDTH)
                k0, k1, k2 = _load_digits(k_ptr, which * pages + n, there, feature, FEATURES, WIDTH)
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
        best = best * tl.load(k_scale_ptr + which * pages + n, mask=there, other=0.0)
        best = tl.where(tl.max(broken, 0) > 0, float("nan"), best)
        tl.store(out_ptr + (which * blocks + block) * pages + n, best, mask=there)


@triton.jit(do_not_specialize=["blocks", "pages", "first_page", "first_block", "recent", "sinks"])
def _keys_kernel(
    scores_ptr, first_pages_ptr, keys_ptr, blocks, pages, first_page, first_block, recent, sinks,
    GROUPS: tl.constexpr, LISTS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole numbers in the order of the scores, 0 for pages that may not be chosen. Grid: (Q * tiles of N, S, B).

    Shapes: scores [B, G, Q, N] of pages `first_page`, …; first_pages [B, Q]; keys [B, S, Q, N] uint32
    """
    tiles = tl.cdiv(pages, BLOCK)
    row = tl.program_id(0) // tiles
    which = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    n = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    there = n < pages
    source = scores_ptr + ((batch * GROUPS + which) * blocks + row) * pages + n
    total = tl.load(source, mask=there, other=0.0)
    if LISTS == 1:
        for i in tl.static_range(1, GROUPS):
            total += tl.load(source + i * blocks.to(tl.int64) * pages, mask=there, other=0.0)
    score = total.to(tl.float32)
    score = tl.where(score == float("inf"), 3.4028234663852886e38, score)
    score = tl.where((score == float("-inf")) | (score != score), -3.4028234663852886e38, score) + 0.0
    score = tl.where(score == 0.0, 0.0, score)  # zero has one sign
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) | -2147483648)
    first = 0
    if FIRST:
        first = tl.minimum(tl.load(first_pages_ptr + batch * blocks + row).to(tl.int32), first_block + row)
    page = first_page + n
    candidate = (page >= first + sinks) & (page <= first_block + row - recent)
    tl.store(keys_ptr + ((batch * LISTS + which) * blocks + row) * pages + n, tl.where(candidate, key, 0), mask=there)


@triton.jit
def _keys_at(keys_ptr, n, pages):
    return tl.load(keys_ptr + n, mask=(n >= 0) & (n < pages), other=0).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["blocks", "pages", "first_page", "first_block", "top_k", "recent", "sinks"])
def _lists_kernel(
    keys_ptr, first_pages_ptr, ids_ptr, blocks, pages, first_page, first_block, top_k, recent, sinks,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sinks, the recent window and the `top_k` largest keys, the earlier of equal ones, in order. Grid: (Q, S, B)."""
    row = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    list_of = (batch * tl.num_programs(1) + tl.program_id(1)) * blocks + row
    keys = keys_ptr + list_of * pages
    block = first_block + row
    # The least key among the best, bit by bit; 0 where there are fewer candidates than places.
    least = tl.full([1], 0, tl.uint32)
    bit = tl.full([1], 2147483648, tl.uint32)
    for _ in range(0, 32):
        trial = least | bit
        count = tl.zeros([1], tl.int32)
        for start in range(0, pages, BLOCK):
            key = _keys_at(keys, start + tl.arange(0, BLOCK), pages)
            count += tl.sum((key >= trial).to(tl.int32), 0)
        least = tl.where(count >= top_k, trial, least)
        bit = bit >> 1
    above = tl.zeros([1], tl.int32)
    for start in range(0, pages, BLOCK):
        above += tl.sum((_keys_at(keys, start + tl.arange(0, BLOCK), pages) > least).to(tl.int32), 0)
    places = top_k - above  # for keys that equal the least

    first = 0
    if FIRST:
        first = tl.minimum(tl.load(first_pages_ptr + batch * blocks + row).to(tl.int32), block)
    width = sinks + recent + top_k
    ids = ids_ptr + list_of * width
    written = tl.zeros([1], tl.int32)
    equals = tl.zeros([1], tl.int32)
    for start in range(0, block + 1, BLOCK):
        page = start + tl.arange(0, BLOCK)
        key = _keys_at(keys, page - first_page, pages)
        equal = (key == least) & (key > 0)
        rank = equals + tl.cumsum(equal.to(tl.int32), 0) - 1
        always = (page >= first) & (page <= block) & ((page < first + sinks) | (page > block - recent))
        chosen = always | (key > least) | (equal & (rank < places))
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(ids + place, page, mask=chosen)
        equals += tl.sum(equal.to(tl.int32), 0)
        written += tl.sum(chosen.to(tl.int32), 0)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(ids + place, tl.full([BLOCK], -1, tl.int32), mask=(place >= written) & (place < width))


def digits(x: Tensor, groups: int, bits: int, bounds: tuple[int, int], real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Shapes: x [B, rows, G * R, F]; real [B, rows] bool → [B, G, rows, 3, F] int8 and [B, G, rows] float64"""
    batch, rows, heads, features = x.shape
    if x[0].is_contiguous() is False:
        x = x.contiguous()
    made = torch.empty(batch, groups, rows, 3, features, dtype=torch.int8, device=x.device)
    scale = torch.empty(batch, groups, rows, dtype=torch.float64, device=x.device)
    width = triton.next_power_of_2(features)
    block = max(1, min(32, 4096 // width))
    flags = scale if real is None else real.contiguous().view(torch.int8)
    _digits_kernel[(triton.cdiv(rows, block), groups, batch)](
        x, flags, made, scale, rows, x.stride(0), GROUPS=groups, REPEAT=heads // groups, FEATURES=features, BITS=bits,
        LEAST=bounds[0], MOST=bounds[1], REAL=real is not None, BLOCK=block, WIDTH=width, num_warps=4,
    )  # fmt: skip
    return made, scale


def scores(
    queries: Tensor, pages: Tensor, page_tokens: int, bits: int, bounds: tuple[int, int], real: Tensor | None
) -> Tensor:
    """exact.largest_dot of every block: queries are summed over the heads of a KV head first.

    Shapes: queries [B, C, H, F]; pages [B, N, G, F]; real [B, C] bool: which queries count
    Returns: [B, G, Q, N] float64
    """
    batch, tokens, _, features = queries.shape
    count, groups = pages.shape[1:3]
    blocks = triton.cdiv(tokens, page_tokens)
    out = torch.empty(batch, groups, blocks, count, dtype=torch.float64, device=queries.device)
    block_q = max(16, min(128, triton.next_power_of_2(page_tokens)))
    width = max(32, min(128, triton.next_power_of_2(features)))
    held = page_tokens <= block_q and features <= width  # else all digits are loaded in the loop
    block_k = _SCORED if held else 32
    shares = min(triton.cdiv(count, block_k), max(1, 2048 // (blocks * batch * groups)))
    with on_device(queries):
        q, q_scale = digits(queries, groups, bits, bounds, real)
        k, k_scale = digits(pages, groups, bits, bounds, None)
        _scores_kernel[(blocks, shares, batch * groups)](
            q, q_scale, k, k_scale, out, tokens, count, blocks, shares, FEATURES=features, PAGE=page_tokens,
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
    count = groups if per_head else 1
    ids = torch.empty(batch, count, blocks, sinks + recent + top_k, dtype=torch.int32, device=scored.device)
    keys = torch.empty(batch, count, blocks, pages, dtype=torch.int32, device=scored.device)
    first = ids if first_pages is None else first_pages.contiguous()
    block = max(16, min(_TILE, triton.next_power_of_2(max(pages, 1))))
    with on_device(scored):
        if pages:
            _keys_kernel[(blocks * triton.cdiv(pages, 1024), count, batch)](
                scored, first, keys, blocks, pages, first_page, first_block, recent, sinks, GROUPS=groups, LISTS=count,
                FIRST=first_pages is not None, BLOCK=1024, num_warps=4,
            )  # fmt: skip
        _lists_kernel[(blocks, count, batch)](
            keys, first, ids, blocks, pages, first_page, first_block, top_k, recent, sinks,
            FIRST=first_pages is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return ids


def on_device(x: Tensor) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
