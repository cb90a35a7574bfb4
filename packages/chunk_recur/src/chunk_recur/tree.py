"""Pytrees taken apart: the tensors that a chunk receives and returns, kept, compared and watched."""

from __future__ import annotations

import enum
import numbers
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_PLAIN = (numbers.Number, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True, eq=False)
class Tree:
    """A flattened pytree."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @staticmethod
    def of(value: Any) -> Tree:
        """Take a pytree apart."""
        leaves, spec = tree_flatten(value)
        return Tree(tuple(leaves), spec)

    def value(self) -> Any:
        """Put it together again, in new containers."""
        return tree_unflatten(list(self.leaves), self.spec)

    def map(self, change: Callable[[int, Tensor], Tensor]) -> Tree:
        """Change the tensors; `change` gets a leaf's place and the tensor."""
        leaves = (change(i, x) if isinstance(x, Tensor) else x for i, x in enumerate(self.leaves))
        return Tree(tuple(leaves), self.spec)

    def tensors(self) -> list[Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def opaque(self) -> str | None:
        """The type of a leaf that might hide a tensor from the engine, or None."""
        for leaf in self.leaves:
            if not isinstance(leaf, (Tensor, *_PLAIN)):
                return type(leaf).__name__
        return None

    def outline(self) -> Outline:
        """Structure, shapes, dtypes, devices and plain values, without the tensors."""
        return Outline(self.spec, tuple(_description(leaf) for leaf in self.leaves))


@dataclass(frozen=True, eq=False)
class Outline:
    """What can be compared of a pytree without reading a tensor."""

    spec: TreeSpec
    leaves: tuple[str, ...]

    def difference(self, other: Outline) -> str | None:
        """The first difference in words, or None."""
        if self.spec != other.spec:
            return f"structure {self.spec} against {other.spec}"
        for place, (mine, theirs) in enumerate(zip(self.leaves, other.leaves)):
            if mine != theirs:
                return f"leaf {place}: {mine} against {theirs}"
        return None


def _description(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__


def kept(tensor: Tensor) -> Tensor:
    """A carried tensor as it waits for the walk: without graph, and without a larger storage behind it.

    A state that is a view of a chunk's activations would otherwise keep all of them alive, for every chunk.
    """
    tensor = tensor.detach()
    dense = type(tensor) is Tensor and tensor.layout is torch.strided  # others have no storage of their own to measure
    if dense and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size():
        return tensor.clone()
    return tensor


def usable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that autograd can use if it was born in inference mode and we are outside of it."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return tensor.clone()
    return tensor


def leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The tensor as a chunk's own input: cut from every graph before it."""
    if requires_grad:
        return usable(tensor).detach().requires_grad_()
    return tensor.detach() if tensor.requires_grad else usable(tensor)


def can_require_grad(tensor: Tensor) -> bool:
    """Whether a gradient can flow through a tensor of this dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


class Versions:
    """A watch over tensors: tells whether one was written in place since. It keeps none of them alive."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Inference tensors count no versions; what is written to them cannot be seen.
        self._seen = [(weakref.ref(t), t._version) for t in tensors if not t.is_inference()]

    def changed(self) -> str | None:
        """The description of a tensor written in place since, or None."""
        for reference, version in self._seen:
            tensor = reference()
            if tensor is not None and tensor._version != version:
                return _description(tensor)
        return None
