"""Selections against loops, and the promises: causal, ascending, no duplicates, the same for every chunking."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_pages import PageSummary, reference, select_pages

SCORERS = ["mean", "minmax"]


def summarized(k, page_tokens, scorer="mean"):
    summary = PageSummary(page_tokens, scorer)
    summary.append(k)
    return summary


@st.composite
def cases(draw):
    """Small integers as keys and queries: scores are exact, and many pages score alike."""
    B, G, R, D = (draw(st.integers(1, most)) for most in (2, 2, 3, 3))
    P, past, C = draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 5)), draw(st.integers(1, 14))
    later = draw(st.integers(0, 6))  # keys beyond the chunk, as a second pass over the sequence finds them
    high = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    q = torch.randint(-high, high + 1, (B, C, G * R, D), generator=generator)
    k = torch.randint(-high, high + 1, (B, past * P + C + later, G, D), generator=generator)
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    budget = {"top_k": draw(st.integers(0, 6)), "recent": draw(st.integers(1, 4)), "sinks": draw(st.integers(0, 4))}
    options = {"past_pages": past, "per_head": draw(st.booleans()), **budget}
    if draw(st.booleans()):
        options["real"] = torch.rand(B, C, generator=generator) < draw(st.sampled_from([0.3, 0.9]))
    if draw(st.booleans()):
        options["first_pages"] = torch.randint(0, past + -(-C // P) + 1, (B, -(-C // P)), generator=generator)
    return q.to(dtype), k.to(dtype), P, draw(st.sampled_from(SCORERS)), options


@given(cases())
@settings(deadline=None, max_examples=120)
def test_equals_loops(case):
    q, k, P, scorer, options = case
    got = select_pages(q, summarized(k, P, scorer), **options)
    want = reference.select_pages(q, k, page_tokens=P, scorer=scorer, **options)
    assert got.dtype == torch.int32
    assert torch.equal(got, want)


@given(cases())
@settings(deadline=None, max_examples=60)
def test_promises(case):
    q, k, P, scorer, options = case
    ids = select_pages(q, summarized(k, P, scorer), **options)
    top_k, recent, sinks, past = (options[name] for name in ("top_k", "recent", "sinks", "past_pages"))
    Q = -(-q.shape[1] // P)
    assert ids.shape == (q.shape[0], k.shape[2] if options["per_head"] else 1, Q, top_k + recent + sinks)
    for b in range(Q):
        block = past + b
        for row in range(q.shape[0]):
            first = min(block, int(options["first_pages"][row, b])) if "first_pages" in options else 0
            for pages in ids[row, :, b].tolist():
                present = [page for page in pages if page >= 0]
                assert pages == present + [-1] * (len(pages) - len(present))
                assert present == sorted(set(present)) and present[-1] == block and present[0] >= first
                always = {p for p in range(first, block + 1) if p < first + sinks or p > block - recent}
                assert always <= set(present)
                assert len(present) == min(block + 1 - first, len(always) + top_k)


@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.integers(1, 2),
    st.sampled_from(SCORERS),
    st.booleans(),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
    st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_the_same_for_every_chunking(P, chunk_pages, G, scorer, per_head, dtype, seed, repeated):
    generator = torch.Generator().manual_seed(seed)
    pages = sum(chunk_pages)
    T = pages * P - int(torch.randint(0, P, (1,), generator=generator))  # the end is ragged
    q = torch.randn(2, T, 2 * G, 24, generator=generator, dtype=torch.float64).to(dtype)
    k = torch.randn(2, T, G, 24, generator=generator, dtype=torch.float64).to(dtype)
    if repeated:  # pages that score alike though their scores are no round numbers
        k = k[:, :P].repeat(1, pages, 1, 1)[:, :T]
    options = {"top_k": 2, "recent": 1, "sinks": 1, "per_head": per_head}
    whole = select_pages(q, summarized(k, P, scorer), past_pages=0, **options)
    if repeated:
        for block in range(4, pages):
            assert (whole[:, :, block] == torch.tensor([0, 1, 2, block])).all()
    summary, parts, past = PageSummary(P, scorer), [], 0
    for n in chunk_pages:
        chunk = slice(past * P, (past + n) * P)
        summary.append(k[:, chunk])
        parts.append(select_pages(q[:, chunk], summary, past_pages=past, **options))
        past += n
    assert torch.equal(torch.cat(parts, 2), whole)


def test_in_small_tiles(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 118, 4, 8, generator=generator), torch.randn(2, 160, 2, 8, generator=generator)
    options = {"past_pages": 10, "top_k": 3, "recent": 2, "sinks": 1}
    whole = select_pages(q, summarized(k, 4), **options)
    for elements in (1, 300, 5000):
        monkeypatch.setattr("sparse_pages.select.TILE_ELEMENTS", elements)
        monkeypatch.setattr("sparse_pages.summary.TILE_ELEMENTS", elements)
        assert torch.equal(select_pages(q, summarized(k, 4), **options), whole)


def test_budget_for_all_selects_all():
    q, k = torch.randn(1, 10, 2, 4), torch.randn(1, 30, 1, 4)
    ids = select_pages(q, summarized(k, 2), past_pages=10, top_k=100, recent=1, sinks=0)
    assert ids.shape == (1, 1, 5, 101)
    for i in range(5):
        assert ids[0, 0, i].tolist() == [*range(11 + i), *[-1] * (90 - i)]


def test_finds_the_page_that_one_query_asks_for():
    """Pooling takes the largest over a block's queries: one that asks loudly is heard among those that do not."""
    k = torch.zeros(1, 64 * 4, 2, 8)
    k[:, 23 * 4 : 24 * 4, 1, 3] = 1
    q = torch.zeros(1, 4, 4, 8)
    q[0, 2, 3, 3] = 5
    q[0, :2, :, 3] = -5
    for scorer in SCORERS:
        summary = summarized(k, 4, scorer)
        ids = select_pages(q, summary, past_pages=63, top_k=1, recent=1, sinks=1, per_head=True)
        assert ids[0, 1, 0].tolist() == [0, 23, 63]
        assert ids[0, 0, 0].tolist() == [0, 1, 63]
        ids = select_pages(q, summary, past_pages=63, top_k=1, recent=1, sinks=1)
        assert ids[0, 0, 0].tolist() == [0, 23, 63]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_numbers_still_give_a_list(bad):
    q, k = torch.randn(1, 4, 1, 4), torch.randn(1, 40, 1, 4)
    k[0, 8:12] = bad
    for queries in (q, torch.full_like(q, bad)):
        ids = select_pages(queries, summarized(k, 4), past_pages=9, top_k=7, recent=2, sinks=1)[0, 0, 0].tolist()
        assert ids == sorted(set(ids)) and len(ids) == 10 and ids[0] == 0 and ids[-1] == 9
    if bad != bad:
        ids = select_pages(q, summarized(k, 4), past_pages=9, top_k=6, recent=2, sinks=1)
        assert 2 not in ids  # a page of NaN comes last


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_negative_zero_is_zero(device):
    k = torch.zeros(1, 24, 1, 1)
    k[0, ::4] = 1
    q = torch.zeros(1, 4, 1, 1)
    k[:, 0:8] *= -1  # scores of -0 for pages 0 and 1, +0 for the others
    ids = select_pages(q.to(device), summarized(k.to(device), 4), past_pages=5, top_k=2, recent=1, sinks=0)
    assert ids[0, 0, 0].tolist() == [0, 1, 5]


def test_no_gradient_and_no_inference_tensors():
    q = torch.randn(1, 4, 1, 4, requires_grad=True)
    summary = summarized(torch.randn(1, 12, 1, 4), 4)
    with torch.inference_mode():
        ids = select_pages(q, summary, past_pages=2, top_k=1, recent=1, sinks=0)
    assert not ids.is_inference()


def test_memory_of_a_long_table_is_bounded(monkeypatch):
    """[B, H, C, N] products never exist at once: here they would be 8 times the bound."""
    seen = []
    from sparse_pages import summary as module

    plain = module.largest_dot

    def watched(queries, pages, real):
        seen.append(queries[..., 0].numel() * pages.shape[1])
        return plain(queries, pages, real)

    monkeypatch.setattr(module, "largest_dot", watched)
    q, k = torch.randn(1, 1024, 2, 2), torch.randn(1, 16384, 2, 2)
    select_pages(q, summarized(k, 1), past_pages=15000, top_k=2, recent=1, sinks=0)
    assert sum(seen) > 7 * module.TILE_ELEMENTS and max(seen) <= module.TILE_ELEMENTS


def test_what_is_padding_or_before_the_first_page_is_of_no_consequence():
    """A document that begins with a page is served as if it were alone, whatever padding stands behind it."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 40, 4, 8, generator=generator), torch.randn(1, 40, 2, 8, generator=generator)
    options = {"top_k": 2, "recent": 1, "sinks": 1}
    alone = select_pages(q, summarized(k, 4), past_pages=0, **options)
    packed_k = torch.cat([torch.randn(1, 24, 2, 8), k, torch.randn(1, 9, 2, 8)], 1)
    packed_q = torch.cat([q[:, 1:39], 50 * torch.randn(1, 2, 4, 8)], 1)
    real = (torch.arange(40) < 38)[None]
    first = torch.full((1, 10), 6)
    shifted = select_pages(q, summarized(packed_k, 4), past_pages=6, first_pages=first, **options)
    assert torch.equal(torch.where(shifted < 0, -1, shifted - 6), alone)
    options |= {"past_pages": 0}
    table = summarized(k, 4)
    for filler in (0.0, 100.0, float("nan")):
        packed_q[:, 38:] = filler
        part = select_pages(packed_q, table, real=real, **options)
        assert torch.equal(part, select_pages(packed_q[:, :38], table, **options))


BUDGET = {"past_pages": 1, "top_k": 1, "recent": 1, "sinks": 1}


@pytest.mark.parametrize(
    "name, value",
    [
        *(("past_pages", v) for v in (-1, 1.0, None, True)),
        *(("top_k", v) for v in (-1, 1.5, True)),
        *(("recent", v) for v in (0, -1, 2.0)),
        *(("sinks", v) for v in (-1, "1")),
    ],
)
def test_bad_counts(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least"):
        select_pages(torch.zeros(1, 4, 1, 2), summarized(torch.zeros(1, 8, 1, 2), 4), **{**BUDGET, name: value})


def test_keys_not_appended():
    q = torch.zeros(1, 8, 1, 2)
    with pytest.raises(ValueError, match="empty"):
        select_pages(q, PageSummary(4), **BUDGET)
    with pytest.raises(ValueError, match=r"number 2.*got 1 \(4 tokens\): append"):
        select_pages(q, summarized(torch.zeros(1, 4, 1, 2), 4), **BUDGET)
    select_pages(q, summarized(torch.zeros(1, 8, 1, 2), 4), **BUDGET)


def test_bad_queries_and_summary():
    summary = summarized(torch.zeros(1, 8, 2, 2), 4)
    for q in (torch.zeros(1, 4, 3, 2), torch.zeros(1, 4, 2, 3), torch.zeros(2, 4, 2, 2), torch.zeros(1, 0, 2, 2), None):
        with pytest.raises(ValueError, match="q must be"):
            select_pages(q, summary, **BUDGET)
    with pytest.raises(ValueError, match="summary must be a PageSummary"):
        select_pages(torch.zeros(1, 4, 2, 2), None, **BUDGET)


@pytest.mark.parametrize("sinks", [0, 2])
def test_first_pages_outside_the_sequence_count_as_its_ends(sinks):
    k, q = torch.randn(2, 32, 1, 4), torch.randn(2, 32, 1, 4)
    options = {"past_pages": 0, "top_k": 2, "recent": 1, "sinks": sinks}
    blocks = torch.arange(8).expand(2, -1)
    for outside, inside in ((torch.full((2, 8), -3), blocks * 0), (blocks + 100, blocks)):
        got, want = (select_pages(q, summarized(k, 4), first_pages=x, **options) for x in (outside, inside))
        assert torch.equal(got, want)


def test_bad_flags_and_too_large_a_budget():
    summary, q = summarized(torch.zeros(1, 8, 1, 2), 4), torch.zeros(1, 6, 1, 2)
    for real in (torch.ones(1, 5, dtype=torch.bool), torch.ones(1, 6), "all"):
        with pytest.raises(ValueError, match="real must be a bool tensor"):
            select_pages(q, summary, **BUDGET, real=real)
    for first in (torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 2), [0, 0]):
        with pytest.raises(ValueError, match="first_pages must be an int tensor"):
            select_pages(q, summary, **BUDGET, first_pages=first)
    with pytest.raises(ValueError, match="at most 65536 pages"):
        select_pages(q, summary, **{**BUDGET, "top_k": 2**16})


@pytest.mark.cuda
@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_same_on_cuda(scorer, dtype, per_head):
    q, k = torch.randn(2, 2000, 8, 64).to(dtype), torch.randn(2, 16 * 400, 2, 64).to(dtype)
    k[:, 16 * 100 : 16 * 200] = k[:, : 16 * 100]  # many pages that score alike
    options = {"past_pages": 270, "top_k": 16, "recent": 4, "sinks": 2, "per_head": per_head}
    here = select_pages(q, summarized(k, 16, scorer), **options)
    there = select_pages(q.cuda(), summarized(k.cuda(), 16, scorer), **options)
    assert there.is_cuda and torch.equal(there.cpu(), here)
