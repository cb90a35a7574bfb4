"""Rotary embeddings whose frequencies depend on the longest position of a call.

`dynamic` and `longrope` read `max(position_ids)` each time they are called. A chunk knows only its own positions, so
for
the time of a pass such a module is primed with the last position of the whole sequence and then held.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn


def depends_on_length(module: nn.Module) -> bool:
    rope_type = getattr(module, "rope_type", None)
    names = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in names)


@contextmanager
def rope_held(model: nn.Module, last_position: int) -> Iterator[None]:
    """Within it, every rotary module of `model` uses the frequencies of a sequence that ends at `last_position`.

    The modules themselves are not touched: a primed copy answers for each of them.
    """
    held = [module for module in model.modules() if depends_on_length(module) and "forward" not in vars(module)]
    try:
        for module in held:
            primed = _primed(module, last_position)
            module.forward = partial(_call, inspect.unwrap(type(module).forward), primed)
        yield
    finally:
        for module in held:
            vars(module).pop("forward", None)


@torch.no_grad()
def _primed(module: nn.Module, last_position: int) -> nn.Module:
    primed = copy.deepcopy(module)
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    x, position = torch.zeros(1, 1, 1, device=device), torch.tensor([[last_position]], device=device)
    layer_types = list(module.rope_type) if isinstance(module.rope_type, dict) else [None]
    for layer_type in layer_types:
        primed.forward(x, position, **({} if layer_type is None else {"layer_type": layer_type}))
    return primed


@torch.no_grad()
def _call(forward, primed: nn.Module, *args, **kwargs):
    return forward(primed, *args, **kwargs)
