"""Scattered rows between pinned host memory and the device, by one kernel that reaches over the link itself.

A copy engine takes a call per row, microseconds of CPU each; a kernel takes one call for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _copy_rows_kernel(
    host_ptr, device_ptr, ids_ptr, rows, units, blocks, GATHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (K * blocks,). A row is `units` numbers; host row ids[i] and device row i. An id outside [0, rows) moves
    nothing into the host; in a gather its device row is filled with ones (NaN in every float type)."""
    place = tl.program_id(0).to(tl.int64)
    i = place // blocks
    row = tl.load(ids_ptr + i).to(tl.int64)
    valid = (row >= 0) & (row < rows)
    lane = (place % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < units
    host = host_ptr + tl.where(valid, row, 0) * units + lane
    device = device_ptr + i * units + lane
    if GATHER:
        value = tl.load(host, mask=inside & valid, other=-1)
        tl.store(device, value, mask=inside)
    else:
        tl.store(host, tl.load(device, mask=inside & valid, other=0), mask=inside & valid)


def copy_rows(host: Tensor, device: Tensor, ids: Tensor, *, gather: bool) -> None:
    """device[i] = host[ids[i]] when `gather`, else host[ids[i]] = device[i]; enqueued on the current stream.

    Shapes: host [N, ...] pinned, device [K, ...], both contiguous, of one dtype; ids [K] int32 or int64 on the device
    Source: oracle: reference.gather and reference.scatter
    """
    if not len(ids) or not device.numel():
        return
    row_bytes = host[0].numel() * host.element_size()
    dtype = next(t for t in (torch.int64, torch.int32, torch.int16, torch.int8) if _fits(t, row_bytes, host, device))
    units = row_bytes // dtype.itemsize
    host_view, device_view = (x.detach().reshape(-1).view(torch.uint8).view(dtype) for x in (host, device))
    blocks = triton.cdiv(units, _BLOCK)
    _copy_rows_kernel[(len(ids) * blocks,)](
        host_view, device_view, ids, len(host), units, blocks, GATHER=gather, BLOCK=_BLOCK, num_warps=8
    )


def _fits(dtype: torch.dtype, row_bytes: int, *tensors: Tensor) -> bool:
    return row_bytes % dtype.itemsize == 0 and all(x.data_ptr() % dtype.itemsize == 0 for x in tensors)
