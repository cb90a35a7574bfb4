"""Tensors put away in one phase of a program and taken back in a later one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload.arena import PinnedArena
from offload.host_memory import HostOutOfMemory
from offload.lanes import Lane, Lanes, Mark

_LEAVING = 4  # tensors on their way out that may still take device memory


@dataclass
class _Entry:
    """Where something is. `host` and `device` may both hold it; `arrived` orders readers after the copy that fills.
    `versions`: of what was put away; none once it is dropped, when its owner may write to it again.

    Units: room in bytes, what it takes of the shelf's share of the device
    """

    host: tuple[Tensor, ...] | None
    left: Mark | None  # the copy to the host
    device: tuple[Tensor, ...] | None
    arrived: Mark | None
    versions: list[int] = field(default_factory=list)
    room: int = 0


class Shelf:
    """Keeps tensors by key: on the device while `device_bytes` lasts, the rest in an arena.

    What is put away must not be written to afterwards. Copies run beside compute; `prefetch` before `get` hides them.
    The arena's bytes are not given back one by one: whoever made the arena resets it after `clear`.

    Units:  device_bytes in bytes
    Raises: ValueError for a number of bytes that is none; HostOutOfMemory from `put` when the arena is full, or when
            there is none
    """

    def __init__(self, lanes: Lanes, arena: PinnedArena | None, *, device_bytes: int = 0) -> None:
        if not isinstance(device_bytes, int) or isinstance(device_bytes, bool) or device_bytes < 0:
            raise ValueError(f"device_bytes must be an integer of at least 0, got {device_bytes!r}")
        self._lanes, self._arena = lanes, arena
        self._room = device_bytes
        self._entries: dict[Hashable, _Entry] = {}
        self._leaving: deque[tuple[_Entry, tuple[Tensor, ...]]] = deque()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def put(self, key: Hashable, tensors: Sequence[Tensor], *, near: bool = False) -> None:
        """Put tensors of the device away. Enqueues copies; returns at once.

        near: keep them on the device, beside `device_bytes`, of which they take nothing.
        Raises: ValueError for a key that is taken, and for anything but a sequence of tensors on the device;
                RuntimeError if what was put away before has been written to since
        """
        if key in self._entries:
            raise ValueError(f"expected a key that is free, got {key!r}, which holds something: drop it first")
        if not isinstance(tensors, Sequence) or not all(isinstance(x, Tensor) for x in tensors):
            got = type(tensors).__name__
            raise ValueError(f"expected a list or tuple of tensors to put away as {key!r}, got {got}: put [tensor]")
        if any(x.layout is not torch.strided or x.is_quantized or x.is_nested for x in tensors):
            raise ValueError(f"expected dense tensors to put away as {key!r}: put the parts of a sparse or nested one")
        if any(x.device != self._lanes.device for x in tensors):
            got = ", ".join(sorted({str(x.device) for x in tensors}))
            raise ValueError(f"expected tensors on {self._lanes.device} to put away as {key!r}, got some on {got}")
        kept = tuple(x.detach() for x in tensors)
        size = sum(x.numel() * x.element_size() for x in kept)
        if near or size <= self._room:
            room = 0 if near else size
            self._room -= room
            self._entries[key] = _Entry(None, None, kept, None, _versions(kept), room)
            return
        if self._arena is None:
            raise HostOutOfMemory(
                f"{size} bytes to put away, {self._room} bytes left on {self._lanes.device} and no arena on the host",
                size,
                self._room,
                self._room,
            )
        while len(self._leaving) >= _LEAVING:
            self._let_go()
        kept = tuple(x if x.is_contiguous() else x.contiguous() for x in kept)
        host = tuple(self._arena.take(x.shape, x.dtype) for x in kept)
        left = self._copy("out", host, kept, after=(self._lanes.mark("compute"),))
        self._entries[key] = entry = _Entry(host, left, None, None, _versions(kept))
        self._leaving.append((entry, kept))

    def prefetch(self, key: Hashable) -> None:
        """Begin to bring a key's tensors to the device; without effect if they are there, or there is no such key."""
        entry = self._entries.get(key)
        if entry is None or entry.device is not None:
            return
        assert entry.host is not None and entry.left is not None
        entry.device = tuple(self._lanes.empty(x.shape, x.dtype) for x in entry.host)
        # the memory is new to this lane: earlier work of the compute lane may still be using it
        after = (self._lanes.mark("compute"), entry.left)
        entry.arrived = self._copy("in", entry.device, entry.host, after=after)

    def get(self, key: Hashable) -> tuple[Tensor, ...]:
        """The tensors, on the device; work enqueued on the compute lane from now on may read them.

        Raises: KeyError for an unknown key; RuntimeError if it has been written to since it was put away
            (in what came back from the host that goes unnoticed)
        """
        self.prefetch(key)
        entry = self._entries[key]
        assert entry.device is not None
        if entry.host is None:
            _check_unwritten(entry.device, entry.versions)
        for leaving, tensors in self._leaving:
            if leaving is entry:
                _check_unwritten(tensors, entry.versions)
        if entry.arrived is not None:
            self._lanes.hold("compute", entry.arrived)
            entry.arrived = None
        return entry.device

    def drop(self, key: Hashable) -> None:
        """Forget a key, if it is there. Tensors that were handed out stay good while they are referred to."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry.versions.clear()
        if entry.device is None:
            return
        if entry.arrived is not None:  # fetched and never read: its memory must not be handed on before the copy ended
            self._lanes.hold("compute", entry.arrived)
        self._room += entry.room
        for x in entry.device:
            self._lanes.release(x)

    def drop_where(self, condition: Callable[[Any], bool]) -> None:
        """Drop every key that fulfils a condition."""
        for key in [key for key in self._entries if condition(key)]:
            self.drop(key)

    def clear(self) -> None:
        """Forget everything. The host bytes may be used again once the lanes have been synchronized."""
        for key in list(self._entries):
            self.drop(key)
        while self._leaving:
            entry, tensors = self._leaving.popleft()
            self._wait_until_left(entry)
            for x in tensors:
                self._lanes.release(x)

    def _let_go(self) -> None:
        entry, tensors = self._leaving[0]
        _check_unwritten(tensors, entry.versions)  # if it was, it stays: whoever gets it is to hear of it too
        self._leaving.popleft()
        self._wait_until_left(entry)
        for x in tensors:
            self._lanes.release(x)

    def _wait_until_left(self, entry: _Entry) -> None:
        assert entry.left is not None
        self._lanes.hold("compute", entry.left)

    def _copy(self, lane: Lane, dst: tuple[Tensor, ...], src: tuple[Tensor, ...], *, after: tuple[Mark, ...]) -> Mark:
        def work() -> None:
            with torch.no_grad():
                for a, b in zip(dst, src, strict=True):
                    a.copy_(b, non_blocking=True)

        return self._lanes.run(lane, work, after=after)


def _versions(tensors: tuple[Tensor, ...]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in tensors]


def _check_unwritten(tensors: tuple[Tensor, ...], versions: list[int]) -> None:
    if versions and _versions(tensors) != versions:
        raise RuntimeError(
            "a tensor was written to in place after it was put away: what comes back would be neither the old nor the "
            "new; put a clone away"
        )
