"""The Triton backend's two functions where queries read listed pages only: lists, launches, and how work is shared out.

The lists rule every launch: what a query block does not list is never touched, so the past costs by the pages listed,
not by its length. Several segments pass the registers' state on, each skipping what lies in the others: the result has
the same bits however the past is cut.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · K pages selected ·
Q query blocks · S lists a sequence, G or 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .past import Segment
from .triton_problem import Problem, Rows
from .triton_sinks import sinks_grad
from .triton_sparse_backward import _add_parts_kernel, _sparse_attention_dkdv_kernel, _sparse_attention_dq_kernel
from .triton_sparse_forward import _sparse_attention_fwd_kernel
from .triton_sparse_lists import Lists, Readers, ranked, readers_of
from .triton_tiles import Tile

_LOG2E = math.log2(math.e)
_PARTS_BYTES = 2**27  # what the float32 partial sums of split pages may take
_LEAST_SHARE = 4  # readers: below that, a partial sum costs more than it spreads

Launches = Iterable[tuple[Segment | None, bool]]


def forward(p: Problem, launches: Launches, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over the listed pages of every segment and of the own block, which joins the last launch.

    Returns: out [B, C, H, D] in q's dtype and lse [B, H, C] float32; out 0 and lse -inf where nothing is seen
    """
    out = torch.empty_like(p.q)
    lse = torch.empty(p.batch, p.q.shape[2], p.tokens, device=p.q.device, dtype=torch.float32)
    carry: tuple[Tensor, Tensor] | None = None
    for segment, last in launches:
        launch = _Launch.of(p, segment)
        target = (out, lse) if last else carry or (torch.empty_like(p.q, dtype=torch.float32), _two_of(lse))
        for tile, first_row, rows in row_tiles(p, launch.lists.blocks):
            _sparse_attention_fwd_kernel[launch.rows_grid(tile, rows)](
                p.q, *launch.keys(tile), launch.table, launch.lists.pages, launch.lists.places, launch.lists.bounds,
                p.lengths, p.documents, lse if sinks is None else sinks, *(carry or (lse, lse)),
                *target,
                p.tokens, launch.columns, launch.first_page, launch.lists.blocks, launch.lists.entries, p.window,
                p.geometry.scale * _LOG2E,
                CARRY=carry is not None, OWN=last, SINKS=last and sinks is not None, STRADDLE=launch.straddle,
                PARTS=tile.parts if launch.block_m(tile) == tile.rows else 1, FIRST_ROW=first_row, ROWS=rows,
                **launch.constants(tile),
            )  # fmt: skip
        carry = None if last else target
    return out, lse


def backward(
    p: Problem, launches: Launches, dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None, *, past_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients from the global output and LSE. Each listed page is added to once, by its owner, in either mode.

    Returns: dq in q's dtype; dk and dv of the own block in float32; that of the sinks
    """
    rows = Rows.prepare(p, dout, out, lse)
    dq = torch.empty_like(p.q)
    dk, dv = (torch.zeros(p.k.shape, device=p.k.device, dtype=torch.float32) for _ in range(2))
    carry: Tensor | None = None
    for segment, last in launches:
        launch = _Launch.of(p, segment)
        if past_grad or last:
            _dkdv(launch, rows, dk, dv, past_grad=past_grad, own=last)
        tile = p.tile("dq")
        target = dq if last else carry if carry is not None else torch.empty_like(p.q, dtype=torch.float32)
        _sparse_attention_dq_kernel[launch.rows_grid(tile, p.geometry.page_tokens * p.repeat)](
            *rows.sources(p, launch.block_m(tile)), *launch.keys(tile), launch.table, launch.lists.pages,
            launch.lists.places, launch.lists.bounds, p.lengths, p.documents, rows.stats,
            rows.stats if carry is None else carry, target,
            p.tokens, rows.stats.shape[1], launch.columns, launch.first_page, launch.lists.blocks, launch.lists.entries,
            p.window, p.sign * p.geometry.scale, p.geometry.scale * _LOG2E,
            CARRY=carry is not None, OWN=last, STRADDLE=launch.straddle, **launch.constants(tile),
        )  # fmt: skip
        carry = None if last else target
    return dq, dk, dv, None if sinks is None else sinks_grad(p, rows, sinks)


def row_tiles(p: Problem, blocks: int) -> list[tuple[Tile, int, int]]:
    """How the forward cuts the rows of each query block: tiles, the first row they take, and how many rows.

    Wide tiles are faster, but few: the cut whose busiest multiprocessor goes through the fewest rows is taken.
    """
    rows = p.geometry.page_tokens * p.repeat
    wide, narrow = p.tile("fwd"), p.tile("narrow fwd")
    by_narrow = [(narrow, 0, rows)]
    whole = rows // wide.rows * wide.rows
    if wide.rows <= narrow.rows or whole == 0:
        return by_narrow
    by_wide = [(wide, 0, whole)]
    if whole < rows:
        by_wide.append((p.tile("rest fwd"), whole, rows - whole))

    def most_rows(cut: list[tuple[Tile, int, int]]) -> int:
        programs = [(tile, blocks * p.groups * p.batch * triton.cdiv(count, tile.rows)) for tile, _, count in cut]
        return sum(tile.rows * triton.cdiv(n, p.slots(tile) // tile.per_sm) for tile, n in programs)

    return min(by_wide, by_narrow, key=most_rows)


def _two_of(lse: Tensor) -> Tensor:
    """Room for the largest scores and the divisors of a state."""
    return lse.new_empty(2, *lse.shape)


def _dkdv(launch: _Launch, rows: Rows, dk: Tensor, dv: Tensor, *, past_grad: bool, own: bool) -> None:
    """dK and dV of a segment's listed pages, into its gradient pages, and of the own block's, into `dk` and `dv`."""
    p, segment = launch.p, launch.segment
    tile = p.tile("dkdv")
    past = past_grad and segment is not None
    grads = (dk, dv, launch.table)
    if past and segment is not None:
        assert segment.dk is not None and segment.dv is not None and segment.grad_slots is not None
        grads = (segment.dk, segment.dv, segment.grad_slots.contiguous())
    readers = launch.readers(grads[2], tile, past=past, own=own)
    columns = launch.columns if past else 0
    parts = torch.empty(
        p.batch * p.groups, readers.most_parts, 2, p.geometry.page_tokens, p.dim, device=p.q.device, dtype=torch.float32
    )
    total, all_lists = readers.counts.shape[3], p.batch * launch.lists.lists
    targets = (*grads[:2], dk, dv)
    constants = launch.constants(tile)
    # Sequences that may share a page must not add to it at the same time.
    together = p.batch == 1 or not past or (segment is not None and p.disjoint(segment))
    for batch, count in [(0, p.batch)] if together else [(b, 1) for b in range(p.batch)]:
        _sparse_attention_dkdv_kernel[readers.items.shape[2] * launch.tiles(tile), p.groups, count](
            *rows.sources(p, launch.block_m(tile)), *launch.keys(tile), launch.table, grads[2], p.lengths, p.documents,
            readers.readers, readers.items, readers.counts, readers.ends, rows.stats, *targets, parts,
            batch, p.tokens, rows.stats.shape[1], columns, launch.first_page, total, readers.readers.shape[2],
            readers.items.shape[2], readers.most_parts, readers.share, p.window, all_lists, p.geometry.scale,
            p.geometry.scale * _LOG2E,
            RAGGED=launch.ragged(tile), PAST=past, OWN=own, **constants,
        )  # fmt: skip
        if readers.most_parts:
            block = 32
            _add_parts_kernel[readers.split.shape[2] * (p.geometry.page_tokens // block), p.groups, count](
                parts, readers.split, readers.counts, readers.ends, grads[2], p.lengths, *targets,
                batch, p.tokens, columns, launch.first_page, total, readers.split.shape[2], readers.most_parts,
                all_lists,
                LISTS=launch.lists.lists, GROUPS=p.groups, HEAD_DIM=p.dim, DIM=triton.next_power_of_2(p.dim),
                PAGE=p.geometry.page_tokens, BLOCK=block, num_warps=4,
            )  # fmt: skip


@dataclass(frozen=True)
class _Launch:
    """One segment as the kernels read it; without one, the own block stands in for pages that are never read."""

    p: Problem
    segment: Segment | None
    lists: Lists
    table: Tensor
    columns: int
    first_page: int

    @staticmethod
    def of(p: Problem, segment: Segment | None) -> _Launch:
        geometry = p.geometry
        assert geometry.selected is not None
        columns, first_page, table = 0, 0, p.lengths
        if segment is not None:
            columns, first_page, table = segment.slots.shape[1], segment.first_page, segment.slots.contiguous()
        lists = ranked(
            geometry.selected, table, columns, first_page, p.lengths, p.tokens, page=geometry.page_tokens
        )  # fmt: skip
        return _Launch(p, segment, lists, table, columns, first_page)

    @property
    def straddle(self) -> bool:
        """Whether some page is part past, part own."""
        return any(n % self.p.geometry.page_tokens for n in self.p.geometry.lengths)

    def block_m(self, tile: Tile) -> int:
        """Rows of a tile: none is larger than a query block."""
        return min(tile.rows, triton.next_power_of_2(self.p.geometry.page_tokens * self.p.repeat))

    def block_n(self, tile: Tile) -> int:
        return min(tile.keys, self.p.geometry.page_tokens)

    def tiles(self, tile: Tile) -> int:
        return self.p.geometry.page_tokens // self.block_n(tile)

    def ragged(self, tile: Tile) -> bool:
        """Whether some row tile holds rows that are not its query block's."""
        page = self.p.geometry.page_tokens
        return self.straddle or self.p.tokens % page > 0 or page * self.p.repeat % self.block_m(tile) > 0

    def rows_grid(self, tile: Tile, rows: int) -> tuple[int, int, int]:
        """Programs for so many rows of each query block."""
        return self.lists.blocks * triton.cdiv(rows, self.block_m(tile)), self.p.groups, self.p.batch

    def keys(self, tile: Tile) -> tuple[TensorDescriptor | Tensor, ...]:
        """The own block's keys and values as kernels read them, then the pages'."""
        block = self.block_n(tile)
        own = tuple(self.p.keys_of(x, block) for x in (self.p.k, self.p.v))
        if self.segment is None:
            return *own, *own
        return *own, self.p.keys_of(self.segment.k, block), self.p.keys_of(self.segment.v, block)

    def readers(self, grad_table: Tensor, tile: Tile, *, past: bool, own: bool) -> Readers:
        return readers_of(
            self.lists, self.table, grad_table, self.columns, self.lists.blocks if own else 0, self.first_page,
            self.p.lengths, page=self.p.geometry.page_tokens, share=self._share(tile), past_grad=past,
        )  # fmt: skip

    def _share(self, tile: Tile) -> int:
        """Readers a program takes: an eighth of what each would get if all were spread evenly, so that none is late.

        The partial sums of split pages are bounded in memory: there are fewer than entries / share of them a list.
        """
        p, entries = self.p, self.lists.blocks * (self.lists.entries + 1)
        spread = triton.cdiv(entries * self.tiles(tile) * p.groups * p.batch, 8 * p.slots(tile))
        part_bytes = 8 * p.geometry.page_tokens * p.dim * p.groups * p.batch
        return max(_LEAST_SHARE, spread, entries * part_bytes // _PARTS_BYTES)

    def constants(self, tile: Tile) -> dict[str, Any]:
        p = self.p
        return {
            "LISTS": self.lists.lists, "GROUPS": p.groups, "REPEAT": p.repeat, "HEAD_DIM": p.dim,
            "DIM": triton.next_power_of_2(p.dim), "PAGE": p.geometry.page_tokens, "BLOCK_M": self.block_m(tile),
            "BLOCK_N": self.block_n(tile), "WINDOW": p.geometry.window is not None,
            "DOCUMENTS": p.geometry.documents is not None, "STAGES": tile.stages, "POINTERS": not p.boxes,
            "num_warps": tile.warps,
            "num_stages": tile.stages, "enable_fp_fusion": True,
        }  # fmt: skip
