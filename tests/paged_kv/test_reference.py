"""The reference backend against dense attention: whole walks, forward and back, over every option together."""

import random
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.numerics import relative
from tests.paged_kv.oracle import Problem, ShuffledTable, SplitPast, poisoned, pool_for
from torch.utils._python_dispatch import TorchDispatchMode

from paged_kv import PagedKV, PagePool, Segment, paged_attention, reference
from paged_kv.past import Geometry


@st.composite
def problems(draw, max_tokens=24):
    batch = draw(st.integers(1, 3))
    lengths = tuple(draw(st.lists(st.integers(1, max_tokens), min_size=batch, max_size=batch)))
    page, groups, share = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens, dim = max(lengths), draw(st.sampled_from([1, 3, 8]))
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_()

    documents = selected = None
    if draw(st.booleans()):
        cuts = (torch.rand(batch, tokens, generator=make) < 0.2).long() * torch.arange(tokens)
        documents = cuts.cummax(1).values
        if draw(st.booleans()):  # a document that begins behind its query: the query sees nothing
            documents[:, draw(st.integers(0, tokens - 1))] = tokens + 5
    if draw(st.booleans()):
        blocks, k = -(-tokens // page), draw(st.integers(1, 4))
        heads = draw(st.sampled_from([1, groups]))
        selected = torch.randint(-1, blocks, (batch, heads, blocks, k), generator=make).int()
    return Problem(
        q=random(batch, tokens, groups * share, dim),
        k=random(batch, tokens, groups, dim),
        v=random(batch, tokens, groups, dim),
        lengths=lengths,
        page=page,
        scale=draw(st.sampled_from([1.0, 0.3, -0.5])),
        window=draw(st.none() | st.integers(1, tokens + 2)),
        sinks=random(groups * share) if draw(st.booleans()) else None,
        documents=documents,
        selected=selected,
    )


def chunkings(draw, problem):
    """Blocks of tokens, one number per sequence: some of uneven size, some with none for a sequence."""
    size, dice = draw(st.integers(1, max(problem.lengths))), random.Random(draw(st.integers(0, 2**16)))
    uneven = draw(st.booleans())
    left, blocks = list(problem.lengths), []
    while any(left):
        block = tuple(
            min(n, size) if not uneven or dice.random() < 0.7 else dice.randint(0, min(n, size)) for n in left
        )
        if any(block):
            blocks.append(block)
            left = [n - m for n, m in zip(left, block)]
    return blocks


def walk(problem, blocks, past_of, kv, weight, **options):
    """Fill all blocks but the last, walk back over all: outputs and gradients of the whole batch, as `leaves`."""
    starts = [tuple(sum(block[b] for block in blocks[:i]) for b in range(kv.batch)) for i in range(len(blocks))]
    out = torch.zeros_like(problem.q)
    grads = [torch.zeros_like(x) for x in problem.leaves]
    past = past_of(kv)
    sinks = None if problem.sinks is None else problem.sinks.detach().requires_grad_()
    for i, block in enumerate(blocks[:-1]):
        kv.extend(block)
        kv.append(0, *(problem.block(x.detach(), starts[i], block) for x in (problem.k, problem.v)))
    kv.extend(blocks[-1])  # its keys and values are nobody's past: never appended
    for i in reversed(range(len(blocks))):
        if i < len(blocks) - 1:
            kv.rewind(starts[i])
        assert kv.lengths == starts[i] and kv.tokens == blocks[i]
        q, k, v = (problem.block(x.detach(), starts[i], blocks[i]).requires_grad_() for x in problem.leaves[:3])
        y = paged_attention(q, k, v, past, 0, sinks=sinks, **problem.options(starts[i], blocks[i]), **options)
        (y * problem.block(weight, starts[i], blocks[i])).sum().backward()
        for target, part in zip((out, *grads), (y.detach(), q.grad, k.grad, v.grad)):
            for b, (start, n) in enumerate(zip(starts[i], blocks[i])):
                target[b, start : start + n] = part[b, :n]
    if sinks is not None:
        grads[3] = sinks.grad
    kv.release()
    return out, grads


def expected(problem, weight):
    out = problem.dense()
    grads = torch.autograd.grad((out * weight).sum(), problem.leaves, allow_unused=True)
    zeros = weight.abs().sum((2, 3)) > 0
    out = torch.where(zeros[..., None, None], out, 0.0)
    return out.detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(grads, problem.leaves)]


def weight_for(problem, seed=0):
    weight = torch.randn(problem.q.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for b, n in enumerate(problem.lengths):
        weight[b, n:] = 0.0
    return weight


def close(ours, true):
    for a, b in zip(ours, true):
        assert float((a - b).abs().max()) <= 1e-10 * max(1.0, float(b.abs().max()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_chunked_walk_has_the_dense_gradient(data):
    problem = data.draw(problems())
    blocks = chunkings(data.draw, problem)
    weight = weight_for(problem)
    split = data.draw(st.none() | st.integers(1, 3))
    shuffle = data.draw(st.none() | st.integers(0, 99))
    with ExitStack() as stack:
        if data.draw(st.booleans()):  # tiles so small that even these shapes have many
            stack.enter_context(mock.patch.multiple(reference, _CPU_TILE=1, _CPU_KEYS=4, _LEAST_QUERIES=3))
        stack.enter_context(poisoned())
        pool = pool_for(problem, shuffle=shuffle, spare=data.draw(st.integers(0, 3)))
        kv = PagedKV(pool, len(problem.lengths))
        first = walk(problem, blocks, (lambda kv: SplitPast(kv, split)) if split else (lambda kv: kv), kv, weight)
        assert pool.table.free_pages == pool.table.total_pages
        again = walk(problem, blocks, lambda kv: kv, kv, weight)  # the pages were used before: zeroed again?
    true = expected(problem, weight)
    for out, grads in (first, again):
        close((out, *grads), (true[0], *true[1]))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_block_in_the_middle_equals_dense_rows(data):
    """Forward alone, without a walk: what inference does, one token at a time included."""
    problem = data.draw(problems())
    weight = weight_for(problem)
    kv = PagedKV(pool_for(problem), len(problem.lengths))
    out = torch.zeros_like(problem.q)
    done = (0,) * kv.batch
    step = data.draw(st.sampled_from([1, 2, 7]))
    while done != problem.lengths:
        block = tuple(min(step, n - d) for n, d in zip(problem.lengths, done))
        kv.extend(block)
        q, k, v = (problem.block(x.detach(), done, block) for x in problem.leaves[:3])
        kv.append(0, k, v)
        with torch.inference_mode():
            y = paged_attention(q, k, v, kv, 0, sinks=problem.sinks, **problem.options(done, block))
        for b, (start, n) in enumerate(zip(done, block)):
            out[b, start : start + n] = y[b, :n]
        done = tuple(d + n for d, n in zip(done, block))
    close([out], [expected(problem, weight)[0]])


def long_problem(tokens, page, dtype=torch.float64, **more):
    make = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, tokens, h, 16, generator=make, dtype=torch.float64).to(dtype) for h in (6, 2, 2))
    leaves = {name: x.requires_grad_() for name, x in (("q", q), ("k", k), ("v", v))}
    return Problem(**leaves, lengths=(tokens,), page=page, scale=0.25, **more)


@pytest.mark.parametrize("more", [{}, {"window": 257}])
@pytest.mark.parametrize("page", [16, 100, 300])
def test_many_tiles_of_the_real_size(page, more):
    problem = long_problem(600, page, **more)
    weight = weight_for(problem)
    with poisoned():
        kv = PagedKV(pool_for(problem), 1)
        out, grads = walk(problem, [(270,), (33,), (297,)], lambda kv: kv, kv, weight)
    true = expected(problem, weight)
    close((out, *grads), (true[0], *true[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_computes_in_float32(dtype):
    """Rounding of inputs and outputs is all that is lost: at most twice the plain computation's own distance."""
    problem = long_problem(400, 64, dtype)
    exact = long_problem(400, 64, dtype)
    for name in ("q", "k", "v"):
        setattr(exact, name, getattr(problem, name).detach().double().requires_grad_())
    weight = weight_for(problem).to(dtype)
    kv = PagedKV(pool_for(problem), 1)
    out, grads = walk(problem, [(150,), (94,), (156,)], lambda kv: kv, kv, weight)
    true = expected(exact, weight.double())
    plain = problem.dense()
    plain = (plain.detach(), torch.autograd.grad((plain * weight).sum(), problem.leaves))
    assert all(g.dtype == dtype for g in (out, *grads))
    for ours, theirs, reference_ in zip((out, *grads), (plain[0], *plain[1]), (true[0], *true[1])):
        assert relative(ours, reference_) <= max(2 * relative(theirs, reference_), 2 * torch.finfo(dtype).eps)


def test_gradient_pages_in_bfloat16_round_once_per_block():
    problem = long_problem(512, 64, torch.bfloat16)
    weight = weight_for(problem).bfloat16()
    exact = long_problem(512, 64, torch.bfloat16)
    for name in ("q", "k", "v"):
        setattr(exact, name, getattr(problem, name).detach().double().requires_grad_())
    pool = PagePool(
        layers=1, slots=8, page_tokens=64, kv_heads=2, head_dim=16, dtype=torch.bfloat16, device="cpu",
        grad_dtype=torch.bfloat16,
    )  # fmt: skip
    _, grads = walk(problem, [(128,)] * 4, lambda kv: kv, PagedKV(pool, 1), weight)
    for ours, true in zip(grads, expected(exact, weight.double())[1]):
        assert relative(ours, true) <= 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("sink", [None, 1.5, -torch.inf])
def test_a_row_that_sees_nothing(sink):
    q, k, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kv = PagedKV(pool_for(Problem(q, k, v, (5,), 3, 1.0)), 1)
    kv.extend(5)
    documents = torch.tensor([[0, 0, 9, 3, 3]])
    sinks = None if sink is None else torch.full((2,), sink, dtype=torch.float64, requires_grad=True)
    kept = {}
    out = paged_attention(q, k, v, kv, 0, scale=1.0, documents=documents, sinks=sinks, kept=kept)
    assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2])) and out[:, 1].abs().min() > 0
    assert kept[0][1][0, :, 2].tolist() == [-torch.inf if sink is None else sink] * 2
    out.backward(torch.ones_like(out))
    for x in (q, k, v) + (() if sinks is None else (sinks,)):
        assert x.grad.isfinite().all()
    assert torch.equal(q.grad[:, 2], torch.zeros_like(q.grad[:, 2]))


class Largest(TorchDispatchMode):
    """Notes the largest storage that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor) and not x._is_view():
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("options", [{}, {"window": 5000}, {"documents": True}, {"selected": True}])
def test_nothing_of_the_size_of_chunk_times_past_is_allocated(options):
    chunk, past, page, heads = 256, 12288, 128, 2
    pool = PagePool(
        layers=1, slots=98, page_tokens=page, kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu"
    )  # fmt: skip
    kv = PagedKV(pool, 1)
    kv.extend(past)
    kv.append(0, *(torch.randn(1, past, 1, 4) for _ in range(2)))
    kv.extend(chunk)
    q, k, v = (torch.randn(1, chunk, h, 4, requires_grad=True) for h in (heads, 1, 1))
    options = dict(options)
    if options.pop("documents", None):
        options["documents"] = torch.full((1, chunk), 7000)
    if options.pop("selected", None):
        options["selected"] = torch.randint(0, 98, (1, 1, 2, 30), dtype=torch.int32)
    with Largest() as largest:
        q_fwd = paged_attention(q, k, v, kv, 0, scale=0.5, **options)
        q_fwd.sum().backward()
    assert largest.numel <= reference._CPU_TILE < chunk * past // 8


def test_pages_out_of_sight_are_not_read_and_get_no_gradient():
    """A window and a promised first token bound what is asked of the past; documents on the CPU bound it alone."""
    problem = long_problem(64, 4)
    pool = pool_for(problem)
    kv = PagedKV(pool, 1)
    kv.extend(48)
    kv.append(0, *(x[:, :48].detach() for x in (problem.k, problem.v)))
    kv.extend(16)
    asked = []
    true = kv.segments
    documents = torch.full((1, 16), 41)
    for options, first in (
        ({}, 0),
        ({"window": 11}, 9),  # query 48 reaches back to key 38
        ({"window": 1}, 12),
        ({"first_token": 23}, 5),
        ({"first_token": 4000}, 12),
        ({"first_token": 23, "window": 30}, 5),
        ({"documents": documents}, 10),
        ({"documents": documents, "first_token": 8}, 2),
    ):
        with mock.patch.object(kv, "segments", lambda *a: asked.append(a[2]) or true(*a)):
            q, k, v = (x[:, 48:].detach().requires_grad_() for x in problem.leaves)
            paged_attention(q, k, v, kv, 0, scale=1.0, **options).sum().backward()
        assert asked == [first, first], options
        asked.clear()
        if first == 9:
            slots = torch.tensor(pool.table.slots(pool.table.sequences[0]))
    assert pool.grad_live(0, slots).tolist() == [True] * 12 + [False] * 4


def test_a_sequence_without_past_does_not_widen_a_window():
    problem = long_problem(20, 4)
    q, k, v = (torch.cat((x.detach(), x.detach())) for x in problem.leaves)
    kv = PagedKV(pool_for(Problem(q, k, v, (20, 12), 4, 1.0)), 2)
    kv.extend([8, 0])
    kv.append(0, k[:, :8], v[:, :8])
    kv.extend(12)
    true, asked = kv.segments, []
    with mock.patch.object(kv, "segments", lambda *a: asked.append(a[2]) or true(*a)):
        paged_attention(q[:, 8:], k[:, 8:], v[:, 8:], kv, 0, scale=1.0, window=3)
    assert asked == [1]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype, bound", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"documents": True}, {"selected": True}, {"sinks": True}])
def test_a_gpu_gives_the_same_numbers(dtype, bound, options):
    make = torch.Generator().manual_seed(5)

    def random(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64).to(dtype)

    past, tokens = (333, 170), 130
    keys, values, q, k, v = (
        random(2, n, h, 16) for n, h in ((333, 2), (333, 2), (tokens, 6), (tokens, 2), (tokens, 2))
    )
    more = dict(options)
    if "documents" in more:
        more["documents"] = (torch.rand(2, tokens, generator=make) * 300).int().cummax(1).values
    if "selected" in more:
        more["selected"] = torch.randint(-1, 15, (2, 2, 5, 5), generator=make).int()
    if "sinks" in more:
        more["sinks"] = random(6)
    results = []
    for device in ("cpu", "cuda"):
        pool = PagePool(
            layers=1, slots=64, page_tokens=32, kv_heads=2, head_dim=16, dtype=dtype, device=device
        )  # fmt: skip
        pool.table = ShuffledTable(64, 32, 1)
        for pages in (*pool.k, *pool.v):
            pages.fill_(torch.nan)
        kv = PagedKV(pool, 2)
        kv.extend(past)
        kv.append(0, keys.to(device), values.to(device))
        kv.extend(tokens)
        leaves = [x.detach().to(device).requires_grad_() for x in (q, k, v)]
        there = {name: x.detach().to(device) if isinstance(x, torch.Tensor) else x for name, x in more.items()}
        if "sinks" in there:
            leaves.append(there["sinks"].requires_grad_())
        out = paged_attention(*leaves[:3], kv, 0, scale=0.25, backend="reference", **there)
        (out * out).sum().backward()
        kv.rewind(0)
        results.append([x.cpu() for x in (out.detach(), *(leaf.grad for leaf in leaves), *kv.own_grad(0))])
    for cpu, gpu in zip(*results):
        assert relative(gpu, cpu) <= bound


def test_two_sequences_that_share_a_page_both_count():
    """The oracle adds sequence by sequence, so a page that two tables hold gets both gradients."""
    torch.manual_seed(0)
    k, v = (torch.randn(3, 4, 1, 8, dtype=torch.float64) for _ in range(2))
    slots = torch.tensor([[2, 0], [2, 1]], dtype=torch.int32)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    segment = Segment(0, k, v, slots, None, dk, dv, slots, None)
    q = torch.randn(2, 3, 2, 8, dtype=torch.float64)
    own = torch.randn(2, 3, 1, 8, dtype=torch.float64)
    geometry = Geometry(1.0, (7, 6), 4)
    out, lse = reference.forward(q, own, own, [segment], geometry)
    reference.backward(q, q, own, own, out, lse, [segment], geometry, past_grad=True, accumulate="owner")

    k_leaf, v_leaf = k.clone().requires_grad_(), v.clone().requires_grad_()
    keys, values = (torch.cat((x[slots.long()].flatten(1, 2), own), 1) for x in (k_leaf, v_leaf))
    position = torch.arange(11)
    own_seen = (position >= 8) & (position <= 8 + torch.arange(3)[:, None])
    seen = torch.stack([(position < n) | own_seen for n in (7, 6)])
    scores = torch.einsum("bihd,bjgd->bhij", q, keys).masked_fill(~seen[:, None], -torch.inf)
    dense = torch.einsum("bhij,bjgd->bihd", scores.softmax(-1), values)
    dense.backward(q)
    close((out, dk, dv), (dense.detach(), k_leaf.grad, v_leaf.grad))


def test_empty_own_slots_hold_what_they_like():
    """-1 in a table never reads a page: not even slot 0, which holds NaN here."""
    q, k, v = (torch.randn(2, 9, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    problem = Problem(q, k, v, (9, 1), 2, 1.0)
    weight = weight_for(problem)
    with poisoned():
        pool = pool_for(problem, spare=4)
        pool.table.extend({pool.table.add(): 2})  # slot 0 belongs to somebody else and was never written
        kv = PagedKV(pool, 2)
        out, grads = walk(problem, [(4, 1), (3, 0), (2, 0)], lambda kv: kv, kv, weight)
    true = expected(problem, weight)
    close((out, *grads), (true[0], *true[1]))
