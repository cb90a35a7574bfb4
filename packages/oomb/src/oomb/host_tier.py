"""Pages in host memory: they stream through a few buffers on the device while it computes.

A unit of transfer is a run of pages of one layer: keys and values in, and in the walk gradients in, added to, and out.
What is needed next is fetched before attention starts on what is there; which layer comes next is read off the chunk
before.

Where lists rule (sparse layers) a unit has a place in its buffer for each of its pages, but only those that the chunk's
lists name are moved, by a kernel that reads the lists: the others hold anything. In the fill a layer's lists are made
just before attention asks for its pages, so what the chunk before chose is fetched ahead, and then the rest.

Every hand-over is a mark (offload.lanes): a buffer is filled after its last reader or its last copy out, read after its
arrival, copied out after its last writer; a host page is fetched after the copy that brought it there, by lists that
have been made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from offload import Lanes, PinnedArena, listed
from offload.lanes import Mark
from paged_kv import Segment

from .host_buffers import Buffer, Pair, Ring, Unit
from .host_pages import LayerPages, Moves
from .probe import LayerFacts

LEAVING = 4  # blocks of keys or values on their way out at once

Call = tuple[int, str]  # layer, phase


class PageLists(Protocol):
    """Which pages the chunks read, where lists rule."""

    def is_sparse(self, layer: int) -> bool:
        """Whether lists rule in a layer."""

    def lists(self, chunk: int, layer: int) -> tuple[Tensor, Mark] | None:
        """The page ids that a chunk reads, [B, ...], and from when on they are there; None while they are not chosen.

        They may be given up when another chunk has begun: a fetch that nobody waits for may then read anything.
        """


class HostTier:
    """Pages [first_page, first_page + pages) of each layer, of every sequence: keys, values, gradients, in an arena.

    A layer's pages are numbered by whoever stores them here, who also says what the layer stores of each chunk.
    Units: segment_pages in pages of one sequence
    """

    def __init__(
        self,
        layers: dict[int, LayerFacts],
        *,
        first_page: dict[int, int],
        pages: dict[int, int],
        page_tokens: int,
        batch: int,
        grad_dtype: torch.dtype,
        segment_pages: int,
        lanes: Lanes,
        arena: PinnedArena,
        lists: PageLists | None = None,
    ) -> None:
        self.page_tokens, self.batch, self.grad_dtype, self.lanes = page_tokens, batch, grad_dtype, lanes
        self.segment_pages = min(segment_pages, max(1, *pages.values()))
        self._lists = lists
        self._sparse = {layer for layer in layers if lists is not None and lists.is_sparse(layer)}
        self._layers = {
            i: LayerPages(i, facts, first_page[i], pages[i], page_tokens, batch, grad_dtype, arena)
            for i, facts in layers.items()
        }
        at_once = [(layer, min(self.segment_pages, layer.count)) for layer in self._layers.values()]
        rows = math.prod(listed.rows_for(batch, self.segment_pages)) if self._sparse else 0
        self._kv = Ring(lanes, max(layer.nbytes(n, layer.facts.dtype) for layer, n in at_once), rows)
        self._grads = Ring(lanes, max(layer.nbytes(n, grad_dtype) for layer, n in at_once), rows)
        self._leaving: deque[tuple[Mark, Tensor]] = deque()
        self._chunk = 0
        self._last_page = 0  # of the past, in the order of the sequence
        self._spans: dict[int, tuple[int, int]] = {}  # the open chunk's tokens that lie here, by layer
        self._before: list[Call] = []  # the calls of the chunk before
        self._now: list[Call] = []
        self._own: dict[int, tuple[Pair, Mark] | None] = {}
        self._slots: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}

    def open(self, chunk: int, past_pages: int, spans: dict[int, tuple[int, int]], *, fresh: bool) -> None:
        """A chunk begins. fresh: the first of its phase, whose calls come in any order.

        past_pages: of a layer that stores all; spans: the tokens that each layer stores of the chunk, by its numbers
        """
        self._chunk, self._last_page = chunk, past_pages
        for layer, (start, stop) in spans.items():
            pages = self._layers[layer]
            first = pages.first * self.page_tokens
            self._spans[layer] = max(start, first), min(stop, first + pages.count * self.page_tokens)
        self._before, self._now = ([] if fresh else self._now), []
        self._own.clear()
        self._kv.forget()
        self._grads.forget()
        for pages in self._layers.values():
            pages.settled = pages.appended
        if self._before:
            self._prefetch(self._before[0])

    def append(self, layer: int, k: Tensor, v: Tensor, start: int) -> None:
        """Store what the layer stores of the open chunk's keys and values, [B, n, G, D], from token `start` on."""
        first, last = self._spans[layer]
        if first >= last:
            return
        pages = self._layers[layer]
        news = [self._packed(x[:, first - start : last - start]) for x in (k, v)]
        moves: Moves = []
        for rows, new in zip(pages.kv, news, strict=True):
            moves += zip(pages.tokens(rows, first, last), new)
        pages.appended = self._copy("out", moves, self.lanes.mark("compute"))
        self._leaving.extend((pages.appended, new) for new in news)
        while len(self._leaving) > LEAVING:
            self._let_go()

    def stream(self, layer: int, phase: str, first: int, last: int, shift: int = 0) -> Iterator[Segment]:
        """The pages [first, last) in order, as segments on the device; where lists rule, from this tier's first page.

        What is not on its way begins to be fetched at once. Gradients leave when the iterator advances.
        shift: what makes a page's number the sequence's
        """
        self._now.append((layer, phase))
        pages = self._layers[layer]
        units = pages.units(pages.first if layer in self._sparse else first, last, self.segment_pages)
        ahead = self._take(units[0], phase) if units else ()
        return self._segments(layer, phase, units, ahead, shift)

    def _segments(
        self, layer: int, phase: str, units: list[Unit], ahead: tuple[Buffer, ...], shift: int
    ) -> Iterator[Segment]:
        following = self._following()
        if not units and following is not None:
            self._prefetch(following)
        for i, (_, start, stop) in enumerate(units):
            taken = ahead
            ahead = self._take(units[i + 1], phase) if i + 1 < len(units) else ()
            if i == 0 and phase == "backward":
                self._own[layer] = self._begin_own(layer)
            if i + 1 == len(units) and following is not None:
                self._prefetch(following)
            try:
                yield self._segment(layer, start, stop, shift, *taken)
            finally:
                self._done(layer, start, stop, *taken)

    def own_grad(self, layer: int) -> tuple[Pair, Mark] | None:
        """What later chunks left for the open chunk's tokens here: [B, n, G, D] each, good after the mark."""
        return self._own.pop(layer) if layer in self._own else self._begin_own(layer)

    def stored(self, layer: int, start: int, stop: int) -> tuple[Pair, Mark]:
        """Keys and values of the tokens [start, stop), all of this tier, on their way to the device."""
        pages = self._layers[layer]
        pair = self._new_tokens(pages, stop - start, pages.facts.dtype)
        moves: Moves = []
        for new, rows in zip(pair, pages.kv, strict=True):
            moves += zip(new, pages.tokens(rows, start, stop))
        assert pages.appended is not None
        return pair, self._copy("in", moves, self.lanes.mark("compute"), pages.appended)

    def clear(self) -> None:
        """Forget everything. The arena's bytes may be used again once the lanes have been synchronized."""
        while self._leaving:
            self._let_go()
        for ring in (self._kv, self._grads):
            ring.clear()
        for pages in self._layers.values():
            if pages.flags is not None:
                self.lanes.hold("compute", *pages.written.values())
                self.lanes.release(pages.flags)
        for own in self._own.values():
            if own is not None:
                self.lanes.hold("compute", own[1])
        self._layers.clear()
        self._own.clear()

    # transfers

    def _take(self, unit: Unit, phase: str) -> tuple[Buffer, ...]:
        """The buffers that hold a unit, or will: keys and values, and in a backward gradients."""
        buffers = [self._kv.find(unit) or self._fetch_kv(unit)]
        if unit[0] in self._sparse and buffers[0].chunk != self._chunk:
            self._fetch_rest(buffers[0], unit)
        if phase == "backward":
            buffers.append(self._grads.find(unit) or self._fetch_grads(unit))
        for buffer in buffers:
            buffer.busy = True
        return tuple(buffers)

    def _fetch_kv(self, unit: Unit) -> Buffer:
        """Where lists rule, by those of this chunk if they are known, else of the chunk before."""
        layer, first, last = unit
        pages = self._layers[layer]
        buffer = self._kv.claim(unit)
        pair = buffer.pair(pages.shape(last - first), pages.facts.dtype)
        after = (buffer.free,) if pages.settled is None else (buffer.free, pages.settled)
        if layer in self._sparse:
            buffer.chunk = self._chunk if self._listed(self._chunk, layer) else self._chunk - 1
            buffer.arrived = self._gather(buffer, unit, pair, pages.kv, *after)
        else:
            buffer.arrived = self._copy("in", pages.moves(pair, first, pages.kv, first, last), *after)
        return buffer

    def _fetch_rest(self, buffer: Buffer, unit: Unit) -> None:
        """What the lists of this chunk name beside those that a unit was fetched by."""
        layer, first, last = unit
        pages = self._layers[layer]
        pair = buffer.pair(pages.shape(last - first), pages.facts.dtype)
        fetched, buffer.chunk = buffer.chunk, self._chunk
        buffer.arrived = self._gather(buffer, unit, pair, pages.kv, but=fetched)

    def _fetch_grads(self, unit: Unit) -> Buffer:
        """Earlier contributions where there are any, zeros elsewhere."""
        layer, first, last = unit
        pages = self._layers[layer]
        buffer = self._grads.claim(unit)
        pair = buffer.pair(pages.shape(last - first), self.grad_dtype)
        marks = pages.written_to(first, last, self.segment_pages)
        if layer in self._sparse:
            buffer.chunk, flags = self._chunk, self._flags(pages)
            buffer.arrived = self._gather(buffer, unit, pair, pages.grads, buffer.free, *marks, flags=flags)
            return buffer
        runs = pages.touched_runs(first, last)
        moves = [move for a, b in runs for move in pages.moves(pair, first, pages.grads, a, b)]
        zero = () if runs == [(first, last)] else pair
        buffer.arrived = self._copy("in", moves, buffer.free, *marks, zero=zero)
        return buffer

    def _begin_own(self, layer: int) -> tuple[Pair, Mark] | None:
        start, stop = self._spans[layer]
        pages = self._layers[layer]
        if start >= stop or pages.stored is None:
            return None
        first, last = start // self.page_tokens, -(-stop // self.page_tokens)
        if layer in self._sparse:
            return self._begin_own_flagged(pages, first, last)
        runs = pages.touched_runs(first, last)
        if not runs:
            return None
        pair = self._new_tokens(pages, stop - start, self.grad_dtype)
        moves: Moves = []
        for a, b in runs:
            low, high = max(a * self.page_tokens, start), min(b * self.page_tokens, stop)
            for new, rows in zip(pair, pages.grads, strict=True):
                moves += zip(new[:, low - start : high - start], pages.tokens(rows, low, high), strict=True)
        marks = pages.written_to(first, last, self.segment_pages)
        zero = () if runs == [(first, last)] else pair
        return pair, self._copy("in", moves, self.lanes.mark("compute"), *marks, zero=zero)

    def _begin_own_flagged(self, pages: LayerPages, first: int, last: int) -> tuple[Pair, Mark] | None:
        """The same where lists rule: of whole pages, for chunks are cut at pages there."""
        flags = pages.flags
        if flags is None:
            return None
        grads = pages.grads
        assert self._spans[pages.layer] == (first * self.page_tokens, last * self.page_tokens)
        device = self._new_pair(pages.shape(last - first), self.grad_dtype)
        rows, marks = self._all_rows(last - first), pages.written_to(first, last, self.segment_pages)
        layout = pages.layout(first, last)

        def work() -> None:
            for near, far in zip(device, grads, strict=True):
                listed.copy_listed(far, near, rows, gather=True, flags=flags, **layout)

        mark = self.lanes.run("in", work, after=(self.lanes.mark("compute"), *marks))
        dk, dv = (x.view(self.batch, -1, *x.shape[2:]) for x in device)
        return (dk, dv), mark

    def _segment(
        self, layer: int, first: int, last: int, shift: int, kv: Buffer, grads: Buffer | None = None
    ) -> Segment:
        pages, count = self._layers[layer], last - first
        shape = pages.shape(count)
        slots, runs = self._slot_table(count), tuple(b * count for b in range(self.batch))
        for buffer in (kv,) if grads is None else (kv, grads):
            assert buffer.arrived is not None
            self.lanes.hold("compute", buffer.arrived)
        k, v = kv.pair(shape, pages.facts.dtype)
        if grads is None:
            return Segment(first + shift, k, v, slots, runs, None, None, None, None)
        dk, dv = grads.pair(shape, self.grad_dtype)
        return Segment(first + shift, k, v, slots, runs, dk, dv, slots, runs)

    def _done(self, layer: int, first: int, last: int, kv: Buffer, grads: Buffer | None = None) -> None:
        """What read or added to a unit is enqueued: its buffers may be used again after it."""
        used = kv.free = self.lanes.mark("compute")
        kv.read, kv.busy = True, False
        if grads is None:
            return
        pages = self._layers[layer]
        pair = grads.pair(pages.shape(last - first), self.grad_dtype)
        if layer in self._sparse:
            grads.free = pages.written[first] = self._scatter(grads, pair, pages, first, last, used)
            grads.unit, grads.busy = None, False
            return
        moves = [(host, device) for device, host in pages.moves(pair, first, pages.grads, first, last)]
        grads.free = pages.written[first] = self._copy("out", moves, used)
        grads.unit, grads.busy = None, False
        a, b = first - pages.first, last - pages.first
        pages.touched[a:b] = b"\1" * (b - a)

    def _prefetch(self, call: Call) -> None:
        """Begin to fetch the first unit that a call will want; windowed layers want other pages, and few."""
        layer, phase = call
        pages = self._layers[layer]
        if pages.stored is None or pages.facts.window is not None:
            return
        units = pages.units(pages.first, self._last_page, self.segment_pages)
        if not units:
            return
        known = layer not in self._sparse or self._listed(self._chunk, layer) is not None
        if self._kv.find(units[0]) is None and (known or self._listed(self._chunk - 1, layer)):
            self._fetch_kv(units[0])
        if phase == "backward" and known and self._grads.find(units[0]) is None:
            self._fetch_grads(units[0])

    def _following(self) -> Call | None:
        """The call that comes next, as the chunk before had it, or as layers are usually gone through."""
        at = len(self._now)
        if self._before[:at] == self._now and at < len(self._before):
            return self._before[at]
        (layer, phase), order = self._now[-1], list(self._layers)
        place = order.index(layer) + (1 if phase == "forward" else -1)
        return (order[place], phase) if 0 <= place < len(order) else None

    def _copy(self, lane: str, moves: Moves, *after: Mark, zero: tuple[Tensor, ...] = ()) -> Mark:
        # torch would pack a tensor with gaps on the CPU, now, before what it holds has arrived
        assert all(a.is_contiguous() and b.is_contiguous() for a, b in moves)

        def work() -> None:
            with torch.no_grad():
                for rows in zero:
                    rows.zero_()
                for dst, src in moves:
                    dst.copy_(src, non_blocking=True)

        return self.lanes.run(lane, work, after=after)  # type: ignore[arg-type]

    def _gather(
        self, buffer: Buffer, unit: Unit, device: Pair, host: Pair, *after: Mark, but: int | None = None,
        flags: Tensor | None = None,
    ) -> Mark:  # fmt: skip
        """Fetch what the lists of buffer.chunk name, and those of chunk `but` do not."""
        layer, first, last = unit
        assert buffer.chunk is not None
        named, fetched = self._listed(buffer.chunk, layer), None if but is None else self._listed(but, layer)
        assert named is not None and (but is None or fetched is not None)
        (ids, made), but_ids = named, None if fetched is None else fetched[0]
        layout = self._layers[layer].layout(first, last)

        def work() -> None:
            listed.list_rows(buffer.rows, ids, first=first, columns=last - first, but=but_ids)
            for near, far in zip(device, host, strict=True):
                listed.copy_listed(far, near, buffer.rows, gather=True, flags=flags, **layout)

        return self.lanes.run("in", work, after=(made, *after))

    def _scatter(self, buffer: Buffer, device: Pair, pages: LayerPages, first: int, last: int, used: Mark) -> Mark:
        """Send back what `_gather` fetched."""
        flags, host, layout = pages.flags, pages.grads, pages.layout(first, last)

        def work() -> None:
            for near, far in zip(device, host, strict=True):
                listed.copy_listed(far, near, buffer.rows, gather=False, flags=flags, **layout)

        return self.lanes.run("out", work, after=(used,))

    def _listed(self, chunk: int, layer: int) -> tuple[Tensor, Mark] | None:
        assert self._lists is not None
        return self._lists.lists(chunk, layer)

    def _packed(self, rows: Tensor) -> Tensor:
        if rows.is_contiguous():
            return rows
        packed = self.lanes.empty(rows.shape, rows.dtype)
        self.lanes.run("compute", lambda: packed.copy_(rows))
        return packed

    def _let_go(self) -> None:
        left, tensor = self._leaving.popleft()
        self.lanes.hold("compute", left)
        self.lanes.release(tensor)

    # memory on the device

    def _flags(self, pages: LayerPages) -> Tensor:
        if pages.flags is None:
            flags = pages.flags = self.lanes.empty((self.batch * pages.count,), torch.uint8)
            self.lanes.run("in", lambda: flags.zero_(), after=(self.lanes.mark("compute"),))
        return pages.flags

    def _slot_table(self, count: int) -> Tensor:
        if count not in self._slots:
            slots = torch.arange(self.batch * count, dtype=torch.int32, device=self.lanes.device)
            self._slots[count] = slots.view(self.batch, count)
        return self._slots[count]

    def _all_rows(self, count: int) -> Tensor:
        """So many pages of every sequence, as a list of rows."""
        if count not in self._rows:
            rows = torch.arange(-1, self.batch * count, dtype=torch.int32, device=self.lanes.device)
            rows[:1] = self.batch * count
            self._rows[count] = rows
        return self._rows[count]

    def _new_tokens(self, pages: LayerPages, count: int, dtype: torch.dtype) -> Pair:
        """Of so many tokens of every sequence."""
        return self._new_pair((self.batch, count, pages.facts.kv_heads, pages.facts.head_dim), dtype)

    def _new_pair(self, shape: tuple[int, ...], dtype: torch.dtype) -> Pair:
        return self.lanes.empty(shape, dtype), self.lanes.empty(shape, dtype)
