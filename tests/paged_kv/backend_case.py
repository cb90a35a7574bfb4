"""One call of a backend module on awkward memory, its dense float64 oracle, and the rule for its errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import torch
from tests.numerics import relative
from tests.paged_kv.oracle import poisoned
from torch import Tensor

from paged_kv import Segment, function, triton_attention
from paged_kv.past import Geometry
from paged_kv.triton_problem import Problem

NAMES = ("out", "lse", "dq", "dk", "dv", "past dk", "past dv")


@dataclass
class Case:
    """Inputs, pages with NaN wherever nothing was written, and gradient pages with earlier contributions.

    Shapes: q, dout [B, C, H, D]; k, v [B, C, G, D]; past_k, past_v: per sequence [lengths[b], G, D]
    `documents`: None, or "some": random starts, with one query that sees nothing. `split`: pages a segment, None: all.
    `shuffle`: slots in random order, the host knowing nothing of them.
    """

    batch: int = 1
    tokens: int = 24
    heads: int = 4
    groups: int = 2
    dim: int = 64
    page: int = 64
    lengths: tuple[int, ...] = (150,)
    window: int | None = None
    documents: str | None = None
    scale: float = 0.15
    split: int | None = None
    shuffle: bool = True
    seed: int = 0
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    device: str = "cpu"
    spare: int = 2
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(self.seed)
        self.q, self.dout = (self._random(self.batch, self.tokens, self.heads, self.dim) for _ in range(2))
        self.k, self.v = (self._random(self.batch, self.tokens, self.groups, self.dim) for _ in range(2))
        self.past_k, self.past_v = (
            [self._random(n, self.groups, self.dim) for n in self.lengths] for _ in range(2)
        )  # fmt: skip
        self.starts = self._documents() if self.documents else None
        self._lay_out()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float32).to(self.dtype)

    def _documents(self) -> Tensor:
        place = torch.arange(self.tokens, device=self.device)
        starts = []
        for n in self.lengths:
            cut = torch.rand(self.tokens, generator=self.generator, device=self.device) < 0.15
            starts.append(torch.where(cut, place + n, max(0, n - 70)).cummax(0).values)
        starts = torch.stack(starts).to(torch.int32)
        starts[:, self.tokens // 2] = 10**6
        return starts

    def _lay_out(self) -> None:
        counts = [-(-n // self.page) for n in self.lengths]
        slots = sum(counts) + self.spare
        order = torch.randperm(slots, generator=self.generator, device=self.device).tolist()
        order = order if self.shuffle else list(range(slots))
        shape = (slots, self.page, self.groups, self.dim)
        self.pages_k, self.pages_v = (
            torch.full(shape, torch.nan, dtype=self.dtype, device=self.device) for _ in range(2)
        )  # fmt: skip
        table = torch.full((self.batch, max(counts)), -1, dtype=torch.int32)
        self.runs = None if self.shuffle else tuple(sum(counts[:b]) for b in range(self.batch))
        for b, count in enumerate(counts):
            for i in range(count):
                table[b, i] = slot = order.pop(0)
                for pages, past in ((self.pages_k, self.past_k), (self.pages_v, self.past_v)):
                    part = past[b][i * self.page : (i + 1) * self.page]
                    pages[slot, : len(part)] = part
        self.table = table.to(self.device)
        # Eighths: what is added to them is not rounded away.
        earlier = torch.randint(-2, 3, shape, generator=self.generator, device=self.device) / 8
        self.earlier = earlier.to(self.grad_dtype)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.scale, self.lengths, self.page, self.window, self.starts)

    def segments(self, grads: tuple[Tensor, Tensor] | None = None, first_page: int = 0) -> Iterator[Segment]:
        columns = self.table.shape[1]
        step = self.split or max(columns, 1)
        for start in range(first_page, columns, step):
            slots = self.table[:, start : start + step]
            runs = self.runs
            if runs is not None:
                runs = tuple(run + start if int(row[0]) >= 0 else 0 for run, row in zip(runs, slots))
            more = () if grads is None else (*grads, slots, runs)
            yield Segment(start, self.pages_k, self.pages_v, slots, runs, *more)

    def run(self, backend, *, accumulate: str = "owner", first_page: int = 0) -> list[Tensor]:
        """What the backend computes, as NAMES; the last two are whole gradient pages."""
        grads = (self.earlier.clone(), self.earlier.clone())
        inputs = (self.q, self.k, self.v)
        out, lse = backend.forward(*inputs, self.segments(None, first_page), self.geometry)
        assert out.dtype == self.dtype and out.shape == self.q.shape
        assert lse.dtype == torch.float32 and lse.shape == (self.batch, self.heads, self.tokens)
        dq, dk, dv = backend.backward(
            self.dout, *inputs, out, lse, self.segments(grads, first_page), self.geometry,
            past_grad=True, accumulate=accumulate,
        )  # fmt: skip
        return [out, lse, dq, dk, dv, *grads]

    def sinks_grads(self, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient of sinks: of the Triton backend, the true one in float64, and what the rounded output says."""
        grads = (self.earlier.clone(), self.earlier.clone())
        inputs = (self.q, self.k, self.v)
        out, lse = triton_attention.forward(*inputs, self.segments(), self.geometry, sinks=sinks)
        ours = triton_attention.backward_with_sinks(
            self.dout, *inputs, out, lse, self.segments(grads), self.geometry,
            sinks=sinks, past_grad=True, accumulate="owner",
        )[3]  # fmt: skip
        _, exact_out, exact_lse = self._dense_forward(torch.float64)
        exact = function._apply_sinks(exact_out.detach(), exact_lse.detach(), sinks.double())
        true = function._sinks_grad(self.dout.double(), *exact, sinks.double())
        assert ours is not None
        return ours, true, function._sinks_grad(self.dout, out, lse, sinks)

    def dense(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The same by one matrix of scores and autograd; the last two are the past's gradients, [tokens, G, D]."""
        leaves, out, lse = self._dense_forward(dtype)
        return [out.detach(), lse.detach(), *self._gradients(leaves, out, self.dout.to(dtype))]

    def rounding_of_delta(self) -> list[float]:
        """How far dq, dk, dv, past dk and past dv move when rowsum(dout * out) is off by the rounding of `out`.

        A backward that is given `out` in its own dtype cannot know better; in float32 the sum itself rounds too, at
        every step. The row sum enters as minus the gradient of the LSE; signs are drawn.
        """
        leaves, out, lse = self._dense_forward(torch.float64)
        size = (self.dout.double() * out).norm(dim=-1).transpose(1, 2) * torch.finfo(self.dtype).eps
        size = size * (1 + self.dim**0.5 / 2) if self.dtype == torch.float32 else size
        sign = torch.randint(0, 2, lse.shape, generator=torch.Generator().manual_seed(0)).to(lse.device) * 2 - 1
        off = torch.where(lse.isneginf(), 0.0, size * sign).detach()
        return [float(x.norm()) for x in self._gradients(leaves, lse.masked_fill(lse.isneginf(), 0.0), off)]

    def _dense_forward(self, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v, *self.past_k, *self.past_v)]
        q, k, v = leaves[:3]
        results = [self._dense_one(b, q[b], k[b], v[b], leaves[3 + b], leaves[3 + self.batch + b]) for b in self._all]
        out, lse = (torch.stack(x) for x in zip(*results))
        return leaves, out, lse

    def _gradients(self, leaves: list[Tensor], result: Tensor, incoming: Tensor) -> list[Tensor]:
        if not result.requires_grad:  # nobody sees anything
            grads = [None] * len(leaves)
        else:
            grads = list(torch.autograd.grad(result, leaves, incoming, allow_unused=True))
        grads = [torch.zeros_like(x) if g is None else g.nan_to_num(0.0) for x, g in zip(leaves, grads)]
        return [*grads[:3], *(torch.cat(x) for x in (grads[3 : 3 + self.batch], grads[3 + self.batch :]))]

    @property
    def _all(self) -> range:
        return range(self.batch)

    def _dense_one(self, b: int, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor):
        share = self.heads // self.groups
        keys, values = (torch.cat(x).repeat_interleave(share, 1) for x in ((past_k, k), (past_v, v)))
        i = self.lengths[b] + torch.arange(self.tokens, device=self.device)[:, None]
        j = torch.arange(len(keys), device=self.device)[None]
        seen = j <= i
        if self.window is not None:
            seen &= j > i - self.window
        if self.starts is not None:
            seen &= j >= self.starts[b][:, None]
        scores = torch.einsum("ihd,jhd->hij", q, keys) * self.scale
        scores = scores.masked_fill(~seen, -torch.inf)
        nothing = ~seen.any(-1)
        weights = scores.masked_fill(nothing[:, None], 0.0).softmax(-1).masked_fill(nothing[:, None], 0.0)
        return torch.einsum("hij,jhd->ihd", weights, values), scores.logsumexp(-1)

    def _size_of_ds(self, grad: Tensor) -> float:
        """About how large a gradient like this one is where nothing cancels."""
        rows = grad.numel() // self.dim
        return abs(self.scale) * rows**0.5 * self.dim  # |dout . v| is about sqrt(D), and so is |q| or |k|

    def _largest_exponent(self, lse: Tensor) -> float:
        score = abs(self.scale) * (self.q.detach().norm(dim=-1).max() * self.k.detach().norm(dim=-1).max())
        return max(float(score), float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 0.0)

    def past_gradients(self, pages: Tensor) -> Tensor:
        """What was added to the past's tokens; asserts that nothing else in the pages changed."""
        added = pages.double() - self.earlier.double()
        parts = []
        for b, n in enumerate(self.lengths):
            for i in range(-(-n // self.page)):
                slot, count = int(self.table[b, i]), min(self.page, n - i * self.page)
                parts.append(added[slot, :count].clone())
                added[slot, :count] = 0.0
        assert not added.any(), "a gradient was written where there is no past"
        return torch.cat(parts) if parts else added.new_zeros(0, self.groups, self.dim)

    def check_without_boxes(self) -> None:
        """As on a chip that fetches no boxes: right, and the bits of one that does."""
        boxes = self.run(triton_attention)
        with mock.patch.object(Problem, "boxes", False), poisoned():
            pointers = self.run(triton_attention)
        self.check(pointers)
        assert all(torch.equal(a, b) for a, b in zip(boxes, pointers, strict=True))

    def check(self, ours: list[Tensor]) -> None:
        """At most twice as far from float64 as the plain computation in the same dtype; never NaN.

        A score or LSE of size S is known to eps * S only, and the backward computes it anew: less is not asked for.
        """
        true, plain = ([x.detach() for x in self.dense(dtype)] for dtype in (torch.float64, self.dtype))
        eps = torch.finfo(self.dtype).eps
        floor = eps / 2 if self.dtype != torch.float32 else eps * max(2.0, self._largest_exponent(true[1]))
        ours = [*ours[:5], self.past_gradients(ours[5]), self.past_gradients(ours[6])]
        assert torch.equal(ours[1].isneginf(), true[1].isneginf())
        inherent = dict(zip(NAMES[2:], self.rounding_of_delta()))
        for name, a, b, c in zip(NAMES, ours, true, plain):
            if name == "lse":
                a, b, c = (x[~true[1].isneginf()] for x in (a, b, c))
            if name in ("dq", "dk", "past dk") and float(b.norm()) <= 1e-3 * self._size_of_ds(b):
                # It cancels (a row that sees one key, say): what is left is rounding of what cancelled.
                allowed = max(2 * eps * self._size_of_ds(b), inherent[name])
                assert float((a.double() - b).norm()) <= allowed, name
                continue
            if not b.any():
                assert not a.any(), name
                continue
            allowed = max(2 * relative(c, b), floor, inherent.get(name, 0.0) / float(b.norm()))
            if name.startswith("past"):  # the sum with what was there before is rounded to the pages' dtype
                allowed += torch.finfo(self.grad_dtype).eps / 2 * float(self.earlier.double().norm() / b.norm())
            assert relative(a, b) <= allowed, f"{name}: {relative(a, b):.2e}, allowed {allowed:.2e}"
