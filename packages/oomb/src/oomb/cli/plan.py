"""`oomb plan`: will it fit, what lives where, and how long does a step take?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from oomb.job import choose_device, choose_dtype, optimizer_name, plan_step
from oomb.model_loading import load_config
from oomb.train_config import TINY, TrainConfig


def run(settings: Mapping[str, Any], *, dry_run: bool = False) -> int:
    """Print the plan. Returns: 0 if it fits, 1 if not"""
    transformers.utils.logging.disable_progress_bar()
    config = TrainConfig.from_settings({"model": TINY, "context": 131072, "data": "stdlib"} | dict(settings))
    if config.gpu_memory_bytes is not None and config.device.startswith("cpu"):
        raise ValueError("device: cpu, and gpu_memory_bytes says to plan for a GPU: give one of the two")
    device = torch.device("cuda") if config.gpu_memory_bytes is not None else choose_device(config.device)
    model_config = load_config(config)
    dtype, mixed = choose_dtype(config.dtype, device)
    batch = config.trainer.get("per_device_train_batch_size", 1)
    accumulation = config.trainer.get("gradient_accumulation_steps", 1)
    found = plan_step(config, model_config, device, batch=batch, accumulation=accumulation)
    kind = str(dtype).removeprefix("torch.") + (" weights, computed in bfloat16" if mixed else " weights")
    learning = "" if config.adapter == "none" else f", {config.adapter}"
    name = optimizer_name(config)
    print(f"{model_config.model_type}, {config.context:,} tokens, {kind}{learning}, {name}, on {device.type}")
    print("\n".join(found.lines()))
    if found.seconds is None and found.obstacle is None:
        print("seconds of a step are told where the GPU is" + ("" if found.plain else ", or with --rates"))
    return 0 if found.obstacle is None else 1
