"""Rotary embeddings whose frequencies depend on the longest position of a call.

`dynamic` and `longrope` read `max(position_ids)` each time they are called. A chunk knows only its own positions, so
such
a module is copied, the copy primed with the last position of the whole sequence, and for the time of a pass the copy
answers for the module.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .hf import Unsupported


class HeldRope:
    """The rotary modules of a model, as they are for a sequence that ends at `last_position`.

    Made once for a loss: both passes use the same frequencies, whatever the model is used for in between.

    Raises: Unsupported for a rotary module that depends on the length in a way that cannot be held
    """

    def __init__(self, model: nn.Module, last_position: int) -> None:
        rotary = [module for module in model.modules() if hasattr(module, "rope_type")]
        self._held = [(module, _primed(module, last_position)) for module in rotary if depends_on_length(module)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within it the copies answer; the modules themselves are not touched."""
        before = [vars(module).get("forward") for module, _ in self._held]
        try:
            for module, primed in self._held:
                module.forward = partial(_call, _plain_forward(module), primed)
            yield
        finally:
            for (module, _), forward in zip(self._held, before, strict=True):
                if forward is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = forward


def depends_on_length(module: nn.Module) -> bool:
    """Whether a rotary module's type is one of those that read the longest position."""
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in _types(module).values())


def _types(module: nn.Module) -> dict[str | None, object]:
    rope_type = getattr(module, "rope_type", None)
    return rope_type if isinstance(rope_type, dict) else {None: rope_type}


def _plain_forward(module: nn.Module):
    """The class's forward without the wrapper that updates frequencies."""
    return inspect.unwrap(type(module).forward)


@torch.no_grad()
def _primed(module: nn.Module, last_position: int) -> nn.Module:
    """A copy with the frequencies of the whole sequence, shown to give them for a part of it."""
    primed = copy.deepcopy(module)
    vars(primed).pop("forward", None)
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    x = torch.zeros(1, 1, 1, device=device)
    ends = torch.tensor([[0, min(1, last_position), last_position]], device=device)
    for layer_type in _types(module):
        more = {} if layer_type is None else {"layer_type": layer_type}
        whole = primed.forward(x, ends, **more)
        held = _plain_forward(module)(primed, x, ends[:, :2], **more)
        if not all(torch.equal(a[..., :2, :], b) for a, b in zip(_tensors(whole), _tensors(held), strict=True)):
            raise Unsupported(
                f"{type(module).__name__} scales positions by the longest one of each call, which a chunk does not know"
            )
    return primed


def _tensors(output: object) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)  # type: ignore[call-overload]


@torch.no_grad()
def _call(forward, primed: nn.Module, *args, **kwargs):
    return forward(primed, *args, **kwargs)
