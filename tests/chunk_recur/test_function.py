"""chunk_recurrent against one graph over all chunks, and everything autograd may do with its result."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chunk_recur.cases import Fault, LinearAttention, LogStore, Recurrent, assert_same, take_grads
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward, reference

lengths = st.integers(1, 9)
chunk_lengths = st.integers(1, 10)
batches = st.integers(1, 3)


def recurrent(batch: int = 2, tokens: int = 7, seed: int = 0) -> tuple[Recurrent, Tensor, list[Tensor]]:
    torch.manual_seed(seed)
    model = Recurrent()
    x = torch.randn(batch, tokens, 3, dtype=torch.float64, requires_grad=True)
    return model, x, [*model.parameters(), x]


def loss_of(model: Recurrent, x: Tensor, chunk: int = 3) -> Tensor:
    return chunk_recurrent(model.step, x.split(chunk, 1), State(model.start(x.shape[0])), params=model.parameters())


def oracle(model: Recurrent, x: Tensor, chunk: int = 3) -> Tensor:
    return reference.chunk_recurrent(model.step, x.split(chunk, 1), State(model.start(x.shape[0])))


@settings(deadline=None, max_examples=30)
@given(batches, lengths, chunk_lengths, st.integers(0, 9))
def test_recurrent_network_equals_one_graph(batch: int, tokens: int, chunk: int, seed: int) -> None:
    model, x, leaves = recurrent(batch, tokens, seed)
    expected = oracle(model, x, chunk)
    expected.backward()
    grads = take_grads(leaves)
    loss = loss_of(model, x, chunk)
    assert_same([loss], [expected])
    loss.backward()
    assert_same(take_grads(leaves), grads)
    whole = chunk_recurrent_backward(model.step, x.split(chunk, 1), State(model.start(batch)))
    assert_same([whole, *take_grads(leaves)], [expected, *grads])
    assert not whole.requires_grad


@settings(deadline=None, max_examples=30)
@given(batches, lengths, chunk_lengths, st.booleans(), st.floats(-3, 3))
def test_linear_attention_equals_one_graph(batch: int, tokens: int, chunk: int, learned: bool, scale: float) -> None:
    torch.manual_seed(tokens)
    model = LinearAttention()
    x = torch.randn(batch, tokens, 3, dtype=torch.float64)
    start = model.start(batch)
    start["matrix"].requires_grad_(learned)
    leaves = [*model.parameters(), start["matrix"]]
    chunks = x.split(chunk, 1)
    expected = reference.chunk_recurrent(model.step, chunks, State(start))
    (expected * scale).backward()
    grads = take_grads(leaves)
    loss = chunk_recurrent(model.step, chunks, State(start), params=model.parameters())
    (loss * scale).backward()
    assert_same([loss, *take_grads(leaves)], [expected, *grads])
    chunk_recurrent_backward(model.step, chunks, State(start), scale=scale)
    assert_same(take_grads(leaves), grads)


def test_the_last_chunk_runs_once_and_the_others_twice() -> None:
    model, x, _ = recurrent()
    calls = []

    def step(index, chunk, h, phase):
        calls.append((index, phase, torch.is_grad_enabled()))
        return model(chunk, h)

    loss = chunk_recurrent(step, x.split(3, 1), State(model.start(2)), params=model.parameters())
    assert calls == [(0, "fill", False), (1, "fill", False), (2, "walk", True)]
    loss.backward()
    assert calls[3:] == [(1, "walk", True), (0, "walk", True)]


def test_gradient_flows_on_into_the_callers_graph() -> None:
    """Embedded tokens and a computed initial state are results of operations that the caller differentiates."""
    model, x, _ = recurrent()
    embed = nn.Linear(3, 3, dtype=torch.float64)
    leaves = [*model.parameters(), *embed.parameters(), x]

    def total(function) -> Tensor:
        h = torch.tanh(model.initial * 2).expand(2, -1)
        return function(model.step, embed(x).split(2, 1), State(h), params=model.parameters()).sqrt()

    expected = total(reference.chunk_recurrent)
    expected.backward()
    grads = take_grads(leaves)
    loss = total(chunk_recurrent)
    loss.backward()
    assert_same([loss, *take_grads(leaves)], [expected, *grads])
    h = torch.tanh(model.initial * 2).expand(2, -1)
    chunk_recurrent_backward(model.step, embed(x).split(2, 1), State(h), scale=0.5 / expected.item())
    assert_same(take_grads(leaves), grads)


def test_a_tensor_in_every_chunk_receives_the_sum() -> None:
    model, x, _ = recurrent()
    shared = torch.randn(3, dtype=torch.float64, requires_grad=True)
    chunks = [{"x": part, "shift": shared, "again": [shared]} for part in x.split(2, 1)]

    def step(index, chunk, h, phase):
        return model(chunk["x"] * chunk["again"][0] + chunk["shift"], h)

    leaves = [*model.parameters(), x, shared]
    reference.chunk_recurrent(step, chunks, State(model.start(2))).backward()
    grads = take_grads(leaves)
    chunk_recurrent(step, chunks, State(model.start(2)), params=model.parameters()).backward()
    assert_same(take_grads(leaves), grads)


def test_carried_tensors_may_pass_through_repeat_and_need_no_gradient() -> None:
    weight = torch.randn(3, dtype=torch.float64, requires_grad=True)
    start = (torch.ones(3, dtype=torch.float64), torch.arange(3), None, "name")

    def step(index, x, carried, phase):
        state, ids, nothing, name = carried[:4]
        new = torch.tanh(state * weight + x)
        extra = carried[4] if len(carried) > 4 else weight * 2  # the structure grows after the first chunk
        return (new * ids * extra).sum(), (new, ids, nothing, name, extra, new)

    chunks = torch.randn(5, 3, dtype=torch.float64).unbind()
    reference.chunk_recurrent(step, chunks, State(start)).backward()
    grads = take_grads([weight])
    chunk_recurrent(step, chunks, State(start), params=[weight]).backward()
    assert_same(take_grads([weight]), grads)


@pytest.mark.parametrize("learned", [False, True])
def test_only_the_walk_asks_for_gradients_and_the_initial_state_only_if_the_caller_does(learned: bool) -> None:
    model, x, _ = recurrent()
    seen = []

    def step(index, chunk, h, phase):
        seen.append((index, phase, chunk.requires_grad, h.requires_grad))
        assert chunk.is_leaf and h.is_leaf
        return model(chunk, h)

    start = torch.zeros(2, 4, dtype=torch.float64, requires_grad=learned)
    chunk_recurrent(step, x.split(3, 1), State(start), params=model.parameters()).backward()
    assert seen == [
        (0, "fill", False, False),
        (1, "fill", False, False),
        (2, "walk", True, True),
        (1, "walk", True, True),
        (0, "walk", True, learned),
    ]


def test_chunks_without_a_loss_still_carry_their_gradient() -> None:
    model, x, leaves = recurrent()

    def step(index, chunk, h, phase):
        loss, h = model(chunk, h)
        return (loss if index == 2 else None if index == 1 else torch.ones((), dtype=torch.float64)), h

    chunks = x.split(2, 1)
    expected = reference.chunk_recurrent(step, chunks, State(model.start(2)))
    expected.backward()
    grads = take_grads(leaves)
    loss = chunk_recurrent(step, chunks, State(model.start(2)), params=model.parameters())
    loss.backward()
    assert_same([loss, *take_grads(leaves)], [expected, *grads])


def test_no_loss_at_all_is_zero_and_gives_nothing() -> None:
    model, x, leaves = recurrent()
    loss = chunk_recurrent(
        lambda i, c, h, p: (None, model(c, h)[1]), x.split(3, 1), State(model.start(2)), params=model.parameters()
    )
    assert loss == 0
    loss.backward()
    assert not any(grad.any() for grad in take_grads(leaves))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_losses_are_summed_in_float32(dtype: torch.dtype) -> None:
    weight = torch.ones((), dtype=dtype, requires_grad=True)
    count = 600  # adding ones in bfloat16 stops at 256
    loss = chunk_recurrent(lambda i, c, s, p: (weight * 1, s), range(count), State(), params=[weight])
    assert loss.dtype == dtype
    assert loss.item() == torch.tensor(float(count), dtype=dtype).item()


def test_sums_accumulation_and_several_losses_alive() -> None:
    model, x, leaves = recurrent()
    y = torch.randn(3, 5, 3, dtype=torch.float64)
    (oracle(model, x) * 2 + oracle(model, y) - oracle(model, x, 2).log()).backward()
    grads = take_grads(leaves)
    a, b, c = loss_of(model, x), loss_of(model, y), loss_of(model, x, 2)
    (a * 2 + b - c.log()).backward()
    assert_same(take_grads(leaves), grads)
    a, b, c = loss_of(model, x), loss_of(model, y), loss_of(model, x, 2)
    (b + a).backward()
    (a2 := loss_of(model, x)).backward()
    (-c.log()).backward()
    assert_same(take_grads(leaves), grads)
    with pytest.raises(RuntimeError, match="walked back already"):
        a2.backward()


@pytest.mark.parametrize("retain", [False, True])
def test_a_second_backward_is_refused_and_adds_nothing(retain: bool) -> None:
    model, x, leaves = recurrent()
    loss = loss_of(model, x)
    loss.backward(retain_graph=True)
    grads = take_grads(leaves)
    with pytest.raises(RuntimeError, match="cannot be walked back: it was walked back already"):
        loss.backward(retain_graph=retain)
    assert not any(grad.any() for grad in take_grads(leaves))
    loss_of(model, x).backward()
    assert_same(take_grads(leaves), grads)


def test_create_graph_is_refused_before_anything_happens() -> None:
    model, x, leaves = recurrent()
    oracle(model, x).backward()
    grads = take_grads(leaves)
    loss = loss_of(model, x)
    with pytest.raises(RuntimeError, match="create_graph"):
        loss.backward(create_graph=True)
    assert not any(grad.any() for grad in take_grads(leaves))
    loss.backward()
    assert_same(take_grads(leaves), grads)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_autograd_grad_for_parameters_is_refused(allow_unused: bool) -> None:
    model, x, leaves = recurrent()
    loss = loss_of(model, x)
    with pytest.raises(RuntimeError, match=r"autograd\.grad cannot return it"):
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=allow_unused)
    assert all(leaf.grad is None for leaf in leaves)


def test_autograd_grad_for_inputs_is_exact_and_leaves_the_parameters_alone() -> None:
    model, x, _ = recurrent()
    (expected,) = torch.autograd.grad(oracle(model, x), [x])
    marks = [torch.full_like(p, 7.0) for p in model.parameters()]
    for p, mark in zip(model.parameters(), marks):
        p.grad = mark
    (grad,) = torch.autograd.grad(loss_of(model, x), [x])
    assert_same([grad], [expected])
    assert all(p.grad is mark and bool((mark == 7).all()) for p, mark in zip(model.parameters(), marks))


def test_backward_with_inputs_gives_only_what_is_asked_for() -> None:
    model, x, leaves = recurrent()
    oracle(model, x).backward()
    grads = take_grads(leaves)
    for wanted in ([0, 2], [len(leaves) - 1], list(range(len(leaves)))):
        loss_of(model, x).backward(inputs=[leaves[i] for i in wanted])
        assert [i for i, leaf in enumerate(leaves) if leaf.grad is not None] == wanted
        got = take_grads(leaves)
        assert_same([got[i] for i in wanted], [grads[i] for i in wanted])


def test_an_initial_state_that_is_itself_a_parameter() -> None:
    model, x, _ = recurrent(batch=4)
    model.initial = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))

    def step(index, chunk, h, phase):  # carried, and used directly as well
        return model(chunk, h + model.initial)

    leaves = list(model.parameters())
    reference.chunk_recurrent(step, x.split(3, 1), State(model.initial)).backward()
    grads = take_grads(leaves)
    for _ in range(2):
        chunk_recurrent(step, x.split(3, 1), State(model.initial), params=leaves).backward()
        assert_same(take_grads(leaves), grads)
        chunk_recurrent_backward(step, x.split(3, 1), State(model.initial))
        assert_same(take_grads(leaves), grads)


def test_frozen_parameters_stay_frozen_and_unlisted_leaves_accumulate() -> None:
    model, x, leaves = recurrent()
    model.cell.requires_grad_(False)
    oracle(model, x).backward()
    frozen = [p.grad is None for p in leaves]
    grads = take_grads(leaves)
    assert any(frozen)
    listed = [model.initial, model.cell.weight_ih]
    chunk_recurrent(model.step, x.split(3, 1), State(model.start(2)), params=listed).backward()
    assert [p.grad is None for p in leaves] == frozen
    assert_same(take_grads(leaves), grads)


class Lazy:
    """Builds each chunk when it is asked for, as a loader from disk does."""

    def __init__(self, tokens: Tensor, embed: nn.Module | None = None):
        self.tokens, self.embed, self.asked = tokens, embed, []

    def __len__(self) -> int:
        return self.tokens.shape[1]

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self.asked.append(index)
        chunk = self.tokens[:, index : index + 1].clone()
        return chunk if self.embed is None else self.embed(chunk)


def test_chunks_are_built_when_needed_once_a_pass() -> None:
    model, x, _ = recurrent(tokens=4)
    params = list(model.parameters())
    chunks = Lazy(x.detach())
    loss = chunk_recurrent(model.step, chunks, State(model.start(2)), params=params)
    assert chunks.asked == [0, 1, 2, 3]
    loss.backward()
    assert chunks.asked == [0, 1, 2, 3, 2, 1, 0]
    with torch.no_grad():
        chunk_recurrent(model.step, chunks, State(model.start(2)), params=params)
    assert chunks.asked[7:] == [0, 1, 2, 3]


@pytest.mark.parametrize("what", ["carried", "first chunk", "last chunk"])
def test_without_parameters_an_input_that_requires_grad_is_enough(what: str) -> None:
    model, x, _ = recurrent()
    model.requires_grad_(False)
    start = torch.zeros(2, 4, dtype=torch.float64, requires_grad=what == "carried")
    chunks = [part.detach().clone() for part in x.split(3, 1)]
    wanted = {"carried": start, "first chunk": chunks[0], "last chunk": chunks[-1]}[what].requires_grad_()
    (expected,) = torch.autograd.grad(reference.chunk_recurrent(model.step, chunks, State(start)), [wanted])
    loss = chunk_recurrent(model.step, chunks, State(start), params=model.parameters())
    loss.backward()
    assert_same([wanted.grad], [expected])


def test_looking_for_gradients_draws_no_numbers() -> None:
    model, x, _ = recurrent(tokens=4)
    model.requires_grad_(False)
    chunks = Lazy(x.detach(), nn.Dropout(0.5))
    losses = []
    for grad in (True, False):
        torch.manual_seed(0)
        with torch.set_grad_enabled(grad):
            losses.append(chunk_recurrent(model.step, chunks, State(model.start(2)), params=[]))
    assert torch.equal(*losses) and not losses[0].requires_grad


def test_parameters_named_twice() -> None:
    model, x, leaves = recurrent()
    oracle(model, x).backward()
    grads = take_grads(leaves)
    params = [*model.parameters(), *model.parameters()]
    chunk_recurrent(model.step, x.split(3, 1), State(model.start(2)), params=params).backward()
    assert_same(take_grads(leaves), grads)
    chunk_recurrent(model.step, x.split(3, 1), State(model.start(2)), params=params).backward(inputs=[x])
    assert_same(take_grads(leaves), [torch.zeros_like(g) for g in grads[:-1]] + grads[-1:])


def test_chunks_built_with_a_graph_hand_their_gradient_to_it() -> None:
    model, x, _ = recurrent(tokens=4)
    embed = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Dropout(0.5))
    leaves = [*model.parameters(), *embed.parameters()]
    torch.manual_seed(3)
    expected = reference.chunk_recurrent(model.step, Lazy(x.detach(), embed), State(model.start(2)))
    expected.backward()
    grads = take_grads(leaves)
    torch.manual_seed(3)
    loss = chunk_recurrent(model.step, Lazy(x.detach(), embed), State(model.start(2)), params=model.parameters())
    loss.backward()
    assert_same([loss, *take_grads(leaves)], [expected, *grads])


@pytest.mark.parametrize("mode", ["no_grad", "inference", "grad in inference", "frozen"])
def test_forward_only_when_no_gradient_can_be_asked_for(mode: str) -> None:
    model, x, _ = recurrent()
    expected = oracle(model, x)
    x = x.detach()
    phases = []

    def step(index, chunk, h, phase):
        phases.append(phase)
        return model(chunk, h)

    model.requires_grad_(mode != "frozen")

    def outer():
        return torch.inference_mode("inference" in mode)

    def inner():  # made anew for each use: it takes effect when it is made, not when it is entered
        return torch.set_grad_enabled(mode in ("frozen", "grad in inference"))

    with outer(), inner():
        loss = chunk_recurrent(step, x.split(3, 1), State(model.start(2)), params=model.parameters())
    assert not loss.requires_grad and phases == ["fill"] * 3
    assert_same([loss], [expected])
    with outer(), inner() if mode != "frozen" else torch.no_grad():
        again = chunk_recurrent_backward(step, x.split(3, 1), State(model.start(2)))
    assert phases == ["fill"] * 6
    assert_same([again], [expected])


def test_the_loss_is_not_part_of_a_reference_cycle() -> None:
    model, x, _ = recurrent()
    gc.collect()
    gc.disable()
    try:
        log: list[Any] = []
        state = State(model.start(2), (LogStore(log),))
        loss = chunk_recurrent(model.step, x.split(3, 1), state, params=model.parameters())
        assert ("store", "abort") not in log
        del loss
        assert log[-1] == ("store", "abort")
    finally:
        gc.enable()


def test_the_incoming_gradient_may_have_any_size_and_sign() -> None:
    model, x, leaves = recurrent()
    oracle(model, x).backward()
    grads = take_grads(leaves)
    for scale in (0.0, -1.0, 65536.0, 1e-200):
        loss_of(model, x).backward(torch.tensor(scale, dtype=torch.float64))
        assert_same([g / (scale or 1) for g in take_grads(leaves)], [g * (scale != 0) for g in grads])
    scale = torch.tensor(3.0, requires_grad=True)
    chunk_recurrent_backward(model.step, x.split(3, 1), State(model.start(2)), scale=scale)
    assert_same([g / 3 for g in take_grads(leaves)], grads)
    assert scale.grad is None


@pytest.mark.cuda
def test_on_a_device_whose_backward_runs_in_another_thread() -> None:
    torch.manual_seed(0)
    model = Recurrent().cuda()
    x = torch.randn(2, 7, 3, dtype=torch.float64, device="cuda", requires_grad=True)
    leaves = [*model.parameters(), x]
    oracle(model, x).backward()
    grads = take_grads(leaves)
    log: list[Any] = []

    def loss_of(fail: bool = False) -> Tensor:
        def step(index, chunk, h, phase):
            if fail and (index, phase) == (0, "walk"):
                raise Fault
            return checkpoint(model, chunk, h, use_reentrant=True)

        state = State(model.start(2), (LogStore(log),))
        return chunk_recurrent(step, x.split(2, 1), state, params=model.parameters())

    for _ in range(2):
        loss = loss_of()
        loss.backward()
        assert_same(take_grads(leaves), grads)
        with pytest.raises(RuntimeError, match="walked back already"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"autograd\.grad cannot return it"):
            torch.autograd.grad(loss_of(), [model.head.weight])
        log.clear()
        with pytest.raises(Fault):
            loss_of(fail=True).backward()
        assert log[-1] == ("store", "abort")
        take_grads(leaves)
    chunk_recurrent(model.step, x.split(2, 1), State(model.start(2)), params=model.parameters()).backward(inputs=[x])
    assert all(leaf.grad is None for leaf in leaves[:-1])
    assert_same([x.grad], grads[-1:])


def test_hooks_on_parameters_see_gradients_of_every_chunk_and_never_none() -> None:
    model, x, leaves = recurrent()
    oracle(model, x).backward()
    expected = take_grads(leaves)
    first, second, *_ = [p for p in model.parameters() if p.requires_grad]
    place = [leaf is first for leaf in leaves].index(True)
    seen: list[Tensor] = []
    collected: list[Tensor] = []

    def collect(param: Tensor) -> None:  # as fp32 main gradients do
        collected.append(param.grad.clone())
        param.grad = None

    first.register_hook(seen.append)
    second.register_post_accumulate_grad_hook(collect)
    loss_of(model, x).backward()
    assert_same([sum(seen), sum(collected)], [expected[place], expected[place + 1]])
    first.grad = None
    loss_of(model, x).backward(inputs=[first])
    assert_same([first.grad], [expected[place]])
