"""What surrounds a forward is found again in the walk: random state, autocast, grad modes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.chunk_recur.cases import KVStore, Recurrent, Transformer, assert_same, causal, take_grads
from torch import Tensor, nn

from chunk_recur import State, chunk_recurrent, chunk_recurrent_backward, reference

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 10), st.sampled_from(["loss", "whole"]))
def test_dropout_and_noise_agree_between_the_passes(tokens: int, chunk: int, entry: str) -> None:
    torch.manual_seed(0)
    model = Recurrent(dropout=0.5)
    x = torch.randn(2, tokens, 3, dtype=torch.float64, requires_grad=True)
    leaves = [*model.parameters(), x]

    def step(index, part, h, phase):
        loss, h = model(part + torch.randn_like(part), h)
        return loss, h + torch.rand(()) * h

    chunks = x.split(chunk, 1)
    torch.manual_seed(1)
    expected = reference.chunk_recurrent(step, chunks, State(model.start(2)))
    after = torch.get_rng_state()
    expected.backward()
    grads = take_grads(leaves)
    torch.manual_seed(1)
    if entry == "loss":
        loss = chunk_recurrent(step, chunks, State(model.start(2)), params=model.parameters())
        assert torch.equal(torch.get_rng_state(), after)
        torch.manual_seed(2)
        between = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), between)
    else:
        loss = chunk_recurrent_backward(step, chunks, State(model.start(2)))
        assert torch.equal(torch.get_rng_state(), after)
    assert_same([loss, *take_grads(leaves)], [expected, *grads])


@pytest.mark.cuda
def test_the_device_generator_is_replayed() -> None:
    weight = torch.ones(8, device="cuda", requires_grad=True)

    def step(index, chunk, h, phase):
        h = h * torch.rand_like(weight) + torch.dropout(weight, 0.5, True)
        return h.sum(), h

    state = State(torch.zeros(8, device="cuda"))
    torch.manual_seed(1)
    expected = reference.chunk_recurrent(step, range(5), state)
    expected.backward()
    (grad,) = take_grads([weight])
    torch.manual_seed(1)
    loss = chunk_recurrent(step, range(5), state, params=[weight])
    torch.manual_seed(2)
    before = torch.cuda.get_rng_state()
    loss.backward()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert_same([loss, *take_grads([weight])], [expected, grad], 1e-6)


def test_the_random_state_is_put_back_after_a_failed_walk() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(index, chunk, h, phase):
        if index == 0 and phase == "walk":
            raise KeyError("no")
        return (weight * torch.rand(3)).sum(), h

    loss = chunk_recurrent(step, range(3), State(), params=[weight])
    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)


def mixed(device: str) -> tuple[nn.Module, Tensor, list[Tensor]]:
    torch.manual_seed(0)
    model = Recurrent(8, 16, dtype=torch.float32).to(device)
    x = torch.randn(3, 12, 8, device=device, requires_grad=True)
    return model, x, [*model.parameters(), x]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("where", ["outside", "inside", "whole"])
@pytest.mark.parametrize("cache", [True, False])
def test_autocast_is_the_forwards_in_both_passes(device: str, where: str, cache: bool) -> None:
    """Bit for bit the gradient of one graph under autocast, which differs from the one without."""
    model, x, leaves = mixed(device)
    oracle = reference.chunk_recurrent(model.step, x.split(4, 1), State(model.start(3)))
    oracle.backward()
    without = take_grads(leaves)
    seen = []

    def step(index, part, h, phase):
        loss, h = model(part, h)
        seen.append(model.head(h).dtype)
        return loss, h

    region = torch.autocast(device, torch.bfloat16, cache_enabled=cache)
    with region:
        expected = reference.chunk_recurrent(step, x.split(4, 1), State(model.start(3)))
    expected.backward()
    grads = take_grads(leaves)
    with torch.autocast(device, torch.bfloat16, cache_enabled=cache):
        if where == "whole":
            loss = chunk_recurrent_backward(step, x.split(4, 1), State(model.start(3)))
        else:
            loss = chunk_recurrent(step, x.split(4, 1), State(model.start(3)), params=model.parameters())
        if where == "inside":
            loss.backward()
    if where == "outside":
        loss.backward()
    assert set(seen) == {torch.bfloat16}
    got = take_grads(leaves)
    assert all(bool(g.any()) for g in got)  # no weight cast under no_grad was reused
    # Each parameter's gradient is cast once for the whole graph there and once for each chunk here.
    assert_same(got, grads, 1e-2)
    assert max(float((a - b).abs().max()) for a, b in zip(got, without)) > 1e-4
    assert_same([loss], [expected], 1e-3)


def test_a_cast_cached_without_grad_is_not_used_with_it() -> None:
    """And no cast of ours is left to the caller's region, nor one of the caller's used by us."""
    layer = nn.Linear(4, 4)
    x = torch.randn(6, 4)

    def step(index, part, carried, phase):
        return layer(part).float().square().sum(), carried

    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
            chunk_recurrent(step, x.split(2), State(), params=layer.parameters())
        chunk_recurrent(step, x.split(2), State(), params=layer.parameters()).backward()
        ours = take_grads(list(layer.parameters()))
        with torch.no_grad():
            chunk_recurrent(step, x.split(2), State(), params=layer.parameters())
        layer(x).float().square().sum().backward()
    assert all(bool(g.any()) for g in ours)
    assert_same(ours, take_grads(list(layer.parameters())), 1e-2)


def test_backward_runs_without_autocast() -> None:
    model, x, _ = mixed("cpu")
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.view_as(h)

        @staticmethod
        def backward(ctx, grad):
            seen.append(torch.is_autocast_enabled("cpu"))
            return grad

    def step(index, part, h, phase):
        return model(part, Probe.apply(h))

    with torch.autocast("cpu", torch.bfloat16):
        chunk_recurrent_backward(step, x.split(4, 1), State(model.start(3)))
        chunk_recurrent(step, x.split(4, 1), State(model.start(3)), params=model.parameters()).backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen and not any(seen)


def test_a_grad_scaler_scales_and_unscales() -> None:
    model, x, leaves = mixed("cpu")
    reference.chunk_recurrent(model.step, x.split(5, 1), State(model.start(3))).backward()
    grads = take_grads(leaves)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    loss = chunk_recurrent(model.step, x.split(5, 1), State(model.start(3)), params=model.parameters())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    steps = [(b - p.detach()) / 0.1 for b, p in zip(before, model.parameters())]
    assert_same(steps, grads[:-1], 1e-4)


def test_inference_mode_before_between_and_after() -> None:
    model = Recurrent()
    with torch.inference_mode():
        start = torch.zeros(2, 4, dtype=torch.float64)
        x = torch.randn(2, 7, 3, dtype=torch.float64)
        before = chunk_recurrent(model.step, x.split(3, 1), State(start), params=model.parameters())
    leaves = list(model.parameters())
    expected = reference.chunk_recurrent(model.step, x.clone().split(3, 1), State(start.clone()))
    expected.backward()
    grads = take_grads(leaves)
    loss = chunk_recurrent(model.step, x.split(3, 1), State(start), params=leaves)
    with torch.inference_mode():
        again = chunk_recurrent_backward(model.step, x.split(3, 1), State(start))
        loss.backward()
    assert not any(p.grad is None or p.grad.is_inference() for p in leaves if p is not model.initial)
    assert_same([loss, before, again, *take_grads(leaves)], [expected, expected, expected, *grads])
    torch.optim.AdamW(leaves).step()


@pytest.mark.parametrize("inner", [torch.no_grad, torch.inference_mode])
def test_stores_of_an_evaluation_serve_the_next_training_step(inner) -> None:
    torch.manual_seed(0)
    model, store = Transformer(), KVStore(2)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    labelled = torch.ones(2, 6)
    model(x, labelled, lambda layer, q, kv: causal(q, kv)).backward()
    grads = take_grads(list(model.parameters()))
    chunks = list(zip(x.split(2, 1), labelled.split(2, 1)))
    state = State((), (store,))
    for _ in range(2):
        with inner():
            chunk_recurrent(model.stepper(store), chunks, state, params=model.parameters())
        chunk_recurrent(model.stepper(store), chunks, state, params=model.parameters()).backward()
        assert_same(take_grads(list(model.parameters())), grads, 1e-11)


def test_backward_under_no_grad() -> None:
    model = Recurrent()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    leaves = list(model.parameters())
    reference.chunk_recurrent(model.step, x.split(3, 1), State(model.start(2))).backward()
    grads = take_grads(leaves)
    loss = chunk_recurrent(model.step, x.split(3, 1), State(model.start(2)), params=leaves)
    with torch.no_grad():
        loss.backward()
    assert_same(take_grads(leaves), grads)


def test_anomaly_detection_and_saved_tensor_hooks() -> None:
    model = Recurrent()
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    leaves = list(model.parameters())
    reference.chunk_recurrent(model.step, x.split(3, 1), State(model.start(2))).backward()
    grads = take_grads(leaves)
    with torch.autograd.set_detect_anomaly(True), torch.autograd.graph.save_on_cpu():
        chunk_recurrent(model.step, x.split(3, 1), State(model.start(2)), params=leaves).backward()
    assert_same(take_grads(leaves), grads)
