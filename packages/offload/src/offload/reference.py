"""Gather and scatter by loops, what the fast ones are tested against."""

from __future__ import annotations

from torch import Tensor


def gather(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """dst[i] = src[ids[i]].

    Shapes: dst [K, ...]; src [N, ...]; ids [K]
    """
    for i, row in enumerate(ids.tolist()):
        dst[i] = src[row].to(dst.device)


def scatter(dst: Tensor, src: Tensor, ids: Tensor) -> None:
    """dst[ids[i]] = src[i].

    Shapes: dst [N, ...]; src [K, ...]; ids [K]
    """
    for i, row in enumerate(ids.tolist()):
        dst[row] = src[i].to(dst.device)
