"""Arithmetic whose result does not depend on how the work was cut, nor on the device.

A selection must be the same for every chunk length and on every device, ties included, so no rounding error may depend
on the shape of a call. Library sums and matrix products do not promise that; these do.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT64_INTEGER_BITS, MOST_BITS = 53, 22  # three signed digits of 8 bits hold 22
# Vectors below 2^-900 count as zero: their scale would overflow.
LEAST_EXPONENT, MOST_EXPONENT = -900, 1024


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension by halving: the order of the additions depends on its length alone."""
    while (length := x.shape[dim]) > 1:
        half = length // 2
        paired = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([paired, x.narrow(dim, 2 * half, 1)], dim) if length % 2 else paired
    return x.squeeze(dim)


def sum_in_turn(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension, from the first element to the last."""
    total = x.select(dim, 0)
    for i in range(1, x.shape[dim]):
        total = total + x.select(dim, i)
    return total


def integer_bits(features: int) -> int:
    """Bits of the integers that vectors of so many features are rounded to."""
    return min(MOST_BITS, (FLOAT64_INTEGER_BITS - (features - 1).bit_length()) // 2)


def largest_dot(queries: Tensor, pages: Tensor, real: Tensor | None = None) -> Tensor:
    """The largest dot product of each page with the queries of each block.

    Every vector is rounded to integers times a power of two of its own, small enough that float64 holds every sum of
    products exactly: then the order in which a matrix product adds is of no consequence. The error is that of the
    rounding, about 2^-22 of the product of the largest elements, as in float32. A vector with an element that is not
    finite has no dot product: it is NaN.

    Shapes: queries [B, Q, P, G, F]; pages [B, N, G, F]; real [B, Q, P] bool, which queries count
    Returns: [B, G, Q, N] float64; -inf where no query of a block counts
    """
    B, Q, P, G, F = queries.shape
    bits = integer_bits(F)
    q_BQPGF, q_scale = _integers(queries, bits)
    k_BNGF, k_scale = _integers(pages, bits)
    dots = q_BQPGF.permute(0, 3, 1, 2, 4).reshape(B, G, Q * P, F) @ k_BNGF.permute(0, 2, 3, 1)
    dots = dots.view(B, G, Q, P, -1).mul_(q_scale.permute(0, 3, 1, 2, 4))
    if real is not None:
        dots.masked_fill_(~real[:, None, :, :, None], -torch.inf)
    return dots.amax(3) * k_scale.permute(0, 2, 3, 1)


def _integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The vectors along the last dimension as integers of at most 2^bits in float64, and the scale of each."""
    finite = x.isfinite().all(-1, keepdim=True)
    x = x.double().masked_fill(~finite, 0.0)
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent.clamp(LEAST_EXPONENT, MOST_EXPONENT)
    scale = _power_of_two(exponent - bits).masked_fill(~finite, torch.nan)
    return torch.round(x * _power_of_two(bits - exponent)), scale


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent, built from its bits: library powers need not be exact."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
