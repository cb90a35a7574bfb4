"""Stores: exact gradients through appended keys and values, and no way out of a pass without an abort."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chunk_recur.cases import Fault, KVStore, LogStore, Transformer, assert_same, causal, take_grads
from torch import Tensor

from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward, hold

CHUNKS = 4
PASSES = [(i, "fill") for i in range(CHUNKS - 1)] + [(i, "walk") for i in reversed(range(CHUNKS))]


def transformer(tokens: int, batch: int = 2, seed: int = 0) -> tuple[Transformer, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = Transformer()
    x = torch.randn(batch, tokens, 4, dtype=torch.float64, requires_grad=True)
    return model, x, (torch.rand(batch, tokens) > 0.5).double()


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 11), st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))
def test_keys_and_values_equal_dense_attention(tokens: int, chunk: int, batch: int, seed: int) -> None:
    model, x, labelled = transformer(tokens, batch, seed)
    leaves = [*model.parameters(), x]
    expected = model(x, labelled, lambda layer, q, kv: causal(q, kv))
    expected.backward()
    grads = take_grads(leaves)
    store = KVStore(2)
    chunks = list(zip(x.split(chunk, 1), labelled.split(chunk, 1)))
    loss = chunk_recurrent(model.stepper(store), chunks, State((), (store,)), params=model.parameters())
    loss.backward()
    assert_same([loss, *take_grads(leaves)], [expected, *grads], 1e-11)
    whole = chunk_recurrent_backward(model.stepper(store), chunks, State((), (store,)))
    assert_same([whole, *take_grads(leaves)], [expected, *grads], 1e-11)
    assert store.kept == [[], []]


def test_backward_with_inputs_sees_the_paths_through_stores() -> None:
    """The first chunk's tokens reach later losses through the store alone, where autograd sees no path."""
    model, x, labelled = transformer(6)
    leaves = [*model.parameters(), x]
    model(x, labelled, lambda layer, q, kv: causal(q, kv)).backward()
    grads = take_grads(leaves)
    store = KVStore(2)
    for wanted in ([len(leaves) - 1], [0], [0, 3]):
        chunks = list(zip(x.split(2, 1), labelled.split(2, 1)))
        loss = chunk_recurrent(model.stepper(store), chunks, State((), (store,)), params=model.parameters())
        loss.backward(inputs=[leaves[i] for i in wanted])
        assert [i for i, leaf in enumerate(leaves) if leaf.grad is not None] == wanted
        got = take_grads(leaves)
        assert_same([got[i] for i in wanted], [grads[i] for i in wanted], 1e-11)


def logging_step(log: list[Any], fail: tuple[Any, ...] | None = None) -> tuple[Callable[..., Any], Tensor]:
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def step(index: int, chunk: float, h: Tensor, phase: str) -> tuple[Tensor, Tensor]:
        log.append(("step", "run", index, phase))
        if fail == ("step", index, phase):
            raise Fault("step")
        h = torch.tanh(h * weight + chunk)
        if phase == "walk":
            h.register_hook(lambda grad: backward(index))
        return h.sum(), h

    def backward(index: int) -> None:
        log.append(("step", "backward", index, "walk"))
        if fail == ("backward", index, "walk"):
            raise Fault("backward")

    return step, weight


def expected_log() -> list[Any]:
    log: list[Any] = []
    for index, phase in PASSES:
        log += [(name, "open", index, phase) for name in ("a", "b")] + [("step", "run", index, phase)]
        log += [("step", "backward", index, phase)] if phase == "walk" else []
        log += [(name, "close", index, phase) for name in ("b", "a")]
    return [*log, ("a", "abort"), ("b", "abort")]


def run(entry: str, step: Callable[..., Any], weight: Tensor, stores: tuple[Any, ...]) -> None:
    state = State(torch.zeros(2, dtype=torch.float64), stores)
    if entry == "loss":
        chunk_recurrent(step, [0.1, 0.2, 0.3, 0.4], state, params=[weight]).backward()
    else:
        chunk_recurrent_backward(step, [0.1, 0.2, 0.3, 0.4], state)


@pytest.mark.parametrize("entry", ["loss", "whole"])
def test_every_chunk_is_bracketed(entry: str) -> None:
    log: list[Any] = []
    step, weight = logging_step(log)
    run(entry, step, weight, (LogStore(log, "a"), LogStore(log, "b")))
    assert log == expected_log()


def test_a_forward_without_grad_is_bracketed_and_ends_with_abort() -> None:
    log: list[Any] = []
    step, _ = logging_step(log)
    with torch.no_grad():
        chunk_recurrent(step, [0.1, 0.2], State(torch.zeros(2), (LogStore(log),)), params=[])
    calls = [call for i in range(2) for call in [("store", "open"), ("step", "run"), ("store", "close")]]
    assert [entry[:2] for entry in log] == [*calls, ("store", "abort")]
    assert {entry[3] for entry in log[:-1]} == {"fill"}


FAULTS = [
    (what, index, phase)
    for index, phase in PASSES
    for what in ("open", "step", "backward", "close")
    if what != "backward" or phase == "walk"
]


@pytest.mark.parametrize("entry", ["loss", "whole"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault)))
def test_a_fault_anywhere_aborts_every_store_and_the_next_step_is_right(entry: str, fault: tuple[Any, ...]) -> None:
    log: list[Any] = []
    step, weight = logging_step(log)
    run(entry, step, weight, ())
    (grad,) = take_grads([weight])
    log.clear()

    step, weight = logging_step(log, fault)
    stores = (LogStore(log, "a"), LogStore(log, "b", fault))
    with pytest.raises(Fault):
        run(entry, step, weight, stores)
    assert log[-2:] == [("a", "abort"), ("b", "abort")]
    calls = expected_log()
    assert log[:-2] == calls[: len(log) - 2]  # nothing skipped, nothing called twice, nothing after the fault
    assert [call for call in log if call[1] == "abort"] == log[-2:]

    log.clear()
    step, weight = logging_step(log)
    stores[1].fail = None
    run(entry, step, weight, stores)
    assert log == calls
    assert_same(take_grads([weight]), [grad])


def test_a_failed_backward_spends_the_loss() -> None:
    log: list[Any] = []
    step, weight = logging_step(log, ("step", 1, "walk"))
    state = State(torch.zeros(2, dtype=torch.float64), (LogStore(log),))
    loss = chunk_recurrent(step, [0.1, 0.2, 0.3, 0.4], state, params=[weight])
    with pytest.raises(Fault):
        loss.backward()
    weight.grad = None
    with pytest.raises(RuntimeError, match=r"its backward failed \(Fault\)"):
        loss.backward()
    assert weight.grad is None
    assert log.count(("store", "abort")) == 1


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_abort_that_fails_spares_no_other_store_and_hides_no_error(place: str) -> None:
    log: list[Any] = []
    fault = ("step", 1, "fill") if place == "forward" else ("step", 1, "walk")
    step, weight = logging_step(log, fault)
    stores = (LogStore(log, "a", ("abort",)), LogStore(log, "b"), LogStore(log, "c", ("abort",)))
    with pytest.raises(Fault, match="step"):
        run("loss", step, weight, stores)
    assert log[-3:] == [("a", "abort"), ("b", "abort"), ("c", "abort")]


def test_an_abort_that_fails_at_the_end_of_a_good_pass_is_raised() -> None:
    log: list[Any] = []
    step, weight = logging_step(log)
    with pytest.raises(Fault, match="abort"):
        run("loss", step, weight, (LogStore(log, "a", ("abort",)), LogStore(log, "b")))
    assert log[-2:] == [("a", "abort"), ("b", "abort")]


@pytest.mark.parametrize("interrupted_by", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_interrupts_propagate(interrupted_by: type[BaseException]) -> None:
    log: list[Any] = []

    def step(index, chunk, h, phase):
        raise interrupted_by

    with pytest.raises(interrupted_by):
        chunk_recurrent(step, [1], State((), (LogStore(log),)), params=[torch.ones(1, requires_grad=True)])
    assert log == [("store", "open", 0, "walk"), ("store", "abort")]


def test_a_dropped_loss_releases_its_stores() -> None:
    log: list[Any] = []
    step, weight = logging_step(log)
    state = State(torch.zeros(2, dtype=torch.float64), (LogStore(log),))
    loss = chunk_recurrent(step, [0.1, 0.2], state, params=[weight]) * 2
    gc.collect()
    assert ("store", "abort") not in log
    del loss
    gc.collect()
    assert log[-1] == ("store", "abort")


def test_a_later_loss_takes_over_a_store_and_the_earlier_one_says_so() -> None:
    """Otherwise the late abort of a forgotten loss would empty the store under its successor."""
    model, x, labelled = transformer(6)
    leaves = [*model.parameters(), x]
    store = KVStore(2)
    chunks = list(zip(x.split(2, 1), labelled.split(2, 1)))

    def loss_of() -> Tensor:
        return chunk_recurrent(model.stepper(store), chunks, State((), (store,)), params=model.parameters())

    loss_of().backward()
    grads = take_grads(leaves)
    first = loss_of()
    first, kept = loss_of(), first
    with pytest.raises(RuntimeError, match="a later loss took over one of its stores"):
        kept.backward()
    del kept
    gc.collect()
    first.backward()
    assert_same(take_grads(leaves), grads)


def test_two_losses_with_stores_of_their_own_live_side_by_side() -> None:
    model, x, labelled = transformer(6)
    leaves = [*model.parameters(), x]
    model(x, labelled, lambda layer, q, kv: causal(q, kv)).backward()
    grads = take_grads(leaves)
    losses = []
    for chunk in (2, 4):
        store = KVStore(2)
        chunks = list(zip(x.split(chunk, 1), labelled.split(chunk, 1)))
        losses.append(chunk_recurrent(model.stepper(store), chunks, State((), (store,)), params=model.parameters()))
    (losses[0] + 2 * losses[1]).backward()
    assert_same([g / 3 for g in take_grads(leaves)], grads, 1e-11)


class Slotted:
    """A store without a dict, weak references or a hash."""

    __slots__ = ("calls",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.calls = 0

    def __eq__(self, other: object) -> bool:
        return True

    def open(self, index: int, phase: str) -> None:
        self.calls += 1

    close = open

    def abort(self) -> None:
        self.calls += 1


def test_stores_need_nothing_but_their_three_methods() -> None:
    log: list[Any] = []
    step, weight = logging_step(log)
    stores = (Slotted(), Slotted())
    run("loss", step, weight, stores)
    assert not {id(store) for store in stores} & hold._HOLDS.keys()
    assert [store.calls for store in stores] == [2 * len(PASSES) + 1] * 2


def test_around_holds_for_each_pass_and_not_between() -> None:
    log: list[Any] = []
    step, weight = logging_step(log)

    @contextmanager
    def around(phase):
        log.append(("around", "enter", phase))
        try:
            yield
        finally:
            log.append(("around", "exit", phase))

    state = State(torch.zeros(2, dtype=torch.float64))
    loss = chunk_recurrent(step, [0.1, 0.2], state, params=[weight], around=around)
    forward = [("around", "enter", "fill"), ("step", "run", 0, "fill"), ("step", "run", 1, "walk")]
    forward.append(("around", "exit", "fill"))
    assert log == forward
    loss.backward()
    assert log[len(forward)] == ("around", "enter", "walk") and log[-1] == ("around", "exit", "walk")
    whole = list(log)
    log.clear()
    chunk_recurrent_backward(step, [0.1, 0.2], state, around=around)
    assert log == whole


def test_a_failing_around_aborts_too() -> None:
    log: list[Any] = []
    step, _ = logging_step(log)

    def around(phase):
        if phase == "walk":
            raise Fault
        return torch.no_grad()

    with pytest.raises(Fault):
        chunk_recurrent_backward(step, [0.1], State(torch.zeros(2), (LogStore(log),)), around=around)
    assert log[-1] == ("store", "abort")
