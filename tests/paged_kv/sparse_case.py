"""A call of a backend over listed pages, on awkward memory, and its dense float64 oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from tests.paged_kv.backend_case import Case
from torch import Tensor

from paged_kv.past import Geometry


@dataclass
class SparseCase(Case):
    """`entries`: pages a list. `kind`: "random" (any order, duplicates, pages not yet there, gaps), "all" (every page),
    "none" (nothing), "hot" (all lists the same few pages), "ascending" (as selection gives them).
    """

    entries: int = 3
    per_head: bool = False
    kind: str = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks = max((n + self.tokens - 1) // self.page - n // self.page + 1 for n in self.lengths)
        shape = (self.batch, self.groups if self.per_head else 1, blocks, self.entries)
        last = max((n + self.tokens - 1) // self.page for n in self.lengths)
        if self.kind == "all":
            lists = torch.arange(last + 1).expand(*shape[:3], -1)
        elif self.kind == "none":
            lists = torch.full(shape, -1)
        elif self.kind == "hot":
            lists = torch.arange(self.entries).expand(shape)
        else:
            draw = torch.Generator().manual_seed(self.seed)
            lists = torch.randint(-1, last + 2, shape, generator=draw)
            if self.kind == "ascending":
                own = torch.tensor(self.lengths)[:, None, None, None] // self.page + torch.arange(blocks)[:, None]
                lists = torch.cat((lists[..., 1:], own.expand(*shape[:3], 1)), -1).sort(-1).values
                again = torch.nn.functional.pad(lists.diff(dim=-1) == 0, (1, 0))
                lists = lists.masked_fill(again | (lists > own), 2**30).sort(-1).values
                lists = lists.masked_fill(lists == 2**30, -1)
        self.selected = lists.to(torch.int32).contiguous().to(self.device)

    @property
    def geometry(self) -> Geometry:
        return replace(super().geometry, selected=self.selected)

    def seen(self, b: int) -> Tensor:
        """[H, C, keys] by the definition, pair by pair."""
        i = self.lengths[b] + torch.arange(self.tokens, device=self.device)[:, None]
        j = torch.arange(self.lengths[b] + self.tokens, device=self.device)[None]
        seen = j <= i
        if self.window is not None:
            seen = seen & (j > i - self.window)
        if self.starts is not None:
            seen = seen & (j >= self.starts[b][:, None])
        lists = self.selected[b][:, i[:, 0] // self.page - self.lengths[b] // self.page]  # [1 or G, C, K]
        listed = (lists[:, :, None, :] == (j[0] // self.page)[None, None, :, None]).any(-1)
        return (seen & listed).repeat_interleave(self.heads // listed.shape[0], 0)

    def _dense_one(self, b: int, q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor):
        share = self.heads // self.groups
        keys, values = (torch.cat(x).repeat_interleave(share, 1) for x in ((past_k, k), (past_v, v)))
        seen = self.seen(b)
        scores = torch.einsum("ihd,jhd->hij", q, keys) * self.scale
        scores = scores.masked_fill(~seen, -torch.inf)
        nothing = ~seen.any(-1, keepdim=True)
        weights = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        return torch.einsum("hij,jhd->ihd", weights, values), scores.logsumexp(-1)
