"""The shapes, calls and checks that the attention benchmarks share; nothing to run here, see attention.py."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages/paged_kv/src"))

from paged_kv import Segment
from paged_kv.past import Geometry

DEVICE = "cuda"


@dataclass(frozen=True)
class Config:
    """One shape: chunk of `tokens` queries over `past` tokens."""

    tokens: int = 4096
    past: int = 65536
    heads: int = 28
    groups: int = 4
    dim: int = 128
    page: int = 128
    window: int | None = None
    sinks: bool = False
    shuffle: bool = False

    @property
    def flops(self) -> float:
        if self.window is not None:
            pairs = self.tokens * min(self.window, self.past)
        else:
            pairs = self.tokens * self.past + self.tokens * (self.tokens + 1) / 2
        return 4.0 * self.heads * self.dim * pairs

    @property
    def bytes(self) -> dict[str, float]:
        """The least memory that a pass moves: 16-bit tensors read or written once, gradients of keys in float32.

        Where a window hides most of the past, this bounds the speed and not the matrix units.
        """
        rows = self.tokens * self.heads * (2 * self.dim)  # of one of q, out, dout, dq
        stats = self.tokens * self.heads * 4
        keys = (self.tokens + (self.past if self.window is None else self.window)) * self.groups * self.dim
        return {"fwd": 2 * rows + stats + keys * 4, "bwd": 4 * rows + stats + keys * (4 + 8)}

    @property
    def name(self) -> str:
        text = f"{self.tokens // 1024}K x {self.past // 1024}K D{self.dim} {self.heads}/{self.groups} P{self.page}"
        return (
            text
            + (f" window {self.window}" if self.window else "")
            + (" sinks" if self.sinks else "")
            + (" shuffled" if self.shuffle else "")
        )


class Bench:
    """The tensors of one configuration and its calls."""

    def __init__(self, config: Config, dtype: torch.dtype = torch.bfloat16) -> None:
        self.config = c = config
        torch.manual_seed(0)
        make = lambda *shape: torch.randn(shape, device=DEVICE, dtype=dtype)  # noqa: E731
        self.q, self.dout = make(1, c.tokens, c.heads, c.dim), make(1, c.tokens, c.heads, c.dim)
        self.k, self.v = make(1, c.tokens, c.groups, c.dim), make(1, c.tokens, c.groups, c.dim)
        pages = c.past // c.page
        self.pages_k, self.pages_v = (make(pages, c.page, c.groups, c.dim) for _ in range(2))
        self.dk, self.dv = (torch.zeros(self.pages_k.shape, device=DEVICE) for _ in range(2))
        order = torch.randperm(pages, device=DEVICE) if c.shuffle else torch.arange(pages, device=DEVICE)
        self.slots = order.to(torch.int32)[None]
        self.geometry = Geometry(c.dim**-0.5, (c.past,), c.page, c.window)
        self.sinks = torch.randn(c.heads, device=DEVICE) if c.sinks else None
        self.first = 0 if c.window is None else max(0, c.past - c.window + 1) // c.page

    @property
    def segment(self) -> Segment:
        runs = None if self.config.shuffle else (self.first,)
        slots = self.slots[:, self.first :]
        return Segment(self.first, self.pages_k, self.pages_v, slots, runs, self.dk, self.dv, slots, runs)

    def forward(self, backend) -> tuple[Tensor, Tensor]:
        more = {} if self.sinks is None else {"sinks": self.sinks}
        return backend.forward(self.q, self.k, self.v, iter([self.segment]), self.geometry, **more)

    def backward(self, backend, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (self.dout, self.q, self.k, self.v, out, lse, iter([self.segment]), self.geometry)
        options = {"past_grad": True, "accumulate": "owner"}
        if self.sinks is None:
            return backend.backward(*inputs, **options)
        return backend.backward_with_sinks(*inputs, sinks=self.sinks, **options)[:3]

    def keys(self, group: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a group in logical order, float64 [past + C, D]."""
        order = self.slots[0].long()
        return tuple(
            torch.cat((pages[order][:, :, group].flatten(0, 1), own[0, :, group])).double()
            for pages, own in ((self.pages_k, self.k), (self.pages_v, self.v))
        )

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        i, j = self.config.past + queries[:, None], keys[None]
        return (j <= i) & (j > i - (self.config.window or 2**40))

    def check(self, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor | None = None) -> float:
        """Worst relative error against float64 on sampled queries of one head, and on sampled past keys."""
        c, group = self.config, self.config.groups - 1
        head = c.heads - 1
        k, v = self.keys(group)
        queries = torch.randint(0, c.tokens, (48,), device=DEVICE)
        q, dout = (x[0, queries, head].double() for x in (self.q, self.dout))
        seen = self.seen(queries, torch.arange(len(k), device=DEVICE))
        scores = (q @ k.T * self.geometry.scale).masked_fill(~seen, -math.inf)
        stats = scores.logsumexp(-1)
        if self.sinks is not None:
            stats = torch.logaddexp(stats, self.sinks[head].double())
        p = torch.exp(scores - stats[:, None])
        true = p @ v
        ds = p * (dout @ v.T - (true * dout).sum(-1, keepdim=True))
        errors = [_relative(out[0, queries, head], true), _relative(dq[0, queries, head], ds @ k * self.geometry.scale)]
        errors.append(_relative(lse[0, head, queries], stats))
        if dk is not None:
            errors.append(self._check_dk(dk, group, k, v, out, lse))
        assert max(errors) < 2e-2, f"{c.name}: wrong, errors {errors}"
        return max(errors)

    def _check_dk(self, dk: Tensor, group: int, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> float:
        c, share = self.config, self.config.heads // self.config.groups
        recent = c.past if c.window is None else c.window
        places = c.past - 1 - torch.randint(0, recent, (32,), device=DEVICE)
        heads = slice(group * share, (group + 1) * share)
        q, dout, out = (x[0, :, heads].double().flatten(0, 1) for x in (self.q, self.dout, out))
        stats = lse[0, heads].T.flatten().double()
        seen = self.seen(torch.arange(c.tokens, device=DEVICE), places).repeat_interleave(share, 0)
        p = torch.exp(q @ k[places].T * self.geometry.scale - stats[:, None]).masked_fill(~seen, 0.0)
        ds = p * (dout @ v[places].T - (out * dout).sum(-1, keepdim=True))
        ours = dk[self.slots[0, places // c.page].long(), places % c.page, group]
        return _relative(ours, ds.T @ q * self.geometry.scale)


def _relative(a: Tensor, b: Tensor) -> float:
    error = float((a.double() - b).norm() / b.norm())
    return error if error == error else math.inf


def median_ms(call, *, graph: bool = False, rep: int = 120) -> float:
    if graph:
        return do_bench_cudagraph(call, rep=rep, return_mode="median")
    return do_bench(call, warmup=25, rep=rep, return_mode="median")


@dataclass(frozen=True)
class Timed:
    """Something to time; `repeats`: how often one call does it; `keeps`: what must live as long."""

    call: Callable[[], object]
    repeats: int = 1
    keeps: object = None

    @staticmethod
    def in_graph(call: Callable[[], object], repeats: int = 20) -> Timed:
        """For what takes microseconds, where launches would be timed instead."""
        call()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        return Timed(graph.replay, repeats, keeps=call)  # a graph does not hold the tensors that it reads


def side_by_side(systems: dict[str, Timed], *, rounds: int = 6, seconds: float = 0.1) -> list[dict[str, float]]:
    """Milliseconds of each system, round by round, every other round in reverse order.

    Clocks and temperature drift over seconds; within a round all systems meet the same. A turn begins with half as many
    calls that are not timed: a single call would run at whatever clock the system before it left, where work that goes
    on keeps the chip at the clock that its own power allows.
    """

    def run(system: Timed, calls: int) -> None:
        for _ in range(calls):
            system.call()

    def turn(system: Timed, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # a head start, so that the GPU never waits for a launch
        run(system, (calls + 1) // 2)
        start.record()
        run(system, calls)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls

    order = list(systems)
    calls = {}
    for name in order:
        run(systems[name], 1)
        calls[name] = max(1, round(1000 * seconds / turn(systems[name], 1)))
    return [
        {n: turn(systems[n], calls[n]) / systems[n].repeats for n in (order if i % 2 else order[::-1])}
        for i in range(rounds)
    ]


DENSE = {64: Config(dim=64), 128: Config(), 256: Config(heads=14, groups=2, dim=256)}
NARROW = Config(heads=64, groups=8, dim=64, window=128, sinks=True)
