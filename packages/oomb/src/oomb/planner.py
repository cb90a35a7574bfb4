"""What a step will take, in memory and in time, told from a model's config alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from .adapters import RANK, adapter_parameters
from .bare import bare
from .config import ChunkConfig
from .longest import longest_context
from .memory import Machine
from .optimizer_states import Optimizer
from .question import Question
from .rates import Rates, Speeds
from .remedies import remedies
from .step_plan import StepPlan


def plan(
    model_config: PretrainedConfig,
    context_tokens: int,
    *,
    config: ChunkConfig | None = None,
    batch: int = 1,
    accumulation: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    autocast: torch.dtype | None = None,
    optim: str | None = None,
    optim_args: str | None = None,
    adapters: bool = False,
    adapter_rank: int = RANK,
    adapter_config: Any = None,
    quantized: bool = False,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    device: torch.device | str | None = None,
    speeds: Rates | Callable[[int], Speeds | None] | None = None,
) -> StepPlan:
    """Will a training step of the whole model fit, in how much memory, and how long will it take?

    What is "auto" is resolved as a step on such a machine would resolve it; no weights are needed.
    accumulation: batches whose gradients one step adds up. autocast: what is computed in over wider weights.
    optim, optim_args: as the Trainer takes them; None: no optimizer. adapters: the base is frozen and what peft makes
    of `adapter_config` learns; None: LoRA of `adapter_rank` on every linear layer. quantized: the base in 4 bits.
    device: "cpu" for a step there; default: a GPU of `gpu_bytes`, or this machine's device. speeds: rates that are
    stated, or a function of the chunk's length that measures (`calibration.calibrate`); None: no seconds
    Units:  gpu_bytes, host_bytes: memory of the machine (None: what is free here)
    Raises: ValueError for a length or a size that is not positive, a config that makes no model, a backend that does
        not serve it, adapters that cannot be put on; Unsupported for a model that cannot be run in chunks
    """
    config = ChunkConfig() if config is None else config
    counts = {"context_tokens": context_tokens, "batch": batch, "accumulation": accumulation}
    for name, value in (counts | {"adapter_rank": adapter_rank}).items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    machine = _machine(device, gpu_bytes, host_bytes)
    optimizer = None if optim is None else Optimizer.of(optim, optim_args)
    parts, profile = bare(model_config, context_tokens, dtype=dtype, autocast=autocast)
    adapted = functools.cache(lambda: adapter_parameters(model_config, dtype, adapter_config, adapter_rank))
    question = Question(
        parts, profile, machine, config, context_tokens, batch, optimizer, adapted() if adapters else None, quantized,
        accumulation,
    )  # fmt: skip
    found, placed = question.answer()
    longest = longest_context(question)
    if found.obstacle is not None:
        return replace(found, longest=longest, remedies=tuple(remedies(question, adapted)))
    # a chunk of its own length is the context's, whatever longer ones would take
    found = replace(found, longest=max(longest, context_tokens))
    return found if speeds is None else replace(found, seconds=question.seconds(speeds, found, placed))


def _machine(device: torch.device | str | None, gpu_bytes: int | None, host_bytes: int | None) -> Machine:
    """The one that is planned for: as it is here, or of the sizes that are given."""
    for name, size in (("gpu_bytes", gpu_bytes), ("host_bytes", host_bytes)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be a positive number of bytes, got {size!r}")
    if device is None:
        device = "cuda" if gpu_bytes or torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and gpu_bytes is None and not torch.cuda.is_available():
        raise ValueError("there is no GPU here: say for how large a one to plan (gpu_bytes)")
    here = Machine.now(device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu"))
    if device.type == "cpu":
        return Machine(None, 0, host_bytes or here.host_free)
    total = gpu_bytes or here.device_total
    return Machine(total if gpu_bytes else here.device_free, total, host_bytes or here.host_free)
