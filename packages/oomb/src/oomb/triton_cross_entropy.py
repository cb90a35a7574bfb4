"""Cross-entropy of 16-bit or float32 logits in float32, without a float32 copy of them: one read forward, one read and
one write backward. Plain torch casts, normalizes and differentiates in passes of their own over float32.

Letters: N tokens · V vocabulary
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCK = 8192


@triton.jit(do_not_specialize=["columns"])
def _loss_fwd_kernel(
    logits_ptr, labels_ptr, losses_ptr, top_ptr, log_ptr, columns, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (N,). A negative label is ignored: its loss is zero.

    The largest logit and the logarithm of the sum are not added to one number, which would round the small one away.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits = logits_ptr + row * columns
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = new
    log = tl.log(total)
    own = tl.load(logits + tl.maximum(label, 0)).to(tl.float32)
    tl.store(top_ptr + row, top)
    tl.store(log_ptr + row, log)
    tl.store(losses_ptr + row, tl.where(label < 0, 0.0, log - (own - top)))


@triton.jit(do_not_specialize=["columns"])
def _loss_bwd_kernel(
    logits_ptr, labels_ptr, top_ptr, log_ptr, grad_ptr, dlogits_ptr, columns, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (N, blocks of V). d logits = (softmax - one at the label) * grad."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    grad = tl.where(label < 0, 0.0, tl.load(grad_ptr + row).to(tl.float32))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(logits_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(x - tl.load(top_ptr + row) - tl.load(log_ptr + row)) - tl.where(column == label, 1.0, 0.0)
    tl.store(dlogits_ptr + row * columns + column, (share * grad).to(dlogits_ptr.dtype.element_ty), mask=inside)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.contiguous(), labels.contiguous()
        losses, top, log = (torch.empty(len(labels), device=logits.device, dtype=torch.float32) for _ in range(3))
        with _on(logits):
            _loss_fwd_kernel[(len(labels),)](
                logits, labels, losses, top, log, logits.shape[1], BLOCK=_block(logits), num_warps=8
            )
        ctx.save_for_backward(logits, labels, top, log)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels, top, log = ctx.saved_tensors
        dlogits = torch.empty_like(logits)
        block = _block(logits)
        with _on(logits):
            _loss_bwd_kernel[(len(labels), triton.cdiv(logits.shape[1], block))](
                logits, labels, top, log, grad.contiguous(), dlogits, logits.shape[1], BLOCK=block, num_warps=8
            )
        return dlogits, None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of each token, in float32; zero where the label is negative.

    Shapes: logits [N, V] of one of DTYPES, labels [N] int64 below V -> [N]
    Source: oracle: torch.nn.functional.cross_entropy
    """
    return _CrossEntropy.apply(logits, labels)


def _block(logits: Tensor) -> int:
    return min(_BLOCK, triton.next_power_of_2(logits.shape[1]))


def _on(logits: Tensor) -> contextlib.AbstractContextManager:
    return torch.cuda.device(logits.device) if logits.is_cuda else contextlib.nullcontext()
