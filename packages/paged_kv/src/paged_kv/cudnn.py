"""The cuDNN backend: torch's own operators on runs of consecutive pages, joined by log-sum-exp.

A run of pages [pages, P, G, D] is an ordinary strided [1, G, tokens, D] view, which cuDNN takes at full speed. Partial
outputs are merged in float32; the backward of each run gets the global output and LSE, so its gradient is exact, and
dK and dV are added to the gradient pages through their table. cuDNN's dQ differs from run to run in its last bits.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · D head dim
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .past import Geometry, Segment
from .triton_merge import add_to_pages, merge_two

# dK and dV of a run exist once more in 16 bits before they are added: bound what that takes.
RUN_TOKENS = 65536
_forward = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


def forward(q: Tensor, k: Tensor, v: Tensor, segments: Iterable[Segment], geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Attention of the chunk over the segments' pages and its own causal block.

    Shapes: q [B, C, H, D]; k, v [B, C, G, D]
    Returns: out [B, C, H, D] in q's dtype and lse [B, H, C] float32
    Raises: ValueError for what cuDNN cannot serve: a window, documents, selected pages, pages that are not consecutive,
        a dtype, head dim or device it does not take
    """
    _check(q, geometry)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    # The own block comes last: its merge writes the result. Runs before it are merged in float32.
    state: dict[int, _Part] = {}
    for run in _runs(segments, geometry):
        b = run.sequence
        part = _attend(q[b : b + 1], run.k, run.v, geometry.scale, causal=False)
        state[b] = _merge(state[b], part) if b in state else part
    own = _attend(q, k, v, geometry.scale, causal=True)
    if not state:
        return own
    out, lse = (torch.empty_like(x) for x in own)
    for b in range(q.shape[0]):
        row = slice(b, b + 1)
        if b in state:
            merge_two(*state[b], own[0][row], own[1][row], out[row], lse[row])
        else:
            out[row], lse[row] = own[0][row], own[1][row]
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Iterable[Segment],
    geometry: Geometry,
    *,
    past_grad: bool,
    accumulate: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients from the global output and LSE; those of past keys and values are added to their pages in float32.

    Both modes of `accumulate` are one here: a page is added to once per call, by one program.
    Shapes: dout, q, out [B, C, H, D]; k, v [B, C, G, D]; lse [B, H, C]
    Returns: dq in q's dtype; dk and dv of the own block
    Raises: ValueError as forward; RuntimeError under torch.use_deterministic_algorithms, which cuDNN's dQ is not
    """
    del accumulate
    _check(q, geometry)
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError('paged_attention, backend "cudnn": dQ is not deterministic; use backend="triton"')
    # torch caches cuDNN's plans by the layout of q, k and v alone: out, dout and lse must always come in the same one.
    dout, q, k, v, out, lse = (x.contiguous() for x in (dout, q, k, v, out, lse))
    sums: dict[int, Tensor] = {}
    for run in _runs(segments, geometry):
        b, row = run.sequence, slice(run.sequence, run.sequence + 1)
        dq, dk, dv = _gradients(dout[row], q[row], run.k, run.v, out[row], lse[row], geometry.scale, causal=False)
        sums[b] = sums[b].float() + dq if b in sums else dq
        if past_grad:
            run.add(dk[0], dv[0])
    dq, dk, dv = _gradients(dout, q, k, v, out, lse, geometry.scale, causal=True)
    for b, total in sums.items():
        dq[b : b + 1] += total
    return dq, dk, dv


def head_dims(device: torch.device) -> tuple[int, ...]:
    """The head dims that cuDNN's forward and backward take; the wide ones only on Hopper."""
    wide = (192, 256) if torch.cuda.get_device_capability(device) == (9, 0) else ()
    return (64, 80, 96, 128, *wide)


@dataclass(frozen=True)
class _Run:
    """Consecutive pages of one sequence: k, v [1, T, G, D] in place; page i of the run is column + i of the segment."""

    sequence: int
    k: Tensor
    v: Tensor
    segment: Segment
    column: int

    def add(self, dk: Tensor, dv: Tensor) -> None:
        """Add the run's gradients, [T, G, D]."""
        segment = self.segment
        assert segment.dk is not None and segment.dv is not None and segment.grad_slots is not None
        slots = segment.grad_slots[self.sequence].contiguous()[self.column :]
        add_to_pages(dk.contiguous(), dv.contiguous(), slots, segment.dk, segment.dv)


def _runs(segments: Iterable[Segment], geometry: Geometry) -> Iterator[_Run]:
    """Every sequence's past, in runs of consecutive pages of about equal length."""
    page = geometry.page_tokens
    for segment in segments:
        if segment.runs is None:
            raise _refusal("expected pages in consecutive slots")
        if not segment.k.is_contiguous() or not segment.v.is_contiguous():
            raise _refusal(f"expected contiguous pages, got strides {segment.k.stride()} and {segment.v.stride()}")
        for b, (first_slot, length) in enumerate(zip(segment.runs, geometry.lengths)):
            tokens = min(length - segment.first_page * page, segment.slots.shape[1] * page)
            if tokens <= 0:
                continue
            pages = -(-tokens // page)
            count = min(pages, -(-tokens // RUN_TOKENS))
            for part in range(count):
                start, end = pages * part // count, pages * (part + 1) // count
                rows = slice((first_slot + start) * page, first_slot * page + min(end * page, tokens))
                k, v = (x.flatten(0, 1)[None, rows] for x in (segment.k, segment.v))
                yield _Run(b, k, v, segment, start)


_Part = tuple[Tensor, Tensor]  # out [B, C, H, D] and lse [B, H, C]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> _Part:
    if k.shape[1] == 1:
        lse = _one_score(q, k, scale).flatten(2).transpose(1, 2).contiguous()
        return v.repeat_interleave(q.shape[2] // v.shape[2], 2).expand_as(q).contiguous(), lse
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = _forward(*heads_first, None, True, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2).contiguous(), lse.view(lse.shape[:3]).contiguous()


def _gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if k.shape[1] == 1:
        return _one_key_gradients(dout, q, k, v, out, lse, scale)
    heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    unused = q.new_zeros((), dtype=torch.int64)  # the random state of a dropout that is not asked for
    grads = _backward(
        *heads_first, lse[..., None], unused, unused, None, None, None, q.shape[1], k.shape[1], 0.0, causal,
        scale=scale,
    )  # fmt: skip
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq.contiguous(), dk, dv


def _one_score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scores against one key, which cuDNN does not take: q [B, C, H, D], k [B, 1, G, D] to [B, C, G, H / G] float32."""
    return (q.unflatten(2, (k.shape[2], -1)).float() * k[:, :, :, None].float()).sum(-1) * scale


def _one_key_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[2]
    dout, q_rows, out = (x.unflatten(2, (groups, -1)).float() for x in (dout, q, out))
    p = torch.exp(_one_score(q, k, scale) - lse.transpose(1, 2).unflatten(2, (groups, -1)))[..., None]
    ds = p * (dout * (v[:, :, :, None].float() - out)).sum(-1, keepdim=True) * scale
    dq = (ds * k[:, :, :, None].float()).flatten(2, 3).to(q.dtype)
    return dq, (ds * q_rows).sum((1, 3))[:, None], (p * dout).sum((1, 3))[:, None]


def _merge(a: _Part, b: _Part) -> _Part:
    out, lse = torch.empty_like(a[0], dtype=torch.float32), torch.empty_like(a[1])
    merge_two(*a, *b, out, lse)
    return out, lse


def _check(q: Tensor, geometry: Geometry) -> None:
    if not q.is_cuda or torch.version.hip is not None:
        raise _refusal(f"expected NVIDIA CUDA tensors, got {q.device}")
    dims = head_dims(q.device)
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise _refusal(f"expected dtype bfloat16 or float16, got {q.dtype}")
    if q.shape[3] not in dims:
        raise _refusal(f"expected head dim in {dims}, got {q.shape[3]}")
    for name in ("window", "documents", "selected"):
        if getattr(geometry, name) is not None:
            raise _refusal(f"{name} is not supported")
    if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE") == "1":
        raise _refusal("expected TORCH_CUDNN_SDPA_AVOID_RECOMPILE to be unset: it changes the layout of the LSE")


def _refusal(problem: str) -> ValueError:
    return ValueError(f'paged_attention, backend "cudnn": {problem}; use backend="triton" or "reference"')
