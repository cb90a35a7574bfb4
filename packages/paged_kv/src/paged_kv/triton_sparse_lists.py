"""Page lists made ready for the sparse kernels, and their inverse: which query blocks read each page.

Query block r of sequence b is what lies of the chunk in logical page `lengths[b] // P + r`. Its list may be in any
order, with duplicates, and may name pages that it cannot see: `_lists_kernel` ranks it once, so that all else finds
ascending pages. The inverse is a counting sort without atomics: one program owns a few pages and looks each up in every
list, so that a page's readers come in order and the same bits come out of every run. A page with many readers is shared
out in parts of `share` readers and a rest; the whole parts are worked on first, so that no long program starts last.
Nothing is larger than the lists.

Letters: B batch · N pages · P tokens a page · G KV heads · K pages selected · Q query blocks · Z columns: the pages of
a segment, then those of the own block · S lists a sequence, G or 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128  # entries of a list ranked by one program
_COLUMNS, _ROWS = 32, 32
_ABSENT = tl.constexpr(2**30)  # behind every page


@triton.jit
def _entries(list_ptr, places, entries, block):
    """Pages of a list that its query block may see, `_ABSENT` for all others."""
    page = tl.load(list_ptr + places, mask=places < entries, other=-1)
    return tl.where((page >= 0) & (page <= block), page, _ABSENT)


@triton.jit(do_not_specialize=["blocks", "entries", "tokens", "columns", "first_page"])
def _lists_kernel(
    selected_ptr, table_ptr, lengths_ptr, pages_ptr, places_ptr, bounds_ptr,
    blocks, entries, tokens, columns, first_page, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rank one list. Grid: (Q * tiles of K, S, B).

    pages: ascending. places: the slot of a whole page of this segment, the first row of a whole page of the own block,
    -1 for duplicates and whatever is elsewhere. bounds: the entries [0, 1) are whole past pages of this segment, [2, 3)
    whole own pages before the block's own; 4: the page that is part past, part own is listed; 5: the block's own is.
    """
    tiles = tl.cdiv(entries, BLOCK)
    r = tl.program_id(0) // tiles
    batch = tl.program_id(2)
    row = (batch * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * blocks + r
    source = selected_ptr + row * entries
    length = tl.load(lengths_ptr + batch)
    whole = length // PAGE
    block = whole + r
    block = tl.where(block * PAGE < length + tokens, block, -1)  # a sequence with fewer blocks than others
    i = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    mine = _entries(source, i, entries, block)
    past_end = tl.minimum(first_page + columns, whole)
    rank = tl.zeros([BLOCK], tl.int32)
    again = tl.zeros([BLOCK], tl.int32)
    before_first = 0
    before_past_end = 0
    before_own = 0
    before_block = 0
    straddles = 0
    own = 0
    for start in range(0, entries, 32):
        j = start + tl.arange(0, 32)
        other = _entries(source, j, entries, block)
        same = (other[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum((same | (other[None, :] < mine[:, None])).to(tl.int32), 1)
        again += tl.sum(same.to(tl.int32), 1)
        before_first += tl.sum((other < first_page).to(tl.int32), 0)
        before_past_end += tl.sum((other < past_end).to(tl.int32), 0)
        before_own += tl.sum((other < tl.cdiv(length, PAGE)).to(tl.int32), 0)
        before_block += tl.sum((other < block).to(tl.int32), 0)
        straddles += tl.sum((other == whole).to(tl.int32), 0)
        own += tl.sum((other == block).to(tl.int32), 0)

    in_segment = (mine >= first_page) & (mine < past_end)
    slot = tl.load(table_ptr + batch.to(tl.int64) * columns + mine - first_page, mask=in_segment, other=-1)
    own_row = tl.where(mine == _ABSENT, 0, mine) * PAGE - length
    place = tl.where(in_segment, slot, tl.where((mine < _ABSENT) & (own_row >= 0), own_row, -1))
    place = tl.where(again > 0, -1, place)
    listed = i < entries
    tl.store(pages_ptr + row * entries + rank, mine, mask=listed)
    tl.store(places_ptr + row * entries + rank, place, mask=listed)
    if tl.program_id(0) % tiles == 0:
        bounds = bounds_ptr + row * 6
        tl.store(bounds, before_first)
        tl.store(bounds + 1, tl.maximum(before_past_end, before_first))
        tl.store(bounds + 2, before_own)
        tl.store(bounds + 3, before_block)
        tl.store(bounds + 4, ((straddles > 0) & (length % PAGE != 0)).to(tl.int32))
        tl.store(bounds + 5, ((own > 0) & (block >= 0)).to(tl.int32))


@triton.jit
def _columns(
    z, batch, table_ptr, grad_table_ptr, lengths_ptr, columns, total, first_page, PAGE: tl.constexpr,
    PAST_GRAD: tl.constexpr,
):  # fmt: skip
    """The page of each column; -1 for one whose gradient nobody keeps."""
    length = tl.load(lengths_ptr + batch)
    past = z < columns
    page = tl.where(past, first_page + z, length // PAGE + z - columns)
    kept = (z < total) & (past | (z >= columns))
    if PAST_GRAD:
        entry = batch.to(tl.int64) * columns + z
        slot = tl.load(table_ptr + entry, mask=past, other=0)
        grad_slot = tl.load(grad_table_ptr + entry, mask=past, other=0)
        kept = kept & ((page * PAGE < length) | (z >= columns)) & (slot >= 0) & (grad_slot >= 0)
    return tl.where(kept, page, -1)


@triton.jit
def _readers(lists_ptr, page, rows, blocks, entries, STEPS: tl.constexpr):
    """[rows, pages] whether each list holds each page, by bisection."""
    inside = (rows < blocks)[:, None] & (page >= 0)[None, :]
    lists = lists_ptr + rows.to(tl.int64)[:, None] * entries
    low = tl.zeros(inside.shape, tl.int32)
    high = low + entries
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        value = tl.load(lists + middle, mask=inside & (middle < entries), other=_ABSENT)
        later = (low < high) & (value < page[None, :])
        high = tl.where(later, high, middle)
        low = tl.where(later, middle + 1, low)
    found = tl.load(lists + low, mask=inside & (low < entries), other=-1)
    return inside & (found == page[None, :])


@triton.jit(do_not_specialize=["blocks", "entries", "columns", "total", "first_page", "share"])
def _count_readers_kernel(
    pages_ptr, table_ptr, grad_table_ptr, lengths_ptr, counts_ptr, blocks, entries, columns, total, first_page, share,
    PAGE: tl.constexpr, STEPS: tl.constexpr, PAST_GRAD: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Per page: its readers, its whole parts, whether there is a rest, its parts beyond the first, and whether there
    are any. Grid: (tiles of Z, S, B)."""
    batch = tl.program_id(2)
    which = batch * tl.num_programs(1) + tl.program_id(1)
    z = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    page = _columns(z, batch, table_ptr, grad_table_ptr, lengths_ptr, columns, total, first_page, PAGE, PAST_GRAD)
    lists = pages_ptr + which.to(tl.int64) * blocks * entries
    count = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, blocks, ROWS):
        found = _readers(lists, page, start + tl.arange(0, ROWS), blocks, entries, STEPS)
        count += tl.sum(found.to(tl.int32), 0)
    whole = count // share
    rest = (count % share > 0).to(tl.int32)
    more = tl.maximum(whole + rest - 1, 0)
    target = counts_ptr + which.to(tl.int64) * total + z
    step = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * total
    tl.store(target, count, mask=z < total)
    tl.store(target + step, whole, mask=z < total)
    tl.store(target + 2 * step, rest, mask=z < total)
    tl.store(target + 3 * step, more, mask=z < total)
    tl.store(target + 4 * step, (more > 0).to(tl.int32), mask=z < total)


@triton.jit(
    do_not_specialize=["blocks", "entries", "columns", "total", "first_page", "listed", "most_items", "most_split"]
)
def _fill_readers_kernel(
    pages_ptr, table_ptr, grad_table_ptr, lengths_ptr, counts_ptr, ends_ptr, readers_ptr, items_ptr, split_ptr,
    blocks, entries, columns, total, first_page, listed, most_items, most_split,
    PAGE: tl.constexpr, STEPS: tl.constexpr, PAST_GRAD: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write each page's readers, its column once for each part, and the columns that are split. Grid: as above."""
    batch = tl.program_id(2)
    which = (batch * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    z = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    page = _columns(z, batch, table_ptr, grad_table_ptr, lengths_ptr, columns, total, first_page, PAGE, PAST_GRAD)
    lists = pages_ptr + which * blocks * entries
    here = which * total + z
    step = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64) * total
    inside = z < total
    place = tl.load(ends_ptr + here, mask=inside, other=0) - tl.load(counts_ptr + here, mask=inside, other=0)
    for start in range(0, blocks, ROWS):
        rows = start + tl.arange(0, ROWS)
        found = _readers(lists, page, rows, blocks, entries, STEPS)
        order = tl.cumsum(found.to(tl.int32), 0)
        target = readers_ptr + which * listed + place[None, :] + order - 1
        tl.store(target, tl.broadcast_to(rows[:, None], [ROWS, COLUMNS]), mask=found)
        place += tl.sum(found.to(tl.int32), 0)
    whole = tl.load(counts_ptr + step + here, mask=inside, other=0)
    item = which * most_items + tl.load(ends_ptr + step + here, mask=inside, other=0) - whole
    for part in range(0, tl.max(whole, 0)):
        tl.store(items_ptr + item + part, z, mask=part < whole)
    # The rests come behind, the last page's first: pages of the own block have the most readers.
    last = which * total + total - 1
    all_items = tl.load(ends_ptr + step + last) + tl.load(ends_ptr + 2 * step + last)
    rest = tl.load(counts_ptr + 2 * step + here, mask=inside, other=0)
    number = tl.load(ends_ptr + 2 * step + here, mask=inside, other=0)
    tl.store(items_ptr + which * most_items + all_items - number, z, mask=rest > 0)
    several = tl.load(counts_ptr + 4 * step + here, mask=inside, other=0)
    number = tl.load(ends_ptr + 4 * step + here, mask=inside, other=0) - 1
    tl.store(split_ptr + which * most_split + number, z, mask=several > 0)


@dataclass(frozen=True)
class Lists:
    """The ranked lists of one launch. Shapes: pages, places [B, S, Q, K]; bounds [B, S, Q, 6], all int32"""

    pages: Tensor
    places: Tensor
    bounds: Tensor

    @property
    def lists(self) -> int:
        return self.pages.shape[1]

    @property
    def blocks(self) -> int:
        return self.pages.shape[2]

    @property
    def entries(self) -> int:
        return self.pages.shape[3]


def ranked(
    selected: Tensor, table: Tensor, columns: int, first_page: int, lengths: Tensor, tokens: int, *, page: int
) -> Lists:
    """Shapes: selected [B, S, Q, K]; table [B, columns] int32; lengths [B] int32, all on one device."""
    if selected.shape[3] == 0:  # a list of nothing
        selected = selected.new_full((*selected.shape[:3], 1), -1)
    batch, lists, blocks, entries = selected.shape
    pages, places = torch.empty_like(selected), torch.empty_like(selected)
    bounds = selected.new_empty(batch, lists, blocks, 6)
    _lists_kernel[(blocks * triton.cdiv(entries, _BLOCK), lists, batch)](
        selected, table, lengths, pages, places, bounds, blocks, entries, tokens, columns, first_page,
        PAGE=page, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return Lists(pages, places, bounds)


@dataclass(frozen=True)
class Readers:
    """The inverse of the lists: work for one program each, `items`.

    Shapes: readers [B, S, Q * (K + 1)]; items [B, S, most items] columns; split [B, S, most split] those of several
        parts; counts, ends [5, B, S, Z]: per column its readers, whole parts, whether there is a rest, parts beyond the
        first, whether there are any; and running sums
    """

    readers: Tensor
    items: Tensor
    split: Tensor
    counts: Tensor
    ends: Tensor
    share: int
    most_parts: int


def readers_of(
    lists: Lists, table: Tensor, grad_table: Tensor, columns: int, own_columns: int, first_page: int, lengths: Tensor,
    *, page: int, share: int, past_grad: bool,
) -> Readers:  # fmt: skip
    """Invert the lists. Without `past_grad` only the own block's pages are asked for.

    Shapes: table, grad_table [B, columns]
    Units:  share: readers a program takes
    """
    batch, blocks, entries = lists.pages.shape[0], lists.blocks, lists.entries
    if not past_grad:
        columns = 0
    total, listed = columns + own_columns, blocks * (entries + 1)  # a page part past, part own has two columns
    make = lists.pages.new_empty
    most_items = max(min(total, listed) + listed // share, 1)
    most_split = max(listed // (share + 1), 1)
    counts = make(5, batch, lists.lists, total)
    readers, items, split = (make(batch, lists.lists, n) for n in (listed, most_items, most_split))
    grid = (triton.cdiv(total, _COLUMNS), lists.lists, batch)
    constants = {
        "PAGE": page, "STEPS": entries.bit_length(), "PAST_GRAD": past_grad, "COLUMNS": _COLUMNS, "ROWS": _ROWS,
        "num_warps": 4,
    }  # fmt: skip
    sources = (lists.pages, table, grad_table, lengths)
    _count_readers_kernel[grid](
        *sources, counts, blocks, entries, columns, total, first_page, share, **constants
    )  # fmt: skip
    ends = counts.cumsum(3, dtype=torch.int32)
    _fill_readers_kernel[grid](
        *sources, counts, ends, readers, items, split, blocks, entries, columns, total, first_page, listed, most_items,
        most_split, **constants,
    )  # fmt: skip
    # A page of n readers has at most (n - 1) / share parts beyond the first, and n is at most the number of blocks.
    most_more = (blocks - 1) // share
    most_parts = listed * most_more // (share * most_more + 1)
    return Readers(readers, items, split, counts, ends, share, most_parts)
