"""One layer's pages in host memory: where they lie, which hold gradients, and when what was copied is there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from offload import PinnedArena
from offload.lanes import Mark

from .host_buffers import Pair, Unit
from .probe import LayerFacts

Moves = list[tuple[Tensor, Tensor]]  # (destination, source)


@dataclass
class LayerPages:
    """Pages [first, first + count) of one layer, of every sequence; memory is taken from an arena when it is wanted.

    Shapes: keys, values and gradients are [B * count, P, G, D] each
    `stored`: keys and values, None until there are any; `appended`: the last copy of them to the host; `settled`: the
    same when the open block was opened; `written`: by a unit's first page, the copy of its gradients; `touched`: a byte
    a page, whether it holds gradients; where lists rule the CPU does not know, and `flags` [B * count] on the device
    tell.
    """

    layer: int
    facts: LayerFacts
    first: int
    count: int
    page_tokens: int
    batch: int
    grad_dtype: torch.dtype
    arena: PinnedArena
    stored: Pair | None = None
    flags: Tensor | None = None
    appended: Mark | None = None
    settled: Mark | None = None
    written: dict[int, Mark] = field(default_factory=dict)
    _grads: Pair | None = None

    def __post_init__(self) -> None:
        self.touched = bytearray(self.count)

    def shape(self, count: int) -> tuple[int, ...]:
        """Of so many pages of every sequence."""
        return (self.batch * count, self.page_tokens, self.facts.kv_heads, self.facts.head_dim)

    def nbytes(self, count: int, dtype: torch.dtype) -> int:
        """Of a pair of so many pages of every sequence."""
        return 2 * math.prod(self.shape(count)) * dtype.itemsize

    @property
    def kv(self) -> Pair:
        """Keys and values."""
        if self.stored is None:
            self.stored = self._pair(self.facts.dtype)
        return self.stored

    @property
    def grads(self) -> Pair:
        """Gradients. They hold anything where `touched` or `flags` do not say otherwise."""
        if self._grads is None:
            self._grads = self._pair(self.grad_dtype)
        return self._grads

    def units(self, first: int, last: int, length: int) -> list[Unit]:
        """Pages [first, last) cut at fixed multiples of `length`."""
        edges = {first, last, *range(self.first, last, length)}
        return [(self.layer, a, b) for a, b in pairwise(sorted(e for e in edges if first <= e <= last))]

    def touched_runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs of pages in [first, last) that hold gradients."""
        runs = []
        at, end = first - self.first, last - self.first
        while (a := self.touched.find(1, at, end)) >= 0:
            b = self.touched.find(0, a, end)
            at = end if b < 0 else b
            runs.append((a + self.first, at + self.first))
        return runs

    def written_to(self, first: int, last: int, length: int) -> list[Mark]:
        """Marks of the copies that may have brought gradients to the pages [first, last), in units of `length`."""
        return [mark for unit, mark in self.written.items() if first - length < unit < last]

    def tokens(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """The tokens [start, stop) in host pages: a view [B, stop - start, G, D]."""
        flat = rows.view(self.batch, self.count * self.page_tokens, *rows.shape[2:])
        base = self.first * self.page_tokens
        return flat[:, start - base : stop - base]

    def moves(self, device: Pair, device_first: int, host: Pair, first: int, last: int) -> Moves:
        """(device, host): contiguous runs of the pages [first, last), one for each tensor and sequence."""
        moves = []
        for staged, rows in zip(device, host, strict=True):
            near = staged.view(self.batch, -1, *staged.shape[1:])[:, first - device_first : last - device_first]
            far = rows.view(self.batch, self.count, *rows.shape[1:])[:, first - self.first : last - self.first]
            moves += [(near[b], far[b]) for b in range(self.batch)]
        return moves

    def layout(self, first: int, last: int) -> dict[str, int]:
        """Where the pages [first, last) lie on either side (offload.listed)."""
        return {"columns": last - first, "host_columns": self.count, "host_first": first - self.first}

    def _pair(self, dtype: torch.dtype) -> Pair:
        shape = self.shape(self.count)
        return self.arena.take(shape, dtype), self.arena.take(shape, dtype)
