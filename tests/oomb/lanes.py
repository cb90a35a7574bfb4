"""Lanes that are the device's own, but for what a test puts before their work: a delay, or an error."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

import oomb.host
from offload import Lanes, lanes_for
from offload.lanes import Mark


class WatchedLanes:
    """offload.Lanes around others. `on(what)` is told of every call; `delay(lane)` is enqueued before a lane's work."""

    def __init__(
        self, inner: Lanes, *, on: Callable[[str], None] = lambda _: None, delay: Callable[[str], None] | None = None
    ) -> None:
        self.inner, self.on, self.delay, self.device = inner, on, delay, inner.device

    def run(self, lane, work: Callable[[], object], after: Iterable[Mark] = ()) -> Mark:
        self.on(lane)

        def late() -> None:
            if self.delay is not None:
                self.delay(lane)
            work()

        mark = self.inner.run(lane, late, after)
        self.on(f"after {lane}")
        return mark

    def mark(self, lane) -> Mark:
        if self.delay is not None and lane == "compute":  # most of what computes does not pass through here
            self.delay(lane)
        return self.inner.mark(lane)

    def hold(self, lane, *marks: Mark) -> None:
        self.inner.hold(lane, *marks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.on("memory")
        return self.inner.empty(shape, dtype)

    def release(self, tensor: Tensor) -> None:
        self.inner.release(tensor)

    def synchronize(self) -> None:
        self.inner.synchronize()


@contextmanager
def watched(**what) -> Iterator[None]:
    """Losses that begin inside run over `WatchedLanes(**what)`."""
    with mock.patch.object(oomb.host, "lanes_for", lambda device: WatchedLanes(lanes_for(device), **what)):
        yield


def sleeping(slow: Sequence[str], seed: int, milliseconds: float = 0.5, share: float = 0.3) -> Callable[[str], None]:
    """A delay, of at most so long, before a share of the work on the lanes that are slow."""
    chooser = random.Random(seed)

    def delay(lane: str) -> None:
        if lane in slow and chooser.random() < share:
            torch.cuda._sleep(int(chooser.random() * milliseconds * 2e6))

    return delay
