"""What lives where during a step, pages and kept outputs, on the device or the host: decided before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from .config import ChunkConfig
from .hf import Parts
from .keep import Keep, KeepCosts, plan_keep
from .memory import Machine, Rooms, replays, rooms, working_bytes
from .probe import Profile
from .storage import Asked, Budget, Stored, divide


@dataclass(frozen=True)
class Placement:
    """One step's decisions. layered: layers are walked back one at a time; working: bytes a step takes, by part; room:
    the budgets that were resolved; kept_bytes: what is kept on the device at the step's peak;
    near_bytes: its pages
    """

    budget: Budget
    room: Rooms
    keep: Keep
    grad_dtype: torch.dtype
    layered: bool
    working: dict[str, int]
    kept_bytes: int
    near_bytes: int

    @property
    def host_bytes(self) -> int:
        return self.budget.host_bytes + self.keep.host_bytes


LEAST_CHUNK = 1024  # of those that "auto" chooses on a device of its own memory


def chunk_length(
    config: ChunkConfig, parts: Parts, profile: Profile, tokens: int, *, batch: int, train: bool, machine: Machine
) -> int:
    """Tokens a chunk. "auto" is the device's usual length, halved until what a step takes beside its past fits."""
    device = torch.device("cpu" if machine.device_free is None else "cuda")
    length = config.chunk_length(device)
    if config.chunk_tokens != "auto" or machine.device_free is None:
        return length
    while length > LEAST_CHUNK:
        if working_total(config, parts, profile, tokens, length, batch, train, gpu=True) <= machine.room():
            break
        length //= 2
    page = config.page_tokens if config.attention == "sparse" else 1
    return max(length // page, 1) * page


def working_total(
    config: ChunkConfig,
    parts: Parts,
    profile: Profile,
    tokens: int,
    chunk_tokens: int,
    batch: int,
    train: bool,
    *,
    gpu: bool,
) -> int:
    """Bytes a step takes beside weights, pages and what is kept, at most."""
    layered = is_layered(config, parts, profile, train=train)
    taken = working_bytes(
        config, parts, profile, length=tokens, chunk_tokens=min(chunk_tokens, tokens), batch=batch, train=train,
        layered=layered, gpu=gpu,
    )  # fmt: skip
    return sum(taken.values())


def is_layered(config: ChunkConfig, parts: Parts, profile: Profile, *, train: bool) -> bool:
    """Whether layers are walked back one at a time."""
    return train and replays(config, profile) and not isinstance(parts.given, nn.parallel.DistributedDataParallel)


def page_grad_dtype(config: ChunkConfig, profile: Profile) -> torch.dtype:
    """Of the gradients of keys and values."""
    dtypes = {facts.dtype for facts in profile.layers.values()}
    return config.grad_page_dtype or (torch.float64 if torch.float64 in dtypes else torch.float32)


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
    grad_dtype = page_grad_dtype(config, profile)
    windows = {f.window for f in profile.layers.values()}
    stored = {window: Stored.count(window, bounds, config.page_tokens) for window in windows}
    asked = Asked.of(profile.layers, stored, config.page_tokens, batch, grad_dtype if train else None)
    layered = is_layered(config, parts, profile, train=train)
    working = working_bytes(
        config, parts, profile, length=bounds[-1][1], chunk_tokens=min(chunk_tokens, bounds[-1][1]), batch=batch,
        train=train, layered=layered, gpu=machine.device_free is not None,
    )  # fmt: skip
    room = rooms(config, machine, working=sum(working.values()), page_bytes=asked.first(asked.pages))
    budget = divide(asked, device_budget=room.device_pages, host_budget=room.host)
    costs = keep_costs(parts, profile, batch, layered=layered)
    host_left = max(room.host - budget.host_bytes, 0)
    keep = plan_keep(costs, bounds, device_bytes=room.device_kept, host_bytes=host_left)
    if not train:
        keep = replace(keep, attention=range(0), layers=range(0), device_bytes=0, host_bytes=0)
    if not budget.host_pages:
        working["segments"] = 0
    if not keep.host_bytes:
        working["moving"] = 0
    near = asked.first(budget.device_pages)
    kept = _kept_at_the_peak(keep, costs, bounds, working["gradients"] + near // 2)
    outputs = 0 if len(keep.layers) == len(bounds) else working["layer outputs"]
    working["layer outputs"] = max(outputs - kept, 0)  # of chunks that had none kept, when what others had is gone
    return Placement(budget, room, keep, grad_dtype, layered, working, kept, near)


def _kept_at_the_peak(keep: Keep, costs: KeepCosts, bounds: Sequence[tuple[int, int]], grads: int) -> int:
    """Bytes of what is kept on the device once all gradients are there: the last chunk is then done.

    grads: of parameters and pages, which are not there before
    """
    last = len(bounds) - 1
    if last == 0 or keep.host_bytes:
        return keep.device_bytes
    length = bounds[last][1] - bounds[last][0]
    held = [kind for kind, chunks in (("attention", keep.attention), ("layers", keep.layers)) if last in chunks]
    return keep.device_bytes - min(sum(sum(costs.items(kind, length)) for kind in held), grads)


def keep_costs(parts: Parts, profile: Profile, batch: int, *, layered: bool) -> KeepCosts:
    """What may be kept of a chunk, and its sizes."""
    facts = list(profile.layers.values())
    if not layered:
        return KeepCosts(facts, None, 0, batch)
    assert profile.stack is not None
    layer = parts.decoder.get_submodule(profile.stack.names[0])
    # the last layer runs once in the walk, with its graph
    return KeepCosts(facts[:-1], profile.stack, 2 * sum(p.numel() for p in layer.parameters()), batch)
