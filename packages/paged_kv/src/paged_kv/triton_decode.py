"""Decoding in Triton: a few queries a sequence over all its pages, split over programs and merged in a fixed order.

A unit of work is a few tokens of one sequence and one KV head; its rows are (token, head of the group) pairs. All
units' key tiles stand in one line, and each program takes an equal share of it, however long the sequences are: the
programs of one chip are filled by one sequence of 256 K tokens as by 64 of unequal length. A program that has a whole
unit writes its output; a unit that several programs share is merged by a second kernel. Lengths, tables and the cut
are read and worked out on the device, so that the launch is the same at every step and can be captured in a graph.

Letters: S sequences · T tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim ·
K pages selected
Source: Flash-Decoding and Stream-K (arXiv 2301.03598); oracle: reference.py
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device_table import Step

MAX_TOKENS = 16  # a sequence's queries in one call; more are a prefill
_MAX_ROWS = 64  # rows of a unit, where one token's heads are not more
_LEAST_TILES = 4  # of a program, where there are enough
_NUMBERS = ["rows_ptr", "starts_ptr", "firsts_ptr", "counts_ptr", "sequences"]  # slices of one buffer, however aligned


@triton.jit
def _units(
    starts_ptr, counts_ptr, sequences, window, tiles_selected,
    CHUNKS: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr, UNITS: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """All units: the tiles each has, and those up to its end. A sequence with more than MOST tokens has none.

    Unit u is tokens [u % CHUNKS * TOKENS, …) of sequence u // CHUNKS.
    """
    unit = tl.arange(0, UNITS)
    sequence = unit // CHUNKS
    inside = sequence < sequences
    start = tl.load(starts_ptr + sequence, mask=inside, other=0).to(tl.int32)
    count = tl.load(counts_ptr + sequence, mask=inside, other=0).to(tl.int32)
    token = unit % CHUNKS * TOKENS
    first, end = _tiles(start + token, start + tl.minimum(token + TOKENS, count), window, BLOCK_N, WINDOW)
    if SELECTED:
        tiles = tl.zeros_like(end) + tiles_selected
    else:
        tiles = end - first
    tiles = tl.where(inside & (count <= MOST) & (token < count), tiles, 0)
    return tiles, tl.cumsum(tiles, 0)


@triton.jit
def _tiles(position, end, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The key tiles that queries at positions [position, end) see."""
    first = tl.zeros_like(position)
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // BLOCK_N
    return first, (end + BLOCK_N - 1) // BLOCK_N


@triton.jit
def _cut(total, programs, LEAST: tl.constexpr):
    """How many programs share `total` tiles: all, unless that left them less than LEAST each."""
    return tl.maximum(tl.minimum(programs, total // LEAST), 1)


@triton.jit
def _finish(acc, m, l, sinks_ptr, head, valid, SINKS: tl.constexpr):
    """Divide by the softmax's sum, with the sinks in it; a row that saw nothing is zero."""
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=valid, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        top = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.math.exp2(m - top)
        l = l * shrink + tl.math.exp2(sink - top)
        acc = acc * shrink[:, None]
    return acc / tl.where(l == 0.0, 1.0, l)[:, None]


@triton.jit(do_not_specialize=[*_NUMBERS, "window", "columns", "blocks"])
def _paged_attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, rows_ptr, starts_ptr, firsts_ptr, counts_ptr, selected_ptr, sinks_ptr,
    out_ptr, parts_ptr, stats_ptr,
    sequences, window, columns, blocks, scale_log2,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr,
    UNITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SELECTED: tl.constexpr,
    LISTED: tl.constexpr, LISTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (G, programs a KV head). Programs of one share of the line stand next to each other: they read one token's
    heads at about the same time.

    SELECTED: pages in each list, 0 for none; LISTED: that, rounded up to a power of two; LISTS: heads that have one.
    Partial results: two a program, first of a unit that it goes on with, then of one that it begins and does not end.
    """
    group = tl.program_id(0)
    program = tl.program_id(1)
    TILES: tl.constexpr = PAGE // BLOCK_N
    tiles, after = _units(starts_ptr, counts_ptr, sequences, window, SELECTED * TILES,
                          CHUNKS, TOKENS, MOST, UNITS, BLOCK_N, WINDOW, SELECTED > 0)  # fmt: skip
    total = tl.sum(tiles, 0)
    share = _cut(total, tl.num_programs(1), LEAST)
    tile = (total.to(tl.int64) * program // share).to(tl.int32)
    stop = (total.to(tl.int64) * (program + 1) // share).to(tl.int32)
    if program >= share:
        stop = tile
    row = tl.arange(0, BLOCK_M)
    head = group * REPEAT + row % REPEAT
    dims = tl.arange(0, DIM)
    within = dims < HEAD_DIM
    keys = tl.arange(0, BLOCK_N)
    key_offsets = (keys[:, None] * GROUPS + group) * HEAD_DIM + dims[None, :]
    while tile < stop:
        unit = tl.sum((after <= tile).to(tl.int32), 0)
        unit_end = tl.min(tl.where(after > tile, after, 2147483647), 0)
        sequence = unit // CHUNKS
        token = unit % CHUNKS * TOKENS
        start = tl.load(starts_ptr + sequence).to(tl.int32)
        count = tl.minimum(tl.load(counts_ptr + sequence).to(tl.int32) - token, TOKENS)
        position = start + token + row // REPEAT
        valid = row < count * REPEAT
        first, end = _tiles(start + token, start + token + count, window, BLOCK_N, WINDOW)
        unit_tiles = end - first
        if SELECTED > 0:
            first = 0
            unit_tiles = SELECTED * TILES
        unit_begin = unit_end - unit_tiles
        until = tl.minimum(stop, unit_end)
        place = tl.load(firsts_ptr + sequence) + token + row // REPEAT
        offsets = (place[:, None] * (GROUPS * REPEAT) + head[:, None]) * HEAD_DIM + dims[None, :]
        q = tl.load(q_ptr + offsets, mask=valid[:, None] & within[None, :], other=0.0)
        table = table_ptr + tl.load(rows_ptr + sequence) * columns
        listed = selected_ptr
        if SELECTED > 0:
            block = (start + token) // PAGE - start // PAGE
            listed += ((sequence.to(tl.int64) * LISTS + (group if LISTS > 1 else 0)) * blocks + block) * SELECTED
            places = tl.arange(0, LISTED)
            pages = tl.load(listed + places, mask=places < SELECTED, other=-1)
        low = tl.maximum(position - window + 1, 0) if WINDOW else tl.zeros_like(position)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        for i in tl.range(first + tile - unit_begin, first + until - unit_begin, num_stages=STAGES):
            page = i // TILES
            written = start + token + count  # behind the last token may be anything
            if SELECTED > 0:
                # A page counts once, however often it is listed.
                earlier = (pages == tl.load(listed + page)) & (places < page)
                page = tl.load(listed + page)
                there = (page >= 0) & (page <= (written - 1) // PAGE) & (tl.sum(earlier.to(tl.int32), 0) == 0)
                page = tl.where(there, page, 0)
                written = tl.where(there, written, 0)
            base = page * PAGE + i % TILES * BLOCK_N
            slot = tl.load(table + page).to(tl.int64)
            tile_offset = (slot * PAGE + i % TILES * BLOCK_N) * (GROUPS * HEAD_DIM)
            reading = (base + keys < written)[:, None] & within[None, :]
            k = tl.load(k_ptr + tile_offset + key_offsets, mask=reading, other=0.0)
            s = tl.dot(q, k.T, input_precision="ieee") * scale_log2
            seen = (base + keys[None, :] <= position[:, None]) & (base + keys[None, :] >= low[:, None])
            s = tl.where(seen & (base + keys < written)[None, :], s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.math.exp2(s - shift[:, None])
            alpha = tl.math.exp2(m - shift)
            l = l * alpha + tl.sum(p, 1)
            v = tl.load(v_ptr + tile_offset + key_offsets, mask=reading, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m = m_new
        begins = tile == unit_begin
        if begins & (until == unit_end):
            out = _finish(acc, m, l, sinks_ptr, head, valid, SINKS)
            tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & within[None, :])
        else:
            part = ((program * 2 + begins.to(tl.int32)) * GROUPS + group) * BLOCK_M + row
            tl.store(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=valid[:, None] & within[None, :])
            tl.store(stats_ptr + part * 2, m, mask=valid)
            tl.store(stats_ptr + part * 2 + 1, l, mask=valid)
        tile = until


@triton.jit(do_not_specialize=[*_NUMBERS, "window", "programs"])
def _merge_decode_kernel(
    starts_ptr, firsts_ptr, counts_ptr, sinks_ptr, out_ptr, parts_ptr, stats_ptr, sequences, window, programs,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, MOST: tl.constexpr,
    UNITS: tl.constexpr, LEAST: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SELECTED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (S * MOST tokens, H). Joins the parts of one row, in the order of the keys, PARTS at a time."""
    sequence = tl.program_id(0) // MOST
    token = tl.program_id(0) % MOST
    head = tl.program_id(1)
    unit = sequence * CHUNKS + token // TOKENS
    tiles, after = _units(starts_ptr, counts_ptr, sequences, window, SELECTED * (PAGE // BLOCK_N),
                          CHUNKS, TOKENS, MOST, UNITS, BLOCK_N, WINDOW, SELECTED > 0)  # fmt: skip
    total = tl.sum(tiles, 0)
    share = _cut(total, programs, LEAST)
    units = tl.arange(0, UNITS)
    end = tl.sum(tl.where(units == unit, after, 0), 0)
    begin = end - tl.sum(tl.where(units == unit, tiles, 0), 0)
    count = tl.load(counts_ptr + sequence).to(tl.int32)
    # The program that has a tile: the last whose share begins at or before it.
    first = (((begin + 1).to(tl.int64) * share - 1) // tl.maximum(total, 1)).to(tl.int32)
    last = ((end.to(tl.int64) * share - 1) // tl.maximum(total, 1)).to(tl.int32)
    if (begin < end) & (first < last) & (token < count):
        dims = tl.arange(0, DIM)
        within = dims < HEAD_DIM
        row = token % TOKENS * REPEAT + head % REPEAT
        m = tl.full([1], float("-inf"), tl.float32)
        l = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, DIM], tl.float32)
        for start in range(first, last + 1, PARTS):
            program = start + tl.arange(0, PARTS)
            mine = program <= last
            begins = (program == first).to(tl.int32)
            part = ((program * 2 + begins) * GROUPS + head // REPEAT) * BLOCK_M + row
            m_part = tl.load(stats_ptr + part * 2, mask=mine, other=float("-inf"))
            l_part = tl.load(stats_ptr + part * 2 + 1, mask=mine, other=0.0)
            value = tl.load(parts_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mine[:, None] & within[None, :],
                            other=0.0)  # fmt: skip
            m_new = tl.maximum(m, tl.max(m_part, 0))
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight = tl.math.exp2(m_part - shift)
            shrink = tl.math.exp2(m - shift)
            l = l * shrink + tl.sum(l_part * weight, 0)
            acc = acc * shrink[:, None] + tl.sum(value * weight[:, None], 0)[None, :]
            m = m_new
        heads = head + tl.zeros([1], tl.int32)
        out = _finish(acc, m, l, sinks_ptr, heads, heads >= 0, SINKS)
        place = tl.load(firsts_ptr + sequence) + token
        offsets = (place * (GROUPS * REPEAT) + heads[:, None]) * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=within[None, :])


@dataclass(frozen=True)
class Tile:
    """Units: keys of a tile; stages of its pipeline; per_sm: programs a multiprocessor."""

    keys: int
    warps: int
    stages: int
    per_sm: int


INTERPRETED = not isinstance(_merge_decode_kernel, triton.JITFunction)


def tile_for(dim: int, rows: int, dtype: torch.dtype, capability: tuple[int, int]) -> Tile:
    """The launch shape for a padded head dim and rows a unit. What matters is bytes under way, not products."""
    if dtype == torch.float32:
        return Tile(32, 4, 2, 1)
    if capability[0] in (9, 10):
        return Tile(64, 4, 5 if dim <= 128 else 3, 2 if dim * rows <= 128 * 32 else 1)
    return Tile(32, 4, 3 if dim <= 128 else 2, 2)


def why_not(q: Tensor, kv_heads: int, page_tokens: int) -> str | None:
    """What keeps these kernels from serving a call, in words, or None. Shapes: q [T, H, D]"""
    if not q.is_cuda and not INTERPRETED:
        return f"expected CUDA tensors, got {q.device}"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"expected dtype bfloat16, float16 or float32, got {q.dtype}"
    if q.dtype == torch.bfloat16 and INTERPRETED:
        return "bfloat16 is computed wrongly by Triton's interpreter; expected float16 or float32 there"
    if q.shape[2] > 256:
        return f"expected a head dim of at most 256, got {q.shape[2]}"
    if q.shape[1] // kv_heads > 128:
        return f"expected at most 128 query heads a KV head, got {q.shape[1] // kv_heads}"
    if page_tokens % 16:
        return f"expected pages of a multiple of 16 tokens, got {page_tokens}"
    return None


@dataclass(frozen=True)
class _Launch:
    """What does not change from call to call of one kind.

    Units: parts, stats: numbers of float32 in the partial results
    """

    programs: int
    parts: int
    stats: int
    tokens: int
    decode: dict[str, Any]
    merge: dict[str, Any]


@cache
def _launch(
    shape: tuple[int, ...], heads: int, sequences: int, tokens: int, lists: tuple[int, int], window: bool, sinks: bool,
    dtype: torch.dtype, device: torch.device, tile: Tile | None,
) -> _Launch:  # fmt: skip
    """shape of the pages; lists (heads that have one, pages in each, 0 for none)."""
    _, page, groups, dim = shape
    repeat, tokens = heads // groups, triton.next_power_of_2(tokens)  # few kernels for many numbers of tokens
    padded = max(16, triton.next_power_of_2(dim))
    per_unit = 1 if lists[1] else max(1, min(tokens, _MAX_ROWS // repeat))
    rows = max(16, triton.next_power_of_2(per_unit * repeat))
    capability, processors = (9, 0), 3
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    tile = tile or tile_for(padded, rows, dtype, capability)
    chunks = -(-tokens // per_unit)
    programs = max(1, processors * tile.per_sm // groups)
    common = {
        "GROUPS": groups, "REPEAT": repeat, "HEAD_DIM": dim, "DIM": padded, "PAGE": page, "BLOCK_M": rows,
        "BLOCK_N": min(tile.keys, page & -page), "CHUNKS": chunks, "TOKENS": per_unit, "MOST": tokens,
        "UNITS": triton.next_power_of_2(sequences * chunks), "LEAST": _LEAST_TILES, "WINDOW": window, "SINKS": sinks,
        "SELECTED": lists[1], "enable_fp_fusion": True,
    }  # fmt: skip
    decode = common | {
        "LISTED": triton.next_power_of_2(max(lists[1], 1)), "LISTS": lists[0], "STAGES": tile.stages,
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    parts = programs * 2 * groups * rows
    return _Launch(programs, parts * dim, parts * 2, tokens, decode, common | {"PARTS": 16, "num_warps": 4})


def decode(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, step: Step, tokens: int, *, scale: float, window: int | None,
    sinks: Tensor | None, selected: Tensor | None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """Attention of the queries of all sequences that have at most `tokens` in the block; other rows are left alone.

    The block's keys and values must be in the pages, and no sequence may have more than `tokens` and at most
    MAX_TOKENS. Two launches, nothing waits, no grid depends on a length.
    Shapes: q, out [T, H, D] contiguous; k, v [slots, P, G, D]; selected [S, G or 1, Q, K] int32
    """
    sequences, heads = step.rows.shape[0], q.shape[1]
    lists = (1, 0) if selected is None else (selected.shape[1], selected.shape[3])
    launch = _launch(
        tuple(k.shape), heads, sequences, tokens, lists, window is not None, sinks is not None, q.dtype, q.device, tile
    )
    parts, stats = torch.empty(launch.parts + launch.stats, device=q.device, dtype=torch.float32).split(
        (launch.parts, launch.stats)
    )
    window = min(window or 0, 2**30)
    sinks = stats if sinks is None else sinks
    with on_device(q):
        _paged_attention_decode_kernel[k.shape[2], launch.programs](
            q, k, v, step.table, step.rows, step.starts, step.firsts, step.counts,
            step.table if selected is None else selected, sinks, out, parts, stats,
            sequences, window, step.table.shape[1], 1 if selected is None else selected.shape[2],
            scale * math.log2(math.e), **launch.decode,
        )  # fmt: skip
        _merge_decode_kernel[sequences * launch.tokens, heads](
            step.starts, step.firsts, step.counts, sinks, out, parts, stats, sequences, window, launch.programs,
            **launch.merge,
        )  # fmt: skip


def on_device(q: Tensor) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()
