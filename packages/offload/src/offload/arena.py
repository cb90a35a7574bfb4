"""One block of pinned host memory, taken from the system once and reused."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from offload.device import resolve_device
from offload.host_memory import HostOutOfMemory, free_host_bytes

ALIGNMENT_BYTES = 256
TOUCH_BYTES = 64 << 20
TOUCH_THREADS = 16
HOST_REGISTER_PORTABLE_MAPPED = 1 | 2


class PinnedArena:
    """A block of exactly `nbytes` of host memory: pinned for CUDA where there is one, reused for ever.

    `device` is the CUDA device to pin for (default: the current one where CUDA is available). Without CUDA, and with
    `device="cpu"`, the arena is ordinary memory; where pinning was to be had and is refused, it warns and works
    pageable: `pinned` tells. The memory is touched now, by several threads, on huge pages where the system allows,
    and is not inherited by forked processes (using the arena in one is an error).

    Every view is taken at a multiple of 256 bytes and keeps the block mapped while it lives.

    Units:  nbytes, used_bytes in bytes
    Raises: HostOutOfMemory if more is asked than is free (available memory, and what each cgroup leaves);
            ValueError if nbytes is not a positive integer or device is neither CPU nor CUDA
    """

    def __init__(self, nbytes: int, device: torch.device | str | int | None = None) -> None:
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes <= 0:
            raise ValueError(f"nbytes must be a positive integer, got {nbytes!r}: pass the arena's size in bytes")
        target = _cuda_target(device)
        self._nbytes = nbytes
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._buffer: Any = _allocate(nbytes)
        self._used = 0
        self._generation = 0
        self._freed: dict[int, int] = {}  # end → start of bytes lent and given back, not yet on top
        self._given_back: deque[tuple[int, int, int]] = deque()  # (generation, start, end), filled by dying loans
        address = ctypes.addressof(self._buffer)
        _touch(address, nbytes)
        # The finalizer owns the buffer too: memory must not be unmapped while it is registered. It is there before,
        # because an interrupt that comes while the memory is pinned, which takes long, is raised just after.
        self._finalizer = weakref.finalize(self, _unregister, self._buffer, target, self._pid)
        self._pinned = target is not None and _register(address, nbytes, target)
        if not self._pinned:
            self._finalizer.detach()

    @property
    def nbytes(self) -> int:
        """Size of the block."""
        return self._nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes up to the end of the last view, alignment included."""
        with self._lock:
            self._reclaim()
            return self._used

    @property
    def pinned(self) -> bool:
        """Whether CUDA copies to and from the block need no staging."""
        return self._pinned

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor over bytes that nobody else has, until `reset`. Its contents are whatever was there.

        Returns: contiguous tensor on the CPU, its own storage starting at a multiple of 256 bytes
        Raises: HostOutOfMemory with the numbers when it does not fit; ValueError for a bad shape or dtype, after
                `close`, and in a forked process
        """
        sizes = _check_shape(shape)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype must be a torch.dtype, got {dtype!r}")
        count = math.prod(sizes)
        if count == 0:
            self._check_usable()
            with torch.inference_mode(False):
                return torch.empty(sizes, dtype=dtype, device="cpu")
        with self._lock:
            start, _ = self._reserve(count * dtype.itemsize)
            buffer = self._buffer
        return _tensor(buffer, dtype, start, sizes)

    def reset(self) -> None:
        """Make all bytes takeable again. Tensors taken before then share their bytes with later ones: drop them first.

        What `saved_on_host` keeps for a graph whose backward is still to come is lost, and that backward says so.

        Raises: ValueError after `close` and in a forked process
        """
        with self._lock:
            self._check_usable()
            self._forget()

    def close(self) -> None:
        """Unpin the block and give it back to the system as soon as no view of it lives. Also done at exit.

        Idempotent; waits for the device, so that no copy under way loses its memory.
        """
        with self._lock:
            self._forget()
            self._buffer = None
            self._pinned = False
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._buffer is None else "pinned" if self._pinned else "pageable"
        return f"PinnedArena(nbytes={self._nbytes}, used_bytes={self.used_bytes}, {state})"

    def _lend(self, nbytes: int) -> Loan:
        """Bytes that come back by themselves when the loan dies and nothing above them is in use."""
        with self._lock:
            start, end = self._reserve(nbytes)
            return Loan(self, start, end, _tensor(self._buffer, torch.uint8, start, (nbytes,)))

    def _reserve(self, nbytes: int) -> tuple[int, int]:
        self._check_usable()
        self._reclaim()
        start = self._used
        free = self._nbytes - start
        if nbytes > free:
            raise HostOutOfMemory(
                f"the arena is full: {nbytes} bytes asked for, {free} of {self._nbytes} free: make the arena larger, "
                "or reset() it once what it holds is done with",
                nbytes,
                free,
                free,
            )
        aligned = -(-(start + nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._used = min(aligned, self._nbytes)
        return start, self._used

    def _reclaim(self) -> None:
        while self._given_back:
            generation, start, end = self._given_back.popleft()
            if generation == self._generation:
                self._freed[end] = start
        while self._used in self._freed:
            self._used = self._freed.pop(self._used)

    def _forget(self) -> None:
        self._used = 0
        self._generation += 1
        self._freed.clear()

    def _check_usable(self) -> None:
        if self._buffer is None:
            raise ValueError("this PinnedArena is closed: make a new one")
        if os.getpid() != self._pid:
            raise ValueError(
                f"this PinnedArena belongs to process {self._pid} and its memory is not inherited by forks: "
                "make one in this process"
            )


class Loan:
    """Bytes of an arena, lent until this object dies. Keeps the arena alive, so that the bytes stay pinned."""

    __slots__ = ("__weakref__", "_arena", "_generation", "_range", "bytes")

    def __init__(self, arena: PinnedArena, start: int, end: int, view: Tensor) -> None:
        self._arena = arena
        self._generation = arena._generation
        self._range = (start, end)
        self.bytes = view

    def check(self) -> None:
        """Raise unless the bytes are still this loan's."""
        if self._generation != self._arena._generation:
            raise ValueError(
                "the arena was reset or closed while this graph still needed what it had saved there: "
                "run backward first, then reset()"
            )

    def __del__(self) -> None:
        # Runs at any moment and in any thread, a holder of the arena's lock included: only an atomic append here.
        self._arena._given_back.append((self._generation, *self._range))


def _tensor(buffer: Any, dtype: torch.dtype, start: int, sizes: tuple[int, ...]) -> Tensor:
    """A tensor over part of the buffer, with a storage of its own and no base.

    So saving one view does not save the arena, and writing into one does not look to autograd like writing into others.
    """
    with torch.inference_mode(False):  # else a view taken in inference mode could never be trained with
        flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(sizes), offset=start)
        strides = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        return torch.empty(0, dtype=dtype, device="cpu").set_(flat.untyped_storage(), 0, sizes, strides)


def _check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, Sequence) else None
    if sizes is None or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in sizes):
        raise ValueError(f"shape must be a sequence of non-negative integers, got {shape!r}")
    return sizes


def _cuda_target(device: torch.device | str | int | None) -> torch.device | None:
    """The CUDA device to pin for, or None for none."""
    if device is None:
        return resolve_device("cuda") if torch.cuda.is_available() else None
    target = resolve_device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        warnings.warn(f"memory cannot be pinned for {target}: no CUDA; the arena works pageable", stacklevel=3)
        return None
    return target if target.type == "cuda" else None


def _allocate(nbytes: int) -> Any:
    """A ctypes array over anonymous private memory; tensors over it keep it mapped."""
    free = free_host_bytes()
    if free is not None:
        largest = free - free // 64  # the rest is for page tables and for everybody else
        if nbytes > largest:
            raise _too_large(nbytes, free, largest)
    try:
        block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        largest = _largest_mapping(nbytes)  # a limit of the process's own (ulimit -v), or of what may be promised
        raise _too_large(nbytes, largest if free is None else min(free, largest), largest - largest // 64) from error
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):  # a kernel built without it
                block.madvise(getattr(mmap, advice))
    buffer = (ctypes.c_char * nbytes).from_buffer(block)
    weakref.finalize(buffer, _drop, block, os.getpid()).atexit = False
    return buffer


def _largest_mapping(refused: int) -> int:
    """The most bytes that the system maps at once, to a MiB. Nothing is touched."""
    fits = 0
    while refused - fits > 1 << 20:
        middle = (fits + refused) // 2
        try:
            mmap.mmap(-1, middle, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
            fits = middle
        except (OSError, OverflowError):
            refused = middle
    return fits


def _too_large(nbytes: int, free: int, largest: int) -> HostOutOfMemory:
    return HostOutOfMemory(
        f"an arena of {nbytes} bytes does not fit in host memory: {free} bytes are free, "
        f"the largest that fits is {largest} bytes",
        nbytes,
        free,
        largest,
    )


def _drop(block: mmap.mmap, pid: int) -> None:
    """The last view is gone. In a forked child the range was never mapped and may be something else's by now."""
    if os.getpid() != pid:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(block))  # never unmapped there


def _touch(address: int, nbytes: int) -> None:
    """Make every page real now; one thread spends most of its time in the kernel clearing pages."""
    starts = range(0, nbytes, TOUCH_BYTES)

    def clear(start: int) -> None:
        ctypes.memset(address + start, 0, min(TOUCH_BYTES, nbytes - start))  # without the interpreter's lock

    threads = min(TOUCH_THREADS, os.cpu_count() or 1, len(starts))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(clear, starts):
            pass


def _register(address: int, nbytes: int, device: torch.device) -> bool:
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, HOST_REGISTER_PORTABLE_MAPPED))
        if code == 0:
            return True
        _blame_nobody(device)
    warnings.warn(f"pinning {nbytes} bytes was refused (CUDA error {code}); the arena works pageable", stacklevel=3)
    return False


def _unregister(buffer: Any, device: torch.device | None, pid: int) -> None:
    if device is None or os.getpid() != pid:
        return
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        code = int(torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(buffer)))
        if code:  # interrupted before it was registered
            _blame_nobody(device)


def _blame_nobody(device: torch.device) -> None:
    """A refusal stays behind as CUDA's last error, and the next kernel launch would be blamed for it."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device).add_(1)
