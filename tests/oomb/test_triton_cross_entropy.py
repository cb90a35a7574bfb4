"""The loss kernels against float64, in Triton's interpreter and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compiling import compiled
from tests.numerics import relative

triton_cross_entropy = pytest.importorskip("oomb.triton_cross_entropy")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter computes bfloat16 wrongly


def case(tokens: int, vocabulary: int, dtype: torch.dtype, scale: float, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(tokens, vocabulary, generator=generator)).to(DEVICE, dtype)
    labels = torch.randint(vocabulary, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < 0.2] = -100
    return logits, labels.to(DEVICE), torch.randn(tokens, generator=generator).to(DEVICE)


def run(function, logits, labels, grad):
    leaf = logits.detach().clone().requires_grad_()
    losses = function(leaf, labels)
    losses.backward(grad.to(losses.dtype))
    return losses.detach(), leaf.grad


def plain(logits, labels):
    return F.cross_entropy(logits.float(), labels, reduction="none")


def wide(logits, labels):
    return F.cross_entropy(logits.double(), labels, reduction="none")


@settings(deadline=None, max_examples=25)
@given(
    tokens=st.integers(1, 9),
    vocabulary=st.integers(1, 90),
    block=st.sampled_from([16, 64, 8192]),
    low=st.booleans(),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 1000),
)
def test_against_float64(tokens, vocabulary, block, low, scale, seed):
    logits, labels, grad = case(tokens, vocabulary, LOW if low else torch.float32, scale, seed)
    before, triton_cross_entropy._BLOCK = triton_cross_entropy._BLOCK, block
    try:
        losses, dlogits = run(triton_cross_entropy.cross_entropy, logits, labels, grad)
    finally:
        triton_cross_entropy._BLOCK = before
    exact, exact_grad = run(wide, logits.double(), labels, grad)
    other, other_grad = run(plain, logits, labels, grad)
    assert losses.dtype == torch.float32 and dlogits.dtype == logits.dtype
    assert relative(losses, exact) <= 2 * relative(other, exact) + 1e-7
    assert relative(dlogits, exact_grad) <= 2 * relative(other_grad, exact_grad) + 1e-7


def test_what_is_not_finite_shows_where_it_is():
    logits, labels, _ = case(6, 40, torch.float32, 1.0, 0)
    labels[:] = 3
    logits[1, 7], logits[2, 7], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, 7] = -torch.inf  # a token that the model rules out: nothing wrong with it
    losses = triton_cross_entropy.cross_entropy(logits, labels)
    assert losses.isfinite().tolist() == [True, False, False, False, True, True]
    torch.testing.assert_close(losses[[0, 4, 5]], plain(logits, labels)[[0, 4, 5]])


def test_rows_with_gaps():
    logits, labels, grad = case(5, 20, torch.float32, 1.0, 1)
    ours = run(triton_cross_entropy.cross_entropy, logits[:, :11], labels.clamp_max(10), grad)
    torch.testing.assert_close(ours, run(plain, logits[:, :11], labels.clamp_max(10), grad))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", triton_cross_entropy.DTYPES)
def test_a_large_vocabulary(dtype):
    logits, labels, grad = case(700, 152064, dtype, 3.0, 2)
    ours = run(triton_cross_entropy.cross_entropy, logits, labels, grad)
    exact = run(wide, logits.double(), labels, grad)
    other = run(plain, logits, labels, grad)
    for mine, theirs, true in zip(ours, other, exact, strict=True):
        assert relative(mine, true) <= 2 * relative(theirs, true) + 5e-6  # Triton's exp is an approximation


@pytest.mark.parametrize("arch", [80, 90])
def test_the_kernels_compile_without_spilling(arch):
    pytest.importorskip("triton.backends.nvidia")
    rows = compiled(Path(__file__).with_name("compile_cross_entropy.py"), arch)
    assert len(rows) == 2 and all(row["stack"] == 0 for row in rows)
