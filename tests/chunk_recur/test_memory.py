"""One chunk's graph at a time, and nothing of a chunk's activations left between the passes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.chunk_recur.cases import LinearAttention, LogStore, Recurrent
from torch import Tensor

from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward, reference


class Saved:
    """Counts the tensors that autograd holds for backward."""

    def __init__(self) -> None:
        self.alive = self.peak = 0

    def pack(self, tensor: Tensor) -> Any:
        class Box:
            pass

        box = Box()
        box.tensor = tensor.detach()  # an output of the node that saves it would otherwise close a cycle
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        weakref.finalize(box, self._freed)
        return box

    def _freed(self) -> None:
        self.alive -= 1

    def hooks(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box.tensor)


def saved(function: Any, count: int, *, backward: bool = True) -> Saved:
    torch.manual_seed(0)
    model, counter = Recurrent(), Saved()

    def step(index, chunk, h, phase):
        with counter.hooks():
            return model(chunk, h)

    chunks = torch.randn(2, 3 * count, 3, dtype=torch.float64).split(3, 1)
    kwargs = {"params": model.parameters()} if function is not chunk_recurrent_backward else {}
    loss = function(step, chunks, State(torch.zeros(2, 4, dtype=torch.float64)), **kwargs)
    if backward and loss.requires_grad:
        loss.backward()
    return counter


@pytest.mark.parametrize("function", [chunk_recurrent, chunk_recurrent_backward])
def test_saved_tensors_are_bounded_by_one_chunk(function: Any) -> None:
    one = saved(reference.chunk_recurrent, 1).peak
    assert saved(reference.chunk_recurrent, 10).peak > 9 * one
    for count in (1, 2, 10):
        counter = saved(function, count)
        # The last state of a chunk is an input of the next, saved on its side: a few more than for one chunk alone.
        assert one <= counter.peak <= one + 4, (count, counter.peak, one)
        assert counter.alive == 0


def test_between_the_passes_only_the_last_chunk_is_held() -> None:
    assert saved(chunk_recurrent, 10, backward=False).alive == 0  # the loss is gone, and so is its graph
    with torch.no_grad():
        assert saved(chunk_recurrent, 10).peak == 0


@pytest.mark.parametrize("grad", [True, False])
def test_what_waits_for_the_walk_is_the_carried_state_alone(grad: bool) -> None:
    """States that are views of a chunk's activations are copied; without grad not even they are kept."""
    model = LinearAttention()
    chunks = torch.randn(2, 40, 3, dtype=torch.float64).split(10, 1)
    activations: list[Any] = []
    states: list[Any] = []

    def step(index, chunk, state, phase):
        loss, after = model.step(index, chunk, state, phase)
        activations.append(weakref.ref(after["matrix"].untyped_storage()))
        states.append(weakref.ref(state["matrix"]))
        return loss, after

    with torch.set_grad_enabled(grad):
        loss = chunk_recurrent(step, chunks, State(model.start(2)), params=model.parameters())
    alive = [reference() is not None for reference in activations]
    assert alive == [False, False, False, grad]  # the last chunk's graph waits for the backward
    assert sum(reference() is not None for reference in states[1:-1]) == (2 if grad else 0)
    if grad:
        loss.backward()
        del loss
        assert not any(reference() for reference in activations)


def test_a_loss_that_is_a_view_does_not_keep_what_it_is_a_view_of() -> None:
    w, storages = torch.ones(1000, requires_grad=True), []

    def step(i: int, c: float, h: Any, p: str) -> tuple[Tensor, Any]:
        losses = w * c
        storages.append(weakref.ref(losses.untyped_storage()))
        return losses[0], h

    loss = chunk_recurrent(step, [1.0, 2.0, 3.0], State(), params=[w])
    assert [storage() is None for storage in storages] == [True, True, False]  # the last waits with its graph
    loss.backward()
    assert w.grad is not None and float(w.grad[0]) == 6


def test_the_walk_frees_states_as_it_goes() -> None:
    model = LinearAttention()
    states: list[Any] = []

    def step(index, chunk, state, phase):
        if phase == "fill":
            states.append(weakref.ref(state["matrix"]))
        elif index < 7:
            assert [i for i, reference in enumerate(states) if reference() is not None] == list(
                range(min(index + 2, 7))
            )
        return model.step(index, chunk, state, phase)

    chunks = torch.randn(2, 8, 3, dtype=torch.float64).split(1, 1)
    chunk_recurrent(step, chunks, State(model.start(2)), params=model.parameters()).backward()
    assert len(states) == 7


def test_a_state_that_passes_through_is_kept_once() -> None:
    table = torch.randn(1000, dtype=torch.float64)[:600]
    w = torch.ones(600, dtype=torch.float64, requires_grad=True)
    pointers = set()

    def step(index, chunk, h, phase):
        pointers.add(h.data_ptr())
        return (h * w).sum(), h

    loss = chunk_recurrent(step, range(20), State(table), params=[w])
    assert len(pointers) <= 2
    loss.backward()


def test_a_spent_loss_holds_nothing() -> None:
    """A list of losses for a log must not keep models, stores and chunks alive."""
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    seen: list[Any] = []
    log: list[Any] = []

    def loss_of() -> Tensor:
        model, store = Recurrent(), LogStore(log)

        def step(index, chunk, h, phase):
            seen.extend([weakref.ref(chunk), weakref.ref(h)])
            return model(chunk, h)

        start = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True) * 2
        chunks = x.split(3, 1)
        seen.extend([weakref.ref(kept) for kept in (step, store, start, *chunks)])
        return chunk_recurrent(step, chunks, State(start, (store,)), params=model.parameters())

    loss = loss_of()
    assert seen[0]() is not None and seen[1]() is not None
    loss.backward()
    assert not any(reference() is not None for reference in seen)
    assert loss.requires_grad
