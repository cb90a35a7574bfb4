"""Plain torch attention over pages: any dtype, any device, any page size; the oracle of the other backends.

16-bit and 32-bit inputs are computed in float32, float64 in float64. Scores exist only for one tile at a time: a few
queries of all heads against a few pages, cut so that a tile stays in a CPU's cache. Grouped heads are folded into rows,
so keys and values are never repeated; a tile that every query sees whole needs no mask, one that none sees is skipped.

Letters: B batch · C chunk tokens · P tokens a page · G KV heads · J query heads a KV head · D head dim ·
S keys of a tile · R rows of a tile, J times its queries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .past import Geometry, Segment
from .visibility import Keys, Visibility

# Scores in a tile and keys in a tile: measured on a CPU, where a tile that leaves the cache costs twice the time; a GPU
# wants few launches.
_CPU_TILE, _CPU_KEYS = 2**18, 256
_GPU_TILE, _GPU_KEYS = 2**25, 4096
_LEAST_QUERIES = 64

_Block = tuple[Keys, list[tuple[int, Tensor | None]], Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Iterable[Segment], geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one block's queries over the past's segments and the block itself.

    Shapes: q [B, C, H, D]; k, v [B, C, G, D]
    Returns: out [B, C, H, D] in q's dtype; lse [B, H, C] in float32, or float64 for float64
    """
    work = _Work(q, k, geometry)
    q_tiles = [rows.mul_(geometry.scale) for rows in work.rows(q)]
    acc = [torch.zeros_like(rows) for rows in q_tiles]
    top = [rows.new_full(rows.shape[:2], -math.inf) for rows in q_tiles]
    total = [torch.zeros_like(rows) for rows in top]
    for _, tiles, k_GSD, v_GSD in work.blocks(k, v, segments):
        for t, seen in tiles:
            scores = torch.bmm(q_tiles[t], k_GSD.mT)
            if seen is not None:
                work.folded(scores, t).masked_fill_(~seen[:, :, None], -math.inf)
            new_top = torch.maximum(top[t], scores.amax(-1))
            safe = new_top.masked_fill(new_top == -math.inf, 0.0)  # a row that has seen nothing yet
            scores.sub_(safe[..., None]).exp_()
            shrink = torch.exp(top[t] - safe)
            total[t].mul_(shrink).add_(scores.sum(-1))
            acc[t].mul_(shrink[..., None]).baddbmm_(scores, v_GSD)
            top[t] = new_top
    out = work.unfold([a.div_(n.masked_fill(n == 0, 1.0)[..., None]) for a, n in zip(acc, total)])
    lse = work.unfold([(m + torch.log(n))[..., None] for m, n in zip(top, total)])
    return out.to(q.dtype), lse.squeeze(-1).transpose(1, 2).contiguous()


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Iterable[Segment],
    geometry: Geometry,
    *,
    past_grad: bool,
    accumulate: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and of the own k, v; the past's are added into the segments' dk and dv when `past_grad`.

    `out` and `lse` are global: with all segments, the own block and the sink in them. `accumulate` makes no difference
    here: one thread of control adds once to each page.
    Shapes: dout, out [B, C, H, D]; lse [B, H, C]
    Returns: dq in q's dtype; dk and dv of the own block in the dtype of the computation
    """
    del accumulate
    work = _Work(q, k, geometry)
    dtype = work.dtype
    q_tiles = [rows.mul_(geometry.scale) for rows in work.rows(q)]
    do_tiles = work.rows(dout)
    delta = (dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    minus_delta = [rows.neg_() for rows in work.rows(delta)]
    # Infinite where nothing is seen; such a row is masked in every tile, after the exponential.
    minus_lse = [rows.neg_() for rows in work.rows(lse.transpose(1, 2)[..., None])]
    dq = [torch.zeros_like(rows) for rows in q_tiles]
    own = (torch.zeros(k.shape, dtype=dtype, device=k.device), torch.zeros(v.shape, dtype=dtype, device=v.device))
    for keys, tiles, k_GSD, v_GSD in work.blocks(k, v, segments):
        dk, dv = torch.zeros_like(k_GSD), torch.zeros_like(v_GSD)
        for t, seen in tiles:
            p = torch.baddbmm(minus_lse[t], q_tiles[t], k_GSD.mT).exp_()
            if seen is not None:
                work.folded(p, t).masked_fill_(~seen[:, :, None], 0.0)
            ds = torch.baddbmm(minus_delta[t], do_tiles[t], v_GSD.mT).mul_(p)
            dq[t].baddbmm_(ds, k_GSD)
            if past_grad:
                dv.baddbmm_(p.mT, do_tiles[t])
                dk.baddbmm_(ds.mT, q_tiles[t])
        if past_grad:
            _add_grad(keys, work.token_major(dk), work.token_major(dv), own)
    return work.unfold(dq).mul_(geometry.scale).to(q.dtype), *own


class _Work:
    """How one call is cut: query tiles, key blocks, and the folding of heads into rows."""

    def __init__(self, q: Tensor, k: Tensor, geometry: Geometry) -> None:
        self.batch, self.tokens, heads, _ = q.shape
        self.groups = k.shape[2]
        self.share = heads // self.groups
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.geometry = geometry
        budget, keys = (_GPU_TILE, _GPU_KEYS) if q.device.type == "cuda" else (_CPU_TILE, _CPU_KEYS)
        self.key_pages = max(1, keys // geometry.page_tokens)
        self.own_keys = keys
        length = max(_LEAST_QUERIES, budget // (self.batch * heads * keys))
        self.tiles = [(c, min(c + length, self.tokens)) for c in range(0, self.tokens, length)]
        self.visibility = Visibility(geometry, self.tokens, q.device, self.tiles)

    def rows(self, x: Tensor) -> list[Tensor]:
        """[B, C, H, D] to one [B * G, R, D] per tile, each a new tensor in the dtype of the computation."""
        folded = x.unflatten(2, (self.groups, self.share)).permute(0, 2, 3, 1, 4)  # [B, G, J, C, D]
        return [
            folded[:, :, :, c0:c1]
            .to(self.dtype, copy=True, memory_format=torch.contiguous_format)
            .view(self.batch * self.groups, -1, x.shape[3])
            for c0, c1 in self.tiles
        ]

    def unfold(self, tiles: list[Tensor]) -> Tensor:
        """The inverse of `rows`: [B, C, H, D]."""
        parts = [self.folded(rows, t).permute(0, 3, 1, 2, 4).flatten(2, 3) for t, rows in enumerate(tiles)]
        return torch.cat(parts, dim=1)

    def folded(self, x: Tensor, tile: int) -> Tensor:
        """A view of a tile's rows, [B * G, R, n], as [B, G, J, queries, n]."""
        c0, c1 = self.tiles[tile]
        return x.view(self.batch, self.groups, self.share, c1 - c0, x.shape[-1])

    def token_major(self, x: Tensor) -> Tensor:
        """[B * G, S, D] as [B, S, G, D]."""
        return x.view(self.batch, self.groups, *x.shape[1:]).transpose(1, 2)

    def head_major(self, x: Tensor) -> Tensor:
        """[B, S, G, D] to [B * G, S, D] in the dtype of the computation; a view where batch and dtype allow."""
        return x.to(self.dtype).transpose(1, 2).flatten(0, 1)

    def blocks(self, k: Tensor, v: Tensor, segments: Iterable[Segment]) -> Iterator[_Block]:
        """Every block of keys that some tile sees, the past's in order, then the own: (keys, tiles, k, v)."""
        page, lengths = self.geometry.page_tokens, self.geometry.lengths
        for segment in segments:
            columns = segment.slots.shape[1]
            for column in range(0, columns, self.key_pages):
                first = (segment.first_page + column) * page
                size = (min(column + self.key_pages, columns) - column) * page
                counts = tuple(min(max(length - first, 0), size) for length in lengths)
                keys = Keys((first,) * self.batch, counts, max(counts), segment, column)
                tiles = self.visibility.tiles_of(keys)
                if tiles:
                    k_BSGD, v_BSGD = (_gather(pages, segment, keys) for pages in (segment.k, segment.v))
                    if self.geometry.selected is not None:  # in pages that no list names may stand anything
                        unnamed = ~self.visibility.named(keys)[..., None, None]
                        k_BSGD, v_BSGD = (x.masked_fill(unnamed, 0.0) for x in (k_BSGD, v_BSGD))
                    yield keys, tiles, self.head_major(k_BSGD), self.head_major(v_BSGD)
        for c in range(0, self.tokens, self.own_keys):
            size = min(self.own_keys, self.tokens - c)
            keys = Keys(tuple(n + c for n in lengths), (size,) * self.batch, size, None, c)
            tiles = self.visibility.tiles_of(keys)
            if tiles:
                yield keys, tiles, self.head_major(k[:, c : c + size]), self.head_major(v[:, c : c + size])


def _pages_of(slots: Tensor, run: int | None, keys: Keys, b: int, page: int) -> slice | Tensor:
    """Which slots hold sequence b's keys: a slice where they are consecutive, else their ids."""
    pages = -(-keys.counts[b] // page)
    if run is not None:
        return slice(run + keys.column, run + keys.column + pages)
    return slots[b, keys.column : keys.column + pages].long()


def _gather(pages: Tensor, segment: Segment, keys: Keys) -> Tensor:
    """The keys' tokens, [B, S, G, D]; zero where a sequence has fewer, so that what lies there cannot matter."""
    parts = []
    for b, count in enumerate(keys.counts):
        where = _pages_of(segment.slots, segment.runs[b] if segment.runs else None, keys, b, pages.shape[1])
        part = pages[where].flatten(0, 1)[:count]
        if count < keys.size:
            part = torch.cat((part, part.new_zeros((keys.size - count, *part.shape[1:]))))
        parts.append(part)
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _add_grad(keys: Keys, dk: Tensor, dv: Tensor, own: tuple[Tensor, Tensor]) -> None:
    """Add one block's gradients, [B, S, G, D], to the own block's or to the pages they belong to."""
    if keys.segment is None:
        for total, part in zip(own, (dk, dv)):
            total[:, keys.column : keys.column + keys.size] += part
        return
    segment = keys.segment
    assert segment.dk is not None and segment.dv is not None and segment.grad_slots is not None
    runs = segment.grad_runs
    for pages, part in ((segment.dk, dk), (segment.dv, dv)):
        # One sequence after the other: two that share a page must both be counted.
        for b, count in enumerate(keys.counts):
            where = _pages_of(segment.grad_slots, runs[b] if runs else None, keys, b, pages.shape[1])
            touched = pages[where]  # a copy where the slots are scattered
            whole = count // pages.shape[1]
            touched[:whole] += part[b, : whole * pages.shape[1]].unflatten(0, (whole, pages.shape[1]))
            touched[whole:, : count - whole * pages.shape[1]] += part[b, whole * pages.shape[1] : count]
            if isinstance(where, Tensor):
                pages[where] = touched
