"""What of the fill is kept for the walk: outputs of attention, outputs of layers, or neither; late chunks first.

An attention output saves one run of the attention over the whole past, more the later the chunk; a layer's output saves
one run of its linear part. What saves the most for a byte is kept first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from .layers import Stack
from .probe import LayerFacts

LINE = 256  # where tensors in an arena begin


@dataclass(frozen=True)
class Keep:
    """Chunks whose outputs are kept, and what that takes. Units: bytes, for all layers and sequences."""

    attention: range
    layers: range
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class KeepCosts:
    """One loss's sizes. Units: tokens of all sequences, bytes a token and layer, FLOPs a token and layer."""

    facts: Sequence[LayerFacts]  # of the layers whose attention may be kept, in order
    stack: Stack | None  # None: layers are not replayed, so their outputs are of no use
    linear_flops: float
    batch: int

    def attention_bytes(self, facts: LayerFacts, tokens: int) -> int:
        rows = self.batch * tokens * facts.heads
        lse = max(facts.dtype.itemsize, 4)  # float32, float64 for float64
        return _lines(rows * facts.head_dim * facts.dtype.itemsize) + _lines(rows * lse)

    def layer_bytes(self, tokens: int) -> int:
        assert self.stack is not None
        return _lines(self.batch * tokens * self.stack.width * self.stack.dtype.itemsize)

    def items(self, kind: str, tokens: int) -> list[int]:
        """Bytes of what one chunk keeps of a kind, layer by layer."""
        if kind == "attention":
            return [self.attention_bytes(facts, tokens) for facts in self.facts]
        return [self.layer_bytes(tokens)] * len(self.facts)

    def saved(self, kind: str, start: int) -> float:
        """FLOPs that a kept byte of a chunk saves; windows make attention cheap."""
        if kind == "layers":
            return self.linear_flops / (self.layer_bytes(4096) / 4096 / self.batch)
        seen = [min(start, facts.window or start) for facts in self.facts]
        flops = sum(4 * f.heads * f.head_dim * n for f, n in zip(self.facts, seen, strict=True))
        return flops / (sum(self.items("attention", 4096)) / 4096 / self.batch)


def plan_keep(costs: KeepCosts, bounds: Sequence[tuple[int, int]], *, device_bytes: int, host_bytes: int) -> Keep:
    """Choose what is kept within two budgets.

    Without replayed layers the last chunk has nothing to keep: it runs once, with its graph.
    """
    last = len(bounds) - (0 if costs.stack is not None else 1)
    first = {"attention": last, "layers": last}
    room = device_bytes + host_bytes
    for kind, start, stop, tokens in _order(costs, bounds, last):
        if first[kind] != stop:
            continue  # a later chunk had no room
        each = costs.items(kind, tokens)
        # one item may leave a gap on the device that the next does not fit
        taken = min(max(room - max(each), 0) // sum(each), stop - start)
        first[kind] -= taken
        room -= taken * sum(each)
    kept = {kind: range(start, last) for kind, start in first.items()}
    device, host = _placed(costs, bounds, kept, device_bytes)
    return Keep(kept["attention"], kept["layers"], device, host)


Run = tuple[str, int, int, int]  # what is kept of the chunks [start, stop), all of so many tokens


def _order(costs: KeepCosts, bounds: Sequence[tuple[int, int]], last: int) -> list[Run]:
    """Runs of chunks, those first that save the most for a byte; within a run the late ones do."""
    turn = 0
    if costs.stack is not None:
        turn = bisect.bisect_right(
            range(last), costs.saved("layers", 0), key=lambda c: costs.saved("attention", bounds[c][0])
        )
    parts = [("attention", turn, last), ("layers", 0, last if costs.stack is not None else 0), ("attention", 0, turn)]
    return [(kind, *run) for kind, start, stop in parts for run in reversed(_alike(bounds, start, stop))]


def _alike(bounds: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int, int]]:
    """Chunks [start, stop) in runs of one length: only the last of a sequence may be shorter. (start, stop, tokens)"""
    cut = min(stop, max(start, len(bounds) - 1))
    return [(a, b, bounds[a][1] - bounds[a][0]) for a, b in ((start, cut), (cut, stop)) if a < b]


def _placed(costs: KeepCosts, bounds: Sequence[tuple[int, int]], kept: dict[str, range], room: int) -> tuple[int, int]:
    """Bytes on the device and on the host, when each is put where there is room, in the order of the fill."""
    device = host = 0
    cuts = sorted({chunk for chunks in kept.values() for chunk in (chunks.start, chunks.stop)})
    for a, b in pairwise(cuts):
        for start, stop, tokens in _alike(bounds, a, b):
            held = [costs.items(kind, tokens) for kind, chunks in kept.items() if start in chunks]
            each = list(chain.from_iterable(zip(*held, strict=True)))  # layer by layer
            whole = min(room // sum(each), stop - start)
            device += whole * sum(each)
            room -= whole * sum(each)
            left = stop - start - whole
            while left and room >= min(each):
                for size in each:
                    if size <= room:
                        room, device = room - size, device + size
                    else:
                        host += size
                left -= 1
            host += left * sum(each)
    return device, host


def _lines(nbytes: int) -> int:
    """Bytes that a tensor takes in an arena, at most."""
    return -(-nbytes // LINE) * LINE
