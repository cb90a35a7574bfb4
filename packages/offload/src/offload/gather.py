"""Scattered rows between pinned host memory and the device, by kernels that reach over the link themselves.

A copy engine takes a call per row, microseconds of CPU each; a kernel takes one call for all of them. It waits for the
link nearly all of its time, so it is a few programs that go through all rows: more would only be in the way of what
computes beside it, writers above all (benchmarks/transfers.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GATHERING, SCATTERING = 32, 4  # programs
_BLOCK = 2048  # numbers that a program has under way: 16 KiB where rows are whole numbers of 8 bytes
_LISTED = 1024  # entries of a list that are looked at together


@triton.jit(do_not_specialize=["count", "rows", "columns", "host_columns", "host_first"])
def _copy_rows_kernel(
    host_ptr, device_ptr, ids_ptr, flags_ptr, count, rows, units, blocks, columns, host_columns, host_first,
    GATHER: tl.constexpr, LISTED: tl.constexpr, FLAGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: any. A row is `units` numbers in `blocks` blocks; program p takes blocks p, p + programs, ... of all rows.

    Without LISTED host row ids[i] goes with device row i; an id outside [0, rows) moves nothing into the host, and in a
    gather fills its device row with ones (NaN in every float type). LISTED: ids are how many, then device rows b *
    columns + j, each with host row b * host_columns + host_first + j. FLAGS, one a host row: a gather takes zeros where
    they are 0, a scatter sets them.
    """
    if LISTED:
        count = tl.load(ids_ptr)
        ids_ptr += 1
    step = tl.num_programs(0)
    last = count - 1
    id_ahead = tl.load(ids_ptr + tl.minimum(tl.program_id(0) // blocks, last))
    for place in range(tl.program_id(0), count * blocks, step):
        row = id_ahead.to(tl.int64)
        id_ahead = tl.load(ids_ptr + tl.minimum((place + step) // blocks, last))
        device_row = (place // blocks).to(tl.int64)
        limit = units  # of the numbers that are read
        if LISTED:
            device_row = row
            row = row // columns * host_columns + host_first + row % columns
            if GATHER and FLAGS:
                limit = tl.where(tl.load(flags_ptr + row) != 0, units, 0)
        else:
            valid = (row >= 0) & (row < rows)
            row = tl.where(valid, row, 0)
            limit = tl.where(valid, units, 0)
        lane = place % blocks * BLOCK + tl.arange(0, BLOCK)
        host = host_ptr + row * units + lane
        device = device_ptr + device_row * units + lane
        if GATHER:
            tl.store(device, tl.load(host, mask=lane < limit, other=0 if LISTED else -1), mask=lane < units)
        else:
            tl.store(host, tl.load(device, mask=lane < limit, other=0), mask=lane < limit)
            if FLAGS:
                tl.store(flags_ptr + row, tl.full([], 1, tl.uint8))


@triton.jit
def _mark(flags_ptr, ids_ptr, value, entries, batch, first, columns, BLOCK: tl.constexpr):
    """Set the flags of what the lists of every sequence name."""
    for b in range(batch):
        for start in range(0, entries, BLOCK):
            i = start + tl.arange(0, BLOCK)
            column = tl.load(ids_ptr + b * entries + i, mask=i < entries, other=-1).to(tl.int32) - first
            named = (i < entries) & (column >= 0) & (column < columns)
            tl.store(flags_ptr + b * columns + column, tl.zeros([BLOCK], tl.int32) + value, mask=named)


@triton.jit(do_not_specialize=["entries", "but_entries", "batch", "first", "columns"])
def _list_rows_kernel(
    rows_ptr, ids_ptr, but_ptr, entries, but_entries, batch, first, columns, BUT: tl.constexpr, BLOCK: tl.constexpr
):
    """listed.list_rows. Grid: (1,). Behind the rows there is room for a flag each."""
    total = batch * columns
    flags_ptr = rows_ptr + 1 + total
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(flags_ptr + i, tl.zeros([BLOCK], tl.int32), mask=i < total)
    tl.debug_barrier()
    _mark(flags_ptr, ids_ptr, 1, entries, batch, first, columns, BLOCK)
    tl.debug_barrier()
    if BUT:
        _mark(flags_ptr, but_ptr, 0, but_entries, batch, first, columns, BLOCK)
        tl.debug_barrier()
    count = 0
    for start in range(0, total, BLOCK):
        i = start + tl.arange(0, BLOCK)
        flag = tl.load(flags_ptr + i, mask=i < total, other=0)
        tl.store(rows_ptr + count + tl.cumsum(flag, 0), i, mask=flag > 0)
        count += tl.sum(flag, 0)
    tl.store(rows_ptr, count)


def copy_rows(host: Tensor, device: Tensor, ids: Tensor, *, gather: bool, programs: int | None = None) -> None:
    """device[i] = host[ids[i]] when `gather`, else host[ids[i]] = device[i]; enqueued on the current stream.

    Shapes: host [N, ...] pinned, device [K, ...], both contiguous, of one dtype; ids [K] int32 or int64 on the device
    Source: oracle: reference.gather and reference.scatter
    """
    if not len(ids) or not device.numel():
        return
    views, units, blocks = _numbers(host, device)
    programs = programs or (GATHERING if gather else SCATTERING)
    _copy_rows_kernel[(min(programs, len(ids) * blocks),)](
        *views, ids, ids, len(ids), len(host), units, blocks, 1, 1, 0,
        GATHER=gather, LISTED=False, FLAGS=False, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def copy_listed(
    host: Tensor, device: Tensor, rows: Tensor, *, columns: int, host_columns: int, host_first: int, gather: bool,
    flags: Tensor | None = None, programs: int | None = None,
) -> None:  # fmt: skip
    """listed.copy_listed, enqueued on the current stream; host pinned."""
    views, units, blocks = _numbers(host, device)
    _copy_rows_kernel[(programs or (GATHERING if gather else SCATTERING),)](
        *views, rows, rows if flags is None else flags, 0, len(host), units, blocks, columns, host_columns, host_first,
        GATHER=gather, LISTED=True, FLAGS=flags is not None, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def list_rows(rows: Tensor, ids: Tensor, *, first: int, columns: int, but: Tensor | None = None) -> None:
    """listed.list_rows, enqueued on the current stream."""
    batch, other = len(ids), ids if but is None else but
    _list_rows_kernel[(1,)](
        rows, ids, other, ids.numel() // batch, other.numel() // batch, batch, first, columns,
        BUT=but is not None, BLOCK=_LISTED, num_warps=8,
    )  # fmt: skip


def _numbers(host: Tensor, device: Tensor) -> tuple[tuple[Tensor, Tensor], int, int]:
    """Both as the widest whole numbers that fit, how many make a row, and in how many blocks."""
    row_bytes = host[0].numel() * host.element_size()
    dtype = next(t for t in (torch.int64, torch.int32, torch.int16, torch.int8) if _fits(t, row_bytes, host, device))
    host_view, device_view = (x.detach().reshape(-1).view(torch.uint8).view(dtype) for x in (host, device))
    units = row_bytes // dtype.itemsize
    blocks = triton.cdiv(units, _BLOCK)
    assert (len(device) + 1024) * blocks < 2**31
    return (host_view, device_view), units, blocks


def _fits(dtype: torch.dtype, row_bytes: int, *tensors: Tensor) -> bool:
    return row_bytes % dtype.itemsize == 0 and all(x.data_ptr() % dtype.itemsize == 0 for x in tensors)
