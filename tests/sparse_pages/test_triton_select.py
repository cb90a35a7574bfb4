"""The kernels of selection against the plain code: not near, the same bits. In the interpreter here, on a GPU there."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sparse_pages.test_select import SCORERS, summarized

from sparse_pages import select, select_pages, summary

triton_select = pytest.importorskip("sparse_pages.triton_select")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")


def with_kernels():
    stack = mock.patch.object(summary, "triton_for", lambda x: triton_select)
    return stack, mock.patch.object(select, "triton_for", lambda x: triton_select)


@st.composite
def cases(draw):
    B, G, R = (draw(st.integers(1, most)) for most in (2, 2, 3))
    D = draw(st.sampled_from([1, 3, 24, 80, 130]))
    P, past, C = draw(st.sampled_from([1, 4, 20, 130])), draw(st.integers(0, 30)), draw(st.integers(1, 150))
    C = min(C, 3 * P)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q = torch.randn(B, C, G * R, D, generator=generator, dtype=torch.float64)
    k = torch.randn(B, past * P + C, G, D, generator=generator, dtype=torch.float64)
    values = draw(st.sampled_from(["any", "few", "zero", "broken", "tiny"]))
    if values == "few":  # many scores alike
        q, k = q.round(), k.round().clamp(-1, 1)
    elif values == "zero":
        k[:, : k.shape[1] // 2] *= -0.0
    elif values == "broken":
        k[:, k.shape[1] // 3] = torch.nan
        q[:, 0, 0] = torch.inf
    elif values == "tiny":
        q[:, ::2] *= 1e-300
        k[:, ::3] *= 1e-40
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float16]))
    real = first = None
    if draw(st.booleans()):
        real = torch.arange(C) < torch.randint(0, C + 1, (B, 1), generator=generator)
    blocks = -(-C // P)
    if draw(st.booleans()):
        first = torch.randint(0, past + blocks + 1, (B, blocks), generator=generator)
    budget = {"top_k": draw(st.integers(0, 9)), "recent": draw(st.integers(1, 4)), "sinks": draw(st.integers(0, 3))}
    options = {"past_pages": past, "per_head": draw(st.booleans()), "real": real, "first_pages": first, **budget}
    return q.to(dtype), k.to(dtype), P, draw(st.sampled_from(SCORERS)), options


@interpreted
@settings(deadline=None, max_examples=20)
@given(cases(), st.sampled_from([16, 4096]))
def test_the_same_bits_as_the_plain_code(case, tile):
    q, k, P, scorer, options = case
    table = summarized(k, P, scorer)
    plain, plain_scores = select_pages(q, table, **options), table.scores(q, real=options["real"])
    one, two = with_kernels()
    with one, two, mock.patch.object(triton_select, "_TILE", tile):
        features, table = table._features, summarized(k, P, scorer)
        assert features is None or same(table._features[:, : table.pages], features[:, : table.pages])
        scores, ids = table.scores(q, real=options["real"]), select_pages(q, table, **options)
    assert same(scores, plain_scores)
    assert ids.dtype == torch.int32 and torch.equal(ids, plain)


@interpreted
@pytest.mark.parametrize("width", [1, 3, 33])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_same_bits_for_a_scorer_of_ones_own(dtype, width):
    """Whatever it returns: sums over heads are no narrower than float32."""

    class Own:
        def page_features(self, keys):
            return keys[:, :, 1, :, :width].to(dtype)

        def query_features(self, queries):
            return queries[..., :width].to(dtype)

    q, k = (torch.randn(1, 22, heads, 40, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2))
    plain = summarized(k, 4, Own()).scores(q)
    one, two = with_kernels()
    with one, two:
        assert torch.equal(summarized(k, 4, Own()).scores(q), plain)


def same(a, b):
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("page", [16, 128])
def test_the_same_bits_on_cuda(page, scorer, dtype):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 15 * page + 3, 14, 128, generator=generator).to(dtype)
    k = torch.randn(2, 300 * page, 2, 128, generator=generator).to(dtype)
    k[:, 100 * page : 200 * page] = k[:, : 100 * page]  # many pages that score alike
    real = torch.arange(q.shape[1]) < torch.tensor([[q.shape[1]], [7 * page + 5]])
    first = torch.tensor([[0], [30]]) + torch.arange(16)
    here, there = summarized(k, page, scorer), summarized(k.cuda(), page, scorer)
    assert torch.equal(there.scores(q.cuda(), real=real.cuda()).cpu(), here.scores(q, real=real))
    for per_head in (False, True):
        options = {"past_pages": 270, "top_k": 16, "recent": 4, "sinks": 2, "per_head": per_head}
        mine = select_pages(q, here, real=real, first_pages=first, **options)
        ours = select_pages(q.cuda(), there, real=real.cuda(), first_pages=first.cuda(), **options)
        assert ours.is_cuda and torch.equal(ours.cpu(), mine)
