"""How much memory there is for the past and for what is kept, and how much a step takes beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from offload import free_host_bytes

from .config import ChunkConfig
from .hf import Parts
from .host import spare_bytes
from .host_buffers import BUFFERS
from .layers import Stack
from .loss import TILE_LOGITS
from .probe import Profile

MARGIN = 0.03  # of the device's memory: fragments, and what libraries take for themselves
HOST_SHARE = 0.9  # of the free host memory, with "auto"


@dataclass(frozen=True)
class Rooms:
    """Bytes that a step may use. None: no limit."""

    device_pages: int | None
    device_kept: int
    host: int


@dataclass(frozen=True)
class Machine:
    """Memory to be had. Units: bytes; None: unknown. device_free: None where the device's memory is the host's."""

    device_free: int | None
    device_total: int
    host_free: int | None

    @staticmethod
    def now(device: torch.device) -> Machine:
        """What is free at this moment; what this process holds for the next step counts as free."""
        host = free_host_bytes()
        host = None if host is None else host + spare_bytes()
        if device.type != "cuda":
            return Machine(None, 0, host)
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return Machine(free, total, host)


def rooms(config: ChunkConfig, machine: Machine, *, working: int, page_bytes: int) -> Rooms:
    """Resolve the budgets of a config. working: what a step takes beside; page_bytes: what all pages would take."""
    host = config.host_budget_bytes
    if host == "auto":
        host = 0 if machine.host_free is None else int(HOST_SHARE * machine.host_free)
    pages, kept = config.gpu_kv_budget_bytes, config.gpu_keep_budget_bytes
    if machine.device_free is None:
        # the device's memory is the host's: one half of it is for what is kept, nothing is moved
        if kept == "auto":
            kept = 1 << 62 if machine.host_free is None else machine.host_free // 2
        return Rooms(None, kept, 0) if pages == "auto" else Rooms(pages, kept, host)
    room = max(0, int(machine.device_free - MARGIN * machine.device_total - working))
    device_pages = room if pages == "auto" else pages
    device_kept = max(0, room - min(device_pages, page_bytes)) if kept == "auto" else kept
    return Rooms(device_pages, device_kept, host)


def working_bytes(
    config: ChunkConfig,
    parts: Parts,
    profile: Profile,
    *,
    chunk_tokens: int,
    batch: int,
    train: bool,
    layered: bool,
) -> dict[str, int]:
    """What a step takes on the device beside weights, pages and what is kept, by part. An estimate.

    layered: layers are walked back one at a time. Half of what a layer takes in its backward its forward has saved.
    """
    tokens = batch * chunk_tokens
    trainable = [p for p in parts.causal.parameters() if p.requires_grad] if train else []
    layer = tokens * layer_bytes(parts.decoder, profile)
    layers = len(profile.layers)
    attention = max(f.heads * f.head_dim for f in profile.layers.values())
    stack = profile.stack if layered else None
    width = attention if stack is None else stack.width
    graph = layer * (1 if layered else layers) if train else 0  # held while the loss is computed
    logits = min(TILE_LOGITS, tokens * parts.label_size)
    loss = logits * (12 if train else 8) + tokens * width * 8
    segments = _segment_bytes(config, profile, batch, grads=train)
    return {
        "gradients": sum(p.numel() * p.element_size() for p in trainable if p.grad is None),
        "float32 gradients": sum(4 * p.numel() for p in trainable) if config.fp32_main_grads else 0,
        "layers and loss": max(graph + layer, graph + loss),
        "layer outputs": 0 if stack is None else tokens * layers * stack.width * stack.dtype.itemsize,
        "attention": tokens * attention * 4 * 3,
        "segments": segments,
    }


def replays(config: ChunkConfig, profile: Profile) -> bool:
    """Whether layers are walked back one at a time."""
    deep = len(profile.layers) > 1  # the last layer's graph is held in any case
    return config.recompute != "chunk" and profile.stack is not None and profile.router is None and deep


def layer_bytes(decoder: nn.Module, profile: Profile) -> int:
    """What the largest layer's graph keeps for its backward, about. Units: bytes a token

    Every product keeps its input, and its output passes through something that keeps it too.
    """
    itemsize = next(iter(profile.layers.values())).dtype.itemsize
    names = _layer_names(decoder, profile.stack)
    modules = [decoder.get_submodule(name) for name in names]
    experts = (
        getattr(decoder.config, "num_experts_per_tok", None) or 1
    )  # weights [experts, in, out] see a token so often
    numbers = [
        sum(sum(p.shape[-2:]) * (experts if p.dim() == 3 else 1) for p in module.parameters() if p.dim() in (2, 3))
        for module in modules
    ]
    return itemsize * max(numbers, default=0)


def _layer_names(decoder: nn.Module, stack: Stack | None) -> tuple[str, ...]:
    if stack is not None:
        return stack.names
    lists = [(name, m) for name, m in decoder.named_modules() if isinstance(m, nn.ModuleList)]
    return tuple(f"{name}.{i}" for name, m in lists[:1] for i in range(len(m)))


def _segment_bytes(config: ChunkConfig, profile: Profile, batch: int, *, grads: bool) -> int:
    row = max(f.kv_heads * f.head_dim * (f.dtype.itemsize + (4 if grads else 0)) for f in profile.layers.values())
    return 2 * BUFFERS * batch * config.segment_tokens * row
