"""A mask is told apart by asking it; what is neither causal nor a window is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from oomb.hf import Unsupported
from oomb.masks import window_of

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 3000), window=st.integers(1, 4000))
def test_windows(length, window):
    assert window_of(causal_mask_function, length, CPU) is None
    expected = window if window < length else None
    assert window_of(sliding_window_causal_mask_function(window), length, CPU) == expected


@settings(deadline=None, max_examples=30)
@given(length=st.integers(2, 3000), chunk=st.integers(1, 2999))
def test_chunks_that_show_at_this_length_are_refused(length, chunk):
    mask = chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.long))
    if chunk == 1:
        assert window_of(mask, length, CPU) == 1  # each token sees itself: the same as a window of one
    elif chunk < length:
        with pytest.raises(Unsupported, match="neither causal"):
            window_of(mask, length, CPU)
    else:
        assert window_of(mask, length, CPU) is None


@pytest.mark.parametrize(
    "mask",
    [
        bidirectional_mask_function,
        or_masks(causal_mask_function, lambda b, h, q, kv: kv < 5),  # a prefix everybody sees
        lambda b, h, q, kv: kv < q,  # not even itself
        lambda b, h, q, kv: (kv <= q) & (kv % 3 != 1),
        lambda b, h, q, kv: (kv <= q) & ((kv > q - 50) | (kv < 4)),  # a window and a sink
    ],
)
def test_other_masks_are_refused(mask):
    with pytest.raises(Unsupported, match="neither causal"):
        window_of(mask, 500, CPU)


def test_a_mask_that_reads_a_table_is_refused():
    table = torch.zeros(1, 8)
    with pytest.raises(Unsupported, match="position by position"):
        window_of(lambda b, h, q, kv: table[b, kv] == table[b, q], 500, CPU)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(Unsupported, match="not even itself"):
        window_of(sliding_window_causal_mask_function(0), 500, CPU)
