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
import oomb.host_buffers
import oomb.host_tier
import oomb.storage
from oomb.probe import LayerFacts
from oomb.storage import Budget, TieredPast

CPU = torch.device("cpu")
HEADS, DIM = 1, 2
ORDERS = ("plain", "checkpointed", "backward only", "every layer again", "the first layer now and then")


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
    sparse: bool = False  # layers without a window read listed pages only

    def __post_init__(self) -> None:
        if self.sparse:
            self.chunk = -(-self.chunk // self.page) * self.page

    def past(self) -> tuple[TieredPast, Lists]:
        facts = {i: LayerFacts(HEADS, HEADS, DIM, torch.float64, window) for i, window in enumerate(self.windows)}
        bounds = [(start, min(start + self.chunk, self.tokens)) for start in range(0, self.tokens, self.chunk)]
        pages = -(-bounds[-1][0] // self.page)
        near = min(self.device_pages, pages)
        nbytes = len(facts) * 4 * (256 + (pages - near) * self.batch * self.page * HEADS * DIM * 8)
        lease = oomb.host.HostLease(nbytes if pages > near else 0, CPU)
        lists = Lists(self, lease.lanes)
        past = TieredPast(
            facts, bounds, batch=self.batch, page_tokens=self.page, grad_dtype=torch.float64,
            budget=Budget(near, pages - near, nbytes if pages > near else 0), segment_tokens=self.segment, check=False,
            lease=lease, lists=lists,
        )  # fmt: skip
        return past, lists

    def first_page(self, layer: int, start: int) -> int:
        window = self.windows[layer]
        if window == 1:  # nobody looks back
            return -(-start // self.page)
        first = 0 if window is None else max(start - window + 1, 0)
        return max(first, *(cut for cut in self.documents if cut <= start), 0) // self.page

    def run(self, seed: int, steps: int = 2) -> None:
        for step in range(steps):
            past, lists = self.past()
            try:
                _Step(self, past, lists, seed + step).run()
            finally:
                past.abort()
            if isinstance(past.lanes, SimulatedLanes):
                under_way = sum(map(len, past.lanes.queues.values()))
                assert not under_way, f"host memory was given back with {under_way} pieces of work under way"


class Lists:
    """Which pages each chunk reads, chosen by the device when it gets there; memory that is given up is poisoned."""

    def __init__(self, case: Pass, lanes) -> None:
        self.case, self.lanes = case, lanes
        self.made: dict = {}

    def is_sparse(self, layer: int) -> bool:
        return self.case.sparse and self.case.windows[layer] is None

    def lists(self, chunk: int, layer: int):
        return self.made[chunk, layer][:2] if (chunk, layer) in self.made else None

    def choose(self, chunk: int, layer: int, generator: torch.Generator) -> None:
        """Two lists a sequence: pages that chunks before chose, in part, and the newest ones; some are not there."""
        start = chunk * self.case.chunk
        first, last = self.case.first_page(layer, start), start // self.case.page
        values = torch.randint(first, last + 2, (self.case.batch, 1, 2, 3), generator=generator)
        before = self.made.get((chunk - 1, layer))
        if before is not None:
            values[:, :, 0] = torch.where(before[2][:, :, 0] >= first, before[2][:, :, 0], -1)
        ids = self.lanes.empty(values.shape, torch.int32)
        self.lanes.run("compute", lambda: ids.copy_(values))
        self.made[chunk, layer] = ids, self.lanes.mark("compute"), values

    def drop(self, beyond: int) -> None:
        for key in [key for key in self.made if key[0] > beyond]:
            self.lanes.release(self.made.pop(key)[0])

    def named(self, chunk: int, layer: int, b: int, pages: range) -> list[int]:
        """The places of those among some pages that are read."""
        if not self.is_sparse(layer):
            return list(range(len(pages)))
        values = set(self.made[chunk, layer][2][b].flatten().tolist())
        return [i for i, page in enumerate(pages) if page in values]


class _Step:
    def __init__(self, case: Pass, past: TieredPast, lists: Lists, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (len(case.windows), 2, case.batch, case.tokens, HEADS, DIM)
        self.case, self.past, self.lists, self.lanes = case, past, lists, past.lanes
        self.truth = torch.randint(1, 1000, shape, generator=generator).double()
        self.grads = torch.zeros(shape, dtype=torch.float64)
        self.generator = generator

    def run(self) -> None:
        past, layers = self.past, range(len(self.case.windows))
        count = len(past.bounds)
        for index in range(count):
            self.chunk = index
            past.open(index, "fill" if index < count - 1 else "walk")
            for layer in layers:
                self.append(layer)
                if self.lists.is_sparse(layer):
                    self.lists.choose(index, layer, self.generator)
                self.read(layer, "forward")
            if index < count - 1:
                past.close(index, "fill")
        for index in reversed(range(count)):
            self.chunk = index
            if index < count - 1:
                past.open(index, "walk")
            self.lists.drop(index)
            if self.case.order in ("plain", "checkpointed") and index < count - 1:
                for layer in layers:
                    self.read(layer, "forward")
            for layer in reversed(layers):
                if self.case.order == ORDERS[-1] and layer == 0 and index % 2:
                    continue
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
        at = first_page = self.case.first_page(layer, self.past.start)
        for segment in self.past.segments(layer, phase, first_page):
            assert segment.first_page == at or (self.lists.is_sparse(layer) and segment.first_page < at == first_page)
            at = segment.first_page + segment.slots.shape[1]
            self.attend(layer, phase, segment)
        assert at >= -(-self.past.start // self.case.page)

    def attend(self, layer: int, phase: str, segment) -> None:
        first = segment.first_page * self.case.page
        last = min(first + segment.slots.shape[1] * self.case.page, self.past.start)
        pages_here = range(segment.first_page, segment.first_page + segment.slots.shape[1])
        read = [
            [n * self.case.page + i for n in self.lists.named(self.chunk, layer, b, pages_here)
             for i in range(self.case.page) if first + n * self.case.page + i < last]
            for b in range(self.case.batch)
        ]  # fmt: skip
        expected = self.truth[layer, :, :, first:last]
        added = None
        if phase == "backward":
            added = torch.randint(1, 9, expected.shape, generator=self.generator).double()
            for b, tokens in enumerate(read):
                self.grads[layer, :, b, first:last][:, tokens] += added[:, b, tokens]

        def work() -> None:
            for i, (pages, grads) in enumerate(((segment.k, segment.dk), (segment.v, segment.dv))):
                for (b, slots), tokens in zip(enumerate(segment.slots.long()), read):
                    rows = pages[slots].flatten(0, 1)[tokens]
                    wrong = f"{phase}: keys or values of layer {layer} are wrong"
                    assert torch.equal(rows, expected[i, b, tokens]), wrong
                    if added is not None:
                        rows = grads[slots].flatten(0, 1)
                        rows[tokens] += added[i, b, tokens]
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
def simulated(choose, tier=oomb.host_tier.HostTier, ring=oomb.host_buffers.Ring):
    lanes = SimulatedLanes(choose)
    oomb.host.close_spare()
    with (
        mock.patch.object(oomb.host, "lanes_for", lambda device: lanes),
        mock.patch.object(oomb.storage, "HostTier", tier),
        mock.patch.object(oomb.host_tier, "Ring", ring),
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
        sparse=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=100)
@given(case=passes(), seed=st.integers(0, 2**32), data=st.data())
def test_right_under_any_timing(case, seed, data):
    chooser = random.Random(seed)
    first = [data.draw(st.integers(0, 7)) for _ in range(6)]  # the bias of the case, shrunk by hypothesis
    with simulated(lambda n: first.pop() % n if first else chooser.randrange(n)):
        case.run(seed)


TIER, BUFFERS = "oomb.host_tier", "oomb.host_buffers"
MUTANTS = {
    "reads before arrival": (TIER, 'self.lanes.hold("compute", buffer.arrived)', "pass"),
    "keys' buffer filled while it is read": (
        TIER, 'used = kv.free = self.lanes.mark("compute")', 'used = self.lanes.mark("compute")',
    ),
    "gradients leave before they are added": (TIER, 'self._copy("out", moves, used)', 'self._copy("out", moves)'),
    "gradients' buffer filled before it is copied out": (
        TIER, "grads.free = pages.written[first] = self._copy", "pages.written[first] = self._copy",
    ),
    "gradients fetched before they are written": (TIER, "buffer.free, *marks, zero=zero", "buffer.free, zero=zero"),
    "keys fetched before they are written": (TIER, "else (buffer.free, pages.settled)", "else (buffer.free,)"),
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
        BUFFERS, 'Buffer(*new, self.lanes.mark("compute"))', 'Buffer(*new, self.lanes.mark("in"))',
    ),
    "a buffer claimed while it is read": (BUFFERS, "if not b.busy]", "]"),
    "lists read before they are made": (TIER, "after=(made, *after)", "after=after"),
    "what was guessed is taken for all": (TIER, "self._fetch_rest(buffers[0], unit)", "pass"),
    "what another chunk chose is taken for this one's": (TIER, "buffers[0].chunk != self._chunk", "False"),
    "listed gradients leave before they are added": (TIER, 'run("out", work, after=(used,))', 'run("out", work)'),
    "listed gradients' buffer filled before it is copied out": (
        TIER, "grads.free = pages.written[first] = self._scatter", "pages.written[first] = self._scatter",
    ),
    "listed gradients fetched before they are written": (
        TIER, "buffer.free, *marks, flags=flags", "buffer.free, flags=flags",
    ),
    "own listed gradients fetched before they are written": (
        TIER, 'after=(self.lanes.mark("compute"), *marks))', 'after=(self.lanes.mark("compute"),))',
    ),
    "gradient pages that hold nothing yet are believed": (TIER, "lambda: flags.zero_()", "lambda: flags.fill_(1)"),
    "flags written while others use their memory": (
        TIER, 'flags.zero_(), after=(self.lanes.mark("compute"),)', "flags.zero_()",
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
    ring = changed.Ring if where == BUFFERS else oomb.host_buffers.Ring
    lease = changed.HostLease if where == "oomb.host" else oomb.host.HostLease
    for seed in range(300):
        chooser = random.Random(seed)
        pick = chooser.choice
        case = Pass(
            tokens=chooser.randrange(8, 30), chunk=chooser.randrange(1, 9), page=pick((1, 2, 3, 4)), device_pages=0,
            segment=chooser.randrange(1, 8), batch=1, windows=pick(([None], [None, None], [None, 3, None])),
            order=pick(ORDERS), documents=tuple(chooser.randrange(30) for _ in range(chooser.randrange(3))),
            sparse=seed % 2 == 1,
        )  # fmt: skip
        if seed % 4 == 0:  # a page fetched in vain, then added to, then fetched for a reason
            case = Pass(12, 1, 4, 0, 8, 1, [None], "backward only", (7,))
        with simulated(chooser.randrange, tier, ring), mock.patch.object(oomb.host, "HostLease", lease):
            if where == "oomb.host":
                changed.lanes_for = oomb.host.lanes_for
            try:
                case.run(seed)
            except AssertionError:
                return
    pytest.fail(f"{name}: nobody noticed")
