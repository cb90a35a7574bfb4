"""What attention knows of the past: protocols and plain records, no storage.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · D head dim ·
K pages selected · Q query blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Segment:
    """A run of logical pages of one layer, as attention reads it.

    Sequence b owns the columns up to its last past page; behind them its table holds -1. Its run, where there is one,
    covers the pages it owns and no more: `runs[b] + i` is the slot of its i-th column. Without pages its run is 0.

    Shapes: k, v [slots, P, G, D]; slots [B, N] int32 on k's device, -1 where the sequence has no such page;
        dk, dv [grad slots, P, G, D] and grad_slots [B, N] int32, all None in phase "forward"
    Units:  first_page is the logical id of column 0; runs and grad_runs hold slots, one a sequence, or are None when
        some sequence's slots are not consecutive
    """

    first_page: int
    k: Tensor
    v: Tensor
    slots: Tensor
    runs: tuple[int, ...] | None
    dk: Tensor | None = None
    dv: Tensor | None = None
    grad_slots: Tensor | None = None
    grad_runs: tuple[int, ...] | None = None


@runtime_checkable
class PastSource(Protocol):
    """Where attention finds the pages of the past, wherever they live.

    Units: page_tokens and lengths in tokens; a key in a page at position >= lengths[b] is not past
    """

    @property
    def page_tokens(self) -> int: ...

    @property
    def lengths(self) -> tuple[int, ...]: ...

    def segments(self, layer: int, phase: Phase, first_page: int = 0) -> Iterator[Segment]:
        """Yield the pages `[first_page, ceil(max(lengths) / P))` of one layer, in order.

        Work on a segment must be enqueued before the iterator advances. Pages may hold anything (NaN too) beyond what
        was written. In phase "backward" the gradient pages hold zeros or earlier contributions.
        """
        ...

    def own_grad(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """What later blocks left for the open block's keys and values, [B, C, G, D] each; None when nothing was."""
        ...


@dataclass(frozen=True)
class Geometry:
    """Which keys a query sees, and how scores are scaled; the same for every backend.

    Query c of sequence b stands at `i = lengths[b] + c` and sees key j iff `j <= i`, `j > i - window`,
    `j >= documents[b, c]` and `j // P` is in `selected[b, g, i // P - lengths[b] // P]`, each where it is given.

    Shapes: lengths [B]; documents [B, C] int32; selected [B, G or 1, Q, K] int32, logical ids, -1 padded
    Units:  lengths, window and documents in tokens
    """

    scale: float
    lengths: tuple[int, ...]
    page_tokens: int
    window: int | None = None
    documents: Tensor | None = None
    selected: Tensor | None = None


def listed(selected: Tensor) -> Tensor:
    """Page lists as kernels read them: contiguous, and with an entry each, so that empty lists list nothing (-1)."""
    return selected.contiguous() if selected.shape[3] else selected.new_full((*selected.shape[:3], 1), -1)
