"""The gradient of attention sinks, from what the backward keeps of each row.

Letters: B batch · C chunk tokens · H query heads · G KV heads · R = H / G · M = C * R rows of a KV head
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_problem import Problem, Rows


@triton.jit(do_not_specialize=["batches", "tokens", "stride"])
def _sinks_bwd_kernel(
    stats_ptr, sinks_ptr, grad_ptr, batches, tokens, stride,
    GROUPS: tl.constexpr, REPEAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head's sum, in a fixed order. Grid: (H,). Rows that see nothing have LSE = +inf and count for nothing."""
    head = tl.program_id(0)
    sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
    total = tl.zeros([BLOCK], tl.float32)
    for batch in range(batches):
        start = (batch * GROUPS + head // REPEAT).to(tl.int64) * stride + head % REPEAT
        for token in range(0, tokens, BLOCK):
            place = token + tl.arange(0, BLOCK)
            pair = stats_ptr + (start + place * REPEAT) * 2
            lse = tl.load(pair, mask=place < tokens, other=float("inf"))
            delta = tl.load(pair + 1, mask=place < tokens, other=0.0)
            total += tl.math.exp2(sink - lse) * delta
    tl.store(grad_ptr + head, (-tl.sum(total, 0)).to(grad_ptr.dtype.element_ty))


def sinks_grad(p: Problem, rows: Rows, sinks: Tensor) -> Tensor:
    """d sink = -sum exp(sink - LSE) * delta over all rows, LSE having the sink in it.

    Shapes: sinks [H]
    Returns: [H] in sinks' dtype
    """
    grad = torch.empty_like(sinks, memory_format=torch.contiguous_format)
    block = max(16, min(2048, triton.next_power_of_2(p.tokens)))
    groups = rows.stats.shape[0] // p.batch  # rows come group by group, or head by head
    _sinks_bwd_kernel[(sinks.numel(),)](
        rows.stats, sinks.contiguous(), grad, p.batch, p.tokens, rows.stats.shape[1],
        GROUPS=groups, REPEAT=sinks.numel() // groups, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return grad
