"""Saved activations in the arena: the same gradients, from memory that is really free meanwhile."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from offload import HostOutOfMemory, Offloader, PinnedArena, saved_on_host

MIB = 1 << 20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def poisoned(nbytes=4 * MIB):
    arena = PinnedArena(nbytes)
    arena.take((nbytes // 4,), torch.float32).fill_(float("nan"))
    arena.reset()
    return arena


def mlp(device="cpu", layers=3, width=16, seed=0):
    torch.manual_seed(seed)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width))
        for _ in range(layers)
    ]
    return torch.nn.Sequential(*blocks).to(device)


class Probe(torch.autograd.Function):
    """Saves a tensor of any layout and notes what comes back."""

    came_back: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, x, *odd):
        ctx.save_for_backward(*odd)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Probe.came_back = ctx.saved_tensors
        return grad, *[None] * len(Probe.came_back)


def through(tensors, device="cpu", min_bytes=0, arena=None):
    """The tensors as backward gets them, and the bytes they took."""
    arena = arena or poisoned()
    with saved_on_host(Offloader(device), arena, min_bytes=min_bytes):
        out = Probe.apply(torch.ones(1, device=device, requires_grad=True), *tensors)
    used = arena.used_bytes
    out.backward()
    came_back, Probe.came_back = Probe.came_back, None
    del out
    assert arena.used_bytes == 0
    return came_back, used


@st.composite
def layouts(draw):
    """A tensor of some odd layout: permuted, sliced, expanded, diagonal, windowed, offset."""
    dims = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    dtype = draw(st.sampled_from([torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool]))
    x = torch.randn(dims, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["permute", "slice", "expand", "window", "select", "unsqueeze", "diagonal"]))
        if how == "permute":
            x = x.permute(draw(st.permutations(range(x.dim()))))
        elif how == "unsqueeze":
            x = x.unsqueeze(draw(st.integers(0, x.dim())))
        elif how == "expand":
            x = x.unsqueeze(0).expand(draw(st.integers(1, 3)), *x.shape)
        elif how == "diagonal" and x.dim() >= 2:
            x = x.diagonal()
        elif x.dim():
            dim = draw(st.integers(0, x.dim() - 1))
            if how == "slice":
                x = x[(slice(None),) * dim + (slice(draw(st.integers(0, 2)), None, draw(st.integers(1, 3))),)]
            elif how == "window" and x.shape[dim] >= 2:
                x = x.unfold(dim, 2, 1)
            elif how == "select" and x.shape[dim]:
                x = x.select(dim, x.shape[dim] - 1)
    return x


@given(x=layouts())
@settings(deadline=None, max_examples=150)
def test_any_layout_comes_back_as_it_was(x):
    (back,), used = through([x])
    assert back.shape == x.shape and back.stride() == x.stride() and back.dtype == x.dtype
    assert torch.equal(back, x)
    assert back.numel() == 0 or back.data_ptr() != x.data_ptr()
    assert used <= -(-x.untyped_storage().nbytes() // 256) * 256


def test_gaps_beside_overlap():
    x = torch.randn(19, 8).unfold(1, 3, 1)[::9]
    (back,), _ = through([x])
    assert back.stride() == x.stride() and torch.equal(back, x)


@pytest.mark.cuda
def test_layouts_on_cuda():
    base = torch.randn(6, 7, 8, device="cuda")
    for x in (base.permute(2, 0, 1), base[:, ::2], base[:, :1].expand(6, 7, 8), base.unfold(0, 2, 1)):
        (back,), _ = through([x], "cuda")
        assert back.is_cuda and back.stride() == x.stride() and torch.equal(back, x)


def test_gaps_and_repetitions_take_no_space():
    base = torch.randn(64, 1024)
    for x, elements in ((base[:, :64], 64 * 64), (base[:1].expand(64, 1024), 1024), (base.t(), 64 * 1024)):
        assert through([x])[1] == 4 * elements


def test_conjugate_views_come_back_right():
    x = torch.randn(64, dtype=torch.complex64).conj()
    assert torch.equal(through([x])[0][0], x)


def test_once_however_often_saved():
    x = torch.randn(64, 64)
    back, used = through([x, x, x.detach(), x.view(64, 64)])
    assert used == x.nbytes and all(torch.equal(b, x) for b in back)
    assert through([x, x[:32]])[1] == x.nbytes * 3 // 2  # other views are other tensors


def test_written_between_two_savings_is_two_tensors():
    arena, x = poisoned(), torch.zeros(256)
    one = torch.ones(1, requires_grad=True)
    with saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        first = Probe.apply(one, x)
        x.add_(1)
        second = Probe.apply(one, x)
    x.add_(1)
    for out, value in ((first, 0), (second, 1)):
        out.backward()
        assert (Probe.came_back[0] == value).all()


def test_recycled_storage_is_not_mistaken_for_the_old_one():
    """Freed and allocated again at the same address with the same version: contents differ, and so must the bytes."""
    arena, one = poisoned(), torch.ones(1, requires_grad=True)
    outs = []
    with saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        for value in range(20):
            outs.append(Probe.apply(one, torch.full((4096,), float(value))))
    for value, out in enumerate(outs):
        out.backward()
        assert (Probe.came_back[0] == value).all()


@pytest.mark.parametrize("device", DEVICES)
def test_training_is_bit_identical_and_needs_no_reset(device):
    def run(context):
        model = mlp(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(6):
            x = torch.randn(8, 5, 16, generator=torch.Generator().manual_seed(step)).to(device)
            with context():
                loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    arena, offloader = poisoned(64 << 10), Offloader(device)
    plain = run(lambda: torch.enable_grad())
    moved = run(lambda: saved_on_host(offloader, arena, min_bytes=0))
    assert all(torch.equal(a, b) for a, b in zip(plain, moved))
    assert arena.used_bytes == 0


def test_parameters_and_their_views_stay():
    arena = poisoned()
    frozen = torch.nn.Parameter(torch.randn(32, 32), requires_grad=False)
    leaf = torch.randn(4, 32, requires_grad=True)
    layer = torch.nn.Linear(32, 32)
    with saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        out = leaf @ layer.weight.t() @ frozen + leaf @ layer.weight[:, :]
    assert arena.used_bytes == 0
    out.sum().backward()
    assert layer.weight.grad is not None


def test_activations_are_freed_meanwhile():
    arena = poisoned()
    x = torch.randn(64, 64, requires_grad=True)
    with saved_on_host(Offloader("cpu"), arena):
        hidden = (x * 2).exp()  # exp saves its own result; at 16 KiB it is small
        big = torch.cat([hidden] * 8).exp()
        storages = [StorageWeakRef(t.untyped_storage()) for t in (hidden, big)]
        loss = big.sum()
        del hidden, big
    gc.collect()
    kept, moved = (not s.expired() for s in storages)
    assert kept and not moved
    assert arena.used_bytes == 8 * 64 * 64 * 4
    loss.backward()
    expected = 8 * 2 * (2 * x.detach()).exp() * (2 * x.detach()).exp().exp()
    torch.testing.assert_close(x.grad, expected)


def test_graphs_alive_at_once_keep_apart():
    arena, model, offloader = poisoned(), mlp(), Offloader("cpu")
    xs = [torch.randn(4, 16, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = []
    for x in xs:
        expected.append(torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    losses = []
    for x in xs[:3]:
        with saved_on_host(offloader, arena, min_bytes=0):
            losses.append(model(x).square().sum())
    got = {}
    got[1] = torch.autograd.grad(losses[1], list(model.parameters()))  # the middle one first: a hole in the arena
    with saved_on_host(offloader, arena, min_bytes=0):
        losses.append(model(xs[3]).square().sum())
    for i in (0, 3, 2):
        got[i] = torch.autograd.grad(losses[i], list(model.parameters()))
    assert all(torch.equal(a, b) for i in range(4) for a, b in zip(got[i], expected[i]))
    del losses
    assert arena.used_bytes == 0


def test_what_the_user_took_is_never_given_away():
    arena, model = poisoned(), mlp()
    with saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        loss = model(torch.randn(4, 16)).sum()
        mine = arena.take((100,), torch.float32).fill_(5)
        loss = loss + model(torch.randn(4, 16)).sum()
    loss.backward()
    del loss
    arena.take((arena.nbytes - arena.used_bytes,), torch.uint8).fill_(0)
    assert (mine == 5).all()


def test_retained_graph_and_second_derivative():
    arena = poisoned()
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        y = (x.exp() * x).sum()
        (first,) = torch.autograd.grad(y, x, retain_graph=True)
        (again,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(again.sum(), x)
    assert torch.equal(first, again)
    torch.testing.assert_close(again, x.exp() * (x + 1))
    torch.testing.assert_close(second, x.exp() * (x + 2))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_activation_checkpointing(reentrant):
    model, arena = mlp(), poisoned()
    x = torch.randn(4, 16, requires_grad=True)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    with saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        hidden = x * 1
        for block in model:
            hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        loss = hidden.square().sum()
    loss.backward()
    for got, want in zip([x, *model.parameters()], expected):
        assert torch.equal(got.grad, want)


@pytest.mark.parametrize("how", ["reset", "close", "reset and reuse"])
def test_arena_taken_from_under_a_graph_is_loud(how):
    arena, model = poisoned(), mlp()
    with saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        loss = model(torch.randn(4, 16)).sum()
    if how == "close":
        arena.close()
    else:
        arena.reset()
    if how == "reset and reuse":
        arena.take((64,), torch.float32).zero_()  # ends where something of the graph's ended
    with pytest.raises(ValueError, match="reset or closed"):
        loss.backward()
    del loss
    if how == "reset and reuse":
        assert arena.used_bytes == 256  # the dead graph's bytes are not given back a second time


def test_full_arena_is_loud_and_the_next_step_works():
    arena, model = PinnedArena(2048), mlp()
    offloader = Offloader("cpu")
    moved = saved_on_host(offloader, arena, min_bytes=0)
    with pytest.raises(HostOutOfMemory, match="arena is full") as caught, moved:
        model(torch.randn(64, 16)).sum()
    assert caught.value.requested == 64 * 16 * 4
    del caught
    gc.collect()
    assert arena.used_bytes == 0
    with saved_on_host(offloader, arena, min_bytes=8192):
        model(torch.randn(64, 16)).sum().backward()


def test_parameter_changed_before_backward_is_loud():
    """Autograd's own check does not run under hooks."""
    model = mlp()
    with saved_on_host(Offloader("cpu"), poisoned()):
        loss = model(torch.randn(4, 16)).sum()
    with torch.no_grad():
        model[1][0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_exception_inside_leaves_no_hooks():
    arena = poisoned()
    with pytest.raises(KeyError), saved_on_host(Offloader("cpu"), arena, min_bytes=0):
        raise KeyError
    torch.randn(64, requires_grad=True).exp().sum().backward()
    assert arena.used_bytes == 0


def test_bad_arguments():
    offloader, arena = Offloader("cpu"), PinnedArena(16)
    for arguments in ((arena, offloader), (offloader, None)):
        with pytest.raises(ValueError, match="takes an Offloader and a PinnedArena"), saved_on_host(*arguments):
            pass
    for min_bytes in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="min_bytes"), saved_on_host(offloader, arena, min_bytes=min_bytes):
            pass
    arena.close()
    with pytest.raises(ValueError, match="closed"), saved_on_host(offloader, arena):
        pass


@pytest.mark.cuda
def test_gpu_memory_falls():
    def peak(context):
        model = mlp("cuda", layers=12, width=1024)
        x = torch.randn(4096, 1024, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        with context:
            loss = model(x).square().mean()
        loss.backward()
        return torch.cuda.max_memory_allocated()

    plain = peak(torch.enable_grad())
    assert peak(saved_on_host(Offloader("cuda"), PinnedArena(1 << 30))) < 0.6 * plain
