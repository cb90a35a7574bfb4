"""The last product of a layer that runs again only to be differentiated: nobody reads what comes out of it.

A layer that ends with `x + W h` needs W, h and the incoming gradient for its backward, not W h, which is a quarter of
all its products in a gated MLP. The product is left out (NaN in its place) where the graph shows that its value meets
nothing but the last addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

HARMLESS = {Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.size, Tensor.dim}  # type: ignore[attr-defined]


class _Unread(torch.autograd.Function):
    """`F.linear` with the gradients of it and the value of nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_full((*x.shape[:-1], weight.shape[0]), torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            (rows @ weight).view(x.shape) if need_x else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if need_weight else None,
            rows.sum(0) if need_bias else None,
        )


def tail_of(layer: nn.Module) -> nn.Linear | None:
    """The plain linear map that comes last among a layer's modules, if there is one; none where hooks read values, and
    none where parts are compiled: another forward within them would break their graphs.
    """
    modules = list(layer.modules())
    if any(map(hooked, modules)) or any(map(_compiled, modules[1:])):
        return None
    plain = [module for module in modules if type(module) is nn.Linear and "forward" not in vars(module)]
    tail = plain[-1] if plain else None
    # weights of another kind (quantized ones) multiply in their own way
    return tail if tail is not None and type(tail.weight) is nn.Parameter else None


def _compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks around its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def unread(linear: nn.Linear) -> Iterator[list[Any]]:
    """Within it the module's value is not computed. Yields the graph's nodes of what it returned instead."""
    nodes: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        tensors: tuple[Tensor | None, ...] = (x, linear.weight, linear.bias)
        if torch.is_autocast_enabled(x.device.type):  # as it would do with `F.linear`
            dtype = torch.get_autocast_dtype(x.device.type)
            tensors = tuple(None if t is None else t.to(dtype) for t in tensors)
        promise = _Unread.apply(*tensors)
        nodes.append(promise.grad_fn)
        return promise

    with replaced(linear, "forward", forward):
        yield nodes


@contextmanager
def noted(linear: nn.Linear) -> Iterator[list[Any]]:
    """Within it the module computes as ever. Yields the graph's nodes of what it returned; afterwards none if that, or
    what was made of it, was used again: a use without a gradient does not show in the graph.
    """
    nodes: list[Any] = []
    uses = _Uses()

    def forward(x: Tensor) -> Tensor:
        value = F.linear(x, linear.weight, linear.bias)
        nodes.append(value.grad_fn)
        uses.of.append(value)
        return value

    with replaced(linear, "forward", forward), uses:
        yield nodes
    if uses.count != 1:
        nodes.clear()


class _Uses(TorchFunctionMode):
    """Counts what torch is asked of some tensors and of all that it makes of them, but for their shape and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.of: list[Tensor] = []
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in HARMLESS and any(x is y for x in tree_leaves((args, kwargs)) for y in self.of):
            self.count += 1
            self.of += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


def only_added(out: Tensor, nodes: list[Any]) -> bool:
    """Whether `out` is the sum of the one tensor that was returned and another, as its graph shows."""
    root: Any = out.grad_fn
    if root is None or len(nodes) != 1 or nodes[0] is None or type(root).__name__ != "AddBackward0":
        return False
    return [node is nodes[0] for node, _ in root.next_functions].count(True) == 1


@contextmanager
def replaced(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Another value for an attribute of one module; what the module itself did not have it does not keep."""
    missing = object()
    before = vars(module).get(name, missing)
    vars(module)[name] = value
    try:
        yield
    finally:
        if before is missing:
            del vars(module)[name]
        else:
            vars(module)[name] = before
