"""Pages of one loss on two tiers: whatever the budget, attention reads the same tokens and gradients come back to
them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models import VOCAB, build, configs
from tests.oomb.lanes import watched
from torch.utils._python_dispatch import TorchDispatchMode

from offload import HostOutOfMemory
from oomb import ChunkConfig, chunked_backward
from oomb.hf import take_apart
from oomb.host import HostLease
from oomb.probe import LayerFacts, outline
from oomb.storage import Asked, Budget, Stored, TieredPast, divide, one_page_bytes

FACTS = LayerFacts(heads=4, kv_heads=2, head_dim=3, dtype=torch.float64, window=None)
CPU = torch.device("cpu")


def tiered(tokens: int, chunk: int, page: int, device_pages: int, segment: int, batch: int) -> TieredPast:
    bounds = [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
    pages = -(-bounds[-1][0] // page)
    device_pages = min(device_pages, pages)
    host = pages - device_pages
    nbytes = host * batch * page * 2 * 3 * 8 * 4 + 4 * 256
    return TieredPast(
        {0: FACTS},
        bounds,
        batch=batch,
        page_tokens=page,
        grad_dtype=torch.float64,
        budget=Budget(device_pages, host, nbytes if host else 0),
        segment_tokens=segment,
        check=True,
        lease=HostLease(nbytes if host else 0, CPU),
    )


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 41),
    page=st.integers(1, 9),
    device_pages=st.integers(0, 12),
    segment=st.integers(1, 20),
    batch=st.integers(1, 3),
)
def test_every_token_is_read_where_it_was_written_and_gets_its_gradient(
    tokens, chunk, page, device_pages, segment, batch
):
    past = tiered(tokens, chunk, page, device_pages, segment, batch)
    k, v = torch.randn(2, batch, tokens, 2, 3, dtype=torch.float64)
    count = len(past.bounds)
    for index in range(count - 1):
        past.open(index, "fill")
        past.append(0, k[:, past.start : past.stop], v[:, past.start : past.stop])
        past.close(index, "fill")
    expected = torch.zeros(2, batch, tokens, 2, 3, dtype=torch.float64)
    for index in reversed(range(count)):
        past.open(index, "walk")
        start, stop = past.bounds[index]
        seen = 0
        for segment_read in past.segments(0, "backward"):
            assert segment_read.first_page * page == seen
            for b in range(batch):
                slots = segment_read.slots[b].long()
                assert slots.tolist() == list(range(segment_read.runs[b], segment_read.runs[b] + len(slots)))
                tokens_here = min(start - seen, len(slots) * page)
                rows = segment_read.k[slots].flatten(0, 1)[:tokens_here]
                assert torch.equal(rows, k[b, seen : seen + tokens_here])
                assert torch.equal(segment_read.v[slots].flatten(0, 1)[:tokens_here], v[b, seen : seen + tokens_here])
                gradient = torch.randn(2, tokens_here, 2, 3, dtype=torch.float64)
                expected[:, b, seen : seen + tokens_here] += gradient
                for grads, added in zip((segment_read.dk, segment_read.dv), gradient):
                    rows = grads[slots].flatten(0, 1)
                    rows[:tokens_here] += added
                    grads[slots] = rows.view(len(slots), page, 2, 3)
            seen += len(slots) * page
        assert seen >= start
        own = past.own_grad(0)
        if index < count - 1 and start < past.bounds[-1][0]:
            assert torch.equal(torch.stack(own), expected[:, :, start:stop])
        else:
            assert own is None
        past.close(index, "walk")
    assert not past.near.kv and not past.near.grads and past.far is None and past.lease.arena is None


@settings(deadline=None, max_examples=100)
@given(
    windows=st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=3),
    chunks=st.integers(1, 12),
    page=st.integers(1, 6),
    device=st.none() | st.integers(0, 10**5),
    host=st.integers(0, 10**5),
)
def test_budgets_are_kept(windows, chunks, page, device, host):
    """Of what is stored: a layer with a window has few pages, and asks for no more."""
    facts = {i: dataclasses.replace(FACTS, head_dim=3 + i, window=window) for i, window in enumerate(windows)}
    bounds = [(10 * i, 10 * i + 10) for i in range(chunks)]
    stored = {i: Stored.of(window, bounds, page).pages for i, window in enumerate(windows)}
    size = {
        i: 2 * 2 * page * 2 * (3 + i) * (8 + 4) for i in facts
    }  # k and v, batch, tokens, heads, dims, bytes of both
    pages = {window: Stored.count(window, bounds, page) for window in windows}
    asked = Asked.of(facts, pages, page, 2, torch.float32)
    whole = sum(stored[i] * size[i] for i in facts)

    def near(count: int) -> int:
        return sum(min(count, stored[i]) * size[i] for i in facts)

    try:
        budget = divide(asked, device_budget=device, host_budget=host)
    except HostOutOfMemory as error:
        assert error.requested > host
        return
    assert budget.device_pages + budget.host_pages == max(stored.values())
    assert device is None or near(budget.device_pages) <= device
    assert whole - near(budget.device_pages) <= budget.host_bytes <= host
    assert budget.host_pages == 0 or near(budget.device_pages + 1) > device
    assert budget.host_pages or not budget.host_bytes


def test_the_budget_of_the_host_is_enough_for_what_is_taken_from_it():
    """The arena's lines of 256 bytes are in the numbers."""
    facts = {layer: LayerFacts(2, 1, 1 + layer, torch.float32, None) for layer in range(3)}
    budget = divide(Asked.of(facts, {None: 5}, 1, 1, torch.float32), device_budget=0, host_budget=10**6)
    past = TieredPast(
        facts, [(0, 5), (5, 6)], batch=1, page_tokens=1, grad_dtype=torch.float32, budget=budget,
        segment_tokens=2, check=False, lease=HostLease(budget.host_bytes, CPU),
    )  # fmt: skip
    past.open(0, "fill")
    for layer, fact in facts.items():
        past.append(layer, *torch.randn(2, 1, 5, 1, fact.head_dim))
    past.open(1, "walk")
    for layer in facts:
        list(past.segments(layer, "backward"))
    past.abort()


@pytest.mark.parametrize("name", ["qwen2_window", "gpt_oss"])
@pytest.mark.parametrize("device", [1, 4000])
def test_layers_with_windows_ask_the_host_for_what_they_store(name, device):
    """The same gradients with exactly that much: all that full layers would need was asked for once."""
    model, ids = build(configs()[name], dtype=torch.float32), torch.randint(VOCAB, (1, 120))
    resident = ChunkConfig(chunk_tokens=20, page_tokens=4)
    expected = chunked_backward(model, ids, config=resident)
    grads = [p.grad.clone() for p in model.parameters()]
    parts, bounds = take_apart(model), [(i, i + 20) for i in range(0, 120, 20)]
    layers = outline(parts, 120).layers
    pages = {i: Stored.of(f.window, bounds, 4).pages for i, f in layers.items()}
    assert min(pages.values()) < max(pages.values())
    size = {i: one_page_bytes({i: f}, 4, 1, torch.float32) for i, f in layers.items()}
    near = max(n for n in range(26) if sum(min(n, pages[i]) * size[i] for i in layers) <= device)
    stored = sum(max(pages[i] - near, 0) * size[i] for i in layers) + 1024 * len(layers)
    model.zero_grad()
    budgets = {"gpu_kv_budget_bytes": device, "gpu_keep_budget_bytes": 0}
    tight = dataclasses.replace(resident, host_budget_bytes=stored, **budgets)
    torch.testing.assert_close(chunked_backward(model, ids, config=tight), expected)
    for p, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad)
    with pytest.raises(HostOutOfMemory, match=f"need {stored:,} bytes"):
        chunked_backward(model, ids, config=dataclasses.replace(tight, host_budget_bytes=stored - 1))


@settings(deadline=None, max_examples=200)
@given(
    window=st.none() | st.integers(1, 30), tokens=st.integers(1, 80), chunk=st.integers(1, 20), page=st.integers(1, 6)
)
def test_a_layer_stores_the_pages_that_later_chunks_read(window, tokens, chunk, page):
    bounds = [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
    stored = Stored.of(window, bounds, page)
    read = set()
    for start, _ in bounds[1:]:
        first = 0 if window is None else max(start - window + 1, 0)
        if first < start:
            pages = range(first // page, -(-start // page))
            read |= set(pages)
            numbers = [p - stored.shift(p) for p in pages]
            assert numbers == list(range(numbers[0], numbers[0] + len(pages)))
            assert stored.shift(pages[0]) == stored.shift(pages[-1])
    kept = [p for first, last in stored.runs for p in range(first, last)]
    assert set(kept) == read and stored.pages == len(read) == Stored.count(window, bounds, page)
    assert [p - stored.shift(p) for p in kept] == list(range(len(kept)))
    assert [stored.place(number) for number in range(len(kept))] == kept
    for start, stop in bounds[:-1]:
        begin, skipped = stored.span(start, stop)
        tokens_stored = [t for t in range(start, stop) if t // page in read]
        reached = [t for t in tokens_stored if window is None or t > stop - window]
        assert set(reached) <= set(range(start + skipped, stop))
        if skipped < stop - start:
            assert begin == start + skipped - stored.shift((start + skipped) // page) * page


def test_recomputed_values_that_differ_name_their_layer():
    past = tiered(10, 5, 2, 1, 2, 1)
    k, v = torch.randn(2, 1, 5, 2, 3, dtype=torch.float64)
    past.open(0, "fill")
    past.append(0, k, v)
    past.open(0, "walk")
    past.compare(0, k, v * 1.01)
    with pytest.raises(RuntimeError, match="layer 0: keys or values"):
        past.close(0, "walk")


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_enqueued_does_not_depend_on_how_many_pages_a_segment_has(packed):
    """Python does a step's work by segments: 32 or 2 pages in each make the same calls and the same copies."""
    model = build(configs()["qwen2"])
    ids = torch.randint(61, (1, 260), generator=torch.Generator().manual_seed(0))
    documents = torch.arange(260)[None] // 50 if packed else None
    there = {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0, "backend": "reference"}

    def step(page: int) -> tuple[Counter, int]:
        calls: list[str] = []
        config = ChunkConfig(chunk_tokens=32, page_tokens=page, segment_tokens=64, **there)
        with watched(on=calls.append), Copies() as copies:
            chunked_backward(model, ids, document_ids=documents, config=config)
        return Counter(calls), copies.count

    calls, copies = step(32)
    assert calls["in"] > 100 and calls["out"] > 50 and copies > 500
    assert step(2) == (calls, copies)


class Copies(TorchDispatchMode):
    """Counts torch's copies."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten.copy_.default
        return operator(*args, **(kwargs or {}))
