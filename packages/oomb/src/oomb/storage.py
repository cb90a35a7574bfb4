"""Where one loss's past lives: pages on the device up to a budget, the rest in host memory.

Logical page p of sequence b is slot `b * pages + p - first_page` of its tier: a training pass knows its length, so no
table is needed. The first pages stay on the device: they are the past of the most chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from offload import HostOutOfMemory, Offloader, PinnedArena
from paged_kv import Segment

from .probe import LayerFacts


@dataclass
class PageRange:
    """Pages [first_page, first_page + pages) of every layer and sequence, KV and gradients, on one device."""

    first_page: int
    pages: int
    page_tokens: int
    batch: int
    device: torch.device
    arena: PinnedArena | None = None
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # layer: [B * pages, P, G, D] each
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def first_token(self) -> int:
        return self.first_page * self.page_tokens

    @cached_property
    def slots(self) -> Tensor:
        return torch.arange(self.batch * self.pages, dtype=torch.int32, device=self.device).view(self.batch, self.pages)

    def allocate(self, facts: LayerFacts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (self.batch * self.pages, self.page_tokens, facts.kv_heads, facts.head_dim)
        if self.arena is not None:
            return self.arena.take(shape, dtype), self.arena.take(shape, dtype)
        # a pool born in inference mode could not be written to by a later training step
        with torch.inference_mode(False):
            k, v = (torch.empty(shape, dtype=dtype, device=self.device) for _ in range(2))
        return k, v

    def tokens(self, pages: Tensor, start: int, stop: int) -> Tensor:
        """The tokens [start, stop) that lie in this range: a view [B, tokens, G, D]."""
        rows = pages.view(self.batch, self.pages * self.page_tokens, *pages.shape[2:])
        return rows[:, max(start - self.first_token, 0) : max(stop - self.first_token, 0)]

    def covers(self, start: int, stop: int) -> bool:
        """Whether any of the tokens [start, stop) lies in this range."""
        return start < self.first_token + self.pages * self.page_tokens and stop > self.first_token

    def clear(self) -> None:
        self.kv.clear()
        self.grads.clear()


@dataclass(frozen=True)
class Budget:
    """How the pages of a pass are divided, decided before it begins. Units: pages of one sequence, bytes."""

    device_pages: int
    host_pages: int
    host_bytes: int


def divide(
    layers: dict[int, LayerFacts],
    *,
    pages: int,
    page_tokens: int,
    batch: int,
    grad_dtype: torch.dtype | None,
    device_budget: int | None,
    host_budget: int | None,
) -> Budget:
    """Share `pages` logical pages between the device and the host.

    Units:  budgets in bytes, for all layers and sequences together
    Raises: HostOutOfMemory with the numbers, when what the device cannot take exceeds the host budget
    """
    grad_bytes = grad_dtype.itemsize if grad_dtype is not None else 0
    page_bytes = sum(
        2 * batch * page_tokens * f.kv_heads * f.head_dim * (f.dtype.itemsize + grad_bytes) for f in layers.values()
    )
    fits = pages if device_budget is None else min(pages, device_budget // max(page_bytes, 1))
    host_pages = pages - fits
    tensors = 4 * len(layers)
    host_bytes = host_pages * page_bytes + (256 * tensors if host_pages else 0)  # each tensor starts on a 256-byte line
    if host_budget is not None and host_bytes > host_budget:
        raise HostOutOfMemory(
            f"the past needs {pages} pages of {page_bytes:,} bytes: {fits} fit gpu_kv_budget_bytes={device_budget:,}, "
            f"the other {host_pages} need {host_bytes:,} bytes of host memory, but host_budget_bytes={host_budget:,}; "
            "raise either budget or shorten the context",
            requested=host_bytes,
            free=host_budget,
            largest=host_budget,
        )
    return Budget(fits, host_pages, host_bytes)


class TieredPast:
    """The past of one loss: a `PastSource` for attention and a `ChunkStore` for the recurrence.

    Shapes: k, v given and gradients returned [B, C, G, D]
    Units:  bounds in tokens, segments in tokens
    Source: docs/dataflow.md; oracle: `paged_kv.PagedKV`
    """

    contiguous = True  # every segment has runs: backends that need consecutive pages may be chosen

    def __init__(
        self,
        layers: dict[int, LayerFacts],
        bounds: list[tuple[int, int]],
        *,
        batch: int,
        page_tokens: int,
        device: torch.device,
        grad_dtype: torch.dtype,
        budget: Budget,
        segment_tokens: int,
        check: bool,
    ) -> None:
        self.layers, self.bounds, self.batch, self.page_tokens = layers, bounds, batch, page_tokens
        self.grad_dtype, self.check = grad_dtype, check
        self.segment_pages = max(segment_tokens // page_tokens, 1)
        self.start = self.stop = 0
        self.mismatch: dict[int, Tensor] = {}
        self.device_pages = PageRange(0, budget.device_pages, page_tokens, batch, device)
        self.ranges = [self.device_pages] if budget.device_pages else []
        self.arena: PinnedArena | None = None
        if budget.host_pages:
            self.arena = PinnedArena(budget.host_bytes, device=device)
            self.offloader = Offloader(device)
            host = torch.device("cpu")
            self.ranges.append(PageRange(budget.device_pages, budget.host_pages, page_tokens, batch, host, self.arena))
        self.device = device

    # ChunkStore

    def open(self, index: int, phase: str) -> None:
        self.start, self.stop = self.bounds[index]

    def close(self, index: int, phase: str) -> None:
        if phase == "walk" and index == 0:
            mismatch = self.mismatch
            self.abort()
            self.mismatch = {}
            raise_on_mismatch(mismatch, self.layers)

    def abort(self) -> None:
        for pages in self.ranges:
            pages.clear()
        self.mismatch = {}
        if self.arena is not None:
            self.arena.close()
            self.arena, self.ranges = None, []

    # PastSource

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.start,) * self.batch

    def segments(self, layer: int, phase: str, first_page: int = 0) -> Iterator[Segment]:
        last_page = -(-self.start // self.page_tokens)
        for pages in self.ranges:
            first, last = max(first_page, pages.first_page), min(last_page, pages.first_page + pages.pages)
            if first >= last:
                continue
            if phase == "backward" and layer not in pages.grads:
                pages.grads[layer] = pages.allocate(self.layers[layer], self.grad_dtype)
                for rows in pages.grads[layer]:
                    rows.zero_()
            if pages is self.device_pages:
                yield self._resident(pages, layer, phase, first, last)
            else:
                for page in range(first, last, self.segment_pages):
                    yield from self._staged(pages, layer, phase, page, min(page + self.segment_pages, last))

    def own_grad(self, layer: int) -> tuple[Tensor, Tensor] | None:
        if self.stop == self.bounds[-1][1]:
            return None  # no later chunk read the last one
        parts = [pages for pages in self.ranges if pages.covers(self.start, self.stop)]
        if not any(layer in pages.grads for pages in parts):
            return None
        facts = self.layers[layer]

        def own(pages: PageRange, i: int) -> Tensor:
            if layer in pages.grads:
                return pages.tokens(pages.grads[layer][i], self.start, self.stop).to(self.device)
            tokens = pages.tokens(pages.kv[layer][i], self.start, self.stop).shape[1]  # out of every later window
            shape = (self.batch, tokens, facts.kv_heads, facts.head_dim)
            return torch.zeros(shape, dtype=self.grad_dtype, device=self.device)

        dk, dv = (torch.cat([own(pages, i) for pages in parts], 1) for i in (0, 1))
        assert dk.shape[1] == self.stop - self.start, "the tiers do not cover the chunk"
        return dk, dv

    # what the hook does

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the open chunk's keys and values, unless nobody will read them (the last chunk's)."""
        if self.stop == self.bounds[-1][1]:
            return
        for pages in self.ranges:
            if layer not in pages.kv:
                pages.kv[layer] = pages.allocate(self.layers[layer], self.layers[layer].dtype)
            for rows, new in zip(pages.kv[layer], (k, v), strict=True):
                into = pages.tokens(rows, self.start, self.stop)
                begin = max(pages.first_token - self.start, 0)
                into.copy_(new[:, begin : begin + into.shape[1]])

    def compare(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Note how far recomputed keys and values are from the stored ones; the walk's end reads it, all at once."""
        if not self.check or self.stop == self.bounds[-1][1]:
            return
        for pages in self.ranges:
            for rows, recomputed in zip(pages.kv[layer], (k, v), strict=True):
                stored = pages.tokens(rows, self.start, self.stop)
                begin = max(pages.first_token - self.start, 0)
                new = recomputed.detach()[:, begin : begin + stored.shape[1]].float()
                if new.numel():
                    stored = stored.to(new.device).float()
                    error = (new - stored).norm() / new.norm().clamp_min(1e-30)
                    # what was not finite in the fill cannot be compared; the loss will show it
                    error = torch.where(stored.isfinite().all(), error.nan_to_num(nan=torch.inf), 0.0)
                    self.mismatch[layer] = torch.maximum(self.mismatch.get(layer, error), error)

    def _resident(self, pages: PageRange, layer: int, phase: str, first: int, last: int) -> Segment:
        slots = pages.slots[:, first:last]
        runs = tuple(b * pages.pages + first for b in range(self.batch))
        k, v = pages.kv[layer]
        if phase == "forward":
            return Segment(first, k, v, slots, runs, None, None, None, None)
        dk, dv = pages.grads[layer]
        return Segment(first, k, v, slots, runs, dk, dv, slots, runs)

    def _staged(self, pages: PageRange, layer: int, phase: str, first: int, last: int) -> Iterator[Segment]:
        """Bring pages [first, last) to the device, yield them, and take their gradients back."""
        count, offset = last - first, first - pages.first_page
        slots = torch.arange(self.batch * count, dtype=torch.int32, device=self.device).view(self.batch, count)
        runs = tuple(b * count for b in range(self.batch))

        def host(rows: Tensor) -> list[Tensor]:
            return [rows[b * pages.pages + offset :][:count] for b in range(self.batch)]

        def fetch(rows: Tensor) -> Tensor:
            staged = torch.empty((self.batch * count, *rows.shape[1:]), dtype=rows.dtype, device=self.device)
            for b, part in enumerate(host(rows)):
                self.offloader.fetch(staged[b * count :][:count], part).wait()
            return staged

        k, v = (fetch(rows) for rows in pages.kv[layer])
        if phase == "forward":
            yield Segment(first, k, v, slots, runs, None, None, None, None)
            return
        grads = [fetch(rows) for rows in pages.grads[layer]]
        yield Segment(first, k, v, slots, runs, grads[0], grads[1], slots, runs)
        for rows, staged in zip(pages.grads[layer], grads, strict=True):
            for b, part in enumerate(host(rows)):
                self.offloader.write_back(part, staged[b * count :][:count]).wait()


MISMATCH = {torch.float64: 1e-8, torch.float32: 1e-3}
MISMATCH_16_BIT = 5e-2


def raise_on_mismatch(mismatch: dict[int, Tensor], layers: dict[int, LayerFacts]) -> None:
    """Name the first layer whose recomputed keys differ from those of the fill.

    Raises: RuntimeError: the two passes did not compute the same, so the gradients are wrong
    """
    if not mismatch:
        return
    errors = torch.stack([error.double() for error in mismatch.values()]).tolist()
    for layer, error in sorted(zip(mismatch, errors, strict=True)):
        if error > MISMATCH.get(layers[layer].dtype, MISMATCH_16_BIT):
            raise RuntimeError(
                f"layer {layer}: keys or values recomputed in the walk differ from those of the fill by {error:.2e} "
                f"(relative): "
                "something is not the same in the two passes (weights changed between forward and backward, or "
                "an operation "
                "is not deterministic); the gradients of this step are wrong"
            )
