"""How fast this machine runs a model's own layers: a few short steps of a model with few of them, on this device."""

from __future__ import annotations

import copy
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from .api import PROFILE, chunked_backward
from .config import ChunkConfig
from .eta import Kept, ModelWork, Pass, chunk_passes
from .hf import take_apart
from .memory import replays
from .quiet import quiet
from .rates import Speeds

LAYERS, CHUNKS = (2, 4), (5, 24)  # of the steps that are timed; the chunks at least and at most
REPEATS = 2
LEAST_CHUNK = 128
VOCABULARY = 32768  # a larger one takes memory, not insight
SECONDS = 6.0  # what the steps may take, about
WORK = 20  # of all steps, in forward passes of the deeper model: four each, both repeated, half as much for the other


@dataclass(frozen=True)
class _Question:
    config: ChunkConfig
    device: torch.device
    dtype: torch.dtype
    autocast: torch.dtype | None
    adapters: bool
    targets: str | list[str]


def calibrate(
    model_config: PretrainedConfig,
    *,
    chunk_tokens: int,
    context_tokens: int,
    config: ChunkConfig,
    device: torch.device,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
    adapters: bool = False,
    targets: str | list[str] = "all-linear",
) -> Speeds:
    """Time steps of a model like this one with two and four layers, random weights, up to `context_tokens` long.

    Everything a step does is in them: the backend, merges, norms, launches. Where a GPU waits for launches, attention
    costs nothing until it outweighs them, so a step is as long as a few seconds allow. Random state and parameters of
    the caller's are not touched. Where chunks would take too long (a large model on a CPU) shorter ones are timed.
    """
    # pages stay where they are asked to be: gathered from the host they cost otherwise than read in place
    chunks = replace(config, gpu_keep_budget_bytes="auto", host_budget_bytes="auto", first_sparse_layer=0)
    question = _Question(chunks, device, dtype, autocast, adapters, targets)
    with quiet(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        rows: list[tuple[Pass, float]] = []
        update = 0.0
        shape = None
        whole = model_config.get_text_config().num_hidden_layers
        for layers in sorted({min(count, whole) for count in LAYERS}, reverse=True):
            model = _small(model_config, layers, question)
            shape = shape or _affordable(model, chunk_tokens, context_tokens, question)
            rows += _timed(model, *shape, question)
            update = _update(model)
            del model
        return Speeds(Pass(*_solve(rows)), _link(device), update)


def _small(model_config: PretrainedConfig, layers: int, question: _Question) -> Any:
    small = copy.deepcopy(model_config)
    text = small.get_text_config()
    whole = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, (list, tuple)) and len(value) == whole:  # one entry a layer
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    text.vocab_size = min(text.vocab_size, VOCABULARY)
    for owner in (small, text):
        owner.pad_token_id = None
    with question.device:
        model: Any = AutoModelForCausalLM.from_config(small, dtype=question.dtype)
    if not question.adapters:
        return model.train()
    if importlib.util.find_spec("peft") is None:  # a few numbers that learn: gradients pass, weights get none
        for p in model.parameters():
            p.requires_grad_(p.ndim == 1)
        return model.train()
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=question.targets, task_type="CAUSAL_LM")).train()


def _affordable(model: Any, chunk_tokens: int, context_tokens: int, question: _Question) -> tuple[int, int]:
    """Tokens of a chunk, and how many chunks: those that were asked for, or as much of them as can be timed."""
    side = 4096 if question.device.type == "cuda" else 384
    a = torch.ones(side, side, device=question.device, dtype=question.autocast or question.dtype)
    seconds = []
    for _ in range(4):
        began = _now(question.device)
        a @ a
        seconds.append(_now(question.device) - began)
    affordable = SECONDS * 2 * side**3 / min(seconds) / WORK
    work = ModelWork.of(model, _read(question.config))
    tokens, (least, most) = chunk_tokens, CHUNKS
    page = question.config.page_tokens if question.config.attention == "sparse" else 1
    while work.forward(least * tokens) > affordable and tokens // 2 >= max(LEAST_CHUNK, page):
        tokens //= 2
    tokens = max(tokens // page, 1) * page
    wanted = min(max(-(-context_tokens // tokens), least), most)
    while wanted > least and work.forward(wanted * tokens) > affordable:
        wanted -= 1
    return tokens, wanted


def _read(config: ChunkConfig) -> int | None:
    """Tokens that a sparse layer reads at most; None for dense attention."""
    if config.attention != "sparse":
        return None
    return (config.top_k_pages + config.recent_pages + config.sink_pages) * config.page_tokens


def _timed(model: Any, length: int, chunks: int, question: _Question) -> list[tuple[Pass, float]]:
    """(work, seconds) of each chunk, in the fill and in the walk."""
    _step(model, 2 * length, length, question)  # compiles, chooses, allocates
    runs = [_step(model, chunks * length, length, question) for _ in range(REPEATS)]
    layered = runs[0][1]
    ticks = [min(seconds) for seconds in zip(*(run[0] for run in runs), strict=True)]  # others only ever delay
    everything = range(chunks if layered else chunks - 1)
    bounds = [(i * length, (i + 1) * length) for i in range(chunks)]
    work = ModelWork.of(model, _read(question.config))
    return pair(ticks, *chunk_passes(work, bounds, Kept(everything, everything, layered)))


def pair(ticks: Sequence[float], fill: Sequence[Pass], walk: Sequence[Pass]) -> list[tuple[Pass, float]]:
    """(work, seconds) of a step's passes but for those in whose time a step begins, turns and ends.

    ticks: seconds of the fill's chunks, of the last one's forward, of the walk's chunks from the last one on
    """
    back = ticks[len(fill) + 1 :]
    return [*zip(fill[2:], ticks[2 : len(fill)], strict=True), *zip(walk[-2:0:-1], back[1:-1], strict=True)]


def _step(model: Any, tokens: int, length: int, question: _Question) -> tuple[list[float], bool]:
    """Seconds of each pass of one step, and whether layers were walked back one by one."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, tokens), device="cpu")
    model.zero_grad(set_to_none=True)
    ticks, before = [], _now(question.device)

    def tick(_done: int, _total: int) -> None:
        nonlocal before
        now = _now(question.device)
        ticks.append(now - before)
        before = now

    kind = question.device.type
    with torch.autocast(kind, question.autocast, enabled=question.autocast is not None):
        chunked_backward(model, ids, config=replace(question.config, chunk_tokens=length), progress=tick)
    ticks.append(_now(question.device) - before)  # the backward of the first chunk comes after the last call
    return ticks, replays(question.config, getattr(take_apart(model).causal, PROFILE)[1])


def _update(model: Any) -> float:
    """Seconds that clipping and AdamW take for a parameter."""
    learning, count = [], 0
    for p in model.parameters():
        if p.grad is not None and count < 2**26:
            learning.append(p)
            count += p.numel()
    optimizer = torch.optim.AdamW(learning, lr=0.0)
    device = learning[0].device
    seconds = 0.0
    for _ in range(2):  # the first makes the states
        began = _now(device)
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        seconds = _now(device) - began
    return seconds / count


def _link(device: torch.device) -> float:
    """Seconds a byte takes each way, both ways at once."""
    size = 2**27 if device.type == "cuda" else 2**24
    pinned = device.type == "cuda"
    away, back = (torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(2))
    here, there = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    streams = [torch.cuda.Stream(device) for _ in range(2)] if pinned else []
    seconds = 0.0
    for _ in range(2):
        began = _now(device)
        for i, (target, source) in enumerate(((here, away), (back, there))):
            if pinned:
                with torch.cuda.stream(streams[i]):
                    target.copy_(source, non_blocking=True)
            else:
                target.copy_(source)
        seconds = _now(device) - began
    return seconds / size


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _solve(rows: list[tuple[Pass, float]]) -> list[float]:
    """Seconds that one of each kind takes: least squares over relative errors, none below zero."""
    x = torch.tensor([work for work, _ in rows], dtype=torch.float64, device="cpu")
    y = torch.tensor([seconds for _, seconds in rows], dtype=torch.float64, device="cpu")
    x = x / y[:, None]
    scale = x.norm(dim=0).clamp_min(1e-300)
    active = [i for i in range(x.shape[1]) if float(x[:, i].norm()) > 0]
    while True:
        found: Tensor = torch.linalg.lstsq((x / scale)[:, active], torch.ones_like(y)[:, None]).solution[:, 0]
        worst = int(found.argmin())
        if found[worst] >= 0:
            break
        active.pop(worst)
    each = torch.zeros(x.shape[1], dtype=torch.float64, device="cpu")
    each[active] = found
    return (each / scale).tolist()
