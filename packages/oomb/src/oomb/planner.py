"""How much memory a step will take, on the device and on the host, told from a model's config alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from offload import HostOutOfMemory

from .config import ChunkConfig
from .hf import take_apart
from .memory import Machine
from .placement import Placement, place
from .probe import outline


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by part. `obstacle`: why it does not fit and what would make it fit, or None; the parts are then of no use.

    gpu: everything alive at the step's peak; host: the pinned arena. kept_attention, kept_layers: of so many chunks
    """

    gpu: dict[str, int]
    host: dict[str, int]
    chunk_tokens: int
    chunks: int
    kept_attention: int
    kept_layers: int
    layer_by_layer: bool
    obstacle: str | None = None

    def lines(self) -> list[str]:
        """The plan as a table."""
        rows = [f"{'chunks':28s} {self.chunks} of {self.chunk_tokens:,} tokens"]
        rows.append(f"{'walk back':28s} {'layer by layer' if self.layer_by_layer else 'whole chunks'}")
        if self.obstacle is not None:
            return [*rows, f"{'does not fit':28s} {self.obstacle}"]
        rows.append(f"{'attention kept of':28s} {self.kept_attention} chunks, layers of {self.kept_layers}")
        for where, parts in (("GPU", self.gpu), ("host", self.host)):
            rows += [f"{where + ', ' + name:28s} {size / 2**30:9.2f} GiB" for name, size in parts.items() if size]
            rows.append(f"{where + ', in all':28s} {sum(parts.values()) / 2**30:9.2f} GiB")
        return rows


def plan(
    model_config: PretrainedConfig,
    context_tokens: int,
    *,
    config: ChunkConfig | None = None,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    optimizer_bytes: float = 0.0,
    adapters: bool = False,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """Will a training step of the whole model fit, and in how much memory?

    The budgets that are "auto" are resolved as a step on such a machine would resolve them; no weights are needed.
    adapters: the base is frozen; the adapters' own bytes are not counted.
    Units:  optimizer_bytes of state a parameter; gpu_bytes, host_bytes: memory of the machine (None: this one's)
    Raises: ValueError for a length or a size that is not positive; Unsupported for a model that cannot be run in chunks
    """
    config = ChunkConfig() if config is None else config
    for name, value in (("context_tokens", context_tokens), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    for name, size in (("gpu_bytes", gpu_bytes), ("host_bytes", host_bytes)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be a positive number of bytes, got {size!r}")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
    model.requires_grad_(not adapters)
    parts = take_apart(model.train())
    profile = outline(parts, context_tokens)
    here = Machine.now(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    total = gpu_bytes or here.device_total
    if not total:
        raise ValueError("there is no GPU here: say for how large a one to plan (gpu_bytes)")
    count = sum(p.numel() for p in model.parameters())
    fixed = {
        "weights": sum(p.numel() * p.element_size() for p in model.parameters()),
        "optimizer": 0 if adapters else int(count * optimizer_bytes),
    }
    machine = Machine(total - sum(fixed.values()), total, host_bytes or here.host_free)
    chunk = min(config.chunk_length(torch.device("cuda")), context_tokens)
    bounds = [(i, min(i + chunk, context_tokens)) for i in range(0, context_tokens, chunk)]
    try:
        placed = place(config, parts, profile, bounds, batch=batch, chunk_tokens=chunk, train=True, machine=machine)
    except HostOutOfMemory as error:
        return MemoryPlan(fixed, {}, chunk, len(bounds), 0, 0, False, str(error))
    return _told(placed, fixed, total, chunk, len(bounds))


def _told(placed: Placement, fixed: dict[str, int], total: int, chunk: int, chunks: int) -> MemoryPlan:
    gpu = {
        **fixed,
        **placed.working,
        "pages": placed.budget.device_pages * placed.page_bytes,
        "kept": placed.keep.device_bytes,
    }
    host = {"pages": placed.budget.host_bytes, "kept": placed.keep.host_bytes}
    obstacle = None
    if sum(gpu.values()) > total:
        obstacle = (
            f"{sum(gpu.values()):,} bytes are needed on the GPU, it has {total:,}: smaller chunk_tokens, adapters, or "
            "an optimizer with smaller states"
        )
    keep = placed.keep
    return MemoryPlan(gpu, host, chunk, chunks, len(keep.attention), len(keep.layers), placed.layered, obstacle)
