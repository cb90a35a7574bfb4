"""Transfers between one device and host memory.

Every transfer here is an ordinary synchronous copy: it is over when the call returns. Callers must not build on
that, but wait on the handle: then transfers that overlap with compute can take the place of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.device import resolve_device

HOST = torch.device("cpu")
# Types that torch copies but does not index in every case, and what has their size and can be.
BITS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}


class Handle:
    """A transfer under way."""

    __slots__ = ()

    def wait(self) -> None:
        """Order what comes next after the transfer; may be called any number of times.

        After it, work on the device's current stream may read the destination, the CPU may read a destination on the
        host, and the source may be overwritten.
        """


class Offloader:
    """Moves tensors, or rows of tensors, between host memory and `device` (the CPU too, for tests and fallbacks).

    Bytes are moved as they are: no broadcasting, no casting, nothing that autograd would record. Host tensors may be
    any CPU tensors; those of a pinned `PinnedArena` need no staging.

    Raises: ValueError if the device is neither the CPU nor a CUDA device that exists
    """

    def __init__(self, device: torch.device | str | int) -> None:
        self._device = resolve_device(device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{self._device} was asked for, but CUDA is not available: pass device='cpu'")

    @property
    def device(self) -> torch.device:
        """Where fetches go to and write-backs come from."""
        return self._device

    def fetch(self, dst: Tensor, src: Tensor) -> Handle:
        """Copy a host tensor to the device.

        Shapes: dst on the device, src on the host, of one shape and dtype, any strides
        Returns: a handle; wait for it before reading dst or overwriting src
        Raises: ValueError for another device, dtype or shape
        """
        self._check("fetch", dst, src, self._device, HOST)
        _check_shape("fetch", dst, src.shape)
        return _copy(dst, src)

    def write_back(self, dst: Tensor, src: Tensor) -> Handle:
        """Copy a device tensor to the host.

        Shapes: dst on the host, src on the device, of one shape and dtype, any strides
        Returns: a handle; wait for it before reading dst or overwriting src
        Raises: ValueError for another device, dtype or shape
        """
        self._check("write_back", dst, src, HOST, self._device)
        _check_shape("write_back", dst, src.shape)
        return _copy(dst, src)

    def gather(self, dst: Tensor, src: Tensor, ids: Tensor) -> Handle:
        """dst[i] = src[ids[i]]: rows (pages, say) of a host tensor, packed on the device.

        Shapes: dst [K, ...] on the device; src [N, ...] on the host; ids [K] int32 or int64, on either
        Returns: a handle; wait for it before reading dst or overwriting src
        Raises: ValueError for another device, dtype or shape, or an id outside [0, N)
        Source: oracle: reference.gather
        """
        self._check("gather", dst, src, self._device, HOST)
        rows = self._check_ids("gather", ids, src)
        _check_shape("gather", dst, (len(rows), *src.shape[1:]))
        bits = BITS.get(dst.dtype, dst.dtype)
        return _copy(dst.view(bits), src.detach().view(bits)[rows])

    def scatter(self, dst: Tensor, src: Tensor, ids: Tensor) -> Handle:
        """dst[ids[i]] = src[i]: rows packed on the device, put where they belong on the host.

        Shapes: dst [N, ...] on the host; src [K, ...] on the device; ids [K] int32 or int64, on either
        Returns: a handle; wait for it before reading dst or overwriting src
        Raises: ValueError for another device, dtype or shape, an id outside [0, N), or an id given twice
        Source: oracle: reference.scatter
        """
        self._check("scatter", dst, src, HOST, self._device)
        rows = self._check_ids("scatter", ids, dst)
        _check_shape("scatter", src, (len(rows), *dst.shape[1:]), name="src")
        if len(rows.unique()) != len(rows):
            raise ValueError("scatter: ids must differ, got one twice: which row would stay is undefined")
        bits = BITS.get(dst.dtype, dst.dtype)
        dst.detach().view(bits)[rows] = src.detach().to(HOST).view(bits)
        return Handle()

    def _check(self, call: str, dst: Tensor, src: Tensor, dst_device: torch.device, src_device: torch.device) -> None:
        if not (isinstance(dst, Tensor) and isinstance(src, Tensor)):
            raise ValueError(f"{call}: dst and src must be tensors, got {type(dst).__name__} and {type(src).__name__}")
        if dst.device != dst_device or src.device != src_device:
            raise ValueError(
                f"{call}: dst must be on {dst_device} and src on {src_device}, got {dst.device} and {src.device}"
            )
        if dst.dtype != src.dtype:
            raise ValueError(f"{call}: dst and src must have one dtype, got {dst.dtype} and {src.dtype}: convert first")

    def _check_ids(self, call: str, ids: Tensor, table: Tensor) -> Tensor:
        """The ids as int64 on the host, known to be rows of `table`."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"{call}: ids must be a tensor [K] of int32 or int64, got {got}")
        if ids.device not in (HOST, self._device):
            raise ValueError(f"{call}: ids must be on {HOST} or {self._device}, got {ids.device}")
        if table.dim() == 0:
            raise ValueError(f"{call}: the host tensor must have rows [N, ...], got a 0-dim tensor")
        rows = ids.to(HOST, torch.int64)
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(table)):
            raise ValueError(
                f"{call}: ids must lie in [0, {len(table)}), got {int(rows.min())} to {int(rows.max())}: "
                "drop padding (-1) first"
            )
        return rows


def _check_shape(call: str, tensor: Tensor, expected: tuple[int, ...], name: str = "dst") -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{call}: {name} must have shape {tuple(expected)}, got {tuple(tensor.shape)}")


def _copy(dst: Tensor, src: Tensor) -> Handle:
    dst.detach().copy_(src.detach())
    return Handle()
