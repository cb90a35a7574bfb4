"""The scheduling of host pages, run for real over simulated lanes: right under any timing, and mutants are caught."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulator import SimulatedLanes, mutant

import oomb.host
import oomb.host_tier
import oomb.storage
from oomb.probe import LayerFacts
from oomb.storage import Budget, TieredPast

CPU = torch.device("cpu")
HEADS, DIM = 1, 2
ORDERS = ("plain", "checkpointed", "backward only", "every layer again")


@dataclass
class Pass:
    """A loss's pass over a past: what attention would do, with numbers that tell each token, layer and chunk apart."""

    tokens: int
    chunk: int
    page: int
    device_pages: int
    segment: int
    batch: int
    windows: list[int | None]
    order: str
    documents: tuple[int, ...] = ()  # where documents begin

    def past(self) -> TieredPast:
        facts = {i: LayerFacts(HEADS, HEADS, DIM, torch.float64, window) for i, window in enumerate(self.windows)}
        bounds = [(start, min(start + self.chunk, self.tokens)) for start in range(0, self.tokens, self.chunk)]
        pages = -(-bounds[-1][0] // self.page)
        near = min(self.device_pages, pages)
        nbytes = len(facts) * 4 * (256 + (pages - near) * self.batch * self.page * HEADS * DIM * 8)
        lease = oomb.host.HostLease(nbytes if pages > near else 0, CPU)
        return TieredPast(
            facts, bounds, batch=self.batch, page_tokens=self.page, grad_dtype=torch.float64,
            budget=Budget(near, pages - near, nbytes if pages > near else 0), segment_tokens=self.segment, check=False,
            lease=lease,
        )  # fmt: skip

    def run(self, seed: int, steps: int = 2) -> None:
        for step in range(steps):
            past = self.past()
            try:
                _Step(self, past, seed + step).run()
            finally:
                past.abort()
            if isinstance(past.lanes, SimulatedLanes):
                under_way = sum(map(len, past.lanes.queues.values()))
                assert not under_way, f"host memory was given back with {under_way} pieces of work under way"


class _Step:
    def __init__(self, case: Pass, past: TieredPast, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(case.windows), 2, case.batch, case.tokens, HEADS, DIM)
        self.case, self.past, self.lanes = case, past, past.lanes
        self.truth = torch.randint(1, 1000, shape, generator=generator).double()
        self.grads = torch.zeros(shape, dtype=torch.float64)
        self.generator = generator

    def run(self) -> None:
        past, layers = self.past, range(len(self.case.windows))
        count = len(past.bounds)
        for index in range(count):
            past.open(index, "fill" if index < count - 1 else "walk")
            for layer in layers:
                self.append(layer)
                self.read(layer, "forward")
            if index < count - 1:
                past.close(index, "fill")
        for index in reversed(range(count)):
            if index < count - 1:
                past.open(index, "walk")
            if self.case.order in ("plain", "checkpointed") and index < count - 1:
                for layer in layers:
                    self.read(layer, "forward")
            for layer in reversed(layers):
                if self.case.order in ("checkpointed", "every layer again"):
                    self.read(layer, "forward")
                self.read(layer, "backward")
                self.own(layer)
            past.close(index, "walk")

    def append(self, layer: int) -> None:
        start, stop = self.past.start, self.past.stop
        value = self.truth[layer, :, :, start:stop]
        k, v = (self.lanes.empty(value.shape[1:], torch.float64) for _ in range(2))
        self.lanes.run("compute", lambda: (k.copy_(value[0]), v.copy_(value[1])))
        self.past.append(layer, k, v)

    def read(self, layer: int, phase: str) -> None:
        window, page = self.case.windows[layer], self.case.page
        first = 0 if window is None else max(self.past.start - window + 1, 0)
        first_page = max(first, *(cut for cut in self.case.documents if cut <= self.past.start), 0) // page
        at = first_page
        for segment in self.past.segments(layer, phase, first_page):
            assert segment.first_page == at
            at += segment.slots.shape[1]
            self.attend(layer, phase, segment)
        assert at >= -(-self.past.start // page)

    def attend(self, layer: int, phase: str, segment) -> None:
        first = segment.first_page * self.case.page
        last = min(first + segment.slots.shape[1] * self.case.page, self.past.start)
        expected = self.truth[layer, :, :, first:last]
        added = None
        if phase == "backward":
            added = torch.randint(1, 9, expected.shape, generator=self.generator).double()
            self.grads[layer, :, :, first:last] += added

        def work() -> None:
            for i, (pages, grads) in enumerate(((segment.k, segment.dk), (segment.v, segment.dv))):
                for b, slots in enumerate(segment.slots.long()):
                    rows = pages[slots].flatten(0, 1)[: last - first]
                    assert torch.equal(rows, expected[i, b]), f"{phase}: keys or values of layer {layer} are wrong"
                    if added is not None:
                        rows = grads[slots].flatten(0, 1)
                        rows[: last - first] += added[i, b]
                        grads[slots] = rows.view(-1, *grads.shape[1:])

        self.lanes.run("compute", work)

    def own(self, layer: int) -> None:
        start, stop = self.past.start, self.past.stop
        expected = self.grads[layer, :, :, start:stop].clone()
        own = self.past.own_grad(layer)
        if own is None:
            assert not expected.any(), f"the own gradient of layer {layer} was lost"
            return
        self.lanes.run("compute", lambda: self.check(layer, torch.stack(own), expected))

    @staticmethod
    def check(layer: int, own, expected) -> None:
        assert torch.equal(own, expected), f"the own gradient of layer {layer} is wrong"


@contextmanager
def simulated(choose, tier=oomb.host_tier.HostTier):
    lanes = SimulatedLanes(choose)
    oomb.host.close_spare()
    with (
        mock.patch.object(oomb.host, "lanes_for", lambda device: lanes),
        mock.patch.object(oomb.storage, "HostTier", tier),
    ):
        yield
    oomb.host.close_spare()


@st.composite
def passes(draw) -> Pass:
    return Pass(
        tokens=draw(st.integers(2, 30)),
        chunk=draw(st.integers(1, 12)),
        page=draw(st.integers(1, 5)),
        device_pages=draw(st.sampled_from([0, 0, 1, 3])),
        segment=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 2)),
        windows=draw(st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3)),
        order=draw(st.sampled_from(ORDERS)),
        documents=tuple(draw(st.lists(st.integers(1, 29), max_size=2))),
    )


@settings(deadline=None, max_examples=100)
@given(case=passes(), seed=st.integers(0, 2**32), data=st.data())
def test_right_under_any_timing(case, seed, data):
    chooser = random.Random(seed)
    first = [data.draw(st.integers(0, 7)) for _ in range(6)]  # the bias of the case, shrunk by hypothesis
    with simulated(lambda n: first.pop() % n if first else chooser.randrange(n)):
        case.run(seed)


TIER = "oomb.host_tier"
MUTANTS = {
    "reads before arrival": (TIER, 'self.lanes.hold("compute", buffer.arrived)', "pass"),
    "keys' buffer filled while it is read": (
        TIER, 'used = kv.free = self.lanes.mark("compute")', 'used = self.lanes.mark("compute")',
    ),
    "gradients leave before they are added": (TIER, 'self._copy("out", moves, used)', 'self._copy("out", moves)'),
    "gradients' buffer filled before it is copied out": (
        TIER, "grads.free = pages.written[first] =", "pages.written[first] =",
    ),
    "gradients fetched before they are written": (TIER, "buffer.free, *marks, zero=zero", "buffer.free, zero=zero"),
    "keys fetched before they are written": (TIER, "buffer.free, *settled", "buffer.free"),
    "keys leave before they are computed": (
        TIER, 'pages.appended = self._copy("out", moves, self.lanes.mark("compute"))',
        'pages.appended = self._copy("out", moves)',
    ),
    "keys given up before they left": (TIER, 'self.lanes.hold("compute", left)', "pass"),
    "gradients out of date": (TIER, "        self._grads.forget()\n", ""),
    "own gradients fetched before they are written": (
        TIER, 'self.lanes.mark("compute"), *marks, zero=zero', 'self.lanes.mark("compute"), zero=zero',
    ),
    "new memory filled while others use it": (
        TIER, 'torch.uint8), self.lanes.mark("compute"))', 'torch.uint8), self.lanes.mark("in"))',
    ),
    "forgets which pages hold gradients": (TIER, "pages.touched[a:b] =", "unused ="),
    "host memory used again before its copies ended": ("oomb.host", "self.lanes.synchronize()", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_is_caught(name):
    """The same cases, with one wait taken out of the real code."""
    where, original, replacement = MUTANTS[name]
    changed = mutant(where, original, replacement)
    tier = changed.HostTier if where == TIER else oomb.host_tier.HostTier
    lease = changed.HostLease if where == "oomb.host" else oomb.host.HostLease
    for seed in range(300):
        chooser = random.Random(seed)
        pick = chooser.choice
        case = Pass(
            tokens=chooser.randrange(8, 30), chunk=chooser.randrange(1, 9), page=pick((1, 2, 3, 4)), device_pages=0,
            segment=chooser.randrange(1, 8), batch=1, windows=pick(([None], [None, None], [None, 3, None])),
            order=pick(ORDERS), documents=tuple(chooser.randrange(30) for _ in range(chooser.randrange(3))),
        )  # fmt: skip
        if seed % 4 == 0:  # a page fetched in vain, then added to, then fetched for a reason
            case = Pass(12, 1, 4, 0, 8, 1, [None], "backward only", (7,))
        with simulated(chooser.randrange, tier), mock.patch.object(oomb.host, "HostLease", lease):
            if where == "oomb.host":
                changed.lanes_for = oomb.host.lanes_for
            try:
                case.run(seed)
            except AssertionError:
                return
    pytest.fail(f"{name}: nobody noticed")
