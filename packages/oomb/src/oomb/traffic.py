"""What a step moves between device and host, chunk by chunk, and the seconds of a step that computes beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .config import ChunkConfig
from .eta import Kept, ModelWork, chunk_passes
from .keep import KeepCosts
from .placement import Placement
from .probe import LayerFacts, Profile
from .rates import Speeds
from .storage import Stored


@dataclass(frozen=True)
class Moved:
    """Bytes of one pass over a chunk, to the device and from it."""

    to_device: float
    from_device: float


def kept_of(placed: Placement, chunks: int) -> Kept:
    """What the walk finds, as the model of work has it."""
    layers = None if len(placed.keep.layers) == chunks else placed.keep.layers
    return Kept(placed.keep.attention, layers, placed.layered)


def chunk_moves(
    config: ChunkConfig,
    profile: Profile,
    placed: Placement,
    costs: KeepCosts,
    bounds: Sequence[tuple[int, int]],
) -> tuple[list[Moved], list[Moved]]:
    """Bytes of each chunk, in the fill (without the last) and in the walk."""
    keep, last, page = placed.keep, len(bounds) - 1, config.page_tokens
    on_host = keep.host_bytes / max(keep.host_bytes + keep.device_bytes, 1)
    stored = {w: Stored.of(w, bounds, page) for w in {facts.window for facts in profile.layers.values()}}
    # the token from which on a layer's pages are on the host
    edges = {w: pages.place(placed.budget.device_pages) * page for w, pages in stored.items()}
    kinds = Counter((facts, _is_sparse(config, number, facts)) for number, facts in profile.layers.items())
    fill, walk = [], []
    for i, (start, stop) in enumerate(bounds):
        keys = grads = own_keys = own_grads = 0.0
        for (facts, sparse), count in kinds.items():
            width = count * 2 * facts.kv_heads * facts.head_dim * costs.batch
            edge = edges[facts.window]
            first = max(start - facts.window + 1, 0) // page * page if facts.window else 0
            seen = max(start - max(edge, first), 0)  # of the past on the host
            if sparse:  # a page of its own for each place of each block's list
                seen = min(seen, (stop - start) * config.top_k_pages)
            own = max(stop - max(edge, start + stored[facts.window].span(start, stop)[1]), 0) if i < last else 0
            keys += width * facts.dtype.itemsize * seen
            grads += width * placed.grad_dtype.itemsize * seen
            own_keys += width * facts.dtype.itemsize * own
            own_grads += width * placed.grad_dtype.itemsize * own
        kept = on_host * sum(
            sum(costs.items(kind, stop - start))
            for kind, held in (("attention", keep.attention), ("layers", keep.layers))
            if i in held
        )
        if i < last:
            fill.append(Moved(keys, own_keys + kept))
        forwards = 0 if i in keep.attention else 1 + (placed.layered and i not in keep.layers)
        walk.append(Moved(keys * (1 + forwards) + grads + own_grads + kept, grads))
    return fill, walk


def _is_sparse(config: ChunkConfig, number: int, facts: LayerFacts) -> bool:
    return config.attention == "sparse" and number >= config.first_sparse_layer and facts.window is None


def step_seconds(
    work: ModelWork,
    bounds: Sequence[tuple[int, int]],
    placed: Placement,
    moves: tuple[list[Moved], list[Moved]],
    speeds: Speeds,
    *,
    batch: int,
    learning: int,
    accumulation: int = 1,
) -> float:
    """Seconds of a step, the optimizer's included: each pass takes what the slowest of its three lanes does.

    learning: parameters that the optimizer updates; accumulation: batches whose gradients one step adds up
    """
    total = 0.0
    for passes, moved in zip(chunk_passes(work, bounds, kept_of(placed, len(bounds))), moves, strict=True):
        for done, bytes_ in zip(passes, moved, strict=True):
            link = max(bytes_.to_device, bytes_.from_device) * speeds.link
            total += max(batch * speeds.seconds(done), link)
    return accumulation * total + learning * speeds.update
