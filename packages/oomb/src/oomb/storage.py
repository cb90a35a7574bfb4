"""Where one loss's past lives: pages on the device up to a budget, the rest in host memory (host_tier.py).

A layer with a window stores of each chunk only the pages that a later chunk can reach, and numbers them as they are
stored. Page number p of sequence b is slot `b * pages + p - first_page` of its tier: a training pass knows its length,
so no table is needed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload import HostOutOfMemory, Lanes, Shelf
from paged_kv import Segment

from .host import HostLease
from .host_tier import HostTier, PageLists
from .probe import LayerFacts

EDGE_TOKENS = 64  # of a block in host memory, so many at either end are compared with what the walk recomputes


@dataclass(frozen=True)
class Stored:
    """Which pages of a layer are stored: those that a chunk reads which is not their own.

    runs: ascending, apart from each other, stored one behind the other. Units: window in tokens, None: no window
    """

    window: int | None
    page_tokens: int
    runs: tuple[tuple[int, int], ...]

    @staticmethod
    def of(window: int | None, bounds: Sequence[tuple[int, int]], page_tokens: int) -> Stored:
        runs: list[tuple[int, int]] = []
        for start, _ in bounds[1:]:
            if window == 1:  # nobody looks back
                break
            first = 0 if window is None else max(start - window + 1, 0) // page_tokens
            if runs and first <= runs[-1][1]:
                first = runs.pop()[0]
            runs.append((first, -(-start // page_tokens)))
        return Stored(window, page_tokens, tuple(runs))

    @staticmethod
    def count(window: int | None, bounds: Sequence[tuple[int, int]], page_tokens: int) -> int:
        """How many pages `of` the same finds, in a moment however many chunks of one length there are."""
        starts = torch.arange(len(bounds), device="cpu") * bounds[0][1]
        if window is None or window == 1:
            return 0 if window == 1 else -(-int(starts[-1]) // page_tokens)
        first = (starts[1:] - window + 1).clamp_min_(0) // page_tokens
        last = -(-starts // page_tokens)
        return int((last[1:] - torch.maximum(first, last[:-1])).sum())

    @property
    def pages(self) -> int:
        return sum(last - first for first, last in self.runs)

    def place(self, number: int) -> int:
        """The page of the sequence that is stored under a number, or as many pages later as there are not so many."""
        end = 0
        for first, last in self.runs:
            if number < last - first:
                return first + number
            number, end = number - (last - first), last
        return end + number

    def shift(self, page: int) -> int:
        """What makes the number of a stored page the sequence's."""
        gap = end = 0
        for first, last in self.runs:
            gap, end = gap + first - end, last
            if page < last:
                break
        return gap

    def span(self, start: int, stop: int) -> tuple[int, int]:
        """Where what is stored of a chunk [start, stop) begins, as numbered here, and how many tokens come before."""
        if self.window is None:
            return start, 0
        if self.window == 1:
            return 0, stop - start
        first = max(start, max(stop - self.window + 1, 0) // self.page_tokens * self.page_tokens)
        return first - self.shift(first // self.page_tokens) * self.page_tokens, first - start


@dataclass
class DevicePages:
    """Pages [0, pages) of each layer, of every sequence, KV and gradients, in the device's memory.

    Shapes: [B * pages, P, G, D] each
    """

    pages: dict[int, int]
    page_tokens: int
    batch: int
    lanes: Lanes
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    slots: dict[int, Tensor] = field(default_factory=dict)

    def last_token(self, layer: int) -> int:
        return self.pages[layer] * self.page_tokens

    def allocate(self, layer: int, facts: LayerFacts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (self.batch * self.pages[layer], self.page_tokens, facts.kv_heads, facts.head_dim)
        return self.lanes.empty(shape, dtype), self.lanes.empty(shape, dtype)

    def tokens(self, pages: Tensor, start: int, stop: int) -> Tensor:
        """Those of the tokens [start, stop) that lie here: a view [B, tokens, G, D]."""
        rows = pages.unflatten(0, (self.batch, -1)).flatten(1, 2)
        return rows[:, start:stop]

    def segment(self, layer: int, phase: str, first: int, last: int, shift: int) -> Segment:
        """The pages [first, last), which are `shift` pages further on in the sequence."""
        pages = self.pages[layer]
        if pages not in self.slots:
            slots = torch.arange(self.batch * pages, dtype=torch.int32, device=self.lanes.device)
            self.slots[pages] = slots.view(self.batch, pages)
        slots = self.slots[pages][:, first:last]
        runs = tuple(b * pages + first for b in range(self.batch))
        k, v = self.kv[layer]
        if phase == "forward":
            return Segment(first + shift, k, v, slots, runs, None, None, None, None)
        dk, dv = self.grads[layer]
        return Segment(first + shift, k, v, slots, runs, dk, dv, slots, runs)


@dataclass(frozen=True)
class Budget:
    """How the pages of a pass are divided, decided before it begins. Units: pages of one sequence and layer, at most
    (layers with windows have few); bytes of all."""

    device_pages: int
    host_pages: int
    host_bytes: int


def one_page_bytes(layers: dict[int, LayerFacts], page_tokens: int, batch: int, grad_dtype: torch.dtype | None) -> int:
    """Bytes of one page of every layer and sequence, keys, values and gradients (none for grad_dtype None)."""
    grad_bytes = grad_dtype.itemsize if grad_dtype is not None else 0
    width = sum(2 * f.kv_heads * f.head_dim * (f.dtype.itemsize + grad_bytes) for f in layers.values())
    return batch * page_tokens * width


@dataclass(frozen=True)
class Asked:
    """What a pass stores: for each layer its pages, and the bytes of one, of all sequences."""

    layers: tuple[tuple[int, int], ...]

    @staticmethod
    def of(
        layers: dict[int, LayerFacts],
        pages: Mapping[int | None, int],
        page_tokens: int,
        batch: int,
        grad_dtype: torch.dtype | None,
    ) -> Asked:
        """pages: that a layer with such a window stores"""
        return Asked(
            tuple((pages[f.window], one_page_bytes({i: f}, page_tokens, batch, grad_dtype)) for i, f in layers.items())
        )

    @property
    def pages(self) -> int:
        """Of the layer that stores most."""
        return max((pages for pages, _ in self.layers), default=0)

    def first(self, count: int) -> int:
        """Bytes of the first `count` pages of each layer, as far as it has so many."""
        return sum(min(count, pages) * each for pages, each in self.layers)


def divide(asked: Asked, *, device_budget: int | None, host_budget: int) -> Budget:
    """Share what is stored between the device and the host: of each layer the first pages stay, as many of each.

    Units:  budgets in bytes, None: no limit
    Raises: HostOutOfMemory with the numbers, when what the device cannot take exceeds the host budget
    """
    pages, total = asked.pages, asked.first(asked.pages)
    fits = pages
    if device_budget is not None and device_budget < total:
        fits = bisect.bisect_right(range(1, pages + 1), device_budget, key=asked.first)
    host_bytes = 0
    if fits < pages:  # tensors start on 256-byte lines
        host_bytes = total - asked.first(fits) + 256 * 4 * len(asked.layers)
    if host_bytes > host_budget:
        raise HostOutOfMemory(
            f"the past needs {total:,} bytes: {asked.first(fits):,} fit gpu_kv_budget_bytes={device_budget:,}, the "
            f"others need {host_bytes:,} bytes of host memory, but host_budget_bytes={host_budget:,}; raise either "
            "budget or shorten the context",
            requested=host_bytes,
            free=host_budget,
            largest=host_budget,
        )
    return Budget(fits, pages - fits, host_bytes)


class TieredPast:
    """The past of one loss: a `PastSource` for attention and a `ChunkStore` for the recurrence.

    The first pages are the past of the most chunks: they stay on the device. `lease`: the host memory and the lanes,
    given back when the pass ends; `lists`: which pages the chunks read, where not all.
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
        grad_dtype: torch.dtype,
        budget: Budget,
        segment_tokens: int,
        check: bool,
        lease: HostLease,
        lists: PageLists | None = None,
    ) -> None:
        self.layers, self.bounds, self.batch, self.page_tokens = layers, bounds, batch, page_tokens
        self.grad_dtype, self.check = grad_dtype, check
        self.lease, self.lanes = lease, lease.lanes
        self.shelf = Shelf(self.lanes, lease.arena)
        self.start = self.stop = 0
        self.phase = ""
        self.recomputed: dict[int, tuple[int, tuple[Tensor, Tensor]]] = {}
        self.mismatch: dict[int, Tensor] = {}
        self.stored = {i: Stored.of(facts.window, bounds, page_tokens) for i, facts in layers.items()}
        near = {i: min(budget.device_pages, stored.pages) for i, stored in self.stored.items()}
        self.near = DevicePages(near, page_tokens, batch, self.lanes)
        self.far: HostTier | None = None
        if budget.host_pages:
            assert lease.arena is not None
            self.far = HostTier(
                layers,
                first_page=near,
                pages={i: stored.pages - near[i] for i, stored in self.stored.items()},
                page_tokens=page_tokens,
                batch=batch,
                grad_dtype=grad_dtype,
                segment_pages=max(segment_tokens // page_tokens, 1),
                lanes=self.lanes,
                arena=lease.arena,
                lists=lists,
            )

    # ChunkStore

    def open(self, index: int, phase: str) -> None:
        self.start, self.stop = self.bounds[index]
        fresh, self.phase = phase != self.phase, phase
        if self.far is not None:
            spans = {layer: self._span(layer)[:2] for layer in self.layers}
            self.far.open(index, -(-self.start // self.page_tokens), spans, fresh=fresh)

    def close(self, index: int, phase: str) -> None:
        self._compare_far()
        if phase == "walk" and index == 0:
            mismatch = self.mismatch
            self.abort()
            raise_on_mismatch(mismatch, self.layers)

    def abort(self) -> None:
        if self.lease.foreign:
            return  # a fork drops the loss of its parent, whose device it cannot ask for anything
        self.near.kv.clear()
        self.near.grads.clear()
        self.recomputed, self.mismatch = {}, {}
        self.shelf.clear()
        if self.far is not None:
            self.far.clear()
            self.far = None
        self.lease.release()

    # PastSource

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.start,) * self.batch

    def segments(self, layer: int, phase: str, first_page: int = 0) -> Iterator[Segment]:
        shift = self.stored[layer].shift(first_page)
        first, last, near = first_page - shift, -(-self.start // self.page_tokens) - shift, self.near.pages[layer]
        far: Iterator[Segment] = iter(())
        if self.far is not None:
            far = self.far.stream(layer, phase, max(first, near), last, shift)
        if first < min(last, near):
            if phase == "backward" and layer not in self.near.grads:
                grads = self.near.grads[layer] = self.near.allocate(layer, self.layers[layer], self.grad_dtype)
                self.lanes.run("compute", lambda: [rows.zero_() for rows in grads])
            yield self.near.segment(layer, phase, first, min(last, near), shift)
        yield from far

    def own_grad(self, layer: int) -> tuple[Tensor, Tensor] | None:
        if self.stop == self.bounds[-1][1]:
            return None  # no later chunk read the last one
        start, stop, skipped = self._span(layer)
        edge = self.near.last_token(layer)
        far = self.far.own_grad(layer) if self.far is not None else None
        near = self.near.grads.get(layer) if start < edge else None
        if far is not None:
            self.lanes.hold("compute", far[1])
            if start >= edge and not skipped:
                return far[0]
        if near is None and far is None:
            return None
        facts, cut = self.layers[layer], skipped + max(min(stop, edge) - start, 0)
        shape = (self.batch, self.stop - self.start, facts.kv_heads, facts.head_dim)
        dk, dv = (self.lanes.empty(shape, self.grad_dtype) for _ in range(2))

        # a part that no later chunk read (out of every window) has no gradient
        here = [None, None] if near is None else [self.near.tokens(rows, start, stop) for rows in near]
        there = (None, None) if far is None else far[0]

        def join() -> None:
            for whole, first, rest in zip((dk, dv), here, there, strict=True):
                whole[:, :skipped] = 0.0
                whole[:, skipped:cut] = 0.0 if first is None else first
                whole[:, cut:] = 0.0 if rest is None else rest

        self.lanes.run("compute", join)
        return dk, dv

    # what the hook does

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the open chunk's keys and values, as far as a later chunk reads them (none of the last chunk's)."""
        if self.stop == self.bounds[-1][1]:
            return
        start, stop, skipped = self._span(layer)
        k, v = k[:, skipped:], v[:, skipped:]
        if start < self.near.last_token(layer):
            if layer not in self.near.kv:
                self.near.kv[layer] = self.near.allocate(layer, self.layers[layer], self.layers[layer].dtype)
            into = [self.near.tokens(rows, start, stop) for rows in self.near.kv[layer]]
            moves = [(rows, new[:, : rows.shape[1]]) for rows, new in zip(into, (k, v), strict=True)]
            self.lanes.run("compute", lambda: [rows.copy_(new) for rows, new in moves])
        if self.far is not None:
            self.far.append(layer, k, v, start)

    def _span(self, layer: int) -> tuple[int, int, int]:
        """The tokens that the layer stores of the open chunk, as it numbers them, and how many come before them."""
        start, skipped = self.stored[layer].span(self.start, self.stop)
        return start, start + self.stop - self.start - skipped, skipped

    def compare(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Note how far recomputed keys and values are from the stored ones; the walk's end reads it, all at once.

        Of what is on the host, both ends of the block, when the chunk is closed: fetching all of it would take time.
        """
        if not self.check or self.stop == self.bounds[-1][1]:
            return
        start, stop, skipped = self._span(layer)
        k, v = k[:, skipped:], v[:, skipped:]
        near = min(max(self.near.last_token(layer) - start, 0), stop - start)
        if near:
            stored = (self.near.tokens(rows, start, stop) for rows in self.near.kv[layer])
            self._note(layer, stored, (k[:, :near], v[:, :near]))
        if near < stop - start:
            self.recomputed[layer] = (
                start + near,
                tuple(
                    torch.cat([x[:, near:][:, :EDGE_TOKENS], x[:, near:][:, -EDGE_TOKENS:]], 1).detach() for x in (k, v)
                ),
            )  # type: ignore[assignment]

    def _compare_far(self) -> None:
        recomputed, self.recomputed = self.recomputed, {}
        for layer, (first, pair) in recomputed.items():
            assert self.far is not None
            last = self._span(layer)[1]
            edges = ((first, min(first + EDGE_TOKENS, last)), (max(last - EDGE_TOKENS, first), last))
            fetched = [self.far.stored(layer, *edge) for edge in edges]
            self.lanes.hold("compute", *(mark for _, mark in fetched))
            stored = (torch.cat([part[i] for part, _ in fetched], 1) for i in (0, 1))
            self._note(layer, stored, pair)

    def _note(self, layer: int, stored: Iterable[Tensor], recomputed: Iterable[Tensor]) -> None:
        for old, new in zip(stored, recomputed, strict=True):
            old, new = old.float(), new.detach().float()
            error = (new - old).norm() / new.norm().clamp_min(1e-30)
            # what was not finite in the fill cannot be compared; the loss will show it
            error = torch.where(old.isfinite().all(), error.nan_to_num(nan=torch.inf), 0.0)
            self.mismatch[layer] = torch.maximum(self.mismatch.get(layer, error), error)


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
