"""Which pages the sparse layers of one loss read: chosen when a chunk is first seen, kept, found again in the walk."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload import Lanes
from offload.lanes import Mark
from sparse_pages import PageSummary, select_pages

from .config import ChunkConfig
from .probe import LayerFacts

_SHORT = 2**15  # page ids below it are kept in two bytes
_NEVER = 2**31 - 1


def chooses(config: ChunkConfig, layer: int, facts: LayerFacts) -> bool:
    """Windowed layers read their window's pages and choose nothing."""
    return config.attention == "sparse" and layer >= config.first_sparse_layer and facts.window is None


def summary_bytes(config: ChunkConfig, facts: LayerFacts) -> int:
    """Of one page in one layer; what a scorer of one's own keeps is taken to be as wide as a key."""
    width = 2 if config.scorer == "minmax" else 1
    return width * max(facts.dtype.itemsize, 4) * facts.kv_heads * facts.head_dim


def id_dtype(pages: int) -> torch.dtype:
    """What ids of so many pages are kept in."""
    return torch.int16 if pages <= _SHORT else torch.int32


@dataclass
class Selection:
    """The summaries and selections of one loss.

    Beyond `config.gpu_selection_budget_bytes` they lie in host memory: the summaries first, if all of them do not fit,
    then the selections that come once the budget is spent.

    Shapes: real [B, C] bool, documents [B, C] int, both of the open chunk, on its device, or None; kept: per chunk and
        layer [B, G or 1, Q, K], and from when on they are there
    """

    config: ChunkConfig
    pages: int  # of the whole sequence
    layers: dict[int, LayerFacts]
    lanes: Lanes
    summaries: dict[int, PageSummary] = field(default_factory=dict)
    kept: dict[tuple[int, int], tuple[Tensor, Mark]] = field(default_factory=dict)
    device_bytes: int = 0

    def is_sparse(self, layer: int) -> bool:
        return chooses(self.config, layer, self.layers[layer])

    def begin_walk(self, index: int, last: int) -> None:
        """Drop what no chunk up to `index` will ask for."""
        if index < last:
            self.summaries.clear()
        self.kept = {key: ids for key, ids in self.kept.items() if key[0] <= index}

    def lists(self, chunk: int, layer: int) -> tuple[Tensor, Mark] | None:
        """What a chunk reads in a layer, on the device or the host, and from when on; None if it has not chosen yet."""
        return self.kept.get((chunk, layer))

    def choose(
        self, index: int, layer: int, q: Tensor, k: Tensor, start: int, real: Tensor | None, documents: Tensor | None
    ) -> Tensor | None:
        """Page ids for the chunk's query blocks, None for a layer that is not sparse; the same whenever asked again.

        Shapes: q [B, C, H, D]; k [B, C, G, D]; start: position of the first query → [B, G or 1, Q, K] int32
        """
        if not self.is_sparse(layer):
            return None
        if (index, layer) not in self.kept:
            c = self.config
            summary = self._summary(layer, q.shape[0])
            summary.append(k.detach())
            ids = select_pages(
                q.detach(),
                summary,
                past_pages=start // c.page_tokens,
                top_k=c.top_k_pages,
                recent=c.recent_pages,
                sinks=c.sink_pages,
                per_head=c.select_per_head,
                real=real,
                first_pages=_first_pages(documents, real, c.page_tokens),
            )
            self.kept[index, layer] = self._put_away(ids), self.lanes.mark("compute")
            return ids
        return self.kept[index, layer][0].to(q.device, torch.int32, non_blocking=True)

    def _summary(self, layer: int, batch: int) -> PageSummary:
        if layer not in self.summaries:
            budget = self.config.gpu_selection_budget_bytes
            chosen = [facts for number, facts in self.layers.items() if self.is_sparse(number)]
            size = batch * self.pages * sum(summary_bytes(self.config, facts) for facts in chosen)
            on_host = budget is not None and size > budget
            if not self.summaries and not on_host:
                self.device_bytes += size
            self.summaries[layer] = PageSummary(self.config.page_tokens, self.config.scorer, on_host=on_host)
        return self.summaries[layer]

    def _put_away(self, ids: Tensor) -> Tensor:
        """As few bytes as hold the ids, on the host once the budget is spent."""
        small = ids.to(id_dtype(self.pages))
        budget = self.config.gpu_selection_budget_bytes
        if budget is None or self.device_bytes + small.nbytes <= budget:
            self.device_bytes += small.nbytes
            return small
        host = torch.empty(small.shape, dtype=small.dtype, device="cpu", pin_memory=small.is_cuda)
        return host.copy_(small, non_blocking=True)  # read back in the same stream, behind this copy


def _first_pages(documents: Tensor | None, real: Tensor | None, page: int) -> Tensor | None:
    """The page where the earliest document of each query block begins, [B, Q]; pages before it are of no use to it."""
    if documents is None:
        return None
    starts = documents if real is None else torch.where(real, documents, _NEVER)
    starts = torch.nn.functional.pad(starts, (0, -starts.shape[1] % page), value=_NEVER)
    return starts.unflatten(1, (-1, page)).amin(2) // page
