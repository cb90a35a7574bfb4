"""Lanes whose work runs when a chooser says so: the timing of a device, as bad as it can be, on a CPU.

What is enqueued waits in its lane; whenever the CPU enqueues something, the chooser advances lanes that may advance, by
any number of steps. Memory that is new or given up is overwritten with NaN by the compute lane, when it gets there, as
the work of others would.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

LANES = ("compute", "in", "out")


class SimulatedMark:
    def __init__(self, lanes: SimulatedLanes) -> None:
        self.lanes, self.reached = lanes, False

    def synchronize(self) -> None:
        while not self.reached:
            self.lanes.step()


class SimulatedLanes:
    """offload.Lanes over three queues. choose(n): a number in [0, n)."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.device = torch.device("cpu")
        self.queues: dict[str, deque] = {lane: deque() for lane in LANES}
        # How far the CPU usually gets ahead, and which lanes are fast, differs from case to case.
        self.eagerness = choose(4)
        self.favourites = [lane for lane in LANES if choose(2)] or list(LANES)

    def run(self, lane: str, work: Callable[[], object], after: Iterable[SimulatedMark] = ()) -> SimulatedMark:
        mark = SimulatedMark(self)
        self.queues[lane].append((work, tuple(after), mark))
        for _ in range(self.choose(1 + self.eagerness)):
            self.step(idle=True)
        return mark

    def mark(self, lane: str) -> SimulatedMark:
        return self.run(lane, lambda: None)

    def hold(self, lane: str, *marks: SimulatedMark) -> None:
        self.run(lane, lambda: None, marks)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            tensor = poison(torch.empty(tuple(shape), dtype=dtype))
        self.release(tensor)
        return tensor

    def release(self, tensor: Tensor) -> None:
        self.run("compute", lambda: poison(tensor))

    def synchronize(self) -> None:
        while any(self.queues.values()):
            self.step()

    def step(self, *, idle: bool = False) -> None:
        """Advance one lane by one piece of work. idle: it is fine if none can."""
        ready = [x for x in LANES if self.queues[x] and all(m.reached for m in self.queues[x][0][1])]
        if not ready:
            assert idle or not any(self.queues.values()), "deadlock: every lane waits for another"
            assert idle, "the CPU waits for a mark that nothing will reach"
            return
        liked = [x for x in ready if x in self.favourites]
        if liked and self.choose(8):
            ready = liked
        lane = ready[self.choose(len(ready))]
        work, _, mark = self.queues[lane].popleft()
        work()
        mark.reached = True


def poison(tensor: Tensor) -> Tensor:
    """Ones in every bit: NaN in every float type, -1 in integers; not by its owner, so no version of it is counted."""
    tensor.data.view(-1).view(torch.uint8).fill_(255)
    return tensor


def mutant(name: str, original: str, replacement: str):
    """The module `name` with one line of its source changed, beside the true one."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    assert source.count(original) == 1, f"{name} holds {original!r} {source.count(original)} times, expected once"
    package = name.rpartition(".")[0]
    alias = f"{name}_mutant"
    module = type(sys)(alias)
    module.__package__ = package
    sys.modules[alias] = module  # dataclasses look their module up
    exec(compile(source.replace(original, replacement), spec.origin, "exec"), module.__dict__)
    return module
