"""The naive twin of `chunk_recurrent`: every chunk in one graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from chunk_recur.state import State, Step


def chunk_recurrent(step: Step, chunks: Sequence[Any], state: State, *, params: Iterable[Tensor] = ()) -> Tensor:
    """Sum the step's losses with ordinary autograd; memory grows with the number of chunks.

    Every chunk runs in phase "walk", in order. `params` is accepted so that the call reads as the real one.

    Shapes: each loss [] floating point
    Returns: the sum [], with its graph
    Raises: ValueError if the state has stores (what they keep has no graph), or if no chunk has a loss
    """
    if state.stores:
        raise ValueError("the reference expected no stores: what they keep is outside of autograd's graph")
    carried, losses = state.carried, []
    for index in range(len(chunks)):
        loss, carried = step(index, chunks[index], carried, "walk")
        if loss is not None:
            losses.append(loss)
    if not losses:
        raise ValueError("the reference expected at least one chunk with a loss, got None from each")
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total
