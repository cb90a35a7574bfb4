"""What the caller gets wrong is refused, with the place and the remedy, and leaves nothing open."""

from __future__ import annotations

import contextlib
import enum
import re
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.chunk_recur.cases import LogStore, Recurrent, assert_same, take_grads
from torch import Tensor, nn

import chunk_recur
from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward, reference


def weight() -> Tensor:
    return torch.ones(2, dtype=torch.float64, requires_grad=True)


def never(*args: Any) -> Any:
    raise AssertionError("the step was called")


def both(step: Any, chunks: Any, state: Any, params: Any) -> None:
    """Each entry point must refuse alike."""
    with pytest.raises(ValueError) as one:
        chunk_recurrent(step, chunks, state, params=params)
    with pytest.raises(ValueError) as other:
        chunk_recurrent_backward(step, chunks, state, params=params)
    assert str(one.value) == str(other.value)
    raise one.value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 3}, "step: expected a function .* got int"),
        ({"chunks": []}, "chunks: expected at least one chunk"),
        ({"chunks": torch.ones(0, 3)}, "chunks: expected at least one chunk"),
        ({"chunks": (c for c in [1, 2])}, "chunks: expected a sequence, got generator"),
        ({"chunks": {0: 1}}, "chunks: expected a sequence, got dict"),
        ({"chunks": "ab"}, "chunks: expected a sequence, got str"),
        ({"chunks": 5}, "chunks: expected a sequence, got int"),
        ({"state": ()}, "state: expected a State, got tuple"),
        ({"params": torch.ones(3, requires_grad=True)}, "params: expected an iterable of tensors, got Tensor"),
        ({"params": nn.Linear(1, 1)}, "params: expected an iterable of tensors, got Linear"),
        ({"params": nn.Linear(1, 1).named_parameters()}, r"params\[0\]: expected a tensor, got tuple"),
        ({"params": [weight(), weight() * 2]}, r"params\[1\]: expected a leaf tensor"),
    ],
)
def test_arguments_are_refused_before_work_starts(change: dict[str, Any], message: str) -> None:
    log: list[Any] = []
    call = {"step": never, "chunks": [1, 2], "state": State((), (LogStore(log),)), "params": [weight()]} | change
    with pytest.raises(ValueError, match=message):
        if "params" in change and not isinstance(change["params"], (list, Tensor, nn.Module)):
            chunk_recurrent(call["step"], call["chunks"], call["state"], params=call["params"])  # it serves once
        both(call["step"], call["chunks"], call["state"], call["params"])
    assert log == []


@pytest.mark.parametrize("scale", ["2", None, torch.ones(2), 1j])
def test_scale_is_checked(scale: Any) -> None:
    with pytest.raises(ValueError, match="scale: expected a number or a 0-dim tensor"):
        chunk_recurrent_backward(never, [1], State(), scale=scale)


def test_around_is_checked() -> None:
    with pytest.raises(ValueError, match="around: expected a function from phase to context manager"):
        chunk_recurrent(never, [1], State(), params=[], around="fill")


@pytest.mark.parametrize(
    ("stores", "message"),
    [
        ((SimpleNamespace(open=print, close=print),), r"stores\[0\].* without abort"),
        ((LogStore([]), object()), r"stores\[1\].* without open, close, abort"),
        ((SimpleNamespace(open=1, close=print, abort=print),), r"stores\[0\].* without open"),
        (LogStore([]), r"write stores=\(store,\)"),
        ((lambda store: (store, store))(LogStore([])), "the same object twice"),
    ],
)
def test_stores_are_checked(stores: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        State((), stores)


BAD_RETURNS = [
    (lambda loss, h: loss, "expected the step to return the pair .*, got Tensor"),
    (lambda loss, h: (loss, h, h), "expected the step to return the pair .*, got 3 values"),
    (lambda loss, h: None, "expected the step to return the pair .*, got NoneType"),
    (lambda loss, h: (loss.expand(1), h), r"0-dim floating-point tensor or None, got torch.float64 of shape \(1,\)"),
    (lambda loss, h: (loss.detach().long(), h), "0-dim floating-point tensor or None, got torch.int64"),
    (lambda loss, h: (loss.item(), h), "expected the loss to be a 0-dim tensor or None, got float"),
    (lambda loss, h: (loss, SimpleNamespace(h=h)), "object of type SimpleNamespace"),
    (lambda loss, h: (loss, [h, {"a": {h}}]), "object of type set"),
]


@pytest.mark.parametrize(("index", "phase"), [(0, "fill"), (1, "fill"), (2, "walk"), (1, "walk"), (0, "walk")])
@pytest.mark.parametrize(("bad", "message"), BAD_RETURNS)
def test_what_the_step_returns_is_checked(index: int, phase: str, bad: Any, message: str) -> None:
    log: list[Any] = []
    w = weight()

    def step(i, c, h, p):
        loss = (h * w).sum()
        return bad(loss, h) if (i, p) == (index, phase) else (loss, h * w)

    state = State(torch.ones(2, dtype=torch.float64), (LogStore(log),))
    with pytest.raises(ValueError, match=f"chunk {index}, phase '{phase}'.*{message}"):
        chunk_recurrent(step, range(3), state, params=[w]).backward()
    assert log[-1] == ("store", "abort")


def test_opaque_initial_state_is_refused() -> None:
    with pytest.raises(ValueError, match=r"State.carried: .* object of type SimpleNamespace"):
        chunk_recurrent(never, [1, 2], State({"h": SimpleNamespace(h=torch.ones(2))}), params=[weight()])


def test_plain_values_and_nested_containers_are_carried() -> None:
    Pair = namedtuple("Pair", "a b")
    Color = enum.Enum("Color", "red")
    w = weight()
    start = {
        "pair": Pair(torch.ones(2, dtype=torch.float64), 1),
        "rest": [
            None,
            "s",
            2.5,
            float("nan"),
            Color.red,
            torch.float32,
            torch.device("cpu"),
            True,
            b"x",
            torch.Size([2]),
            (),
        ],
    }

    def step(i, c, carried, p):
        pair = carried["pair"]
        new = Pair(pair.a * w + pair.b, pair.b + 1)
        return new.a.sum(), {"pair": new, "rest": carried["rest"]}

    reference.chunk_recurrent(step, range(4), State(start)).backward()
    (grad,) = take_grads([w])
    chunk_recurrent(step, range(4), State(start), params=[w]).backward()
    assert_same(take_grads([w]), [grad])


def differs_in_the_walk(kind: str) -> Any:
    seen: dict[int, int] = {}

    def step(i, c, h, p):
        again = seen.setdefault(i, 0) > 0
        seen[i] += 1
        h = h["h"] * w
        out: dict[str, Any] = {"h": h, "n": i}
        if again and i == 0:
            out |= {
                "shape": {"h": h.expand(3, 2)},
                "dtype": {"h": h.float()},
                "structure": {"extra": h},
                "value": {"n": 7},
                "kind": {"h": 3},
            }[kind]
        return h.sum(), out

    w = weight()
    return step, w


@pytest.mark.parametrize(
    ("kind", "message"),
    [("shape", r"\(3, 2\)"), ("dtype", "float32"), ("structure", "structure"), ("value", "7"), ("kind", "3")],
)
def test_a_step_that_carries_something_else_in_the_walk(kind: str, message: str) -> None:
    step, w = differs_in_the_walk(kind)
    state = State({"h": torch.ones(2, dtype=torch.float64), "n": 0})
    loss = chunk_recurrent(step, range(3), state, params=[w])
    with pytest.raises(ValueError, match=f"carried state after chunk 0 differs between walk and fill.*{message}"):
        loss.backward()


@pytest.mark.parametrize("change", ["shape", "structure", "requires_grad"])
def test_chunks_that_change_between_the_passes(change: str) -> None:
    w = weight()
    extra = torch.ones(2, dtype=torch.float64)
    chunks: list[Any] = [[torch.ones(2, dtype=torch.float64)] for _ in range(3)]
    loss = chunk_recurrent(lambda i, c, h, p: ((c[0] * w).sum(), h), chunks, State(), params=[w])
    chunks[1] = {"shape": [extra.expand(4, 2)], "structure": [extra, extra], "requires_grad": [weight()]}[change]
    message = "other tensors require grad" if change == "requires_grad" else "differs between walk and fill"
    with pytest.raises(ValueError, match=rf"chunks\[1\].*{message}"):
        loss.backward()


def test_a_loss_that_only_the_fill_has_is_refused() -> None:
    w = weight()

    def step(i, c, h, p):
        return (w.sum() * c if p == "fill" or i == 2 else None), h

    loss = chunk_recurrent(step, [0.0, 2.0, 1.0], State(), params=[w])
    with pytest.raises(ValueError, match=r"chunk 1: .* no loss in the walk but one in the fill"):
        loss.backward()
    w.grad = None
    loss = chunk_recurrent(step, [0.0, 0.0, 1.0], State(), params=[w])
    loss.backward()
    assert_same([loss, *take_grads([w])], [torch.tensor(2.0), torch.ones(2)])
    with torch.no_grad():
        assert chunk_recurrent(step, [0.0, 2.0, 1.0], State(), params=[w]) == 6


@pytest.mark.parametrize("failing", ["fill", "walk"])
def test_a_context_that_swallows_errors_does_not_hide_them(failing: str) -> None:
    w = weight()

    def step(i, c, h, p):
        if p == failing and i == 0:
            raise KeyError("of the step")
        return w.sum() * c, h

    def run(call: Any) -> None:
        with pytest.raises(RuntimeError, match=rf"around\('{failing}'\) swallowed an error"):
            call()

    def whole() -> None:
        chunk_recurrent(
            step, [1.0, 2.0], State(), params=[w], around=lambda phase: contextlib.suppress(KeyError)
        ).backward()

    run(whole)
    run(lambda: chunk_recurrent_backward(step, [1.0, 2.0], State(), around=lambda phase: contextlib.suppress(KeyError)))


def test_a_loss_that_only_the_walk_has_is_refused() -> None:
    w = weight()

    def step(i, c, h, p):
        return (w.sum() * c if p == "walk" else None), h

    loss = chunk_recurrent(step, [0.0, 2.0, 1.0], State(), params=[w])
    with pytest.raises(ValueError, match=r"chunk 1: .* no loss in the fill but one in the walk"):
        loss.backward()
    w.grad = None
    loss = chunk_recurrent(step, [0.0, 0.0, 1.0], State(), params=[w])  # a zero that holds a graph together
    loss.backward()
    assert_same([loss, *take_grads([w])], [torch.tensor(2.0), torch.ones(2)])
    assert chunk_recurrent_backward(step, [0.0, 2.0, 1.0], State()) == 6
    with torch.no_grad(), pytest.raises(ValueError, match="None from every chunk"):
        chunk_recurrent_backward(step, [1.0], State())


@pytest.mark.parametrize("target", ["carried", "integers", "chunk"])
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_step_that_writes_to_its_input_is_refused(target: str, chunk: int) -> None:
    w = weight()

    def step(i, c, carried, p):
        h, n = carried
        if i == chunk:
            {"carried": h, "integers": n, "chunk": c}[target].add_(1)
        return (h * w * c).sum(), (h * w, n)

    start = (torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.long))
    chunks = [torch.ones(2, dtype=torch.float64) for _ in range(3)]
    with pytest.raises(ValueError, match=f"chunk {chunk}, phase 'fill': the step wrote in place"):
        chunk_recurrent(step, chunks, State(start), params=[w])


def test_without_a_second_run_a_step_may_write_to_its_input() -> None:
    def step(i, c, h, p):
        return h.add_(c).sum(), h

    with torch.no_grad():
        assert chunk_recurrent(step, [1.0, 2.0, 3.0], State(torch.zeros(2)), params=[]) == 2 * (1 + 3 + 6)


def test_a_buffer_carried_and_written_by_a_later_chunk_is_refused() -> None:
    w, buffer = weight(), torch.ones(2, dtype=torch.float64)

    def step(i, c, h, p):
        loss = (h * w).sum()
        buffer.copy_((h * w).detach())
        return loss, buffer

    with pytest.raises(ValueError, match="the step wrote in place"):
        chunk_recurrent(step, range(3), State(torch.ones(2, dtype=torch.float64)), params=[w])


@pytest.mark.parametrize("target", ["param", "start", "chunk", "batch"])
def test_writing_between_forward_and_backward_is_refused(target: str) -> None:
    w, start, batch = weight(), torch.ones(2, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    chunks = batch.split(2)
    loss = chunk_recurrent(lambda i, c, h, p: ((h * c * w).sum(), h), chunks, State(start), params=[w])
    with torch.no_grad():
        {"param": w, "start": start, "chunk": chunks[0], "batch": batch}[target].mul_(2)
    with pytest.raises(RuntimeError, match="written in place after the forward"):
        loss.backward()
    assert w.grad is None or target == "start"


def test_an_optimizer_that_steps_inside_the_walk_is_refused() -> None:
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    w.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(RuntimeError, match=r"a parameter .* was written in place"):
        chunk_recurrent_backward(lambda i, c, h, p: (w.sum(), h), range(3), State(), params=[w])


def test_a_loader_may_fill_one_buffer_again_and_again() -> None:
    w = weight()

    class Reused:
        buffer = torch.zeros(2, dtype=torch.float64)

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return self.buffer.fill_(index + 1)

    def step(i, c, h, p):
        h = torch.tanh(h * w) * c
        return h.sum(), h

    start = State(torch.ones(2, dtype=torch.float64))
    separate = [torch.full((2,), i + 1.0, dtype=torch.float64) for i in range(4)]
    reference.chunk_recurrent(step, separate, start).backward()
    (grad,) = take_grads([w])
    chunk_recurrent(step, Reused(), start, params=[w]).backward()
    assert_same(take_grads([w]), [grad])


def test_the_step_receives_new_containers_each_time() -> None:
    w = weight()
    start = [torch.ones(2, dtype=torch.float64)]

    def step(i, c, carried, p):
        carried.append(carried[-1] * w)  # the list is the step's own
        c.clear()
        return carried[-1].sum(), carried

    chunks = [[torch.ones(1)] for _ in range(3)]
    chunk_recurrent(step, chunks, State(start), params=[w]).backward()
    assert len(start) == 1 and all(len(chunk) == 1 for chunk in chunks)
    assert_same(take_grads([w]), [torch.full((2,), 6.0)])


def test_reference_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="no stores"):
        reference.chunk_recurrent(never, [1], State((), (LogStore([]),)))
    with pytest.raises(ValueError, match="at least one chunk with a loss"):
        reference.chunk_recurrent(lambda i, c, h, p: (None, h), [1], State())


def test_the_readme_snippet_runs() -> None:
    text = (Path(__file__).parents[2] / "packages" / "chunk_recur" / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(snippets) == 1
    names: dict[str, Any] = {}
    exec(snippets[0], names)
    assert names["loss"].requires_grad and bool(names["initial"].grad.any())


def test_public_names() -> None:
    assert chunk_recur.__all__ == ["chunk_recurrent", "chunk_recurrent_backward", "State", "ChunkStore", "Phase"]
    model = Recurrent()
    with pytest.raises(TypeError):
        chunk_recurrent(model.step, [1], State())  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        State().carried = 1  # type: ignore[misc]
