"""Device memory that pages of the host come to: a few buffers, used in turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload import Lanes
from offload.lanes import Mark

BUFFERS = 3  # of each kind: one being read, one arriving, one on its way out

Unit = tuple[int, int, int]  # layer, first page, page after the last
Pair = tuple[Tensor, Tensor]


@dataclass(eq=False)
class Buffer:
    """Device memory for one unit.

    `free`: when it may be written again; `unit`: what was fetched; `read`: whether that has been used and may go.
    `chunk`: where lists rule, the chunk by whose lists it was fetched; `rows`: what they name (offload.listed).
    """

    bytes: Tensor
    rows: Tensor
    free: Mark
    unit: Unit | None = None
    arrived: Mark | None = None
    busy: bool = False
    read: bool = False
    chunk: int | None = None

    def pair(self, shape: tuple[int, ...], dtype: torch.dtype) -> Pair:
        size = math.prod(shape) * dtype.itemsize
        a, b = (self.bytes[i * size : (i + 1) * size].view(dtype).view(shape) for i in (0, 1))
        return a, b


@dataclass
class Ring:
    """Buffers of one size. Units: nbytes in bytes; rows: elements of `Buffer.rows`"""

    lanes: Lanes
    nbytes: int
    rows: int
    buffers: list[Buffer] = field(default_factory=list)

    def find(self, unit: Unit) -> Buffer | None:
        return next((b for b in self.buffers if b.unit == unit), None)

    def claim(self, unit: Unit) -> Buffer:
        """One that nobody reads: empty, else new, else the oldest of those read, or of those fetched in vain."""
        idle = [b for b in self.buffers if not b.busy]
        buffer = next((b for b in idle if b.unit is None), None)
        if buffer is None and len(self.buffers) < BUFFERS:
            new = self.lanes.empty((self.nbytes,), torch.uint8), self.lanes.empty((self.rows,), torch.int32)
            # earlier work of the compute lane may still be using this memory
            buffer = Buffer(*new, self.lanes.mark("compute"))
        else:
            buffer = buffer or next((b for b in idle if b.read), idle[0])
            self.buffers.remove(buffer)
        self.buffers.append(buffer)
        buffer.unit, buffer.read, buffer.chunk = unit, False, None
        return buffer

    def forget(self) -> None:
        """What was fetched will be out of date."""
        for buffer in self.buffers:
            buffer.unit, buffer.busy = None, False

    def clear(self) -> None:
        for buffer in self.buffers:
            self.lanes.hold("compute", buffer.free, *(() if buffer.arrived is None else (buffer.arrived,)))
            self.lanes.release(buffer.bytes)
            self.lanes.release(buffer.rows)
        self.buffers.clear()
