"""Launches of the Triton kernels: descriptors of pages, grids, and how keys are shared out.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .past import Segment
from .triton_backward import _paged_attention_dkdv_kernel, _paged_attention_dq_kernel
from .triton_forward import _paged_attention_fwd_kernel
from .triton_merge import merge_parts
from .triton_problem import Partial, Problem, Rows
from .triton_tiles import Tile

_LOG2E = math.log2(math.e)
_PARTS_BYTES = 2**27  # what the float32 partial results of split keys may take


def forward_launch(
    p: Problem,
    segment: Segment | None,
    carry: Partial | None,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    *,
    own: bool,
) -> Partial | None:
    """One forward launch; returns the state for the next, or None when `out` and `lse` are done."""
    tile = p.tile("fwd" if p.rows > 128 else "narrow fwd")
    keys = _Keys.of(p, segment, tile)
    target = Partial(out, lse) if own else carry or Partial.empty(p)
    splits = _splits(p, tile, keys)
    parts = target if splits == 1 else Partial.empty(p, splits)
    grid = (triton.cdiv(p.rows, tile.rows), p.groups, p.batch * splits)
    _paged_attention_fwd_kernel[grid](
        p.q, *keys.own, *keys.pages, keys.slots, p.lengths, p.documents,
        lse if sinks is None else sinks, carry.out if carry else lse, carry.lse if carry else lse, parts.out, parts.lse,
        p.tokens, keys.columns, keys.first, p.window, splits, p.geometry.scale * _LOG2E,
        CARRY=carry is not None, OWN=own, SPLIT=splits > 1, PARTS=tile.parts, AHEAD=tile.ahead,
        SINKS=own and sinks is not None, **p.constants(tile),
    )  # fmt: skip
    if splits > 1:
        merge_parts(parts.out, parts.lse, target.out, target.lse)
    return None if own else target


def dq_launch(
    p: Problem, rows: Rows, segment: Segment | None, carry: Tensor | None, dq: Tensor, *, own: bool
) -> Tensor | None:
    """One dQ launch; returns the float32 sum for the next, or None when `dq` is done."""
    tile = p.tile("dq")
    keys = _Keys.of(p, segment, tile)
    target = dq if own else carry if carry is not None else torch.empty_like(p.q, dtype=torch.float32)
    splits = _splits(p, tile, keys)
    parts = target if splits == 1 else torch.empty(splits, *p.q.shape, device=p.q.device, dtype=torch.float32)
    grid = (triton.cdiv(p.rows, tile.rows), p.groups, p.batch * splits)
    _paged_attention_dq_kernel[grid](
        *rows.sources(p, tile.rows), *keys.own, *keys.pages, keys.slots, p.lengths, p.documents, rows.stats,
        rows.stats if carry is None else carry, parts,
        p.tokens, rows.stats.shape[1], keys.columns, keys.first, p.window, splits,
        p.sign * p.geometry.scale, p.geometry.scale * _LOG2E,
        CARRY=carry is not None, OWN=own, SPLIT=splits > 1, **p.constants(tile),
    )  # fmt: skip
    if splits > 1:
        target.copy_(parts.sum(0))
    return None if own else target


def dkdv_launch(
    p: Problem, rows: Rows, segment: Segment | None, dk: Tensor, dv: Tensor, accumulate: str, *, own: bool
) -> None:
    """dK and dV of a segment's keys, into its gradient pages, and of the own block's, into `dk` and `dv`."""
    tile = p.tile("dkdv")
    keys = _Keys.of(p, segment, tile)
    block = min(tile.keys, p.geometry.page_tokens)
    past_tiles = triton.cdiv(keys.limit, block)
    own_tiles = triton.cdiv(p.tokens, block) if own else 0
    bounds = p.lengths
    if p.geometry.documents is not None:
        bounds = _document_bounds(p, keys.first, past_tiles, own_tiles, block)
    programs = (past_tiles + own_tiles) * p.groups * p.batch
    splits = 1
    if accumulate == "atomic":
        splits = max(1, min(8, 4 * p.slots(tile) // programs))
    grads = (segment.dk, segment.dv, segment.grad_slots) if segment is not None else (dk, dv, keys.slots)
    assert grads[2] is not None
    # Sequences that may share a page must not add to it at the same time.
    together = p.batch == 1 or segment is None or p.disjoint(segment)
    for batch, count in [(0, p.batch)] if together else [(b, 1) for b in range(p.batch)]:
        _paged_attention_dkdv_kernel[past_tiles + own_tiles, p.groups, count * splits](
            *rows.sources(p, tile.rows), *keys.own, *keys.pages, keys.slots, grads[2].contiguous(), p.lengths,
            p.documents, bounds, rows.stats, grads[0], grads[1], dk, dv,
            batch, p.tokens, rows.stats.shape[1], keys.columns, keys.first, p.window, past_tiles,
            past_tiles + own_tiles, splits, p.geometry.scale, p.geometry.scale * _LOG2E,
            PAST=past_tiles > 0, OWN=own, ATOMIC=accumulate == "atomic",
            **p.constants(tile),
        )  # fmt: skip


def _document_bounds(p: Problem, first: int, past_tiles: int, own_tiles: int, block: int) -> Tensor:
    """Per key tile: before which query all queries see all of it, and from which query on none sees any of it.

    Documents start where they start: no order among them is taken for granted.
    Returns: [B, past_tiles + own_tiles, 2] int32
    """
    starts = p.documents
    past = first + block * torch.arange(past_tiles, device=starts.device, dtype=torch.int32)
    own = block * torch.arange(own_tiles, device=starts.device, dtype=torch.int32)
    first_key = torch.cat([past.expand(p.batch, -1), p.lengths[:, None] + own], 1)
    latest = starts.cummax(1).values
    earliest = starts.flip(1).cummin(1).values.flip(1)
    full = torch.searchsorted(latest, first_key, right=True)
    end = torch.searchsorted(earliest.contiguous(), first_key + (block - 1), right=True)
    return torch.stack([full, end], 2).to(torch.int32)


def _splits(p: Problem, tile: Tile, keys: _Keys) -> int:
    """Into how many shares of the keys a row tile is cut, so that the last wave of programs is not mostly empty.

    Costs are in steps of one key tile: 2 to start and finish a program, 5 to launch the merge, 0.018 to merge a part of
    128 rows.
    """
    if p.geometry.window is not None or p.geometry.documents is not None:
        return 1
    programs = triton.cdiv(p.rows, tile.rows) * p.groups * p.batch
    steps = keys.limit // min(tile.keys, p.geometry.page_tokens)
    slots = p.slots(tile)

    def cost(splits: int) -> float:
        merge = 5 + 0.018 * programs * splits * tile.rows / 128 if splits > 1 else 0.0
        return triton.cdiv(programs * splits, slots) * (steps / splits + 2) + merge

    most = min(32, steps // 8, _PARTS_BYTES // (4 * p.q.numel()))
    return min(range(1, max(most, 1) + 1), key=cost)


@dataclass(frozen=True)
class _Keys:
    """The keys of one launch as its kernel reads them; without a segment the pages stand in and are never read."""

    own: tuple[TensorDescriptor | Tensor, TensorDescriptor | Tensor]
    pages: tuple[TensorDescriptor | Tensor, TensorDescriptor | Tensor]
    slots: Tensor
    columns: int
    first: int
    limit: int  # tokens of the longest sequence's past that lie in the segment

    @staticmethod
    def of(p: Problem, segment: Segment | None, tile: Tile) -> _Keys:
        block = min(tile.keys, p.geometry.page_tokens)
        own = (p.keys_of(p.k, block), p.keys_of(p.v, block))
        if segment is None:
            return _Keys(own, own, p.lengths, 0, 0, 0)
        columns = segment.slots.shape[1]
        first = segment.first_page * p.geometry.page_tokens
        limit = max(0, min(max(p.geometry.lengths) - first, columns * p.geometry.page_tokens))
        pages = (p.keys_of(segment.k, block), p.keys_of(segment.v, block))
        return _Keys(own, pages, segment.slots.contiguous(), columns, first, limit)
