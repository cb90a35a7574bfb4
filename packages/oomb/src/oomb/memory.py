"""How much memory there is for the past and for what is kept, and how much a step takes beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from offload import free_host_bytes

from .config import ChunkConfig
from .hf import Parts
from .host import spare_bytes
from .host_tier import BUFFERS
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


def rooms(
    config: ChunkConfig, parts: Parts, profile: Profile, *, chunk_tokens: int, batch: int, page_bytes: int, train: bool
) -> Rooms:
    """Resolve the budgets of a config for this model and this moment. page_bytes: what all pages would take."""
    host = config.host_budget_bytes
    free_host = free_host_bytes()
    if host == "auto":
        host = 0 if free_host is None else int(HOST_SHARE * (free_host + spare_bytes()))
    pages, kept = config.gpu_kv_budget_bytes, config.gpu_keep_budget_bytes
    if parts.device.type != "cuda":
        # the device's memory is the host's: one half of it is for what is kept, nothing is moved
        if kept == "auto":
            kept = 1 << 62 if free_host is None else free_host // 2
        return Rooms(None, kept, 0) if pages == "auto" else Rooms(pages, kept, host)
    free, total = torch.cuda.mem_get_info(parts.device)
    free += torch.cuda.memory_reserved(parts.device) - torch.cuda.memory_allocated(parts.device)
    taken = sum(working_bytes(config, parts, profile, chunk_tokens=chunk_tokens, batch=batch, train=train).values())
    room = max(0, int(free - MARGIN * total - taken))
    device_pages = room if pages == "auto" else pages
    device_kept = max(0, room - min(device_pages, page_bytes)) if kept == "auto" else kept
    return Rooms(device_pages, device_kept, host)


def working_bytes(
    config: ChunkConfig, parts: Parts, profile: Profile, *, chunk_tokens: int, batch: int, train: bool
) -> dict[str, int]:
    """What a step takes on the device beside weights, pages and what is kept, by part. An estimate."""
    tokens = batch * chunk_tokens
    trainable = [p for p in parts.causal.parameters() if p.requires_grad] if train else []
    layer = layer_bytes(parts.decoder, profile)
    stack = profile.stack if replays(config, profile) else None
    layers = len(profile.layers)
    attention = max(f.heads * f.head_dim for f in profile.layers.values())
    width = stack.width if stack is not None else attention
    logits = min(TILE_LOGITS, tokens * parts.label_size)
    return {
        "gradients": sum(p.numel() * p.element_size() for p in trainable if p.grad is None),
        "float32 gradients": sum(4 * p.numel() for p in trainable) if config.fp32_main_grads else 0,
        "layers": tokens * layer * ((2 if stack is not None else 1 + layers) if train else 1),
        "layer outputs": tokens * layers * stack.width * stack.dtype.itemsize if stack is not None and train else 0,
        "loss": logits * (12 if train else 8) + tokens * width * 8,
        "attention": tokens * attention * 4 * 3,
        "segments": _segment_bytes(config, profile, batch) if train else _segment_bytes(config, profile, batch) // 3,
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
    numbers = [sum(sum(p.shape) for p in module.parameters() if p.dim() == 2) for module in modules]
    return itemsize * max(numbers, default=0)


def _layer_names(decoder: nn.Module, stack: Stack | None) -> tuple[str, ...]:
    if stack is not None:
        return stack.names
    lists = [(name, m) for name, m in decoder.named_modules() if isinstance(m, nn.ModuleList)]
    return tuple(f"{name}.{i}" for name, m in lists[:1] for i in range(len(m)))


def _segment_bytes(config: ChunkConfig, profile: Profile, batch: int) -> int:
    row = max(f.kv_heads * f.head_dim * (f.dtype.itemsize + 4) for f in profile.layers.values())
    return 2 * BUFFERS * batch * config.segment_tokens * row
