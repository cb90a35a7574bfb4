"""Layers walked back one at a time: the fill puts each layer's output away, the walk starts every layer from there.

Without it the walk holds the graph of all layers of a chunk, or runs them once more to have a place to start from.
Here the walk's forward computes the last layer only. The others answer with a promise (a NaN of the right shape, which
nobody reads), and their backward fetches their input, runs the layer with grad and differentiates it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from chunk_recur.replay import Autocast, RandomState, fresh_casts, preserved_random_state
from offload import Shelf

from .hf import Unsupported
from .unread import hooked, noted, only_added, replaced, tail_of, unread

Call = Callable[..., Tensor]


@dataclass
class Replay:
    """What one loss keeps of its layers.

    `stored`: the chunks whose layer outputs the fill puts away; of the others the walk computes them first.
    `ahead(index, place)`: begins to fetch what else the backward of a layer will want.
    """

    layers: list[nn.Module]
    shelf: Shelf
    stored: range
    ahead: Callable[[int, int], None]
    index: int = 0
    random: dict[tuple[int, int], RandomState] = field(default_factory=dict)
    handed: Tensor | None = None  # what the layer before returned
    tails: dict[int, nn.Linear | None] = field(default_factory=dict)  # whose value nobody reads, by place

    @property
    def last(self) -> int:
        return len(self.layers) - 1

    def begin(self, index: int) -> None:
        """A chunk begins, in either phase."""
        self.index = index
        for key in [key for key in self.random if key[0] > index]:
            del self.random[key]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand between the decoder and its layers. A layer's own activation checkpointing has nothing left to save."""
        with ExitStack() as stack:
            for place, layer in enumerate(self.layers):
                stack.enter_context(replaced(layer, "_compiled_call_impl", self._stand_in(place, layer)))
                if getattr(layer, "gradient_checkpointing", False):
                    stack.enter_context(replaced(layer, "gradient_checkpointing", False))
            yield

    def _stand_in(self, place: int, layer: nn.Module) -> Call:
        inner: Call = layer._compiled_call_impl or layer._call_impl

        @torch.compiler.disable(recursive=False)
        def call(*args: Any, **kwargs: Any) -> Tensor:
            context = kwargs.get("oomb")
            if context is not None and getattr(context, "replay", None) is not self:
                return inner(*args, **kwargs)  # a loss within this one, of the same model
            self._check_chain(place, layer, args)
            if torch.is_grad_enabled() and place < self.last:
                out = self._promise(place, layer, inner, args, kwargs)
            else:
                self._seat(place)
                out = inner(*args, **kwargs)
                if place < self.last and self.index in self.stored:
                    self.shelf.put((self.index, place), (out,))
            self.handed = out if place < self.last else None
            return out

        return call

    def _check_chain(self, place: int, layer: nn.Module, args: tuple) -> None:
        """The probe runs in evaluation mode; what a decoder does between its layers in training shows only here."""
        before, self.handed = self.handed, None
        if place and not (args and args[0] is before):
            raise Unsupported(
                f"layer {place} ({type(layer).__name__}) was not called with what the layer before returned: the "
                'decoder does something between its layers in training; set recompute="chunk"'
            )

    def _promise(self, place: int, layer: nn.Module, inner: Call, args: tuple, kwargs: dict) -> Tensor:
        """The walk's forward through a layer that is not the last."""
        leaves, spec = tree_flatten((args, kwargs))
        learns = any(p.requires_grad for p in layer.parameters()) or any(map(hooked, layer.modules()))
        tensors = [x if isinstance(x, Tensor) and x.requires_grad else None for x in leaves]
        if learns or any(x is not None for x in tensors):
            anchor = torch.empty(0, device=args[0].device, requires_grad=True)  # the output must require grad
            rest = [x if y is None else None for x, y in zip(leaves, tensors, strict=True)]
            return _Layer.apply(self, place, inner, rest, spec, anchor, *tensors)
        with torch.no_grad():
            return self.output(place, inner, args, kwargs)

    def output(self, place: int, inner: Call, args: tuple, kwargs: dict) -> Tensor:
        """A layer's output as the walk's forward hands it on: real where the last layer reads it, else a promise."""
        key = (self.index, place)
        if key not in self.shelf:
            self._seat(place)
            with fresh_casts():  # the last layer runs with grad in the same region, and may share weights
                out = inner(self.input(place, args[0]), *args[1:], **kwargs)
            self.shelf.put(key, (out,), near=self.index not in self.stored)
        if place + 1 < self.last:
            return args[0].new_full((), torch.nan).expand(args[0].shape)
        (out,) = self.shelf.get(key)
        self.shelf.drop(key)
        self.prefetch(self.index, place)
        return out

    def input(self, place: int, given: Tensor) -> Tensor:
        """What a layer really reads."""
        return given.detach() if place == 0 else self.shelf.get((self.index, place - 1))[0]

    def prefetch(self, index: int, place: int) -> None:
        """Begin to fetch what the backward of a layer starts from."""
        self.shelf.prefetch((index, place - 1))
        self.ahead(index, place)

    def with_grad(self, place: int, inner: Call, args: tuple, kwargs: dict) -> Tensor:
        """A layer with its graph, for gradients alone: the first chunk's shows whether they need its last product."""
        if place not in self.tails:
            layer = self.layers[place]
            tail = tail_of(layer) if inner == layer._call_impl else None  # of compiled code nothing can be left out
            if tail is not None:
                with noted(tail) as nodes:
                    out = inner(*args, **kwargs)
                self.tails[place] = tail if only_added(out, nodes) else None
                return out
            self.tails[place] = None
        tail = self.tails[place]
        if tail is not None:
            with unread(tail) as nodes:
                out = inner(*args, **kwargs)
            if only_added(out, nodes):
                return out
            self.tails[place] = None  # it does something else this time
            self._seat(place)
        return inner(*args, **kwargs)

    def done(self, place: int) -> None:
        """A layer's backward is enqueued."""
        self.shelf.drop((self.index, place - 1))

    def _seat(self, place: int) -> None:
        """Let a layer draw the random numbers that it drew the first time."""
        key = (self.index, place)
        if key in self.random:
            self.random[key].restore()
        else:
            self.random[key] = RandomState.now()

    @contextmanager
    def again(self, place: int) -> Iterator[None]:
        """The surroundings of a layer's second run."""
        with preserved_random_state():
            self._seat(place)
            yield


class _Layer(torch.autograd.Function):
    """One layer in the walk: nothing is computed forward but what is missing; the backward runs the layer with grad."""

    @staticmethod
    def forward(
        ctx: Any, replay: Replay, place: int, inner: Call, rest: list, spec: Any, anchor: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.replay, ctx.place, ctx.index, ctx.inner = replay, place, replay.index, inner
        ctx.rest, ctx.spec, ctx.autocast = rest, spec, Autocast.now()
        ctx.places = [i for i, x in enumerate(tensors) if x is not None]
        ctx.save_for_backward(*(x for x in tensors if x is not None))
        leaves = [x if y is None else y for x, y in zip(rest, tensors, strict=True)]
        args, kwargs = tree_unflatten(leaves, spec)
        return replay.output(place, inner, args, kwargs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        replay, place = ctx.replay, ctx.place
        assert replay.index == ctx.index, "a chunk's layers are walked back before the next chunk begins"
        if place:
            replay.prefetch(ctx.index, place - 1)
        elif ctx.index:  # what the chunk before begins with
            replay.shelf.prefetch((ctx.index - 1, replay.last - 1))
        leaves = list(ctx.rest)
        for i, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            leaves[i] = x.detach().requires_grad_()
        hidden = replay.input(place, leaves[0]).detach().requires_grad_(0 in ctx.places)
        leaves[0] = hidden
        args, kwargs = tree_unflatten(leaves, ctx.spec)
        with torch.enable_grad(), ctx.autocast.entered(), replay.again(place):
            out = replay.with_grad(place, ctx.inner, args, kwargs)
        if out.requires_grad:  # not if all that could learn went unused: experts that no token chose
            # not autograd.grad: parameters accumulate into .grad, with their hooks
            torch.autograd.backward(out, grad)
        replay.done(place)
        grads = [leaves[i].grad if i in ctx.places else None for i in range(len(leaves))]
        return (None,) * 6 + tuple(grads)
