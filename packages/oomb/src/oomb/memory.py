"""How much memory there is for the past and for what is kept, and how much a step takes beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offload import free_host_bytes

from .config import ChunkConfig
from .hf import Parts
from .host import spare_bytes
from .host_buffers import BUFFERS
from .kernels import plain_bytes, why_plain
from .layers import Stack
from .loss import TILE_LOGITS, TRITON
from .probe import Profile
from .selection import chooses, id_dtype, summary_bytes

MARGIN = 0.03  # of the device's memory, or FRAGMENTS: what libraries take for themselves, and what lies between tensors
FRAGMENTS = 3 << 29  # a 7B layer's are half a GiB each, on a small device too; but no more than a sixteenth of it
MOVING = 4  # outputs of a layer or of attention on their way to the host, or read and fetched ahead (shelf.py, keep.py)
ADAPTED = 1.32  # what adapters make of a layer's activations: their inputs are cast to float32 (counted in peft's LoRA)
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
        """What is free at this moment; what this process holds for the next step counts as free. Processes that were
        started together on one host (torchrun, DDP) share what is free of it.
        """
        host, processes = free_host_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        host = None if host is None else host // max(processes, 1) + spare_bytes()
        if device.type != "cuda":
            return Machine(None, 0, host)
        if device.index is None:  # not all that is asked below takes such a device
            device = torch.device("cuda", torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device)
        free += torch.cuda.memory_reserved(device) - allocated
        # torch refuses this process more than a share of the device, where one was set; where none was, the allocator
        # "cudaMallocAsync" says some hundred million
        total = int(total * min(torch.cuda.get_per_process_memory_fraction(device), 1.0))
        return Machine(min(free, total - allocated), total, host)

    def room(self) -> int:
        """Bytes of the device that a step may count on."""
        assert self.device_free is not None
        return int(self.device_free - max(MARGIN * self.device_total, min(FRAGMENTS, self.device_total / 16)))


def rooms(config: ChunkConfig, machine: Machine, *, working: int, page_bytes: int) -> Rooms:
    """Resolve the budgets of a config. working: what a step takes beside; page_bytes: what all pages would take."""
    if machine.device_free is None:
        return _rooms_of_one_memory(config, machine, working=working, page_bytes=page_bytes)
    pages, kept, host = config.gpu_kv_budget_bytes, config.gpu_keep_budget_bytes, config.host_budget_bytes
    if host == "auto":
        host = 0 if machine.host_free is None else int(HOST_SHARE * machine.host_free)
    room = max(0, machine.room() - working)
    device_pages = room if pages == "auto" else pages
    device_kept = max(0, room - min(device_pages, page_bytes)) if kept == "auto" else kept
    return Rooms(device_pages, device_kept, host)


def _rooms_of_one_memory(config: ChunkConfig, machine: Machine, *, working: int, page_bytes: int) -> Rooms:
    """The same where the device's memory is the host's: all share it, and nothing is moved without being asked."""
    free = 1 << 62 if machine.host_free is None else machine.host_free
    room = max(0, int(HOST_SHARE * free) - working)
    pages, keep, host = config.gpu_kv_budget_bytes, config.gpu_keep_budget_bytes, config.host_budget_bytes
    kept = max(0, min(room // 2, room - page_bytes)) if keep == "auto" else keep
    if pages == "auto":
        return Rooms(None, kept, 0)
    return Rooms(pages, kept, max(0, room - min(pages, page_bytes) - kept) if host == "auto" else host)


def working_bytes(
    config: ChunkConfig,
    parts: Parts,
    profile: Profile,
    *,
    length: int,
    chunk_tokens: int,
    batch: int,
    train: bool,
    layered: bool,
    gpu: bool,
) -> dict[str, int]:
    """What a step takes on the device beside weights, pages and what is kept, by part. An estimate.

    length: tokens of a sequence; layered: layers are walked back one at a time. Half of what a layer takes in its
    backward its forward has saved.
    """
    tokens = batch * chunk_tokens
    trainable = [p for p in parts.causal.parameters() if p.requires_grad] if train else []
    layer = tokens * layer_bytes(parts.decoder, profile)
    layers = len(profile.layers)
    attention = max(f.heads * f.head_dim for f in profile.layers.values())
    stack = profile.stack if layered else None
    width = attention if stack is None else stack.width
    graph = layer * (1 if layered else layers) if train else 0  # held while the loss is computed
    itemsize = min(f.dtype.itemsize for f in profile.layers.values())
    loss = _loss_bytes(parts, profile, tokens, gpu=gpu, train=train) + tokens * width * 8
    loss += _head_bytes(parts, train, itemsize)
    layer += _arriving(trainable, 3, itemsize)
    return {
        "gradients": sum(p.numel() * p.element_size() for p in trainable if p.grad is None),
        "float32 gradients": sum(4 * p.numel() for p in trainable) if config.fp32_main_grads else 0,
        "layers and loss": graph + max(layer, loss),
        "layer outputs": 0 if stack is None else tokens * layers * stack.width * stack.dtype.itemsize,
        "moving": 0 if stack is None else MOVING * tokens * stack.width * stack.dtype.itemsize,
        "attention": tokens * attention * 4 * 3
        + (plain_bytes(profile, batch) if why_plain(config, profile, gpu=gpu) else 0),
        "segments": _segment_bytes(config, profile, batch, length, grads=train),
        "selection": _selection_bytes(config, profile, batch, length),
    }


def _loss_bytes(parts: Parts, profile: Profile, tokens: int, *, gpu: bool, train: bool) -> int:
    """A tile of logits and what cross-entropy makes of it (loss.py); on a GPU about as much again, twice (measured)."""
    itemsize = min(f.dtype.itemsize for f in profile.layers.values())
    hidden = parts.causal.get_input_embeddings().weight.dtype
    if not (gpu and TRITON):
        return min(TILE_LOGITS, tokens * parts.label_size) * (max(12, 4 * itemsize) if train else 8)
    tile = TILE_LOGITS * (2 if hidden.itemsize == 2 else 1)
    return min(tile, tokens * parts.label_size) * itemsize * (3 if train else 1)


def _arriving(weights: Iterable[nn.Parameter], least_dims: int, itemsize: int) -> int:
    """The largest gradient, before it is added to `.grad`; computed in 16 bits and cast under autocast."""
    sizes = (p.numel() * (p.element_size() + _narrower(p, itemsize)) for p in weights if p.dim() >= least_dims)
    return max(sizes, default=0)


def _narrower(weight: nn.Parameter, itemsize: int) -> int:
    return itemsize if itemsize < weight.element_size() else 0


def _head_bytes(parts: Parts, train: bool, itemsize: int) -> int:
    """What the head's weight takes while its loss is walked back: its gradient before it is added, and casts."""
    weight: Any = getattr(parts.causal.get_output_embeddings(), "weight", None)
    if weight is None:  # a packed head, which does not learn
        return 0
    cast = weight.numel() * _narrower(weight, itemsize)
    return cast + (_arriving([weight], 2, itemsize) if train and weight.requires_grad else 0)


def _selection_bytes(config: ChunkConfig, profile: Profile, batch: int, length: int) -> int:
    """Page summaries and chosen pages of all sparse layers (selection.py)."""
    sparse = [f for i, f in profile.layers.items() if chooses(config, i, f)]
    pages = -(-length // config.page_tokens)
    summaries = sum(summary_bytes(config, f) for f in sparse)
    read = (config.top_k_pages + config.recent_pages + config.sink_pages) * id_dtype(pages).itemsize
    lists = sum(read * (f.kv_heads if config.select_per_head else 1) for f in sparse)
    budget = config.gpu_selection_budget_bytes
    taken = batch * pages * (summaries + lists)
    return taken if budget is None else min(taken, budget)


def process_bytes() -> int:
    """What this process has resident."""
    import psutil  # accelerate brings it

    return psutil.Process().memory_info().rss


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
    own = [[(n, p) for n, p in module.named_parameters() if "lora_" not in n] for module in modules]
    numbers = [
        sum(sum(p.shape[-2:]) * (experts if p.dim() == 3 else 1) for _, p in weights if p.dim() in (2, 3))
        for weights in own
    ]
    frozen = not any(p.requires_grad for weights in own for _, p in weights)
    return int(itemsize * max(numbers, default=0) * (ADAPTED if frozen else 1.0))


def _layer_names(decoder: nn.Module, stack: Stack | None) -> tuple[str, ...]:
    if stack is not None:
        return stack.names
    lists = [(name, m) for name, m in decoder.named_modules() if isinstance(m, nn.ModuleList)]
    return tuple(f"{name}.{i}" for name, m in lists[:1] for i in range(len(m)))


def _segment_bytes(config: ChunkConfig, profile: Profile, batch: int, length: int, *, grads: bool) -> int:
    row = max(f.kv_heads * f.head_dim * (f.dtype.itemsize + (4 if grads else 0)) for f in profile.layers.values())
    return 2 * BUFFERS * batch * min(config.segment_tokens, length) * row
