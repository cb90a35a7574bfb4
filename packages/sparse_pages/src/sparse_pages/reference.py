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


def block_scores(q: Tensor, k: Tensor, page_tokens: int, scorer: Literal["mean", "minmax"]) -> list:
    """Scores [B][G][Q][N] of all complete pages.

    Shapes: q [B, C, H, D], starting at a block; k [B, T, G, D]
    """
    B, C, H, _ = q.shape
    T, G = k.shape[1:3]
    P, R = page_tokens, H // G
    return [
        [
            [
                [
                    page_score(q[b, i : i + P, g * R : (g + 1) * R], k[b, j : j + P, g], scorer)
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
) -> Tensor:
    """The pages that each block of queries reads.

    Shapes: q [B, C, H, D]; k [B, T, G, D], all keys from position 0
    Returns: [B, G if per_head else 1, Q, sinks + recent + top_k] int32
    """
    out = []
    for heads in block_scores(q, k, page_tokens, scorer):
        if not per_head:
            heads = [[[sum(column) for column in zip(*rows)] for rows in zip(*heads)]]
        out.append([[_list(row, past_pages + i, top_k, recent, sinks) for i, row in enumerate(rows)] for rows in heads])
    return torch.tensor(out, dtype=torch.int32)


def _list(scores: list[float], block: int, top_k: int, recent: int, sinks: int) -> list[int]:
    pages = {page for page in range(block + 1) if page < sinks or page > block - recent}
    between = [page for page in range(block + 1) if page not in pages]
    pages |= set(sorted(between, key=lambda page: (-scores[page], page))[:top_k])
    return sorted(pages) + [-1] * (sinks + recent + top_k - len(pages))
