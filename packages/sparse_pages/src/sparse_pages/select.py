"""Which pages each block of queries reads."""

from __future__ import annotations

import torch
from torch import Tensor

from sparse_pages.exact import sum_in_turn
from sparse_pages.gpu import triton_for
from sparse_pages.summary import TILE_ELEMENTS, PageSummary, check_integer

ABSENT = 2**31 - 1  # sorts behind every page
MOST_PAGES = 2**16  # that a block may read: its list is looked at by one program


def select_pages(
    q: Tensor,
    summary: PageSummary,
    *,
    past_pages: int,
    top_k: int,
    recent: int,
    sinks: int,
    per_head: bool = False,
    real: Tensor | None = None,
    first_pages: Tensor | None = None,
) -> Tensor:
    """The pages that each block of queries of a chunk reads.

    The sequence is cut at absolute multiples of the page length P into blocks, block b beside page b; the chunk starts
    with block `past_pages`, and its last block may be ragged. Block b reads the sink pages [0, sinks), the recent pages
    (b - recent, b], its own among them, and of the pages between the `top_k` best by score; of pages that score alike
    the earlier one.

    A page's score for a block is `PageSummary.scores`, for one list per KV head; for one list for all heads the sum of
    that over the KV heads, in float32. A block's later queries help choose pages for its earlier ones; what is not
    `real` (padding) chooses nothing. With `first_pages` a block reads no page before its own first page, and its sinks
    are counted from there: the first page of its document, where several are packed into one sequence.

    A chunk that ends at a multiple of P (or with the sequence) gets the same lists as the whole sequence in one call,
    on every device. A score that is not a number counts as the lowest.

    Shapes: q [B, C, H, D]; its first query stands at position past_pages * P; real [B, C] bool; first_pages [B, Q] int
    Units:  past_pages, top_k, recent, sinks in pages
    Returns: [B, G if per_head else 1, Q, sinks + recent + top_k] int32 logical page ids, ascending, without duplicates,
             -1 behind them where there are fewer pages than that. A first page before the sequence counts as page 0,
             one behind the block as the block's own
    Raises: ValueError for counts that are not integers or too small (recent at least 1: a query must see its own page),
            q, real or first_pages that do not go with the keys, or pages before the last block that were not appended
    Source: oracle: reference.select_pages
    """
    if not isinstance(summary, PageSummary):
        raise ValueError(f"summary must be a PageSummary, got {type(summary).__name__}")
    check_integer("past_pages", past_pages, 0)
    check_integer("top_k", top_k, 0)
    check_integer("recent", recent, 1)
    check_integer("sinks", sinks, 0)
    if top_k + recent + sinks > MOST_PAGES:
        raise ValueError(f"a block may read at most {MOST_PAGES} pages, got {top_k} + {recent} + {sinks}")
    summary.check_queries(q, real)
    P, end = summary.page_tokens, past_pages + -(-q.shape[1] // summary.page_tokens)
    _check_first_pages(first_pages, q, end - past_pages)
    if summary.pages < end - 1:
        raise ValueError(
            f"the last block of q is number {end - 1}, so as many complete pages must have been appended, got "
            f"{summary.pages} ({summary.tokens} tokens): append the chunk's keys before selecting"
        )
    first_pages = None if first_pages is None else first_pages.clamp(min=0)
    kernels = triton_for(q)
    step = _blocks_at_once(q, end - recent - sinks)
    lists = []
    with torch.inference_mode(False), torch.no_grad():
        for first in range(past_pages, end, step):
            last = min(first + step, end)
            tokens = slice((first - past_pages) * P, (last - past_pages) * P)
            candidates = (sinks, last - recent) if last - recent > sinks else (0, 0)  # of the last block
            scores = summary.scores(q[:, tokens], *candidates, None if real is None else real[:, tokens])
            starts = None if first_pages is None else first_pages[:, first - past_pages : last - past_pages]
            make = _lists if kernels is None else kernels.lists
            budget = {"top_k": top_k, "recent": recent, "sinks": sinks}
            lists.append(make(scores, starts, per_head, first_page=candidates[0], first_block=first, **budget))
        return torch.cat(lists, 2) if len(lists) > 1 else lists[0]


def _blocks_at_once(q: Tensor, candidates: int) -> int:
    """Blocks whose scores are made together, so that memory is bounded however many there are."""
    batch, _, heads, _ = q.shape
    kernels = triton_for(q)
    if kernels is None:
        return max(1, TILE_ELEMENTS // (batch * heads * max(1, candidates)))
    return max(1, kernels.SCORES_BYTES // (8 * batch * heads * max(1, candidates)))


def _check_first_pages(first_pages: Tensor | None, q: Tensor, blocks: int) -> None:
    if first_pages is None:
        return
    good = isinstance(first_pages, Tensor) and first_pages.dtype in (torch.int32, torch.int64)
    if not good or first_pages.shape != (q.shape[0], blocks) or first_pages.device != q.device:
        got = tuple(first_pages.shape) if isinstance(first_pages, Tensor) else type(first_pages).__name__
        raise ValueError(f"first_pages must be an int tensor [{q.shape[0]}, {blocks}] on {q.device}, got {got}")


def _lists(
    scores: Tensor,
    first_pages: Tensor | None,
    per_head: bool,
    *,
    first_page: int,
    first_block: int,
    top_k: int,
    recent: int,
    sinks: int,
) -> Tensor:
    """Shapes: scores [B, G, Q, N] of pages `first_page`, …; first_pages [B, Q] → ids [B, G or 1, Q, all] int32."""
    if not per_head:
        scores = sum_in_turn(scores, 1).unsqueeze(1)
    device, (batch, lists, count, _) = scores.device, scores.shape
    blocks = torch.arange(first_block, first_block + count, device=device)
    first = torch.zeros(1, 1, dtype=torch.int64, device=device) if first_pages is None else first_pages.long()
    first = torch.minimum(first, blocks)[:, None, :, None]  # [B, 1, Q, 1]
    first_recent = torch.maximum(blocks[:, None] - recent + 1, first)
    sink_ids = first + torch.arange(sinks, device=device)
    sink_ids = torch.where(sink_ids < first_recent, sink_ids, ABSENT)  # else it is a recent page, or not there yet
    recent_ids = first_recent + torch.arange(recent, device=device)
    recent_ids = torch.where(recent_ids <= blocks[:, None], recent_ids, ABSENT)
    always = torch.cat([sink_ids.expand(batch, 1, count, -1), recent_ids.expand(batch, 1, count, -1)], 3)
    best = _best(scores.float(), first + sinks, first_recent, top_k, first_page)
    ids = torch.cat([always.expand(-1, lists, -1, -1), best], -1).sort(-1).values
    return torch.where(ids == ABSENT, -1, ids).int()


def _best(scores: Tensor, first: Tensor, last: Tensor, top_k: int, first_page: int) -> Tensor:
    """The `top_k` best of the pages [first, last) ([B, 1, Q, 1]) of each block, ABSENT behind them."""
    device, least = scores.device, torch.finfo(scores.dtype).min
    # A score is never as low as what is no candidate, and zero has one sign: a sort may tell the two apart.
    scores = scores.nan_to_num(nan=least, neginf=least) + 0.0
    pages = first_page + torch.arange(scores.shape[-1], device=device)
    scores = torch.where((pages >= first) & (pages < last), scores, -torch.inf)
    order = scores.sort(stable=True, dim=-1, descending=True).indices[..., :top_k]
    ranks = torch.arange(order.shape[-1], device=device)
    best = torch.where(ranks < last - first, order + first_page, ABSENT)
    return torch.nn.functional.pad(best, (0, top_k - best.shape[-1]), value=ABSENT)
