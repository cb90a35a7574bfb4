"""Where one loss's past lives: pages on the device up to a budget, the rest in host memory (host_tier.py).

Logical page p of sequence b is slot `b * pages + p - first_page` of its tier: a training pass knows its length, so no
table is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from offload import HostOutOfMemory, Lanes, Shelf
from paged_kv import Segment

from .host import HostLease
from .host_tier import HostTier, PageLists
from .probe import LayerFacts

EDGE_TOKENS = 64  # of a block in host memory, so many at either end are compared with what the walk recomputes


@dataclass
class DevicePages:
    """Pages [0, pages) of every layer and sequence, KV and gradients, in the device's memory.

    Shapes: [B * pages, P, G, D] each
    """

    pages: int
    page_tokens: int
    batch: int
    lanes: Lanes
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    grads: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def last_token(self) -> int:
        return self.pages * self.page_tokens

    @cached_property
    def slots(self) -> Tensor:
        slots = torch.arange(self.batch * self.pages, dtype=torch.int32, device=self.lanes.device)
        return slots.view(self.batch, self.pages)

    def allocate(self, facts: LayerFacts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (self.batch * self.pages, self.page_tokens, facts.kv_heads, facts.head_dim)
        return self.lanes.empty(shape, dtype), self.lanes.empty(shape, dtype)

    def tokens(self, pages: Tensor, start: int, stop: int) -> Tensor:
        """Those of the tokens [start, stop) that lie here: a view [B, tokens, G, D]."""
        rows = pages.view(self.batch, self.last_token, *pages.shape[2:])
        return rows[:, start : min(stop, self.last_token)]

    def segment(self, layer: int, phase: str, first: int, last: int) -> Segment:
        slots = self.slots[:, first:last]
        runs = tuple(b * self.pages + first for b in range(self.batch))
        k, v = self.kv[layer]
        if phase == "forward":
            return Segment(first, k, v, slots, runs, None, None, None, None)
        dk, dv = self.grads[layer]
        return Segment(first, k, v, slots, runs, dk, dv, slots, runs)


@dataclass(frozen=True)
class Budget:
    """How the pages of a pass are divided, decided before it begins. Units: pages of one sequence, bytes."""

    device_pages: int
    host_pages: int
    host_bytes: int


def one_page_bytes(layers: dict[int, LayerFacts], page_tokens: int, batch: int, grad_dtype: torch.dtype | None) -> int:
    """Bytes of one page of every layer and sequence, keys, values and gradients (none for grad_dtype None)."""
    grad_bytes = grad_dtype.itemsize if grad_dtype is not None else 0
    width = sum(2 * f.kv_heads * f.head_dim * (f.dtype.itemsize + grad_bytes) for f in layers.values())
    return batch * page_tokens * width


def divide(pages: int, page_bytes: int, layers: int, *, device_budget: int | None, host_budget: int) -> Budget:
    """Share `pages` logical pages between the device and the host.

    Units:  page_bytes for one page of all layers and sequences, as `one_page_bytes`; budgets in bytes, None: no limit
    Raises: HostOutOfMemory with the numbers, when what the device cannot take exceeds the host budget
    """
    fits = pages if device_budget is None else min(pages, device_budget // max(page_bytes, 1))
    host_pages = pages - fits
    host_bytes = host_pages * page_bytes + (256 * 4 * layers if host_pages else 0)  # tensors start on 256-byte lines
    if host_pages and host_bytes > host_budget:
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
        self.near = DevicePages(budget.device_pages, page_tokens, batch, self.lanes)
        self.far: HostTier | None = None
        if budget.host_pages:
            assert lease.arena is not None
            self.far = HostTier(
                layers,
                first_page=budget.device_pages,
                pages=budget.host_pages,
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
            self.far.open(index, self.start, self.stop, fresh=fresh)

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
        last = -(-self.start // self.page_tokens)
        near_last = min(last, self.near.pages)
        far_first = max(first_page, self.near.pages)
        far = self.far.stream(layer, phase, far_first, last) if self.far is not None else iter(())
        if first_page < near_last:
            if phase == "backward" and layer not in self.near.grads:
                grads = self.near.grads[layer] = self.near.allocate(self.layers[layer], self.grad_dtype)
                self.lanes.run("compute", lambda: [rows.zero_() for rows in grads])
            yield self.near.segment(layer, phase, first_page, near_last)
        yield from far

    def own_grad(self, layer: int) -> tuple[Tensor, Tensor] | None:
        if self.stop == self.bounds[-1][1]:
            return None  # no later chunk read the last one
        far = self.far.own_grad(layer) if self.far is not None else None
        near = self.near.grads.get(layer) if self.start < self.near.last_token else None
        if far is not None:
            self.lanes.hold("compute", far[1])
            if self.start >= self.near.last_token:
                return far[0]
        if near is None and far is None:
            return None
        facts, cut = self.layers[layer], min(self.stop, self.near.last_token) - self.start
        shape = (self.batch, self.stop - self.start, facts.kv_heads, facts.head_dim)
        dk, dv = (self.lanes.empty(shape, self.grad_dtype) for _ in range(2))

        # a part that no later chunk read (out of every window) has no gradient
        here = [None, None] if near is None else [self.near.tokens(rows, self.start, self.stop) for rows in near]
        there = (None, None) if far is None else far[0]

        def join() -> None:
            for whole, first, rest in zip((dk, dv), here, there, strict=True):
                whole[:, :cut] = 0.0 if first is None else first
                whole[:, cut:] = 0.0 if rest is None else rest

        self.lanes.run("compute", join)
        return dk, dv

    # what the hook does

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the open chunk's keys and values, unless nobody will read them (the last chunk's)."""
        if self.stop == self.bounds[-1][1]:
            return
        if self.start < self.near.last_token:
            if layer not in self.near.kv:
                self.near.kv[layer] = self.near.allocate(self.layers[layer], self.layers[layer].dtype)
            into = [self.near.tokens(rows, self.start, self.stop) for rows in self.near.kv[layer]]
            moves = [(rows, new[:, : rows.shape[1]]) for rows, new in zip(into, (k, v), strict=True)]
            self.lanes.run("compute", lambda: [rows.copy_(new) for rows, new in moves])
        if self.far is not None:
            self.far.append(layer, k, v, self.start)

    def compare(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Note how far recomputed keys and values are from the stored ones; the walk's end reads it, all at once.

        Of what is on the host, both ends of the block, when the chunk is closed: fetching all of it would take time.
        """
        if not self.check or self.stop == self.bounds[-1][1]:
            return
        near = min(max(self.near.last_token - self.start, 0), self.stop - self.start)
        if near:
            stored = (self.near.tokens(rows, self.start, self.stop) for rows in self.near.kv[layer])
            self._note(layer, stored, (k[:, :near], v[:, :near]))
        if near < self.stop - self.start:
            self.recomputed[layer] = (
                near,
                tuple(
                    torch.cat([x[:, near:][:, :EDGE_TOKENS], x[:, near:][:, -EDGE_TOKENS:]], 1).detach() for x in (k, v)
                ),
            )  # type: ignore[assignment]

    def _compare_far(self) -> None:
        recomputed, self.recomputed = self.recomputed, {}
        for layer, (near, pair) in recomputed.items():
            assert self.far is not None
            first, last = self.start + near, self.stop
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
