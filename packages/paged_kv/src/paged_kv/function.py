"""The autograd Function that every backend shares: sinks, kept outputs, the own block's gradient, and the guards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .past import Geometry, PastSource, Phase, Segment

Accumulate = Literal["owner", "atomic"]


class Kept(Protocol):
    """Where outputs of the forward wait for the backward: layer -> (out, lse). A dict is one.

    Shapes: out [B, C, H, D]; lse [B, H, C]
    """

    def __contains__(self, layer: int, /) -> bool: ...

    def __getitem__(self, layer: int, /) -> tuple[Tensor, Tensor]: ...

    def __setitem__(self, layer: int, value: tuple[Tensor, Tensor], /) -> None: ...

    def __delitem__(self, layer: int, /) -> None: ...


class Backend(Protocol):
    """What a backend module must hold.

    `forward` returns out [B, C, H, D] in q's dtype and lse [B, H, C] in float32 (float64 for float64); a row that sees
    nothing has out = 0 and lse = -inf. `backward` is given the global out and lse (all segments, own block and sink
    included) and adds into the segments' dk and dv when `past_grad`; it returns dq, dk_own and dv_own, new tensors.
    A backend that also has `backward_with_sinks` (the same with `sinks`, whose gradient it returns last) takes `sinks`
    in its forward; for others they are applied here.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Iterable[Segment], geometry: Geometry
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
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
        accumulate: Accumulate,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True)
class Call:
    """What one call of attention holds beside its differentiable tensors."""

    past: PastSource
    layer: int
    geometry: Geometry
    first_page: int
    backend: Backend
    accumulate: Accumulate
    kept: Kept | None


class PagedAttention(torch.autograd.Function):
    """out = attention(q, past and own k, v), with the past's gradient added to its pages in place."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> Tensor:
        out, lse = _kept_or_computed(q, k, v, sinks, call)
        geometry = call.geometry
        ctx.save_for_backward(q, k, v, sinks, out, lse, geometry.documents, geometry.selected)
        # Small tensors travel with the saved ones (hooks see them, a change in place is noticed), not with the call.
        ctx.call = replace(call, geometry=replace(geometry, documents=None, selected=None))
        ctx.spent = False
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse, documents, selected = ctx.saved_tensors
        call: Call = ctx.call
        geometry = replace(call.geometry, documents=documents, selected=selected)
        _check_walk(call, spent=ctx.spent)
        need_q, need_k, need_v, need_sinks, _ = ctx.needs_input_grad
        dq = dk = dv = dsinks = None
        if need_q or need_k or need_v:
            past_grad = need_k or need_v
            with _surroundings(q), _segments(call, q, k, "backward" if past_grad else "forward") as segments:
                inputs = (dout, q, k, v, out, lse, segments, geometry)
                options = {"past_grad": past_grad, "accumulate": call.accumulate}
                if need_sinks and hasattr(call.backend, "backward_with_sinks"):
                    dq, dk, dv, dsinks = call.backend.backward_with_sinks(*inputs, sinks=sinks, **options)
                else:
                    dq, dk, dv = call.backend.backward(*inputs, **options)
            if past_grad:
                own = call.past.own_grad(call.layer)
                # From here a second backward would add to the past again, or hand out the own gradient twice.
                ctx.spent = own is not None or any(geometry.lengths)
                dk, dv = _with_own_grad(dk, dv, own, k, lse.dtype)
        if need_sinks and dsinks is None:
            dsinks = _sinks_grad(dout, out, lse, sinks)
        if call.kept is not None and call.layer in call.kept:
            del call.kept[call.layer]
        return dq if need_q else None, dk if need_k else None, dv if need_v else None, dsinks, None


def _kept_or_computed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """The output and LSE, from `kept` where present. Both are the caller's to return: never kept's own objects."""
    if call.kept is not None and call.layer in call.kept:
        out, lse = call.kept[call.layer]
        if out.is_inference():  # filled under inference_mode; autograd cannot save such a tensor
            out, lse = out.clone(), lse.clone()
        return out.detach(), lse.detach()
    fused = sinks is not None and hasattr(call.backend, "backward_with_sinks")
    with _surroundings(q), _segments(call, q, k, "forward") as segments:
        if fused:
            out, lse = call.backend.forward(q, k, v, segments, call.geometry, sinks=sinks)  # type: ignore[call-arg]
        else:
            out, lse = call.backend.forward(q, k, v, segments, call.geometry)
    if sinks is not None and not fused:
        out, lse = _apply_sinks(out, lse, sinks)
    if call.kept is not None:
        call.kept[call.layer] = (out.detach(), lse)
    return out, lse


def _apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """One more logit per head in the softmax's divisor, whose value is zero.

    Shapes: out [B, C, H, D]; lse [B, H, C]; sinks [H]
    """
    sink = sinks.to(lse.dtype)[None, :, None]
    share = torch.sigmoid(lse - sink).masked_fill_(lse == -math.inf, 0.0)  # where nothing is seen the sink takes all
    return out.mul_(share.transpose(1, 2)[..., None]), torch.logaddexp(lse, sink)


def _sinks_grad(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """d sink = -sum exp(sink - LSE) * rowsum(dout * out), LSE and out with the sink in them."""
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)  # [B, H, C]
    share = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse).masked_fill_(lse == -math.inf, 0.0)
    return (share * delta).sum((0, 2)).neg_().to(sinks.dtype)


def _with_own_grad(
    dk: Tensor, dv: Tensor, own: tuple[Tensor, Tensor] | None, k: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add what later blocks left, once, in the accumulation dtype; then round to k's."""
    if own is not None:
        if own[0].shape != k.shape or own[1].shape != k.shape:
            raise RuntimeError(
                f"paged_attention: expected own_grad() of shape {tuple(k.shape)}, got {tuple(own[0].shape)} and "
                f"{tuple(own[1].shape)}; the past's open block is not the block this attention saw"
            )
        dk, dv = dk.to(dtype) + own[0], dv.to(dtype) + own[1]
    return dk.to(k.dtype), dv.to(k.dtype)


def _check_walk(call: Call, *, spent: bool) -> None:
    """Refuse what would leave wrong gradients in the pages."""
    now, then = tuple(call.past.lengths), call.geometry.lengths
    if now != then:
        raise RuntimeError(
            f"paged_attention: the past was {then} tokens long in layer {call.layer}'s forward and is {now} in its "
            "backward; put the past back (rewind) to where the block began before calling backward"
        )
    if spent:
        raise RuntimeError(
            f"paged_attention: layer {call.layer}'s backward ran already and added to the past's gradient pages; a "
            "second backward would add twice. Sum the losses first, or run the forward again"
        )


@contextmanager
def _segments(call: Call, q: Tensor, k: Tensor, phase: Phase) -> Iterator[Iterator[Segment]]:
    """The past's segments, each checked before a backend reads it, and released even if the backend fails."""
    source = call.past.segments(call.layer, phase, call.first_page)
    try:
        yield (_checked(segment, call, q, k, phase) for segment in source)
    finally:
        close = getattr(source, "close", None)
        if close is not None:
            close()


def _checked(segment: Segment, call: Call, q: Tensor, k: Tensor, phase: Phase) -> Segment:
    page = (call.geometry.page_tokens, k.shape[2], k.shape[3])
    for name, pages in (("k", segment.k), ("v", segment.v)):
        if tuple(pages.shape[1:]) != page or pages.dtype != k.dtype or pages.device != k.device:
            raise ValueError(
                f"paged_attention: expected {name} pages [slots, {', '.join(map(str, page))}] of {k.dtype} on "
                f"{k.device}, got {list(pages.shape)} of {pages.dtype} on {pages.device}; the past must hold this "
                "model's keys and values"
            )
    slots = segment.slots
    if slots.ndim != 2 or slots.shape[0] != q.shape[0] or slots.dtype != torch.int32 or slots.device != k.device:
        raise ValueError(
            f"paged_attention: expected slots [{q.shape[0]}, pages] int32 on {k.device}, got {list(slots.shape)} "
            f"{slots.dtype} on {slots.device}"
        )
    if phase == "backward" and (segment.dk is None or segment.dv is None or segment.grad_slots is None):
        raise ValueError(
            'paged_attention: the past yielded a segment without gradient pages in phase "backward"; a past that is '
            "only read needs keys and values that require no gradient"
        )
    return segment


@contextmanager
def _surroundings(q: Tensor) -> Iterator[None]:
    """What a backend runs in: Triton launches on the current device, whatever the tensors' is, and autocast would run a
    float32 backend's products in 16 bits.
    """
    device = torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext()
    with device, torch.autocast(q.device.type, enabled=False):
        yield
