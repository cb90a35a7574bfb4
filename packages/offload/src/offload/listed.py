"""Copies of the rows that lists on the device name: the CPU enqueues them without ever knowing which.

Host tensors hold `host_columns` rows for each of B sequences; on the device lie `columns` of them, from `host_first`
on, each at a place of its own. Only rows that are listed are moved; the others hold anything.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from offload import reference

TRITON = importlib.util.find_spec("triton") is not None


def rows_for(batch: int, columns: int) -> tuple[int]:
    """The shape of what `list_rows` writes, int32: how many, the rows, and room to work in."""
    return (1 + 2 * batch * columns,)


def list_rows(rows: Tensor, ids: Tensor, *, first: int, columns: int, but: Tensor | None = None) -> None:
    """List which of the ids [first, first + columns) are among each sequence's, and not among those in `but`.

    Shapes: rows as `rows_for`, on the device; ids, but [B, ...] of any integers; on the host they are copied first
    Returns: in rows, how many, then b * columns + id - first, ascending, each once
    Source: oracle: reference.list_rows
    """
    ids, others = ids.to(rows.device, non_blocking=True), None
    if but is not None:
        others = but.to(rows.device, non_blocking=True).contiguous()
    (_kernels(rows) or reference).list_rows(rows, ids.contiguous(), first=first, columns=columns, but=others)


def copy_listed(
    host: Tensor, device: Tensor, rows: Tensor, *, columns: int, host_columns: int, host_first: int, gather: bool,
    flags: Tensor | None = None,
) -> None:  # fmt: skip
    """Copy the listed rows to the device when `gather`, else to the host.

    flags: which host rows hold anything. A gather takes zeros for those that do not; a scatter sets them.
    Shapes: host [B * host_columns, ...], device [B * columns, ...], contiguous, of one dtype; rows as `list_rows`
        leaves it; flags [B * host_columns] uint8, on the device
    Source: oracle: reference.copy_listed
    """
    kernels = _kernels(device) if host.is_pinned() else None
    (kernels or reference).copy_listed(
        host, device, rows, columns=columns, host_columns=host_columns, host_first=host_first, gather=gather,
        flags=flags,
    )  # fmt: skip


def _kernels(x: Tensor):
    """The kernels for a tensor on a device that runs them; None where plain torch serves, which makes the CPU wait."""
    if not TRITON or not x.is_cuda or torch.version.hip is not None:
        return None
    return importlib.import_module("offload.gather")
