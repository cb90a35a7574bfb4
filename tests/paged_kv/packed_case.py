"""A mixed batch over a cache whose unwritten memory holds NaN, and its dense float64 oracle, pair by pair."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from tests.numerics import relative
from tests.paged_kv.oracle import ShuffledTable
from torch import Tensor

from paged_kv import PagedKV, PagePool, paged_attention


@dataclass
class Packed:
    """Sequence s has `starts[s]` tokens of past and `counts[s]` in the block. `lists`: pages in a list of `selected`.

    Shapes: q [T, H, D]; k, v [T, G, D]; keys, values: per sequence [starts[s] + counts[s], G, D]
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    groups: int = 2
    repeat: int = 3
    dim: int = 32
    page: int = 16
    window: int | None = None
    with_sinks: bool = False
    lists: int | None = None
    list_heads: bool = True
    scale: float = 0.2
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        lengths = [s + c for s, c in zip(self.starts, self.counts)]
        self.keys, self.values = ([self.random(n, self.groups, self.dim) for n in lengths] for _ in range(2))
        self.q = self.random(sum(self.counts), self.groups * self.repeat, self.dim)
        self.sinks = self.random(self.groups * self.repeat) * 2 if self.with_sinks else None
        self.selected = None if self.lists is None else self.draw_lists(self.lists)
        self.kv = self.fill()

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).to(self.dtype)

    def blocks(self, s: int) -> int:
        return (self.starts[s] + self.counts[s] - 1) // self.page - self.starts[s] // self.page + 1

    def draw_lists(self, size: int) -> Tensor:
        """Pages in any order, -1 anywhere, some listed twice, some that the sequence or no sequence could have."""
        batch = len(self.counts)
        shape = (batch, self.groups if self.list_heads else 1, max(self.blocks(s) for s in range(batch)), size)
        most = max((s + c) // self.page + 2 for s, c in zip(self.starts, self.counts))
        lists = torch.randint(-1, most, shape, generator=self.generator, device=self.device)
        ids = torch.tensor([2**31 - 1, 2**31 // self.page + 1, -(2**31)], device=self.device)
        strange = torch.randint(0, 12, shape, generator=self.generator, device=self.device)
        return torch.where(strange < 3, ids[strange.clamp(max=2)], lists).to(torch.int32)

    def fill(self) -> PagedKV:
        pages = sum(-(-(s + c) // self.page) for s, c in zip(self.starts, self.counts)) + 3
        pool = PagePool(
            layers=2, slots=pages, page_tokens=self.page, kv_heads=self.groups, head_dim=self.dim, dtype=self.dtype,
            device=self.device,
        )  # fmt: skip
        if self.shuffle:
            pool.table = ShuffledTable(pages, self.page, self.seed)
        for x in (*pool.k, *pool.v):
            x.fill_(torch.nan)
        kv = PagedKV(pool)
        self.ids = [kv.add() for _ in self.counts]
        if any(self.starts):
            kv.extend({s: n for s, n in zip(self.ids, self.starts) if n})
            past_k, past_v = (torch.cat([x[:n] for x, n in zip(xs, self.starts)]) for xs in (self.keys, self.values))
            for layer in (0, 1):
                kv.append(layer, past_k if layer else past_k * 0, past_v if layer else past_v * 0)
        kv.extend(dict(zip(self.ids, self.counts)))
        self.k, self.v = (torch.cat([x[n:] for x, n in zip(xs, self.starts)]) for xs in (self.keys, self.values))
        kv.append(1, self.k, self.v)
        return kv

    def run(self, backend: str) -> Tensor:
        return paged_attention(
            self.q, self.k, self.v, self.kv, 1, scale=self.scale, window=self.window, sinks=self.sinks,
            selected=self.selected, backend=backend,
        )  # fmt: skip

    def dense(self, dtype: torch.dtype = torch.float64) -> Tensor:
        parts, at = [], 0
        for s, count in enumerate(self.counts):
            parts.append(self._dense_one(s, self.q[at : at + count].to(dtype), dtype))
            at += count
        return torch.cat(parts)

    def _dense_one(self, s: int, q: Tensor, dtype: torch.dtype) -> Tensor:
        k, v = (x[s].to(dtype).repeat_interleave(self.repeat, 1) for x in (self.keys, self.values))
        seen = self._seen(s, len(k))
        scores = (torch.einsum("ihd,jhd->hij", q, k) * self.scale).masked_fill(~seen, -torch.inf)
        weights = torch.cat((scores, self._extra(s, seen, dtype)), -1).softmax(-1)[..., :-1]
        return torch.einsum("hij,jhd->ihd", weights, v)

    def _seen(self, s: int, keys: int) -> Tensor:
        """[H, C, keys]"""
        i = self.starts[s] + torch.arange(self.counts[s], device=self.device)[:, None]
        j = torch.arange(keys, device=self.device)[None]
        seen = j <= i
        if self.window is not None:
            seen = seen & (j > i - self.window)
        seen = seen.expand(self.groups * self.repeat, -1, -1)
        if self.selected is not None:
            rows = self.selected[s][:, i[:, 0] // self.page - self.starts[s] // self.page]  # [G or 1, C, K]
            listed = (rows[..., None] == j[0] // self.page).any(2)
            seen = seen & listed.repeat_interleave(self.groups * self.repeat // len(listed), 0)
        return seen

    def _extra(self, s: int, seen: Tensor, dtype: torch.dtype) -> Tensor:
        """One more logit a row, [H, C, 1]: the sink, or what keeps a row that sees nothing from being no number."""
        if self.sinks is not None:
            return self.sinks.to(dtype)[:, None, None].expand(-1, self.counts[s], 1)
        return torch.where(~seen.any(-1, keepdim=True), 0.0, -torch.inf).to(dtype)

    def exact(self) -> Tensor:
        """As `dense`, in numpy's widest numbers: of float64 results a float64 truth is no judge, being as far off."""
        parts, at = [], 0
        for s, count in enumerate(self.counts):
            q, k, v = (
                x.double().cpu().numpy().astype(np.longdouble)
                for x in (
                    self.q[at : at + count],
                    *(y[s].repeat_interleave(self.repeat, 1) for y in (self.keys, self.values)),
                )
            )
            seen = self._seen(s, len(k))
            scores = np.einsum("ihd,jhd->hij", q, k) * np.longdouble(self.scale)
            scores[~seen.cpu().numpy()] = -np.inf
            scores = np.concatenate((scores, self._extra(s, seen, torch.float64).cpu().numpy()), -1)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            parts.append(np.einsum("hij,jhd->ihd", weights[..., :-1], v))
            at += count
        return torch.from_numpy(np.concatenate(parts).astype(np.float64)).to(self.device)

    def check(self, out: Tensor) -> None:
        """At most twice as far from the truth as the plain computation in the same dtype; never NaN.

        A score of size S is known to eps * S only, and so is its exponential.
        """
        true = self.exact() if self.dtype == torch.float64 else self.dense()
        plain = self.dense(self.dtype)
        assert out.shape == self.q.shape and out.dtype == self.dtype
        if not true.any():
            assert not out.any()
            return
        largest = (
            abs(self.scale) * float(self.q.norm(dim=-1).max()) * max(float(k.norm(dim=-1).max()) for k in self.keys)
        )
        floor = torch.finfo(self.dtype).eps * (max(4.0, largest) if self.dtype.itemsize > 2 else 1.0)
        allowed = max(2 * relative(plain, true), floor)
        assert relative(out, true) <= allowed, f"{relative(out, true):.2e}, allowed {allowed:.2e}"
