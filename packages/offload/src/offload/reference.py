"""Copies of rows by loops, what the fast ones are tested against."""

from __future__ import annotations

import torch
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


def list_rows(rows: Tensor, ids: Tensor, *, first: int, columns: int, but: Tensor | None = None) -> None:
    """As listed.list_rows."""
    found = []
    for b in range(len(ids)):
        named = set(ids[b].flatten().tolist()) - set([] if but is None else but[b].flatten().tolist())
        found += [b * columns + i - first for i in range(first, first + columns) if i in named]
    rows[0] = len(found)
    rows[1 : 1 + len(found)] = torch.tensor(found, dtype=rows.dtype, device=rows.device)


def copy_listed(
    host: Tensor, device: Tensor, rows: Tensor, *, columns: int, host_columns: int, host_first: int, gather: bool,
    flags: Tensor | None = None,
) -> None:  # fmt: skip
    """As listed.copy_listed."""
    count = int(rows[0])
    for near in rows[1 : 1 + count].tolist():
        far = near // columns * host_columns + host_first + near % columns
        if not gather:
            host[far] = device[near].to(host.device)
            if flags is not None:
                flags[far] = 1
        elif flags is not None and not flags[far]:
            device[near] = 0
        else:
            device[near] = host[far].to(device.device)
