"""Transfers between one device and host memory, beside what the device computes."""

from __future__ import annotations

import importlib.util
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from offload.lanes import Lane, Lanes, Mark, lanes_for

TRITON = importlib.util.find_spec("triton") is not None
if TRITON:
    from offload.gather import copy_rows

HOST = torch.device("cpu")
LEAVING = 2  # transfers to the host that may be under way at once
Tensors = Tensor | Sequence[Tensor]
# Types that torch copies but does not index in every case, and what has their size and can be.
BITS = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.float8_e8m0fnu: torch.uint8,
    torch.float4_e2m1fn_x2: torch.uint8,
}


class Handle:
    """A transfer under way. Dropped without a wait it is waited for, so that its memory is not handed on too early."""

    __slots__ = ("_held", "_lanes", "_let_go", "_mark")

    def __init__(
        self,
        lanes: Lanes,
        mark: Mark,
        held: tuple[Tensor, ...] = (),
        let_go: Callable[[Mark], None] = lambda _: None,
    ) -> None:
        self._lanes, self._mark, self._held, self._let_go = lanes, mark, held, let_go

    def wait(self) -> None:
        """Let what is enqueued on the device's current stream from now on come after the transfer. The CPU goes on."""
        self._lanes.hold("compute", self._mark)
        self._held = ()
        self._let_go(self._mark)

    def synchronize(self) -> None:
        """Make the CPU wait: after it, it may read a destination on the host and overwrite a source there."""
        self._mark.synchronize()
        self._let_go(self._mark)

    def __del__(self) -> None:
        if self._held:
            self.wait()


class Offloader:
    """Moves tensors, or rows of tensors, between host memory and `device` (the CPU too, for tests and fallbacks).

    A call enqueues the transfer and returns. Transfers to the host run in the order of the calls, and so do those to
    the device; each starts after what was enqueued on the device's current stream before the call, and after every
    earlier transfer in the other direction, so that what was written back can be fetched and host memory can be used
    again without a word. Until a transfer is over its tensors must stay unchanged on the host; on the device they are
    safe once `Handle.wait` was called, and are kept alive until the transfer is ordered before what reuses their
    memory.

    Bytes are moved as they are: no broadcasting, no casting, nothing that autograd would record. Host tensors may be
    any CPU tensors; only contiguous ones of a pinned `PinnedArena` are moved without staging and beside compute.

    Raises: ValueError if the device is neither the CPU nor a CUDA device that exists
    """

    def __init__(self, device: torch.device | str | int) -> None:
        self._lanes = lanes_for(device)
        self._leaving: deque[tuple[Mark, tuple[Tensor, ...]]] = deque()

    @property
    def device(self) -> torch.device:
        """Where fetches go to and write-backs come from."""
        return self._lanes.device

    def fetch(self, dst: Tensors, src: Tensors) -> Handle:
        """Copy a host tensor, or a list of them, to the device.

        Shapes: dst on the device, src on the host, of one shape and dtype, any strides
        Returns: a handle; wait for it before reading dst, synchronize with it before overwriting src
        Raises: ValueError for another device, dtype or shape, what is not dense, or lists of different lengths
        """
        pairs = self._pairs("fetch", dst, src, self.device, HOST)
        return self._transfer("in", pairs)

    def write_back(self, dst: Tensors, src: Tensors) -> Handle:
        """Copy a device tensor, or a list of them, to the host.

        Shapes: dst on the host, src on the device, of one shape and dtype, any strides
        Returns: a handle; wait for it before overwriting src, synchronize with it before the CPU reads dst
        Raises: ValueError for another device, dtype or shape, what is not dense, or lists of different lengths
        """
        pairs = self._pairs("write_back", dst, src, HOST, self.device)
        return self._transfer("out", pairs)

    def gather(self, dst: Tensor, src: Tensor, ids: Tensor) -> Handle:
        """dst[i] = src[ids[i]]: rows (pages, say) of a host tensor, packed on the device.

        Pinned rows come by one kernel that reads host memory directly. Ids on the host are checked; ids on the device
        are not read by the CPU, and one outside [0, N) fills its row with ones in every bit (NaN).

        Shapes: dst [K, ...] on the device; src [N, ...] on the host; ids [K] int32 or int64, on either
        Returns: a handle; wait for it before reading dst, synchronize with it before overwriting src or ids
        Raises: ValueError for another device, dtype or shape, or an id on the host outside [0, N)
        Source: oracle: reference.gather
        """
        self._check("gather", dst, src, self.device, HOST)
        _check_plain("gather", dst, src)
        rows = self._check_ids("gather", ids, src)
        _check_shape("gather", dst, (len(rows), *src.shape[1:]))
        if self._direct(src, dst):
            rows = rows.to(self.device)
            return self._enqueue("in", lambda: copy_rows(src, dst, rows, gather=True), rows, dst)
        bits = BITS.get(dst.dtype, dst.dtype)
        host_rows = rows.to(HOST, torch.int64)
        self._check_range("gather", host_rows, src)
        self._lanes.mark("out").synchronize()  # the CPU reads what may still be on its way
        return self._transfer("in", [(dst.view(bits), src.detach().view(bits)[host_rows])])

    def scatter(self, dst: Tensor, src: Tensor, ids: Tensor) -> Handle:
        """dst[ids[i]] = src[i]: rows packed on the device, put where they belong on the host.

        Shapes: dst [N, ...] on the host; src [K, ...] on the device; ids [K] int32 or int64, on either
        Returns: a handle; wait for it before overwriting src, synchronize with it before the CPU reads dst
        Raises: ValueError for another device, dtype or shape, and for ids on the host outside [0, N) or given twice;
                of ids on the device, those outside [0, N) move nothing, and of two alike either row may stay
        Source: oracle: reference.scatter
        """
        self._check("scatter", dst, src, HOST, self.device)
        _check_plain("scatter", dst, src)
        rows = self._check_ids("scatter", ids, dst)
        _check_shape("scatter", src, (len(rows), *dst.shape[1:]), name="src")
        if rows.device == HOST and len(rows.unique()) != len(rows):
            raise ValueError("scatter: ids must differ, got one twice: which row would stay is undefined")
        if self._direct(dst, src):
            rows, src = rows.to(self.device), src.detach()
            return self._enqueue("out", lambda: copy_rows(dst, src, rows, gather=False), rows, src)
        host_rows = rows.to(HOST, torch.int64)
        self._check_range("scatter", host_rows, dst)
        bits = BITS.get(dst.dtype, dst.dtype)
        self._lanes.synchronize()  # the CPU writes where a transfer may still read
        dst.detach().view(bits)[host_rows] = src.detach().to(HOST).view(bits)
        return Handle(self._lanes, self._lanes.mark("out"))

    def _transfer(self, lane: Lane, pairs: list[tuple[Tensor, Tensor]]) -> Handle:
        def work() -> None:
            for dst, src in pairs:
                dst.copy_(src, non_blocking=True)

        if not all(x.is_contiguous() for pair in pairs for x in pair if x.device == HOST):
            self._lanes.synchronize()  # torch packs what has gaps on the CPU, at once
        return self._enqueue(lane, work, *(x for pair in pairs for x in pair))

    def _enqueue(self, lane: Lane, work: Callable[[], None], *tensors: Tensor) -> Handle:
        """Run after the compute lane and the other direction, and keep the device's tensors alive for it."""
        other: Lane = "out" if lane == "in" else "in"
        mark = self._lanes.run(lane, work, after=(self._lanes.mark("compute"), self._lanes.mark(other)))
        held = tuple(x for x in tensors if x.device == self.device != HOST)
        if lane == "in":
            return Handle(self._lanes, mark, held)
        # What leaves is often dropped by the caller at once. The device may get ahead of the copies by a few only, or
        # memory would be full of tensors on their way out.
        self._leaving.append((mark, held))
        while len(self._leaving) > LEAVING:
            left, _ = self._leaving.popleft()
            self._lanes.hold("compute", left)
        return Handle(self._lanes, mark, let_go=self._let_go)

    def _let_go(self, reached: Mark) -> None:
        """Give up the tensors that left, up to a mark that somebody waited for: transfers run in order."""
        if any(mark is reached for mark, _ in self._leaving):
            while self._leaving.popleft()[0] is not reached:
                pass

    def _direct(self, host: Tensor, device: Tensor) -> bool:
        """Whether a kernel can reach these rows of the host."""
        return (
            TRITON
            and self.device.type == "cuda"
            and host.is_contiguous()
            and device.is_contiguous()
            and host.is_pinned()
        )

    def _pairs(
        self, call: str, dst: Tensors, src: Tensors, dst_device: torch.device, src_device: torch.device
    ) -> list[tuple[Tensor, Tensor]]:
        for x in (dst, src):
            if not isinstance(x, Iterable):
                raise ValueError(f"{call}: dst and src must be tensors or lists of them, got {type(x).__name__}")
        targets, sources = ([x] if isinstance(x, Tensor) else list(x) for x in (dst, src))
        if len(targets) != len(sources):
            raise ValueError(
                f"{call}: expected as many tensors in dst as in src, got {len(targets)} and {len(sources)}"
            )
        for a, b in zip(targets, sources, strict=True):
            self._check(call, a, b, dst_device, src_device)
            _check_shape(call, a, b.shape)
        return [(a.detach(), b.detach()) for a, b in zip(targets, sources, strict=True)]

    def _check(self, call: str, dst: Tensor, src: Tensor, dst_device: torch.device, src_device: torch.device) -> None:
        if not (isinstance(dst, Tensor) and isinstance(src, Tensor)):
            raise ValueError(f"{call}: dst and src must be tensors, got {type(dst).__name__} and {type(src).__name__}")
        for x in (dst, src):
            if x.layout is not torch.strided or x.is_nested:
                kind = "a nested tensor" if x.is_nested else x.layout
                raise ValueError(f"{call}: dst and src must be dense tensors, got {kind}: to_dense() it first")
        if dst.device != dst_device or src.device != src_device:
            raise ValueError(
                f"{call}: dst must be on {dst_device} and src on {src_device}, got {dst.device} and {src.device}"
            )
        if dst.dtype != src.dtype:
            raise ValueError(f"{call}: dst and src must have one dtype, got {dst.dtype} and {src.dtype}: convert first")
        if any(n > 1 and step == 0 for n, step in zip(dst.shape, dst.stride())):
            raise ValueError(f"{call}: dst must have memory for each element, got an expanded tensor: clone it first")

    def _check_ids(self, call: str, ids: Tensor, table: Tensor) -> Tensor:
        """The ids, known to be rows of `table` where the CPU can see them."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
            got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"{call}: ids must be a tensor [K] of int32 or int64, got {got}")
        if ids.device not in (HOST, self.device):
            raise ValueError(f"{call}: ids must be on {HOST} or {self.device}, got {ids.device}")
        if table.dim() == 0:
            raise ValueError(f"{call}: the host tensor must have rows [N, ...], got a 0-dim tensor")
        if ids.device == HOST:
            self._check_range(call, ids, table)
        return ids

    @staticmethod
    def _check_range(call: str, rows: Tensor, table: Tensor) -> None:
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= len(table)):
            raise ValueError(
                f"{call}: ids must lie in [0, {len(table)}), got {int(rows.min())} to {int(rows.max())}: "
                "drop padding (-1) first"
            )


def _check_plain(call: str, *tensors: Tensor) -> None:
    """Rows are moved by their bytes, which must be what the tensor says."""
    for x in tensors:
        if x.is_conj() or x.is_neg():
            raise ValueError(f"{call}: dst and src must not be lazily conjugated or negated views: resolve them first")


def _check_shape(call: str, tensor: Tensor, expected: tuple[int, ...], name: str = "dst") -> None:
    if tuple(tensor.shape) != tuple(expected):
        raise ValueError(f"{call}: {name} must have shape {tuple(expected)}, got {tuple(tensor.shape)}")
