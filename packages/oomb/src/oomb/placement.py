"""What lives where during a step, pages and kept outputs, on the device or the host: decided before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from .config import ChunkConfig
from .hf import Parts
from .keep import Keep, KeepCosts, plan_keep
from .memory import Machine, replays, rooms, working_bytes
from .probe import Profile
from .storage import Budget, divide, one_page_bytes


@dataclass(frozen=True)
class Placement:
    """One step's decisions. layered: layers are walked back one at a time; working: bytes a step takes, by part."""

    budget: Budget
    page_bytes: int
    keep: Keep
    grad_dtype: torch.dtype
    layered: bool
    working: dict[str, int]

    @property
    def host_bytes(self) -> int:
        return self.budget.host_bytes + self.keep.host_bytes


def place(
    config: ChunkConfig,
    parts: Parts,
    profile: Profile,
    bounds: Sequence[tuple[int, int]],
    *,
    batch: int,
    chunk_tokens: int,
    train: bool,
    machine: Machine,
) -> Placement:
    """Decide for a model, a sequence cut at `bounds`, and the memory that a machine has free.

    Raises: HostOutOfMemory with the numbers, if the past does not fit
    """
    dtypes = {facts.dtype for facts in profile.layers.values()}
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    grad_dtype = config.grad_page_dtype or wide
    pages = -(-bounds[-1][0] // config.page_tokens)
    page_bytes = one_page_bytes(profile.layers, config.page_tokens, batch, grad_dtype if train else None)
    layered = train and replays(config, profile) and not isinstance(parts.given, nn.parallel.DistributedDataParallel)
    working = working_bytes(
        config, parts, profile, chunk_tokens=min(chunk_tokens, bounds[-1][1]), batch=batch, train=train, layered=layered
    )
    room = rooms(config, machine, working=sum(working.values()), page_bytes=pages * page_bytes)
    budget = divide(pages, page_bytes, len(profile.layers), device_budget=room.device_pages, host_budget=room.host)
    costs = _costs(parts, profile, batch, layered=layered)
    host_left = max(room.host - budget.host_bytes, 0)
    keep = plan_keep(costs, bounds, device_bytes=room.device_kept, host_bytes=host_left)
    if not train:
        keep = replace(keep, attention=range(0), layers=range(0), device_bytes=0, host_bytes=0)
    if not budget.host_pages:
        working["segments"] = 0
    if len(bounds) - 1 in keep.layers and not keep.host_bytes:
        working["layer outputs"] = 0  # counted with what is kept
    return Placement(budget, page_bytes, keep, grad_dtype, layered, working)


def _costs(parts: Parts, profile: Profile, batch: int, *, layered: bool) -> KeepCosts:
    facts = list(profile.layers.values())
    if not layered:
        return KeepCosts(facts, None, 0, batch)
    assert profile.stack is not None
    layer = parts.decoder.get_submodule(profile.stack.names[0])
    # the last layer runs once in the walk, with its graph
    return KeepCosts(facts[:-1], profile.stack, 2 * sum(p.numel() for p in layer.parameters()), batch)
