"""What only a GPU can show: bfloat16, compiled kernels, races, large offsets, memory, and cuDNN."""

import math

import pytest
import torch
from tests.numerics import relative
from tests.paged_kv.backend_case import Case
from tests.paged_kv.oracle import poisoned
from torch.nn import functional as F

from paged_kv import PagedKV, PagePool, Segment, auto, cudnn, paged_attention, triton_attention
from paged_kv.past import Geometry

pytestmark = pytest.mark.cuda

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = {
    "plain": {"tokens": 300, "heads": 14, "groups": 2, "dim": 128, "page": 128, "lengths": (1000,)},
    "no past": {"tokens": 200, "heads": 4, "groups": 4, "dim": 64, "lengths": (0,)},
    "one token": {"tokens": 1, "heads": 28, "groups": 4, "dim": 128, "page": 128, "lengths": (5000,)},
    "uneven": {"batch": 3, "tokens": 130, "heads": 6, "groups": 2, "dim": 96, "lengths": (640, 0, 129)},
    "segments": {"batch": 2, "tokens": 190, "heads": 7, "groups": 1, "dim": 80, "lengths": (700, 300), "split": 4},
    "wide": {"tokens": 150, "heads": 8, "groups": 2, "dim": 256, "page": 128, "lengths": (500,)},
    "192": {"tokens": 150, "heads": 6, "groups": 2, "dim": 192, "lengths": (500,)},
    "in order": {
        "batch": 2,
        "tokens": 256,
        "heads": 8,
        "groups": 2,
        "dim": 64,
        "lengths": (512, 200),
        "shuffle": False,
    },
}
LIMITED = {
    "small window": {"tokens": 260, "heads": 16, "groups": 2, "dim": 64, "page": 128, "lengths": (700,), "window": 128},
    "uneven small window": {"batch": 2, "tokens": 290, "heads": 14, "groups": 2, "dim": 80, "lengths": (700, 90)}
    | {"window": 64},
    "small window, segments": {"tokens": 300, "heads": 8, "groups": 2, "dim": 128, "lengths": (700,), "split": 1}
    | {"window": 128},
    "small window, documents": {"batch": 2, "tokens": 300, "heads": 6, "groups": 2, "dim": 64, "lengths": (400, 70)}
    | {"window": 192, "documents": "some"},
    "uneven window": {"batch": 2, "tokens": 290, "heads": 14, "groups": 2, "dim": 80, "lengths": (700, 90)}
    | {"window": 100},
    "window": {"tokens": 400, "heads": 14, "groups": 2, "dim": 128, "page": 128, "lengths": (900,), "window": 500},
    "documents": {"batch": 2, "tokens": 300, "heads": 7, "groups": 1, "dim": 128, "lengths": (400, 70)}
    | {"documents": "some"},
    "both": {"tokens": 300, "heads": 4, "groups": 2, "dim": 64, "lengths": (400,), "documents": "some", "window": 90},
}


def case(shape, dtype, **more):
    options = {"scale": shape["dim"] ** -0.5, "device": "cuda", "dtype": dtype, "seed": 5}
    return Case(**(options | shape | more))


@pytest.mark.parametrize("accumulate", ["owner", "atomic"])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LIMITED])
def test_triton_equals_dense_attention(shape, dtype, accumulate):
    problem = case((SHAPES | LIMITED)[shape], dtype)
    with poisoned():
        ours = problem.run(triton_attention, accumulate=accumulate)
    problem.check(ours)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_cudnn_equals_dense_attention(shape, dtype):
    shape = SHAPES[shape]
    problem = case(shape, dtype, shuffle=False)
    if shape["dim"] not in cudnn.head_dims(torch.device("cuda")):
        with pytest.raises(ValueError, match="head dim"):
            problem.run(cudnn)
        problem = case(shape | {"dim": 128}, dtype, shuffle=False)
    problem.check(problem.run(cudnn))


@pytest.mark.parametrize("lengths", [(1,), (65,), (64, 1)])
def test_cudnn_and_single_keys(lengths):
    shape = {"batch": len(lengths), "tokens": 1, "heads": 6, "groups": 2, "dim": 64, "split": 1, "shuffle": False}
    problem = case(shape, BF16, lengths=lengths)
    problem.check(problem.run(cudnn))


@pytest.mark.parametrize("shape", ["small window", "window"])
def test_the_gradient_of_sinks(shape):
    """Registers that hold all weights of a row know delta; other kernels know what the rounded output says of it."""
    problem = case(LIMITED[shape], BF16)
    ours, exact, rounded = problem.sinks_grads(torch.linspace(-2, 2, problem.heads, device="cuda"))
    true = exact if shape == "small window" else rounded
    assert relative(ours, true) < 1e-4


def test_gradient_pages_in_bfloat16():
    problem = case(SHAPES["plain"], BF16, grad_dtype=BF16)
    problem.check(problem.run(triton_attention))


@pytest.mark.parametrize("shape", ["plain", "uneven", "segments", "window", "small window", "documents"])
def test_two_runs_give_the_same_bits(shape):
    problem = case((SHAPES | LIMITED)[shape], BF16)
    first = problem.run(triton_attention)
    for _ in range(4):
        for a, b in zip(first, problem.run(triton_attention)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("window", [None, 128, 300])
def test_offsets_beyond_two_to_the_31(window):
    """The same past at the end of pages of more than 2^31 elements, and in pages of its own."""
    page, groups, dim, count = 128, 4, 128, 6
    slots = 2**31 // (page * groups * dim) + count
    torch.manual_seed(0)
    small = [torch.randn(count, page, groups, dim, device="cuda", dtype=BF16) for _ in range(2)]
    q, dout = (torch.randn(1, 256, 8, dim, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(1, 256, groups, dim, device="cuda", dtype=BF16) for _ in range(2))
    geometry = Geometry(dim**-0.5, (count * page - 5,), page, window)

    def run(backend, pages, first):
        dk, dv = (torch.zeros(p.shape, device="cuda") for p in pages)
        table = torch.arange(first, first + count, device="cuda", dtype=torch.int32)[None]
        segment = Segment(0, *pages, table, (first,), dk, dv, table, (first,))
        out, lse = backend.forward(q, k, v, [segment], geometry)
        grads = backend.backward(
            dout, q, k, v, out, lse, [segment], geometry, past_grad=True, accumulate="owner"
        )  # fmt: skip
        assert not dk[:first].any() and not dv[:first].any()
        return [out, lse, *grads[1:], dk[first : first + count].clone(), dv[first : first + count].clone()]

    large = [torch.empty(slots, page, groups, dim, device="cuda", dtype=BF16).fill_(torch.nan) for _ in range(2)]
    for pages, part in zip(large, small):
        pages[-count:] = part
    assert large[0].numel() > 2**31
    for backend in (triton_attention, cudnn) if window is None else (triton_attention,):
        for a, b in zip(run(backend, small, 0), run(backend, large, slots - count)):
            assert torch.equal(a, b)


# What was asked for: a block that other tests left behind may be up to 1 MiB larger than the tensor that gets it.
REQUESTED = "requested_bytes.all."


def peak_of_a_chunk(backend, past, *, accumulate="owner", window=None, dim=128):
    """Bytes that a forward and a backward take beside what is given."""
    tokens, page, groups = 512, 128, 4
    pages = past // page
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=BF16)  # noqa: E731
    k_pages, v_pages = make(pages, page, groups, dim), make(pages, page, groups, dim)
    dk, dv = (torch.zeros(k_pages.shape, device="cuda") for _ in range(2))
    table = torch.arange(pages, device="cuda", dtype=torch.int32)[None]
    q, dout = (make(1, tokens, 7 * groups, dim) for _ in range(2))
    k, v = (make(1, tokens, groups, dim) for _ in range(2))
    segment = Segment(0, k_pages, v_pages, table, (0,), dk, dv, table, (0,))
    geometry = Geometry(dim**-0.5, (past,), page, window)
    for measured in (False, True):  # the first call of a shape may plan
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()[REQUESTED + "current"]
        torch.cuda.reset_peak_memory_stats()
        out, lse = backend.forward(q, k, v, [segment], geometry)
        backend.backward(
            dout, q, k, v, out, lse, [segment], geometry, past_grad=True, accumulate=accumulate
        )  # fmt: skip
        if not measured:
            del out, lse
    return torch.cuda.memory_stats()[REQUESTED + "peak"] - before, q.nbytes, k_pages.nbytes


@pytest.mark.parametrize("accumulate", ["owner", "atomic"])
@pytest.mark.parametrize("window", [None, 128, 1000])
def test_nothing_of_the_size_of_the_past_is_allocated(window, accumulate):
    peak, queries, pages = peak_of_a_chunk(triton_attention, 262144, window=window, accumulate=accumulate)
    assert peak <= 2**26 + 16 * queries < pages


def test_what_cudnn_takes_does_not_grow_with_the_past():
    """A run's gradients exist once more before they are added, and what is merged, however many runs there are."""
    peaks = [peak_of_a_chunk(cudnn, past)[0] for past in (262144, 524288)]
    assert peaks[1] <= peaks[0] + 2**20


@pytest.mark.parametrize(
    "change, match",
    [({"dtype": torch.float64}, "float64"), ({"dim": 112}, "head dim"), ({"page": 32}, "pages of 64 or 128")],
)
def test_triton_refuses_and_touches_nothing(change, match):
    problem = case(SHAPES["no past"] | {"lengths": (100,)}, **({"dtype": BF16} | change))
    untouched = [x.clone().view(torch.uint8) for x in (problem.pages_k, problem.pages_v, problem.earlier)]
    lse = torch.zeros(problem.batch, problem.heads, problem.tokens, device="cuda")
    inputs = (problem.q, problem.k, problem.v)
    with pytest.raises(ValueError, match=match):
        triton_attention.forward(*inputs, problem.segments(), problem.geometry)
    grads = (problem.earlier, problem.earlier)
    with pytest.raises(ValueError, match=match):
        triton_attention.backward(
            problem.dout, *inputs, problem.q, lse, problem.segments(grads), problem.geometry, past_grad=True,
            accumulate="owner",
        )  # fmt: skip
    for before, now in zip(untouched, (problem.pages_k, problem.pages_v, problem.earlier)):
        assert torch.equal(before, now.view(torch.uint8))


def test_triton_refuses_tensors_that_are_not_on_a_gpu():
    problem = Case(device="cpu")
    with pytest.raises(ValueError, match="CUDA tensors, got cpu"):
        problem.run(triton_attention)


def pool_and_past(lengths, tokens, **more):
    options = {"page_tokens": 128, "kv_heads": 2, "head_dim": 64, "dtype": BF16, "device": "cuda", "layers": 1}
    pool = PagePool(**(options | {"slots": sum(-(-(n + tokens) // 128) for n in lengths) + 2 * len(lengths)} | more))
    kv = PagedKV(pool, len(lengths))
    kv.extend(lengths)
    past = torch.randn(len(lengths), max(lengths), 2, 64, device="cuda", dtype=BF16)
    for layer in range(pool.layers):
        kv.append(layer, past, past)
    kv.extend(tokens)
    return kv


def test_auto_is_deterministic_when_asked_and_serves_what_it_chose():
    kv = pool_and_past((512,), 300)
    inputs = [torch.randn(1, 300, h, 64, device="cuda", dtype=BF16, requires_grad=True) for h in (8, 2, 2)]
    geometry = Geometry(0.125, kv.lengths, 128)
    paged_attention(*inputs, kv, 0, scale=0.125).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        assert auto.choose(inputs[0], inputs[1], geometry, kv)[0] == "triton"
        paged_attention(*inputs, kv, 0, scale=0.125).sum().backward()
        out = paged_attention(*inputs, kv, 0, scale=0.125, backend="cudnn").sum()
        with pytest.raises(RuntimeError, match="not deterministic"):
            out.backward()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_tensors_on_another_device_than_the_current_one(backend):
    found = []
    for device in ("cuda:0", "cuda:1"):
        drawn = torch.Generator().manual_seed(0)
        shapes = ((512, 2), (300, 8), (300, 2), (300, 2))
        past, *inputs = (torch.randn(1, n, h, 64, generator=drawn).to(device, BF16) for n, h in shapes)
        pool = PagePool(layers=1, slots=8, page_tokens=128, kv_heads=2, head_dim=64, dtype=BF16, device=device)
        kv = PagedKV(pool, 1)
        kv.extend((512,))
        kv.append(0, past, past)
        kv.extend(300)
        out = paged_attention(*(x.requires_grad_() for x in inputs), kv, 0, scale=0.125, backend=backend)
        out.float().square().sum().backward()
        slots = list(pool.table.slots(pool.table.sequences[0])[:4])
        grads = [x.grad for x in inputs[1:]] + [pages[slots] for pages in pool.grads(0)]  # cuDNN's dQ differs by run
        found.append([x.cpu() for x in (out.detach(), *grads)])
    assert torch.cuda.current_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*found))


# two layers of full width


def layers(hidden, weights, attend):
    for index, (wq, wk, wv, wo) in enumerate(weights):
        x = F.rms_norm(hidden, hidden.shape[-1:])
        q, k, v = (F.linear(x, w).unflatten(-1, (-1, 128)) for w in (wq, wk, wv))
        hidden = hidden + F.linear(attend(index, q, k, v).flatten(2), wo)
    return hidden


def dense_attention(index, q, k, v):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )  # fmt: skip
    return out.transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["triton", "cudnn"])
def test_two_layers_of_full_width_at_64_k(backend):
    """Chunks of 8,192 against one dense pass; both are bfloat16, and each is as far from the truth."""
    total, chunk, width = 65536, 8192, 3584
    make = torch.Generator("cuda").manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=make, device="cuda", dtype=FP32)

    shapes = ((3584, width), (512, width), (512, width), (width, 3584))
    weights = [
        tuple((random(n, m) / math.sqrt(m)).to(BF16).requires_grad_() for n, m in shapes) for _ in range(2)
    ]  # fmt: skip
    leaves = [w for layer in weights for w in layer]
    hidden, weight = (random(1, total, width).to(BF16) for _ in range(2))
    (layers(hidden, weights, dense_attention).float() * weight).sum().backward()
    dense = [w.grad.float() for w in leaves]
    for w in leaves:
        w.grad = None

    pool = PagePool(layers=2, slots=total // 128, page_tokens=128, kv_heads=4, head_dim=128, dtype=BF16, device="cuda")
    kv = PagedKV(pool, 1)
    starts = range(0, total, chunk)

    def attend(index, q, k, v):
        if not torch.is_grad_enabled():
            kv.append(index, k, v)
        return paged_attention(q, k, v, kv, index, scale=128**-0.5, backend=backend)

    with torch.no_grad():
        for start in starts:
            kv.extend(chunk)
            layers(hidden[:, start : start + chunk], weights, attend)
    grads = [torch.zeros_like(g) for g in dense]
    for start in reversed(starts):
        if start != starts[-1]:
            kv.rewind(start)
        y = layers(hidden[:, start : start + chunk], weights, attend)
        (y.float() * weight[:, start : start + chunk]).sum().backward()
        for total_grad, w in zip(grads, leaves):
            total_grad += w.grad
            w.grad = None
    for ours, theirs in zip(grads, dense):
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-2
