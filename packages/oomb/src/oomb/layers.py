"""Which modules of a decoder are its layers, and whether they are a plain chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .hf import Unsupported


@dataclass(frozen=True)
class Stack:
    """Layers of a decoder, by name and in order, that hand one tensor from each to the next.

    Units: width: numbers a token, the hidden size or a multiple of it ([4, B, C, D] in Gemma 3n)
    """

    names: tuple[str, ...]
    width: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Seen:
    """One call of a layer."""

    name: str
    given: object
    more: tuple[object, ...]  # the leaves of its other arguments
    output: object


def layer_stack(
    decoder: nn.Module, attentions: dict[int, nn.Module], run: Callable[[], tuple[Tensor, object]]
) -> Stack | None:
    """A decoder's layers, if one list holds them all, one attention each, and each is called once with the very tensor
    that the one before returned, of one shape and dtype throughout, which nothing else reads.

    attentions: the attention module of every layer, in the order of the calls; run: a forward of the decoder, its
            hidden states first
    Returns: None for a decoder that does anything else between its layers, or whose layers return more than a tensor
    """
    names = _names(decoder, list(attentions.values()))
    if names is None:
        return None
    with _noted(decoder, names) as seen:
        hidden, _ = run()
    if [call.name for call in seen] != list(names):
        return None
    before = first = seen[0].given
    if not isinstance(first, Tensor):
        return None
    for call in seen:
        given, output = call.given, call.output
        if given is not before or not isinstance(output, Tensor):
            return None
        if output.shape != first.shape or output.dtype != first.dtype or output.device != first.device:
            return None
        before = output
    if not _reads_only_the_last(decoder, seen, hidden, run):
        return None
    tokens = hidden.shape[0] * hidden.shape[1]
    return Stack(names, first.numel() // tokens, first.dtype) if first.numel() % tokens == 0 else None


@contextmanager
def _noted(decoder: nn.Module, names: tuple[str, ...], outputs: Sequence[Tensor] = ()) -> Iterator[list[_Seen]]:
    """Notes the calls of layers. outputs: what the first of them return instead of what they compute."""
    seen: list[_Seen] = []
    hooks = []
    for place, name in enumerate(names):

        def note(
            _module: nn.Module, args: tuple, kwargs: dict, output: object, place: int = place, name: str = name
        ) -> object:
            output = outputs[place] if place < len(outputs) else output
            given, more = (args[0] if args else None), tuple(tree_leaves((args[1:], kwargs)))
            seen.append(_Seen(name, given, more, output))
            return output

        hooks.append(decoder.get_submodule(name).register_forward_hook(note, with_kwargs=True))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _reads_only_the_last(
    decoder: nn.Module, seen: list[_Seen], hidden: Tensor, run: Callable[[], tuple[Tensor, object]]
) -> bool:
    """Whether NaN in place of every output but those of the last two layers shows nowhere else."""
    if len(seen) < 3 or hidden.device.type == "meta":  # a shape has no values to look at
        return True
    outputs = [x.output for x in seen[:-1] if isinstance(x.output, Tensor)]
    promises = [x.new_full((), torch.nan).expand(x.shape) for x in outputs[:-1]]
    try:
        with _noted(decoder, tuple(call.name for call in seen), (*promises, outputs[-1])) as again:
            blind, _ = run()
    except Unsupported:
        return False
    pairs = [(hidden, blind)]
    for call, other in zip(seen, again, strict=True):
        if len(call.more) != len(other.more):
            return False
        pairs += [(a, b) for a, b in zip(call.more, other.more) if isinstance(a, Tensor) and isinstance(b, Tensor)]
    return all(_alike(a, b) for a, b in pairs)


def _alike(a: Tensor, b: Tensor) -> bool:
    """The same shape, and NaN in the same places or, of what cannot be NaN, the same values."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.isnan(), b.isnan()) if a.is_floating_point() else torch.equal(a, b)


def _names(decoder: nn.Module, attentions: list[nn.Module]) -> tuple[str, ...] | None:
    for name, module in decoder.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) != len(attentions):
            continue
        holders = [[i for i, layer in enumerate(module) if any(x is a for x in layer.modules())] for a in attentions]
        if holders == [[i] for i in range(len(attentions))]:
            return tuple(f"{name}.{i}" if name else str(i) for i in range(len(module)))
    return None
