"""Summaries do not remember how the keys came."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_pages import PageSummary, Scorer, reference, select_pages

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def summarized(k, page_tokens, scorer="mean", cuts=()):
    summary = PageSummary(page_tokens, scorer)
    cuts = sorted({0, *cuts, k.shape[1]})
    for start, end in pairwise(cuts):
        chunk = k[:, start:end].clone()
        assert summary.append(chunk) == end
        chunk.fill_(float("nan"))  # what was appended is the summary's own
    return summary


@given(
    st.integers(1, 2),
    st.integers(1, 70),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from(["mean", "minmax"]),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 70), max_size=12),
)
@settings(deadline=None, max_examples=60)
def test_any_chunking_gives_the_same_bits(B, T, G, P, scorer, dtype, cuts):
    k, q = random(B, T, G, 5, dtype=dtype), random(B, 2 * P - 1, 2 * G, 5, seed=1, dtype=dtype)
    whole, cut = summarized(k, P, scorer), summarized(k, P, scorer, [c for c in cuts if c < T])
    assert whole.pages == cut.pages == T // P and whole.tokens == cut.tokens == T
    assert torch.equal(whole.scores(q), cut.scores(q))


@pytest.mark.parametrize("scorer", ["mean", "minmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_against_loops(scorer, dtype):
    k, q = random(2, 23, 2, 6, dtype=dtype), random(2, 9, 6, 6, seed=1, dtype=dtype)
    got = summarized(k, 4, scorer).scores(q)
    want = torch.tensor(reference.block_scores(q, k, 4, scorer), dtype=torch.float64)
    assert got.shape == (2, 2, 3, 5)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert torch.equal(summarized(k, 4, scorer).scores(q, 1, 4), got[..., 1:4])


def test_scores_in_small_tiles(monkeypatch):
    k, q = random(2, 90, 2, 8), random(2, 50, 4, 8, seed=1)
    whole = summarized(k, 4).scores(q)
    for elements in (1, 40, 300, 2000):
        monkeypatch.setattr("sparse_pages.summary.TILE_ELEMENTS", elements)
        assert torch.equal(summarized(k, 4).scores(q), whole)


def test_minmax_bounds_every_logit():
    k, q = random(1, 64, 1, 16), random(1, 8, 1, 16, seed=1)
    bound = summarized(k, 8, "minmax").scores(q)[0, 0, 0]
    logits = (q[0, :, 0] @ k[0, :, 0].T).view(8, 8, 8).amax((0, 2))
    assert (bound >= logits - 1e-5).all()


def test_incomplete_page_is_not_there():
    summary = PageSummary(4)
    assert (summary.pages, summary.tokens) == (0, 0)
    summary.append(torch.full((1, 3, 1, 2), float("nan")))
    assert (summary.pages, summary.tokens) == (0, 3)
    assert summary.scores(torch.zeros(1, 4, 1, 2)).shape == (1, 1, 1, 0)
    summary.append(torch.zeros(1, 0, 1, 2))
    assert summary.tokens == 3


def test_what_is_kept_is_small_and_not_the_chunk():
    k = random(1, 1000, 1, 4)
    summary = summarized(k, 100)
    summary.append(k[:, :30])
    assert summary._tail.untyped_storage().nbytes() == 30 * 4 * 8
    for _ in range(20):
        summary.append(k)
    assert summary._features.shape[1] < 2 * 1.01 * summary.pages


def test_nothing_is_recorded_and_nothing_is_of_inference_mode():
    k = random(1, 9, 1, 4).requires_grad_()
    summary = PageSummary(4)
    with torch.inference_mode():
        for _ in range(3):
            summary.append(random(1, 5, 1, 4))
    assert summary._features.shape[1] > summary.pages  # so that the next page is written into what is there
    summary.append(k[:, :4])
    scores = summary.scores(random(1, 4, 1, 4).requires_grad_())
    assert not scores.requires_grad and not scores.is_inference() and not summary._features.is_inference()


def test_autocast_changes_nothing():
    class Projected(LastKey):
        def page_features(self, keys):
            return keys[:, :, -1] @ torch.linspace(0.1, 0.9, 24).view(8, 3)

        def query_features(self, queries):
            return queries @ torch.linspace(0.2, 0.7, 24).view(8, 3)

    k, q = random(1, 32, 1, 8, dtype=torch.float32), random(1, 8, 2, 8, seed=1, dtype=torch.float32)
    plain = summarized(k, 4, Projected()).scores(q)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(summarized(k, 4, Projected()).scores(q), plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_are_accumulated_wide(dtype):
    k = random(1, 512, 1, 4, dtype=dtype)
    features = summarized(k, 256)._features
    assert features.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    want = k.double().view(1, 2, 256, 1, 4).mean(2)
    torch.testing.assert_close(features.double(), want, rtol=0, atol=1e-15 if dtype == torch.float64 else 1e-7)


@pytest.mark.cuda
@pytest.mark.parametrize("scorer", ["mean", "minmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_on_cuda(scorer, dtype):
    k, q = random(2, 1000, 2, 64, dtype=dtype), random(2, 150, 8, 64, seed=1, dtype=dtype)
    here, there = summarized(k, 16, scorer), summarized(k.cuda(), 16, scorer, [100, 107, 600])
    assert torch.equal(there._features[:, : there.pages].cpu(), here._features[:, : here.pages])
    assert torch.equal(there.scores(q.cuda()).cpu(), here.scores(q))


class LastKey:
    """A scorer of one's own: the logit of a page's last key."""

    def page_features(self, keys):
        return keys[:, :, -1]

    def query_features(self, queries):
        return queries


def test_scorer_of_ones_own():
    assert isinstance(LastKey(), Scorer)
    k, q = random(1, 12, 1, 3), random(1, 4, 1, 3, seed=1)
    want = (q[0, :, 0] @ k[0, 3::4, 0].T).amax(0)
    torch.testing.assert_close(summarized(k, 4, LastKey()).scores(q)[0, 0, 0], want, rtol=0, atol=1e-5)


def test_a_scorer_is_called_without_grad_whoever_calls():
    class Asking(LastKey):
        def page_features(self, keys):
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            return super().page_features(keys)

        def query_features(self, queries):
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            return super().query_features(queries)

    k, q = random(1, 12, 1, 3).requires_grad_(), random(1, 4, 1, 3, seed=1).requires_grad_()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            summary = summarized(k, 4, Asking())
            assert not summary.scores(q).requires_grad
            select_pages(q, summary, past_pages=2, top_k=1, recent=1, sinks=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scorer_may_write_into_what_it_is_handed(dtype):
    """It is no model's keys and queries, whichever dtype they have."""

    class Writing(LastKey):
        def page_features(self, keys):
            return super().page_features(keys.mul_(2))

        def query_features(self, queries):
            return queries.mul_(3)

    k, q = random(1, 14, 1, 3, dtype=dtype), random(1, 4, 1, 3, seed=1, dtype=dtype)
    before = k.clone(), q.clone()
    summary = summarized(k, 4, Writing(), [5])
    torch.testing.assert_close(summary.scores(q), 6 * summarized(k, 4, LastKey()).scores(q), rtol=1e-5, atol=1e-5)
    assert torch.equal(k, before[0]) and torch.equal(q, before[1])


@pytest.mark.parametrize("page_tokens", [0, -1, 2.0, True, None])
def test_bad_page_length(page_tokens):
    with pytest.raises(ValueError, match="page_tokens must be an integer"):
        PageSummary(page_tokens)


@pytest.mark.parametrize("scorer", ["max", None, LastKey, torch.zeros(3)])
def test_bad_scorer(scorer):
    with pytest.raises(ValueError, match="scorer must be"):
        PageSummary(4, scorer)


@pytest.mark.parametrize(
    "page, query",
    [(torch.zeros(1), None), (None, None), (torch.zeros(1, 2, 1, 3, dtype=int), None), (None, torch.zeros(1, 4, 1, 2))],
)
def test_scorer_that_returns_another_shape(page, query):
    class Wrong(LastKey):
        def page_features(self, keys):
            return super().page_features(keys) if query is not None else page

        def query_features(self, queries):
            return query

    summary = PageSummary(4, Wrong())
    with pytest.raises(ValueError, match="the scorer's"):
        summary.append(random(1, 8, 1, 3))
        summary.scores(random(1, 4, 1, 3))
    if query is None:
        assert summary.tokens == 0


BAD_KEYS = {
    "dims": torch.zeros(1, 4, 2),
    "batch": torch.zeros(2, 4, 1, 2),
    "heads": torch.zeros(1, 4, 2, 2),
    "width": torch.zeros(1, 4, 1, 3),
    "dtype": torch.zeros(1, 4, 1, 2, dtype=torch.float64),
    "integers": torch.zeros(1, 4, 1, 2, dtype=torch.int32),
    "device": torch.zeros(1, 4, 1, 2, device="meta"),
    "none": None,
}


@pytest.mark.parametrize("k", BAD_KEYS.values(), ids=BAD_KEYS)
def test_bad_keys_change_nothing(k):
    summary = PageSummary(4)
    summary.append(torch.zeros(1, 5, 1, 2))
    with pytest.raises(ValueError, match="k must be"):
        summary.append(k)
    assert summary.tokens == 5


def test_bad_scores():
    summary = PageSummary(4)
    with pytest.raises(ValueError, match="empty"):
        summary.scores(torch.zeros(1, 4, 1, 2))
    summary.append(torch.zeros(1, 9, 2, 2))
    for first, last in ((0, 3), (-1, 1), (2, 1)):
        with pytest.raises(ValueError, match="2 complete pages"):
            summary.scores(torch.zeros(1, 4, 2, 2), first, last)
    bad = [torch.zeros(1, 4, 3, 2), torch.zeros(1, 4, 2, 3), torch.zeros(2, 4, 2, 2), torch.zeros(1, 0, 2, 2)]
    for q in (*bad, torch.zeros(4, 2, 2), torch.zeros(1, 4, 2, 2, dtype=int), torch.zeros(1, 4, 2, 2, device="meta")):
        with pytest.raises(ValueError, match="q must be"):
            summary.scores(q)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_summaries_in_host_memory(device):
    q, k = random(2, 12, 4, 8).to(device), random(2, 90, 2, 8).to(device)
    here, there = PageSummary(4), PageSummary(4, on_host=True)
    for part in k.split(17, 1):
        here.append(part)
        there.append(part)
    assert there._features.device.type == "cpu" and there._features.is_pinned() == (device == "cuda")
    assert torch.equal(here.scores(q), there.scores(q)) and torch.equal(here.scores(q, 3, 7), there.scores(q, 3, 7))
