"""What is kept of the fill: within both budgets, in runs up to the end, and it really fits where it was planned."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload import PinnedArena, Shelf, lanes_for
from oomb.keep import Keep, KeepCosts, plan_keep
from oomb.layers import Stack
from oomb.probe import LayerFacts

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@st.composite
def losses(draw) -> tuple[KeepCosts, list[tuple[int, int]]]:
    dtype = draw(st.sampled_from(DTYPES))
    facts = [
        LayerFacts(draw(st.sampled_from([1, 2, 4])), 1, draw(st.sampled_from([1, 3, 8])), dtype, window)
        for window in draw(st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=4))
    ]
    names = ("layer",) * (len(facts) + 1)
    stack = draw(st.none() | st.builds(Stack, st.just(names), st.sampled_from([1, 8, 40]), st.sampled_from(DTYPES)))
    tokens, chunk = draw(st.integers(1, 60)), draw(st.integers(1, 62))
    bounds = [(start, min(start + chunk, tokens)) for start in range(0, tokens, chunk)]
    return KeepCosts(facts, stack, draw(st.sampled_from([1, 100, 10_000])), draw(st.integers(1, 2))), bounds


def shelf_for(keep: Keep) -> Shelf:
    arena = PinnedArena(keep.host_bytes, device="cpu") if keep.host_bytes else None
    return Shelf(lanes_for("cpu"), arena, device_bytes=keep.device_bytes)


def fill(shelf: Shelf, costs: KeepCosts, keep: Keep, chunk: int, tokens: int) -> None:
    """What the layers of one chunk put away, in their order; what the budget has no place for, the walk puts near."""
    rows = (costs.batch, tokens)
    for layer, facts in enumerate(costs.facts):
        if chunk in keep.attention:
            wide = torch.float64 if facts.dtype == torch.float64 else torch.float32
            out = torch.zeros(*rows, facts.heads, facts.head_dim, dtype=facts.dtype)
            shelf.put(("attention", chunk, layer), (out, torch.zeros(*rows, facts.heads, dtype=wide)))
        if costs.stack is not None:
            out = torch.zeros(*rows, costs.stack.width, dtype=costs.stack.dtype)
            if chunk in keep.layers:
                shelf.put((chunk, layer), (out,))


@settings(deadline=None, max_examples=200)
@given(loss=losses(), device=st.integers(0, 20_000), host=st.integers(0, 20_000))
def test_what_is_planned_fits(loss, device, host):
    costs, bounds = loss
    keep = plan_keep(costs, bounds, device_bytes=device, host_bytes=host)
    assert keep.device_bytes <= device and keep.host_bytes <= host
    end = len(bounds) - (costs.stack is None)  # without replay the last chunk runs once
    assert keep.attention.stop == keep.layers.stop == end
    assert costs.stack is not None or not keep.layers
    shelf = shelf_for(keep)
    for chunk, (start, stop) in enumerate(bounds):
        fill(shelf, costs, keep, chunk, stop - start)


def one_by_one(costs: KeepCosts, bounds: list[tuple[int, int]], device: int, host: int) -> Keep:
    """The rule itself: what saves most for a byte, chunk by chunk; then each item where there is room."""
    last = len(bounds) - (costs.stack is None)
    kinds = ("attention", "layers") if costs.stack is not None else ("attention",)
    first, room = {"attention": last, "layers": last}, device + host
    for _, chunk, kind in sorted((costs.saved(k, bounds[c][0]), c, k) for k in kinds for c in range(last))[::-1]:
        each = costs.items(kind, bounds[chunk][1] - bounds[chunk][0])
        if first[kind] == chunk + 1 and sum(each) <= room - max(each):
            room, first[kind] = room - sum(each), chunk
    near = far = 0
    for chunk, (start, stop) in enumerate(bounds):
        for place in range(len(costs.facts)):
            for kind in kinds:
                if chunk >= first[kind] and chunk < last:
                    size = costs.items(kind, stop - start)[place]
                    near, far = (near + size, far) if near + size <= device else (near, far + size)
    return Keep(range(first["attention"], last), range(first["layers"], last), near, far)


@settings(deadline=None, max_examples=300)
@given(loss=losses(), device=st.integers(0, 50_000), host=st.integers(0, 20_000))
def test_chunks_taken_at_once_are_those_taken_one_by_one(loss, device, host):
    costs, bounds = loss
    assert plan_keep(costs, bounds, device_bytes=device, host_bytes=host) == one_by_one(costs, bounds, device, host)


@given(loss=losses())
def test_no_room_keeps_nothing_and_all_room_keeps_everything(loss):
    costs, bounds = loss
    nothing = plan_keep(costs, bounds, device_bytes=0, host_bytes=0)
    assert not nothing.attention and not nothing.layers and nothing.device_bytes == nothing.host_bytes == 0
    everything = plan_keep(costs, bounds, device_bytes=1 << 40, host_bytes=0)
    end = len(bounds) - (costs.stack is None)
    assert everything.attention == range(end)
    assert everything.layers == (range(end) if costs.stack is not None else range(end, end))


@pytest.mark.parametrize(("window", "first"), [(None, "attention"), (16, "layers")])
def test_late_attention_is_kept_before_layers_unless_a_window_makes_it_cheap(window, first):
    facts = LayerFacts(4, 2, 8, torch.float32, window)
    costs = KeepCosts([facts] * 2, Stack(("a", "b", "c"), 32, torch.float32), 16_000, 1)
    bounds = [(start, start + 100) for start in range(0, 1000, 100)]
    one = sum(costs.items(first, 100))
    keep = plan_keep(costs, bounds, device_bytes=one + max(costs.items(first, 100)), host_bytes=0)
    kept = {"attention": keep.attention, "layers": keep.layers}
    assert kept.pop(first) == range(9, 10) and not any(kept.values())
