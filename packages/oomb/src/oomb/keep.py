"""What of the fill is kept for the walk: outputs of attention, outputs of layers, or neither; late chunks first.

An attention output saves one run of the attention over the whole past, more the later the chunk; a layer's output saves
one run of its linear part. What saves the most for a byte is kept first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
    kinds = ("attention", "layers") if costs.stack is not None else ("attention",)
    candidates = [(costs.saved(kind, bounds[c][0]), c, kind) for kind in kinds for c in range(last)]
    items = {
        (kind, size): costs.items(kind, size) for kind in kinds for size in {stop - start for start, stop in bounds}
    }
    first = dict.fromkeys(("attention", "layers"), last)
    closed: set[str] = set()
    room = device_bytes + host_bytes
    for _, chunk, kind in sorted(candidates, reverse=True):
        each = items[kind, bounds[chunk][1] - bounds[chunk][0]]
        size = sum(each)
        # one item may leave a gap on the device that the next does not fit
        if kind in closed or size > room - max(each, default=0):
            closed.add(kind)
            continue
        room -= size
        first[kind] = chunk
    kept = {kind: range(first[kind], last) for kind in first}
    device, host = _placed(items, bounds, kept, device_bytes)
    return Keep(kept["attention"], kept["layers"], device, host)


def _placed(
    items: dict[tuple[str, int], list[int]], bounds: Sequence[tuple[int, int]], kept: dict[str, range], room: int
) -> tuple[int, int]:
    """Bytes on the device and on the host, when each is put where there is room, in the order of the fill."""
    device = host = 0
    for chunk, (start, stop) in enumerate(bounds):
        held = [items[kind, stop - start] for kind, chunks in kept.items() if chunk in chunks]
        for size in chain.from_iterable(zip(*held, strict=True)):  # layer by layer
            if size <= room:
                room, device = room - size, device + size
            else:
                host += size
    return device, host


def _lines(nbytes: int) -> int:
    """Bytes that a tensor takes in an arena, at most."""
    return -(-nbytes // LINE) * LINE
