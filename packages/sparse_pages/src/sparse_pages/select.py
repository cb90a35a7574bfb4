"""Which pages each block of queries reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_pages.exact import ordered_sum
from sparse_pages.summary import TILE_ELEMENTS, PageSummary, check_integer

ABSENT = 2**31 - 1  # sorts behind every page


def select_pages(
    q: Tensor,
    summary: PageSummary,
    *,
    past_pages: int,
    top_k: int,
    recent: int,
    sinks: int,
    per_head: bool = False,
) -> Tensor:
    """The pages that each block of queries of a chunk reads.

    The sequence is cut at absolute multiples of the page length P into blocks, block b beside page b; the chunk starts
    with block `past_pages`, and its last block may be ragged. Block b reads the sink pages [0, sinks), the recent pages
    (b - recent, b], its own among them, and of the pages between the `top_k` best by score; of pages that score alike
    the earlier one.

    A page's score for a block is `PageSummary.scores`, for one list per KV head; for one list for all heads the sum of
    that over the KV heads. A block's later queries help choose pages for its earlier ones. A chunk that ends at a
    multiple of P (or with the sequence) gets the same lists as the whole sequence in one call, on every device.
    A score that is not a number counts as the lowest.

    Shapes: q [B, C, H, D]; its first query stands at position past_pages * P
    Units:  past_pages, top_k, recent, sinks in pages
    Returns: [B, G if per_head else 1, Q, sinks + recent + top_k] int32 logical page ids, ascending, without duplicates,
             -1 behind them where there are fewer pages than that
    Raises: ValueError for counts that are not integers or too small (recent at least 1: a query must see its own page),
            q that does not go with the keys, or pages before the last block that were not appended
    Source: oracle: reference.select_pages
    """
    if not isinstance(summary, PageSummary):
        raise ValueError(f"summary must be a PageSummary, got {type(summary).__name__}")
    check_integer("past_pages", past_pages, 0)
    check_integer("top_k", top_k, 0)
    check_integer("recent", recent, 1)
    check_integer("sinks", sinks, 0)
    summary.check_queries(q)
    B, C, H, _ = q.shape
    P = summary.page_tokens
    end = past_pages + -(-C // P)
    if summary.pages < end - 1:
        raise ValueError(
            f"the last block of q is number {end - 1}, so as many complete pages must have been appended, got "
            f"{summary.pages} ({summary.tokens} tokens): append the chunk's keys before selecting"
        )
    step = max(1, TILE_ELEMENTS // (B * H * max(1, end - recent - sinks)))
    lists = []
    with torch.no_grad(), torch.inference_mode(False):
        for first in range(past_pages, end, step):
            last = min(first + step, end)
            tile = q[:, (first - past_pages) * P : (last - past_pages) * P]
            candidates = max(sinks, last - recent)  # of the last block: [sinks, candidates)
            scores = summary.scores(tile, sinks if candidates > sinks else 0, candidates if candidates > sinks else 0)
            if not per_head:
                scores = ordered_sum(scores, 1).unsqueeze(1)
            blocks = torch.arange(first, last, device=q.device)
            lists.append(_lists(scores, blocks, top_k=top_k, recent=recent, sinks=sinks))
        return torch.cat(lists, 2)


def _lists(scores: Tensor, blocks: Tensor, *, top_k: int, recent: int, sinks: int) -> Tensor:
    """Shapes: scores [B, G | 1, Q, N] of pages sinks, sinks + 1, …; blocks [Q] → ids [B, G | 1, Q, all] int32."""
    device = scores.device
    first_recent = (blocks - recent + 1)[:, None]
    sink_ids = torch.arange(sinks, device=device).expand(len(blocks), -1)
    sink_ids = torch.where(sink_ids < first_recent, sink_ids, ABSENT)  # else it is a recent page, or not there yet
    recent_ids = first_recent + torch.arange(recent, device=device)
    recent_ids = torch.where(recent_ids >= 0, recent_ids, ABSENT)
    always = torch.cat([sink_ids, recent_ids], 1).expand(*scores.shape[:2], -1, -1)
    ids = torch.cat([always, _best(scores, first_recent - sinks, top_k, sinks)], -1).sort(-1).values
    return torch.where(ids == ABSENT, -1, ids).int()


def _best(scores: Tensor, candidates: Tensor, top_k: int, first_page: int) -> Tensor:
    """The `top_k` best of the first `candidates` [Q, 1] pages of each block, ABSENT behind them."""
    device, least = scores.device, torch.finfo(scores.dtype).min
    # A score is never as low as what is no candidate, and zero has one sign: a sort may tell the two apart.
    scores = scores.nan_to_num(nan=least, neginf=least) + 0.0
    pages = torch.arange(scores.shape[-1], device=device)
    scores = torch.where(pages < candidates, scores, -torch.inf)
    order = scores.sort(stable=True, dim=-1, descending=True).indices[..., :top_k]
    ranks = torch.arange(order.shape[-1], device=device)
    best = torch.where(ranks < candidates, order + first_page, ABSENT)
    return torch.nn.functional.pad(best, (0, top_k - best.shape[-1]), value=ABSENT)
