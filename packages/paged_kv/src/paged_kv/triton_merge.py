"""Small kernels that join partial results: outputs by log-sum-exp, and gradients into pages through their table.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · D head dim
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 32


@triton.jit
def _block_places(
    tokens, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Where a block of one head's tokens lies in [B, C, H, D] and in [B, H, C]. Grid: (blocks of C, H, B)."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = token < tokens
    token = tl.minimum(token, tokens - 1)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, DIM)
    offsets = (((batch * tokens + token) * HEADS) + head)[:, None] * HEAD_DIM + dims[None, :]
    return offsets, (batch * HEADS + head) * tokens + token, (dims < HEAD_DIM)[None, :], valid


@triton.jit(do_not_specialize=["rows", "tokens"])
def _merge_parts_kernel(
    parts_ptr, parts_lse_ptr, out_ptr, lse_ptr, rows, tokens,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets, stat, inside, valid = _block_places(tokens, HEADS, HEAD_DIM, DIM, BLOCK)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, DIM], tl.float32)
    for part in range(PARTS):
        start = part * rows.to(tl.int64)
        lse = tl.load(parts_lse_ptr + start + stat)
        m_new = tl.maximum(m, lse)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        old = tl.exp(m - shift)
        new = tl.exp(lse - shift)
        value = tl.load(parts_ptr + start * HEAD_DIM + offsets, mask=inside, other=0.0).to(tl.float32)
        acc = acc * old[:, None] + value * new[:, None]
        total = total * old + new
        m = m_new
    unseen = total == 0.0
    total = tl.where(unseen, 1.0, total)
    out = acc / total[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside)
    tl.store(lse_ptr + stat, tl.where(unseen, float("-inf"), m + tl.log(total)), mask=valid)


@triton.jit(do_not_specialize=["tokens"])
def _merge_two_kernel(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, out_ptr, lse_ptr, tokens,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets, stat, inside, valid = _block_places(tokens, HEADS, HEAD_DIM, DIM, BLOCK)
    a_lse = tl.load(a_lse_ptr + stat)
    b_lse = tl.load(b_lse_ptr + stat)
    top = tl.maximum(a_lse, b_lse)
    shift = tl.where(top == float("-inf"), 0.0, top)
    a_weight = tl.exp(a_lse - shift)
    b_weight = tl.exp(b_lse - shift)
    total = a_weight + b_weight
    unseen = total == 0.0
    total = tl.where(unseen, 1.0, total)
    a = tl.load(a_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    out = a * (a_weight / total)[:, None] + b * (b_weight / total)[:, None]
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside)
    tl.store(lse_ptr + stat, tl.where(unseen, float("-inf"), shift + tl.log(total)), mask=valid)


@triton.jit(do_not_specialize=["columns", "tokens"])
def _add_to_pages_kernel(
    dk_ptr, dv_ptr, slots_ptr, dk_pages_ptr, dv_pages_ptr, columns, tokens,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of a page, pages). A page's WIDTH numbers a token are one run, in the pages as in dk and dv."""
    page = tl.program_id(1)
    slot = tl.load(slots_ptr + page)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = page.to(tl.int64) * PAGE * WIDTH + lane
    end = tl.where(slot < 0, 0, tokens.to(tl.int64) * WIDTH)
    mask = (lane < PAGE * WIDTH) & (source < end)
    target = slot.to(tl.int64) * PAGE * WIDTH + lane
    dk = tl.load(dk_pages_ptr + target, mask=mask, other=0.0).to(tl.float32)
    dk += tl.load(dk_ptr + source, mask=mask, other=0.0).to(tl.float32)
    tl.store(dk_pages_ptr + target, dk.to(dk_pages_ptr.dtype.element_ty), mask=mask)
    dv = tl.load(dv_pages_ptr + target, mask=mask, other=0.0).to(tl.float32)
    dv += tl.load(dv_ptr + source, mask=mask, other=0.0).to(tl.float32)
    tl.store(dv_pages_ptr + target, dv.to(dv_pages_ptr.dtype.element_ty), mask=mask)


def merge_parts(parts: Tensor, parts_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Join partial outputs over disjoint keys.

    Shapes: parts [S, B, C, H, D]; parts_lse [S, B, H, C]; out [B, C, H, D] and lse [B, H, C] are written
    """
    count, batch, tokens, heads, dim = parts.shape
    rows = batch * tokens * heads
    _merge_parts_kernel[(triton.cdiv(tokens, _ROWS), heads, batch)](
        parts, parts_lse, out, lse, rows, tokens, HEADS=heads, HEAD_DIM=dim, DIM=triton.next_power_of_2(dim),
        PARTS=count, BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip


def merge_two(a: Tensor, a_lse: Tensor, b: Tensor, b_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Join two partial outputs. `out` and `lse` must be new: where several warps share a row, one that is done would
    overwrite the LSE that another has yet to read.

    Shapes: a, b, out [B, C, H, D], contiguous, of any dtype; a_lse, b_lse, lse [B, H, C] float32, contiguous
    """
    batch, tokens, heads, dim = a.shape
    _merge_two_kernel[(triton.cdiv(tokens, _ROWS), heads, batch)](
        a, a_lse, b, b_lse, out, lse, tokens, HEADS=heads, HEAD_DIM=dim, DIM=triton.next_power_of_2(dim),
        BLOCK=_ROWS, num_warps=4,
    )  # fmt: skip


def add_to_pages(dk: Tensor, dv: Tensor, slots: Tensor, dk_pages: Tensor, dv_pages: Tensor) -> None:
    """Add the gradients of consecutive tokens to their pages, in float32.

    Shapes: dk, dv [T, G, D] contiguous, token 0 being the first of page 0; slots [N] int32; pages [slots, P, G, D]
    """
    tokens = dk.shape[0]
    page_tokens = dk_pages.shape[1]
    width = dk[0].numel()
    pages = triton.cdiv(tokens, page_tokens)
    block = min(2048, triton.next_power_of_2(page_tokens * width))
    grid = (triton.cdiv(page_tokens * width, block), pages)
    _add_to_pages_kernel[grid](
        dk, dv, slots, dk_pages, dv_pages, slots.shape[0], tokens, PAGE=page_tokens, WIDTH=width, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
