"""Three queues of work on one device, and the order between them: everything asynchronous here goes through this file.

"compute" is whatever stream torch works on; "in" carries copies from the host, "out" copies to it. Each runs its own
work in order and knows nothing of the others, except where it is told to wait for a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from offload.device import resolve_device

Lane = Literal["compute", "in", "out"]


class Mark(Protocol):
    """A place in a lane: reached once everything enqueued before it is done."""

    def synchronize(self) -> None:
        """Make the CPU wait until it is reached."""


class Lanes(Protocol):
    """What a scheduler of transfers needs of a device."""

    device: torch.device

    def run(self, lane: Lane, work: Callable[[], object], after: Iterable[Mark] = ()) -> Mark:
        """Enqueue work on a lane, to start after the marks; returns the mark behind it."""

    def mark(self, lane: Lane) -> Mark:
        """The mark behind everything enqueued on a lane so far."""

    def hold(self, lane: Lane, *marks: Mark) -> None:
        """Let what is enqueued on a lane from now on start after the marks."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory on the device. Earlier work on "compute" may still use it: other lanes wait for a mark there first."""

    def release(self, tensor: Tensor) -> None:
        """Give up a tensor from `empty` or from the compute lane: later work on "compute" may get its memory."""

    def synchronize(self) -> None:
        """Make the CPU wait for all three lanes."""


class CudaLanes:
    """The current stream and two of its own; marks are events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {"in": torch.cuda.Stream(device), "out": torch.cuda.Stream(device)}

    def run(self, lane: Lane, work: Callable[[], object], after: Iterable[Mark] = ()) -> Mark:
        stream = self._stream(lane)
        _wait(stream, after)
        if lane == "compute":
            work()
        else:
            with torch.cuda.stream(stream):
                work()
        return stream.record_event()

    def mark(self, lane: Lane) -> Mark:
        return self._stream(lane).record_event()

    def hold(self, lane: Lane, *marks: Mark) -> None:
        _wait(self._stream(lane), marks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def release(self, tensor: Tensor) -> None:
        # torch's allocator hands memory on in the order of the stream it was made on, the compute lane
        pass

    def synchronize(self) -> None:
        for lane in ("compute", "in", "out"):
            self._stream(lane).synchronize()

    def _stream(self, lane: str) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device) if lane == "compute" else self._streams[lane]


def _wait(stream: torch.cuda.Stream, marks: Iterable[Mark]) -> None:
    for mark in marks:
        assert isinstance(mark, torch.cuda.Event)
        stream.wait_event(mark)


class InlineLanes:
    """No device: everything is done when the call returns."""

    class _Done:
        def synchronize(self) -> None:
            pass

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._done = self._Done()

    def run(self, lane: Lane, work: Callable[[], object], after: Iterable[Mark] = ()) -> Mark:
        work()
        return self._done

    def mark(self, lane: Lane) -> Mark:
        return self._done

    def hold(self, lane: Lane, *marks: Mark) -> None:
        pass

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def release(self, tensor: Tensor) -> None:
        pass

    def synchronize(self) -> None:
        pass


def lanes_for(device: torch.device | str | int) -> Lanes:
    """The lanes of a device.

    Raises: ValueError if the device is neither the CPU nor a CUDA device that exists
    """
    target = resolve_device(device)
    if target.type == "cpu":
        return InlineLanes(target)
    if not torch.cuda.is_available():
        raise ValueError(f"{target} was asked for, but CUDA is not available: pass device='cpu'")
    return CudaLanes(target)
