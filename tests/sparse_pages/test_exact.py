"""Sums and products that depend on nothing but their operands."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_pages.exact import _integers, _power_of_two, largest_dot, ordered_sum


@given(st.integers(1, 40), st.integers(0, 2), st.integers(0, 2**31))
@settings(deadline=None, max_examples=40)
def test_ordered_sum(length, dim, seed):
    shape = [3, 2, 4]
    shape[dim] = length
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    total = ordered_sum(x, dim)
    torch.testing.assert_close(total, x.sum(dim), rtol=1e-13, atol=1e-13)
    other = (dim + 1) % 3
    part = ordered_sum(x.narrow(other, 1, 1).clone(), dim)
    assert torch.equal(part, total.narrow(other - (other > dim), 1, 1))


def test_powers_of_two():
    exponents = torch.arange(-1022, 1024)
    assert _power_of_two(exponents).tolist() == [math.ldexp(1.0, e) for e in exponents.tolist()]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5), st.integers(5, 26))
@settings(deadline=None, max_examples=200)
def test_integers_are_integers_within_their_bits(values, bits):
    x, scale = _integers(torch.tensor(values, dtype=torch.float64), bits)
    assert torch.equal(x, x.round()) and x.abs().max() <= 2**bits
    largest = max(abs(v) for v in values)
    for value, rounded in zip(values, x.tolist()):
        error = abs(Fraction(value) - Fraction(rounded) * Fraction(scale.item()))
        assert error <= max(Fraction(largest) / 2**bits, Fraction(2) ** -900)


@given(st.integers(0, 2**31), st.sampled_from([1, 2, 3, 64, 100, 256]), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=40)
def test_largest_dot_is_near_and_the_same_in_any_cut(seed, width, dtype):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 3, 4, 2, width, generator=generator, dtype=dtype)
    k = torch.randn(2, 7, 2, width, generator=generator, dtype=dtype) * torch.tensor([1e-3, 1e3])[:, None].to(dtype)
    got = largest_dot(q, k)
    want = torch.einsum("bqpgf,bngf->bgqpn", q.double(), k.double()).amax(3)
    assert got.dtype == torch.float64 and got.shape == want.shape
    size = torch.einsum("bqpg,bng->bgqpn", q.double().norm(dim=-1), k.double().norm(dim=-1)).amax(3)
    assert ((got - want).abs() <= 2.0**-20 * width**0.5 * size).all()
    for b, block, g, n in ((0, 0, 0, 0), (1, 2, 1, 6), (0, 1, 1, 3)):
        one = largest_dot(q[b : b + 1, block : block + 1, :, g : g + 1], k[b : b + 1, n : n + 1, g : g + 1])
        assert one.item() == got[b, g, block, n].item()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits_on_cuda(dtype):
    q, k = torch.randn(2, 9, 16, 4, 128, dtype=dtype), torch.randn(2, 301, 4, 128, dtype=dtype)
    assert torch.equal(largest_dot(q.cuda(), k.cuda()).cpu(), largest_dot(q, k))
    x = torch.randn(5, 37, 3, dtype=dtype)
    assert torch.equal(ordered_sum(x.cuda(), 1).cpu(), ordered_sum(x, 1))
