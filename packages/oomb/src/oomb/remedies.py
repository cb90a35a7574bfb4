"""What would make a step fit: the fewest changes that do, in the order in which a user would rather make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import nn

from .longest import longest_context
from .memory import HOST_SHARE
from .optimizer_states import Optimizer
from .placement import LEAST_CHUNK
from .question import Question

SMALL_STATES = "adamw_8bit"
GIB = 2**30

Change = tuple[str, Callable[[Question], Question]]  # how it is said, and what it does


def remedies(question: Question, adapted: Callable[[], tuple[nn.Parameter, ...]]) -> list[str]:
    """Each line by itself makes the step fit.

    Single settings that do are all listed; where there is none, the fewest together. Then more host memory and a
    shorter context, beside the fewest settings without which they do not help.
    adapted: what would learn if the base were frozen
    """
    known = list(_changes(question, adapted))
    sets: list[tuple[Change, ...]] = []
    for count in range(len(known) + 1):
        sets += combinations(known, count)
    ways: list[tuple[Change, ...]] = [chosen for chosen in sets if len(chosen) == 1 and _with(question, chosen).fits()]
    if not ways and _with(question, known).fits():
        ways = [next(chosen for chosen in sets if _with(question, chosen).fits())]
    lines = [", ".join(name for name, _ in chosen) for chosen in ways]
    for last in (_more_memory, _shorter_context):
        if ways or last(_with(question, known)) is not None:
            for chosen in sets[:1] if ways else sets:
                said = last(_with(question, chosen))
                if said is not None:
                    lines.append(", ".join([*(name for name, _ in chosen), said]))
                    break
    return lines or ["nothing that is known here"]


def _with(question: Question, chosen: Iterable[Change]) -> Question:
    for _, change in chosen:
        question = change(question)
    return question


def _changes(question: Question, adapted: Callable[[], tuple[nn.Parameter, ...]]) -> Iterator[Change]:
    """Settings that take less memory, those first that cost least."""
    config = question.config
    if config.chunk_tokens != "auto" and config.chunk_tokens > LEAST_CHUNK:
        yield "chunk_tokens: auto", _setting("chunk_tokens", "auto")
    for name in ("gpu_kv_budget_bytes", "gpu_keep_budget_bytes", "host_budget_bytes"):
        if getattr(config, name) != "auto":
            yield f"{name}: auto", _setting(name, "auto")
    if config.grad_page_dtype is None:
        yield "grad_page_dtype: bfloat16", _setting("grad_page_dtype", torch.bfloat16)
    small = replace(question, optimizer=Optimizer(SMALL_STATES))
    if small.state_bytes < question.state_bytes:
        yield f"optim: {SMALL_STATES}", lambda q: replace(q, optimizer=Optimizer(SMALL_STATES))
    if question.adapted is None:
        try:
            learning = adapted()
        except ValueError:  # peft cannot adapt this model
            return
        yield "adapter: lora", lambda q: replace(q, adapted=learning)


def _setting(name: str, value: object) -> Callable[[Question], Question]:
    return lambda q: replace(q, config=replace(q.config, **{name: value}))  # type: ignore[arg-type]


def _more_memory(question: Question) -> str | None:
    """How much more host memory would do."""
    free = question.machine.host_free
    if free is None:
        return None
    rich = replace(question, machine=replace(question.machine, host_free=1 << 60))
    found, _ = rich.answer()
    if found.obstacle is not None:
        return None
    need = sum(size for name, size in found.host.items() if name not in ("process", "kept"))
    more = math.ceil((need / HOST_SHARE - free) / GIB)
    if more < 1 or not replace(question, machine=replace(question.machine, host_free=free + more * GIB)).fits():
        return None
    return f"{more:,} GiB more of host memory"


def _shorter_context(question: Question) -> str | None:
    """How long a context would do; none that is too short to be of use."""
    if not replace(question, tokens=LEAST_CHUNK).fits():
        return None
    longest = longest_context(question)
    if not LEAST_CHUNK <= longest < question.tokens or not replace(question, tokens=longest).fits():
        return None
    return f"a context of {longest:,} tokens"
