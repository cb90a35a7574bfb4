"""An independent dense oracle for paged attention, and ways to make a past awkward."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_kv import PagedKV, PagePool, PageTable, Segment


@dataclass
class Problem:
    """A whole batch of sequences, and what its queries may see, in absolute terms.

    Shapes: q [B, T, H, D]; k, v [B, T, G, D]; sinks [H]; documents [B, T]; selected [B, G or 1, ceil(T / P), K]
    """

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]
    page: int
    scale: float
    window: int | None = None
    sinks: Tensor | None = None
    documents: Tensor | None = None
    selected: Tensor | None = None

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.q, self.k, self.v) + (() if self.sinks is None else (self.sinks,))

    def seen(self) -> Tensor:
        """[B, G or 1, T, T] whether query i sees key j, by the definition, pair by pair."""
        position = torch.arange(self.q.shape[1])
        i, j = position[:, None], position[None, :]
        seen = (j <= i)[None, None]
        if self.window is not None:
            seen = seen & (j > i - self.window)
        if self.documents is not None:
            seen = seen & (j >= self.documents[:, None, :, None])
        if self.selected is not None:
            pages = self.selected[:, :, position // self.page]  # [B, G', T, K]
            seen = seen & (pages[:, :, :, None, :] == (position // self.page)[:, None]).any(-1)
        return seen

    def dense(self) -> Tensor:
        """[B, T, H, D] with a graph: one full score matrix."""
        share = self.q.shape[2] // self.k.shape[2]
        k, v = (x.repeat_interleave(share, 2) for x in (self.k, self.v))
        seen = self.seen()
        if seen.shape[1] > 1:
            seen = seen.repeat_interleave(share, 1)
        scores = torch.einsum("bihd,bjhd->bhij", self.q, k) * self.scale
        extra = torch.zeros((*scores.shape[:3], 1), dtype=scores.dtype)
        if self.sinks is None:  # a row that sees nothing must give zero, not NaN
            empty = ~seen.any(-1, keepdim=True)
            extra = extra.masked_fill(~empty.expand_as(extra), -torch.inf)
        else:
            extra = extra + self.sinks[:, None, None]
        scores = torch.cat((scores.masked_fill(~seen, -torch.inf), extra), -1)
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v)

    def block(self, x: Tensor, starts: tuple[int, ...], tokens: tuple[int, ...]) -> Tensor:
        """Each sequence's tokens [start, start + tokens) of x [B, T, ...], padded on the right with zeros."""
        out = x.new_zeros((x.shape[0], max(tokens), *x.shape[2:]))
        for b, (start, n) in enumerate(zip(starts, tokens)):
            out[b, :n] = x[b, start : start + n]
        return out

    def options(self, starts: tuple[int, ...], tokens: tuple[int, ...]) -> dict:
        """What to pass to `paged_attention` for one block, beside tensors and sinks."""
        documents = selected = None
        if self.documents is not None:
            documents = self.block(self.documents, starts, tokens)
        if self.selected is not None:
            length = max(tokens)
            blocks = max((s + length - 1) // self.page - s // self.page + 1 for s in starts)
            batch, heads, _, k = self.selected.shape
            selected = torch.full((batch, heads, blocks, k), -1, dtype=torch.int32)
            for b, start in enumerate(starts):
                rows = self.selected[b, :, start // self.page :][:, :blocks]
                selected[b, :, : rows.shape[1]] = rows
        return {"scale": self.scale, "window": self.window, "documents": documents, "selected": selected}


class ShuffledTable(PageTable):
    """Hands out free slots in random order."""

    def __init__(self, slots: int, page_tokens: int, seed: int) -> None:
        super().__init__(slots, page_tokens)
        self.random = random.Random(seed)

    def _take(self, sequence: int) -> int:
        slot = self.random.choice([i for i, free in enumerate(self._free) if free])
        self._free[slot] = 0
        self._free_pages -= 1
        return slot


class SplitPast:
    """A past that comes in segments of a few pages."""

    def __init__(self, past: PagedKV, pages: int) -> None:
        self.past, self.pages = past, pages

    @property
    def page_tokens(self) -> int:
        return self.past.page_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.past.lengths

    def own_grad(self, layer: int):
        return self.past.own_grad(layer)

    def segments(self, layer: int, phase: str, first_page: int = 0) -> Iterator[Segment]:
        for whole in self.past.segments(layer, phase, first_page):
            for start in range(0, whole.slots.shape[1], self.pages):
                slots = whole.slots[:, start : start + self.pages]
                runs = whole.runs
                if runs is not None:
                    runs = tuple(run + start if int(row[0]) >= 0 else 0 for run, row in zip(runs, slots))
                grads = {} if whole.dk is None else {"grad_slots": slots, "grad_runs": runs}
                yield replace(whole, first_page=whole.first_page + start, slots=slots, runs=runs, **grads)


def pool_for(problem: Problem, *, shuffle: int | None = None, spare: int = 0, layers: int = 1) -> PagePool:
    """A pool of just enough pages; its KV pages hold NaN, as do gradient pages until they are written."""
    slots = sum(-(-n // problem.page) for n in problem.lengths) + spare
    pool = PagePool(
        layers=layers,
        slots=slots,
        page_tokens=problem.page,
        kv_heads=problem.k.shape[2],
        head_dim=problem.k.shape[3],
        dtype=problem.k.dtype,
        device="cpu",
    )
    if shuffle is not None:
        pool.table = ShuffledTable(slots, problem.page, shuffle)
    for pages in (*pool.k, *pool.v):
        pages.fill_(torch.nan)
    return pool


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is allocated and not written holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
