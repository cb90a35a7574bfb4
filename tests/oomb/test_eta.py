"""How long a step still takes, against steps whose time is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.models import build, configs

from oomb.eta import ModelWork, StepClock, passes
from oomb.tiny import tiny_model


def work(windows=(None, None)):
    return ModelWork(linear=1e6, attention=100.0, windows=windows)


@given(st.integers(0, 50), st.integers(0, 50), st.one_of(st.none(), st.integers(1, 60)))
def test_pairs_are_those_a_loop_counts(start, length, window):
    stop = start + length
    counted = sum(min(position + 1, window or position + 1) for position in range(start, stop))
    assert work((window, None)).pairs(start, stop) == counted + sum(p + 1 for p in range(start, stop))


def test_the_work_of_a_model_is_read_off_its_parameters():
    model = tiny_model(64, 0)
    found = ModelWork.of(model)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1) - model.model.embed_tokens.weight.numel()
    assert found.linear == 2 * matrices and found.attention == 4 * 2 * 32 and found.windows == (None, None)
    tied, window = build(configs()["llama_tied"]), build(configs()["qwen2_window"])
    assert ModelWork.of(tied).linear == 2 * sum(p.numel() for p in tied.parameters() if p.ndim > 1)
    assert ModelWork.of(window).windows == (None, 9, 9)
    moe = build(configs()["qwen3_moe"])
    experts = sum(p.numel() for name, p in moe.named_parameters() if ".experts." in name)
    dense = sum(p.numel() for p in moe.parameters() if p.ndim > 1) - moe.model.embed_tokens.weight.numel()
    assert ModelWork.of(moe).linear == pytest.approx(2 * (dense - experts / 2))


@pytest.mark.parametrize(("total", "chunks"), [(1, 1), (3, 2), (31, 16)])
def test_a_step_fills_all_but_the_last_chunk_and_walks_all_back(total, chunks):
    done = passes(work(), 1600, total)
    assert len(done) == total == 2 * chunks - 1
    # of two layers the fill runs one; the walk runs each and goes back, the last chunk's first layer once more
    assert sum(linear for linear, _ in done[chunks - 1 :]) == pytest.approx((3 + 0.5 / chunks) * 1600 * 1e6)
    assert sum(linear for linear, _ in done[: chunks - 1]) == pytest.approx(0.5e6 * 1600 * (chunks - 1) / chunks)
    attention = [attention for _, attention in done]
    assert attention[: chunks - 1] == sorted(attention[: chunks - 1])
    assert attention[chunks - 1 :] == sorted(attention[chunks - 1 :], reverse=True)


def times(tokens, total, linear_speed, attention_speed, walk=1.0):
    """Seconds of each pass on a machine with two speeds, whose walk is slower than the operations say."""
    turn = total // 2
    return [
        (x / linear_speed + y / attention_speed) * (walk if index >= turn else 1.0)
        for index, (x, y) in enumerate(passes(work(), tokens, total))
    ]


@given(st.floats(0.2, 5.0), st.integers(4, 40), st.sampled_from([2_000, 20_000, 200_000]))
def test_a_tenth_into_the_first_step_the_end_is_known(ratio, chunks, tokens):
    """Whatever the two speeds are to each other; one rate for all passes would be off by a factor of several."""
    seconds = times(tokens, 2 * chunks - 1, 1e9, 1e9 * ratio)
    clock = StepClock(passes(work(), tokens, len(seconds)))
    begun = max(3, len(seconds) // 10)
    for passed in seconds[:begun]:
        clock.tick(passed)
    assert clock.whole() == pytest.approx(sum(seconds), rel=0.25)


def test_one_rate_for_all_passes_would_be_far_off():
    seconds = times(200_000, 79, 1e9, 1e9)
    begun = 8
    clock = StepClock(passes(work(), 200_000, 79))
    for passed in seconds[:begun]:
        clock.tick(passed)
    by_rate = sum(seconds[:begun]) / begun * 79
    assert by_rate < 0.3 * sum(seconds)
    assert clock.whole() == pytest.approx(sum(seconds), rel=1e-6)


def test_a_walk_that_is_slower_than_promised_is_noticed():
    seconds = times(20_000, 39, 1e9, 2e9, walk=1.7)
    clock = StepClock(passes(work(), 20_000, 39))
    for passed in seconds[:24]:
        clock.tick(passed)
    assert clock.remaining() == pytest.approx(sum(seconds[24:]), rel=0.1)


def test_from_the_second_step_on_the_first_is_the_model():
    """Of any shape; a machine that became slower is noticed."""
    first = [1.0, 5.0, 2.0, 7.0, 3.0]
    clock = StepClock(passes(work(), 100, 5), before=first)
    clock.tick(2.0)
    assert clock.whole() == pytest.approx(2 * sum(first)) and clock.remaining() == pytest.approx(34)
    assert StepClock(passes(work(), 100, 3), before=first).whole() == 0.0


def test_nothing_is_promised_before_anything_is_done():
    assert StepClock(passes(work(), 100, 5)).remaining() == 0.0
