"""`oomb plan`: will it fit, and what lives where?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from oomb.job import choose_dtype
from oomb.model_loading import load_config, load_tokenizer
from oomb.planner import plan
from oomb.train_config import TINY, TrainConfig

# bytes of state a parameter; others keep two numbers of the parameter's own type
STATES = {"8bit": 2.03, "fp8": 2.03, "4bit": 1.06, "adafactor": 0.004, "sgd": 0.0}


def run(settings: Mapping[str, Any], *, dry_run: bool = False) -> int:
    """Print the plan. Returns: 0 if it fits, 1 if not"""
    transformers.utils.logging.disable_progress_bar()
    config = TrainConfig.from_settings({"model": TINY, "context": 131072, "data": "stdlib"} | dict(settings))
    dtype, mixed = choose_dtype(config.dtype, torch.device("cuda"))
    model_config = load_config(config, load_tokenizer(config))
    name = str(config.trainer.get("optim", "adamw"))
    state = next((size for word, size in STATES.items() if word in name), 2.0 * dtype.itemsize)
    adapters = config.adapter != "none"
    found = plan(
        model_config,
        config.context,
        config=config.chunks,
        dtype=dtype,
        optimizer_bytes=state,
        adapters=adapters,
        gpu_bytes=config.gpu_memory_bytes,
        host_bytes=config.host_memory_bytes,
    )
    print(f"{model_config.model_type}, {config.context:,} tokens, {str(dtype).removeprefix('torch.')} weights, {name}")
    if mixed:
        print("bfloat16 arithmetic over float32 weights: pages and activations are counted in float32, at most twice")
    if adapters:
        print("adapters: their own weights, gradients and states, of a few hundred megabytes at most, are not counted")
    print("\n".join(found.lines()))
    return 0 if found.obstacle is None else 1
