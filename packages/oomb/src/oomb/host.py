"""The host memory that losses borrow: one arena a process, pinned once and used again by every step."""

from __future__ import annotations

import os
import threading

import torch

from offload import Lanes, PinnedArena, lanes_for

# Pinning costs a third of a second per GiB, so what one loss gives back is kept for the next. It is the process's, as
# the memory is: losses do not know each other. At most one entry, the largest.
_spare: list[tuple[PinnedArena, torch.device]] = []
_lock = threading.RLock()  # the garbage collector may end a forgotten loss while this thread holds it
os.register_at_fork(after_in_child=_spare.clear)  # a fork does not inherit the memory
_imported_by = os.getpid()


class HostLease:
    """An arena of at least `nbytes` and the lanes of a device, until `release`. With nbytes=0 there is no arena.

    Raises: HostOutOfMemory with the numbers when the host has not as much
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device, self._pid = device, os.getpid()
        self.lanes: Lanes = lanes_for(device)
        self.arena: PinnedArena | None = _borrow(nbytes, device) if nbytes else None

    @property
    def foreign(self) -> bool:
        """Whether this is a fork, where neither the arena nor the lanes are of any use."""
        return os.getpid() != self._pid

    def refuse_fork(self) -> None:
        """Raises: ValueError in a fork, if what the loss needs did not come along"""
        if self.foreign and (self.arena is not None or self.device.type != "cpu"):
            raise ValueError(
                f"this loss was made in process {self._pid} and its memory on {self.device} and the host is not "
                f"inherited by forks: call backward there, or make the loss in process {os.getpid()}"
            )

    def release(self) -> None:
        """Wait for every transfer, then give the arena back. Idempotent; without effect in a fork."""
        if self.foreign:
            return
        arena, self.arena = self.arena, None
        self.lanes.synchronize()
        if arena is not None:
            arena.reset()
            _give_back(arena, self.device)


def refuse_fork_with_threads() -> None:
    """OpenMP's threads are not inherited by forks, and torch would wait for them for ever.

    Raises: ValueError in a fork in which torch uses several threads
    """
    threads = torch.get_num_threads()
    if os.getpid() != _imported_by and threads > 1:
        raise ValueError(
            f"this process is a fork and torch would use {threads} threads in it, which hangs once its parent had used "
            'them: call torch.set_num_threads(1) in it, or start it with multiprocessing\'s "spawn"'
        )


def spare_bytes() -> int:
    """What is kept for the next loss: not free, but to be had."""
    with _lock:
        return sum(arena.nbytes for arena, _ in _spare)


def close_spare() -> None:
    """Give the memory that is kept for the next loss back to the system."""
    with _lock:
        spares, _spare[:] = _spare[:], []
    for arena, _ in spares:
        arena.close()


def _borrow(nbytes: int, device: torch.device) -> PinnedArena:
    with _lock:
        spare = _spare.pop() if _spare else None
    if spare is not None:
        arena, pinned_for = spare
        if arena.nbytes >= nbytes and pinned_for == device:
            return arena
        arena.close()  # first, or there might not be room for both
    return PinnedArena(nbytes, device=device)


def _give_back(arena: PinnedArena, device: torch.device) -> None:
    with _lock:
        _spare.append((arena, device))
        _spare.sort(key=lambda entry: entry[0].nbytes)
        surplus, _spare[:] = _spare[:-1], _spare[-1:]
    for other, _ in surplus:
        other.close()
