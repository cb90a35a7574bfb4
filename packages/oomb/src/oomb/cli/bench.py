"""`oomb bench`: how long a step takes, and in how much memory, at several chunk lengths."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from oomb.api import chunked_backward
from oomb.config import ChunkConfig
from oomb.eta import ModelWork
from oomb.job import choose_device, choose_dtype
from oomb.model_loading import load_config, load_model
from oomb.progress import format_bytes, peak_bytes, utilization
from oomb.train_config import TINY, TrainConfig

STEPS = 3


def run(settings: Mapping[str, Any], *, dry_run: bool = False) -> int:
    """Print one row a chunk length. Returns: 0"""
    transformers.utils.logging.disable_progress_bar()
    given = {"model": TINY, "context": 8192, "data": "stdlib"} | dict(settings)  # data are not read
    config = TrainConfig.from_settings(given)
    device = choose_device(config.device)
    dtype, mixed = choose_dtype(config.dtype, device)
    model_config = load_config(config)
    torch.manual_seed(config.seed)
    model = load_model(config, model_config, dtype, device)
    lengths = _lengths(config.chunks, config.context, device)
    steps = config.steps or STEPS
    print(f"{type(model).__name__}, {config.context:,} random tokens on {device}, {steps} steps after one to warm up")
    if dry_run:
        print(f"dry run     would time chunks of {', '.join(f'{length:,}' for length in lengths)}")
        return 0
    print(f"{'chunk':>9} {'s/step':>9} {'tokens/s':>11} {'mfu':>5} {'peak':>11}")
    for length in lengths:
        chunks = dataclasses.replace(config.chunks, chunk_tokens=length)
        seconds, peak = _time(model, chunks, config, device, mixed, steps)
        used = utilization(3 * ModelWork.of(model).forward(config.context), seconds, device)
        shown = "-" if used is None else f"{used:.0%}"
        rate = config.context / seconds
        print(f"{length:>9,} {seconds:>9.3f} {rate:>11,.0f} {shown:>5} {format_bytes(peak):>11}", flush=True)
    if device.type != "cuda":
        print("peak: of the whole process so far, so a later row is never below an earlier one")
    return 0


def _lengths(chunks: ChunkConfig, context: int, device: torch.device) -> list[int]:
    if chunks.chunk_tokens != "auto":
        return [chunks.chunk_tokens]
    auto = chunks.chunk_length(device)
    return sorted({min(length, context) for length in (auto // 2, auto, auto * 2)})


def _time(
    model: Any, chunks: ChunkConfig, config: TrainConfig, device: torch.device, mixed: bool, steps: int
) -> tuple[float, int]:
    """Returns: the median of the steps' seconds, and the peak of memory"""
    vocabulary = model.config.get_text_config().vocab_size
    drawn = torch.Generator().manual_seed(config.seed)
    ids = torch.randint(vocabulary, (1, config.context), generator=drawn, device="cpu")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(steps + 1):
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            float(chunked_backward(model, ids, config=chunks))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[steps // 2], peak_bytes(device)
