"""What a step moves between device and host, chunk by chunk, and the seconds of a step that computes beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config import ChunkConfig
from .eta import Kept, ModelWork, chunk_passes
from .keep import KeepCosts
from .placement import Placement
from .probe import LayerFacts, Profile
from .rates import Speeds


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
    near = placed.budget.device_pages * config.page_tokens
    if not placed.budget.host_pages:
        near = bounds[-1][1]
    keep, last = placed.keep, len(bounds) - 1
    on_host = keep.host_bytes / max(keep.host_bytes + keep.device_bytes, 1)
    fill, walk = [], []
    for i, (start, stop) in enumerate(bounds):
        keys = grads = 0.0  # bytes of the past on the host that the chunk reads
        for number, facts in profile.layers.items():
            width = 2 * facts.kv_heads * facts.head_dim * costs.batch
            seen = _read(config, number, facts, near, start, stop)
            keys += width * facts.dtype.itemsize * seen
            grads += width * placed.grad_dtype.itemsize * seen
        own = max(stop - max(start, near), 0) if i < last else 0
        width = sum(2 * f.kv_heads * f.head_dim * costs.batch for f in profile.layers.values())
        own_keys = (
            sum(2 * f.kv_heads * f.head_dim * f.dtype.itemsize for f in profile.layers.values()) * own * costs.batch
        )
        kept = on_host * sum(
            sum(costs.items(kind, stop - start))
            for kind, held in (("attention", keep.attention), ("layers", keep.layers))
            if i in held
        )
        if i < last:
            fill.append(Moved(keys, own_keys + kept))
        forwards = 0 if i in keep.attention else 1 + (placed.layered and i not in keep.layers)
        own_grads = width * placed.grad_dtype.itemsize * own
        walk.append(Moved(keys * (1 + forwards) + grads + own_grads + kept, grads))
    return fill, walk


def _read(config: ChunkConfig, number: int, facts: LayerFacts, near: int, start: int, stop: int) -> int:
    """Tokens of the past on the host that a chunk reads in a layer."""
    if facts.window is not None:
        return max(start - max(near, start - facts.window), 0)
    past = max(start - near, 0)
    if config.attention == "sparse" and number >= config.first_sparse_layer:
        past = min(past, (stop - start) * config.top_k_pages)  # a page of its own for each place of each block's list
    return past


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
