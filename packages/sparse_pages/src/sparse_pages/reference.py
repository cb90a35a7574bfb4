"""Scores and selection by loops over raw keys, what the fast ones are tested against."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def page_score(q: Tensor, k: Tensor, scorer: Literal["mean", "minmax"]) -> float:
    """How much a block of queries wants a page, for one KV head.

    Shapes: q [queries, R, D], the query heads of the KV head; k [P, D]
    """
    best = -float("inf")
    for query in q.double().tolist():
        total = 0.0
        for head in query:
            for d, x in enumerate(head):
                column = k[:, d].double().tolist()
                if scorer == "mean":
                    total += x * (sum(column) / len(column))
                else:
                    total += max(x * min(column), x * max(column))
        best = max(best, total)
    return best


def block_scores(
    q: Tensor, k: Tensor, page_tokens: int, scorer: Literal["mean", "minmax"], real: Tensor | None = None
) -> list:
    """Scores [B][G][Q][N] of all complete pages.

    Shapes: q [B, C, H, D], starting at a block; k [B, T, G, D]; real [B, C] bool, which queries count
    """
    if real is None:
        real = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device)
    B, C, H, _ = q.shape
    T, G = k.shape[1:3]
    P, R = page_tokens, H // G
    return [
        [
            [
                [
                    page_score(q[b, i : i + P, g * R : (g + 1) * R][real[b, i : i + P]], k[b, j : j + P, g], scorer)
                    for j in range(0, T // P * P, P)
                ]
                for i in range(0, C, P)
            ]
            for g in range(G)
        ]
        for b in range(B)
    ]


def select_pages(
    q: Tensor,
    k: Tensor,
    *,
    page_tokens: int,
    scorer: Literal["mean", "minmax"],
    past_pages: int,
    top_k: int,
    recent: int,
    sinks: int,
    per_head: bool = False,
    real: Tensor | None = None,
    first_pages: Tensor | None = None,
) -> Tensor:
    """The pages that each block of queries reads.

    Shapes: q [B, C, H, D]; k [B, T, G, D], all keys from position 0; real [B, C] bool; first_pages [B, Q] int
    Returns: [B, G if per_head else 1, Q, sinks + recent + top_k] int32
    """
    out = []
    for b, heads in enumerate(block_scores(q, k, page_tokens, scorer, real)):
        if not per_head:
            heads = [[[sum(column) for column in zip(*rows)] for rows in zip(*heads)]]
        starts = [0] * len(heads[0]) if first_pages is None else first_pages[b].tolist()
        blocks = [past_pages + i for i in range(len(heads[0]))]
        out.append([[_list(*one, top_k, recent, sinks) for one in zip(rows, blocks, starts)] for rows in heads])
    return torch.tensor(out, dtype=torch.int32, device=q.device)


def _list(scores: list[float], block: int, first: int, top_k: int, recent: int, sinks: int) -> list[int]:
    first = min(first, block)  # a block always reads its own page
    pages = {page for page in range(first, block + 1) if page < first + sinks or page > block - recent}
    between = [page for page in range(first, block + 1) if page not in pages]
    pages |= set(sorted(between, key=lambda page: (-scores[page], page))[:top_k])
    return sorted(pages) + [-1] * (sinks + recent + top_k - len(pages))
