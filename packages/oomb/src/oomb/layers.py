"""Which modules of a decoder are its layers, and whether they are a plain chain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Stack:
    """Layers of a decoder, by name and in order, that hand a tensor [B, C, width] from each to the next."""

    names: tuple[str, ...]
    width: int
    dtype: torch.dtype


def layer_stack(decoder: nn.Module, attentions: dict[int, nn.Module], run: Callable[[], object]) -> Stack | None:
    """A decoder's layers, if one list holds them all, one attention each, and each is called once with the very tensor
    that the one before returned, of one shape and dtype throughout.

    attentions: the attention module of every layer, in the order of the calls; run: a forward of the decoder
    Returns: None for a decoder that does anything else between its layers, or whose layers return more than a tensor
    """
    names = _names(decoder, list(attentions.values()))
    if names is None:
        return None
    seen: list[tuple[str, object, object]] = []
    hooks = []
    for name in names:

        def note(_module: nn.Module, args: tuple, output: object, name: str = name) -> None:
            seen.append((name, args[0] if args else None, output))

        hooks.append(decoder.get_submodule(name).register_forward_hook(note))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    if [name for name, _, _ in seen] != list(names):
        return None
    before = first = seen[0][1]
    if not isinstance(first, Tensor):
        return None
    for _, given, output in seen:
        if given is not before or not isinstance(output, Tensor):
            return None
        if output.shape != first.shape or output.dtype != first.dtype or output.device != first.device:
            return None
        before = output
    return Stack(names, first.shape[-1], first.dtype)


def _names(decoder: nn.Module, attentions: list[nn.Module]) -> tuple[str, ...] | None:
    for name, module in decoder.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != len(attentions):
            continue
        holders = [[i for i, layer in enumerate(module) if any(x is a for x in layer.modules())] for a in attentions]
        if holders == [[i] for i in range(len(attentions))]:
            return tuple(f"{name}.{i}" if name else str(i) for i in range(len(module)))
    return None
