"""The Triton backend: `forward` and `backward` as function.py calls them, and what they refuse.

With the past in one segment the whole forward (past, own block, normalisation, LSE) is one launch, and so is dQ. With
several, each launch passes a float32 state on to the next. Nothing of the size of the past is allocated.

Letters: B batch · C chunk tokens · N pages · P tokens a page · H query heads · G KV heads · D head dim
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from . import triton_sparse
from .past import Geometry, Segment
from .triton_launch import dkdv_launch, dq_launch, forward_launch
from .triton_problem import INTERPRETED, Partial, Problem, Rows, on_device
from .triton_sinks import sinks_grad
from .triton_window_launch import window_dkdv, window_dq, window_forward

__all__ = ["backward", "backward_with_sinks", "forward"]

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_TOKENS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Iterable[Segment],
    geometry: Geometry,
    *,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of the chunk over the segments' pages and its own causal block, and over `sinks` if they are given.

    A caller that passes no sinks may apply them to the result: it is the same, for one more pass over the output.
    Shapes: q [B, C, H, D]; k, v [B, C, G, D]; sinks [H]
    Returns: out [B, C, H, D] in q's dtype and lse [B, H, C] float32; out 0 and lse -inf where nothing is seen
    Raises: ValueError for a device, dtype, head dim, page size or option that is not supported
    """
    _check_call(q, geometry)
    p = Problem.of(q, k, v, geometry)
    if geometry.selected is not None:
        with on_device(q):
            return triton_sparse.forward(p, _with_own(segments, geometry), sinks)
    out = torch.empty_like(p.q)
    lse = torch.empty(p.batch, q.shape[2], p.tokens, device=q.device, dtype=torch.float32)
    carry: Partial | None = None
    with on_device(q):
        for segment, last in _with_own(segments, geometry):
            if last and carry is None and p.at_once:
                window_forward(p, segment, out, lse, sinks)
            else:
                carry = forward_launch(p, segment, carry, out, lse, sinks, own=last)
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
    """Gradients from the global output and LSE; those of past keys and values are added to their pages in place.

    Shapes: dout, q, out [B, C, H, D]; k, v [B, C, G, D]; lse [B, H, C]
    Returns: dq in q's dtype; dk and dv of the own block in float32
    Raises: ValueError as forward, and for gradient pages that the accumulation mode cannot add to
    """
    grads = backward_with_sinks(
        dout, q, k, v, out, lse, segments, geometry, sinks=None, past_grad=past_grad, accumulate=accumulate
    )
    return grads[:3]


def backward_with_sinks(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Iterable[Segment],
    geometry: Geometry,
    *,
    sinks: Tensor | None,
    past_grad: bool,
    accumulate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As backward, for an output and LSE with `sinks` in them; the sinks' gradient, [H] in their dtype, comes last."""
    _check_call(q, geometry)
    p = Problem.of(q, k, v, geometry)
    dout, out, lse = dout.contiguous(), out.contiguous(), lse.contiguous()
    if geometry.selected is not None:
        launches = _with_own(_checked(segments, accumulate) if past_grad else segments, geometry)
        with on_device(q):
            return triton_sparse.backward(p, launches, dout, out, lse, sinks, past_grad=past_grad)
    dq = torch.empty_like(p.q)
    # Atomic adds need something to add to; an owner stores to every place once.
    make = torch.zeros if accumulate == "atomic" else torch.empty
    dk, dv = (make(k.shape, device=k.device, dtype=torch.float32) for _ in range(2))
    carry: Tensor | None = None
    rows: Rows | None = None
    with on_device(q):
        for segment, last in _with_own(segments, geometry):
            if past_grad and segment is not None:
                _check_gradients(segment, accumulate)
            added = segment if past_grad else None
            if last and rows is None and p.at_once:
                rows = window_dq(p, segment, dout, out, lse, dq)
                window_dkdv(p, rows, added, dk, dv, accumulate)
                continue
            rows = rows or Rows.prepare(p, dout, out, lse)
            if past_grad or last:
                dkdv_launch(p, rows, added, dk, dv, accumulate, own=last)
            carry = dq_launch(p, rows, segment, carry, dq, own=last)
        assert rows is not None
        return dq, dk, dv, None if sinks is None else sinks_grad(p, rows, sinks)


def _check_call(q: Tensor, geometry: Geometry) -> None:
    problem = None
    if not q.is_cuda and not INTERPRETED:
        problem = f"expected CUDA tensors, got {q.device}"
    elif q.dtype not in DTYPES:
        problem = f"expected dtype bfloat16, float16 or float32, got {q.dtype}"
    elif q.dtype == torch.bfloat16 and INTERPRETED:
        problem = "bfloat16 is computed wrongly by Triton's interpreter; expected float16 or float32 there"
    elif q.shape[3] not in HEAD_DIMS:
        problem = f"expected head dim in {HEAD_DIMS}, got {q.shape[3]}"
    elif geometry.page_tokens not in PAGE_TOKENS:
        problem = f"expected pages of {' or '.join(map(str, PAGE_TOKENS))} tokens, got {geometry.page_tokens}"
    if problem is not None:
        raise ValueError(f'paged_attention, backend "triton": {problem}; use backend="reference"')


def _check_gradients(segment: Segment, accumulate: str) -> None:
    for name, pages in (("dk", segment.dk), ("dv", segment.dv)):
        assert pages is not None  # function.py checked it
        if not pages.is_contiguous():
            raise ValueError(f'paged_attention, backend "triton": expected contiguous {name} pages')
        if accumulate == "atomic" and pages.dtype != torch.float32:
            raise ValueError(
                f'paged_attention, backend "triton": accumulate="atomic" needs float32 gradient pages, got '
                f'{pages.dtype}; use accumulate="owner"'
            )


def _checked(segments: Iterable[Segment], accumulate: str) -> Iterator[Segment]:
    for segment in segments:
        _check_gradients(segment, accumulate)
        yield segment


def _with_own(segments: Iterable[Segment], geometry: Geometry) -> Iterator[tuple[Segment | None, bool]]:
    """The segments to launch over, each with whether the own block joins it: the last, or None where there is none."""
    pages = -(-max(geometry.lengths) // geometry.page_tokens)
    after: int | None = None
    joined = False
    for segment in segments:
        if after is not None and segment.first_page != after:
            raise RuntimeError(f"paged_attention: expected a segment from page {after} on, got {segment.first_page}")
        columns = segment.slots.shape[1]
        after = segment.first_page + columns
        if columns:
            joined = after >= pages
            yield segment, joined
    if after is not None and after < pages:
        raise RuntimeError(f"paged_attention: the past's segments ended at page {after} of {pages}")
    if not joined:
        yield None, True
