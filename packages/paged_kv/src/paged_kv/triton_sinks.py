"""The gradient of attention sinks, in one pass over the output and its gradient.

Letters: B batch · C chunk tokens · H query heads · D head dim
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["tokens"])
def _sinks_bwd_kernel(
    dout_ptr, out_ptr, lse_ptr, sinks_ptr, parts_ptr, tokens,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head's share of a block of tokens. Grid: (blocks of C, H, B)."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM)
    mask = (token < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = ((batch * tokens + token) * HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    dout = tl.load(dout_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + (batch * HEADS + head) * tokens + token, mask=token < tokens, other=float("-inf"))
    sink = tl.load(sinks_ptr + head).to(tl.float32)
    weight = tl.where(lse == float("-inf"), 0.0, tl.exp(sink - tl.where(lse == float("-inf"), sink, lse)))
    total = tl.sum(weight * tl.sum(dout * out, 1), 0)
    tl.store(parts_ptr + (batch * HEADS + head) * tl.num_programs(0) + block, -total)


def sinks_grad(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d sink = -sum exp(sink - LSE) * rowsum(dout * out), summed in a fixed order; LSE and out have the sink in them.

    Shapes: dout, out [B, C, H, D]; lse [B, H, C]; sinks [H]
    Returns: [H] in sinks' dtype
    """
    batch, tokens, heads, dim = out.shape
    block = 64
    parts = torch.empty(batch, heads, triton.cdiv(tokens, block), device=out.device, dtype=torch.float32)
    _sinks_bwd_kernel[(parts.shape[2], heads, batch)](
        dout.contiguous(), out.contiguous(), lse.contiguous(), sinks.contiguous(), parts, tokens,
        HEADS=heads, HEAD_DIM=dim, DIM=triton.next_power_of_2(dim), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return parts.sum((0, 2)).to(sinks.dtype)
