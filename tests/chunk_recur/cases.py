"""Small chunked models, a store that keeps keys and values in a list, and stores that write a log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from chunk_recur import Phase


class Recurrent(nn.Module):
    """A GRU cell with a learned initial state and a head; one token after the other."""

    def __init__(self, inputs: int = 3, hidden: int = 4, *, dropout: float = 0.0, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.cell = nn.GRUCell(inputs, hidden, dtype=dtype)
        self.head = nn.Linear(hidden, 2, dtype=dtype)
        self.drop = nn.Dropout(dropout)
        self.initial = nn.Parameter(torch.randn(hidden, dtype=dtype))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        loss = x.new_zeros(())
        for token in x.unbind(1):
            h = self.cell(self.drop(token), h)
            loss = loss + self.head(h).square().sum()
        return loss, h

    def start(self, batch: int) -> Tensor:
        return self.initial.expand(batch, -1)

    def step(self, index: int, x: Tensor, h: Tensor, phase: Phase) -> tuple[Tensor, Tensor]:
        return self(x, h)


class LinearAttention(nn.Module):
    """Linear attention: the carried state is a dict of a matrix, a normalizer and the number of tokens seen."""

    def __init__(self, inputs: int = 3, width: int = 4):
        super().__init__()
        self.qkv = nn.Linear(inputs, 3 * width, dtype=torch.float64)
        self.width = width

    def start(self, batch: int) -> dict[str, Any]:
        matrix = torch.zeros(batch, self.width, self.width, dtype=torch.float64)
        return {"matrix": matrix, "norm": torch.ones(batch, self.width, dtype=torch.float64), "tokens": 0}

    def step(self, index: int, x: Tensor, state: dict[str, Any], phase: Phase) -> tuple[Tensor, dict[str, Any]]:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = q.exp(), k.exp()
        matrix = state["matrix"].unsqueeze(1) + torch.einsum("bck,bcv->bckv", k, v).cumsum(1)
        norm = state["norm"].unsqueeze(1) + k.cumsum(1)
        out = torch.einsum("bck,bckv->bcv", q, matrix) / (q * norm).sum(-1, keepdim=True)
        # Views of the whole chunk, as such models return them.
        after = {"matrix": matrix[:, -1], "norm": norm[:, -1], "tokens": state["tokens"] + x.shape[1]}
        return (out * (state["tokens"] + 1)).square().sum(), after


class KVStore:
    """A ChunkStore of keys and values: appended in the fill; gradients of earlier chunks collected in the walk."""

    def __init__(self, layers: int):
        self.layers = layers
        self.abort()

    def abort(self) -> None:
        self.kept: list[list[Tensor]] = [[] for _ in range(self.layers)]  # [2, B, C, D] per chunk
        self.grads: dict[tuple[int, int], Tensor] = {}
        self.past: dict[int, Tensor] = {}
        self.index = -1

    def open(self, index: int, phase: Phase) -> None:
        self.index = index
        if index:
            for layer in range(self.layers):
                past = torch.cat(self.kept[layer][:index], 2).detach()
                self.past[layer] = past.requires_grad_(phase == "walk")

    def close(self, index: int, phase: Phase) -> None:
        if phase == "walk":
            for layer, past in self.past.items():
                if past.grad is not None:
                    sizes = [kv.shape[2] for kv in self.kept[layer][:index]]
                    for chunk, grad in enumerate(past.grad.split(sizes, 2)):
                        self.grads[chunk, layer] = self.grads.get((chunk, layer), 0) + grad
        self.past = {}

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        if len(self.kept[layer]) == self.index:
            self.kept[layer].append(kv.detach().clone())
        kv = _Inject.apply(kv, self, (self.index, layer))
        if self.index:
            kv = torch.cat([self.past[layer], kv], 2)
        return causal(q, kv)


class _Inject(torch.autograd.Function):
    """Identity; its backward adds what later chunks left for this chunk's keys and values."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, store: KVStore, key: tuple[int, int]) -> Tensor:
        ctx.store, ctx.key = store, key
        return kv.view_as(kv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad + ctx.store.grads.get(ctx.key, 0), None, None


def causal(q: Tensor, kv: Tensor) -> Tensor:
    """Attention of the last queries over all keys: q [B, C, D], kv [2, B, T, D]."""
    scores = q @ kv[0].mT
    unseen = torch.ones(q.shape[1], kv.shape[2], dtype=torch.bool).triu(kv.shape[2] - q.shape[1] + 1)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1) @ kv[1]


class Transformer(nn.Module):
    """Layers of attention; `attend` is either the dense one or a store's. Chunks without a label have no loss."""

    def __init__(self, layers: int = 2, width: int = 4, dropout: float = 0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width, dtype=torch.float64) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, width, dtype=torch.float64) for _ in range(layers))
        self.drop = nn.Dropout(dropout)
        self.wrap: Callable[..., Any] = lambda f, *args: f(*args)  # activation checkpointing goes here

    def layer(self, i: int, x: Tensor, attend: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        q, k, v = self.layers[i](self.drop(x)).chunk(3, -1)
        return x + self.mix[i](attend(i, q, torch.stack([k, v])).tanh())

    def forward(self, x: Tensor, labelled: Tensor, attend: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
        for i in range(len(self.layers)):
            x = self.wrap(self.layer, i, x, attend)
        return (x.square().sum(-1) * labelled).sum()

    def stepper(self, store: KVStore) -> Callable[..., Any]:
        def step(index: int, chunk: tuple[Tensor, Tensor], carried: Any, phase: Phase) -> tuple[Tensor | None, Any]:
            if phase == "walk":  # no loss, but the keys and values still have a gradient to give
                return self(*chunk, store.attend), carried
            loss = self(*chunk, store.attend)
            return (loss if chunk[1].any() else None), carried

        return step


class LogStore:
    """Writes down every call; fails where it is told to."""

    def __init__(self, log: list[tuple[Any, ...]], name: str = "store", fail: tuple[Any, ...] | None = None):
        self.log, self.name, self.fail = log, name, fail

    def _write(self, *call: Any) -> None:
        self.log.append((self.name, *call))
        if call == self.fail:
            raise Fault(str(call))

    def open(self, index: int, phase: Phase) -> None:
        self._write("open", index, phase)

    def close(self, index: int, phase: Phase) -> None:
        self._write("close", index, phase)

    def abort(self) -> None:
        self._write("abort")


class Fault(BaseException):
    """Not an Exception: what holds for it holds for an interrupt."""


def take_grads(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the gradients, which are then cleared; zeros where there is none."""
    grads = [torch.zeros_like(t) if t.grad is None else t.grad.clone() for t in tensors]
    for tensor in tensors:
        tensor.grad = None
    return grads


def assert_same(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    """Each tensor's relative error, measured against its own length; NaN is an error too."""
    assert len(ours) == len(theirs)
    for place, (a, b) in enumerate(zip(ours, theirs)):
        a, b = a.detach().double(), b.detach().double()
        error = float((a - b).norm() / b.norm().clamp_min(1e-30))
        assert error <= tolerance, f"tensor {place}: relative error {error}"
