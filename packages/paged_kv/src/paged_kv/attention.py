"""The public call: checks everything, picks a backend, and hands over to the autograd Function."""

from __future__ import annotations

import importlib
import math
from typing import Literal

import torch
from torch import Tensor

from . import auto, packed
from .function import Accumulate, Backend, Call, Kept, PagedAttention
from .page_table import is_count
from .past import Geometry, PastSource, listed

BackendName = Literal["auto", "reference", "triton", "cudnn"]
_MODULES = {"reference": "reference", "triton": "triton_attention", "cudnn": "cudnn"}


@torch.compiler.disable
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: PastSource,
    layer: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    documents: Tensor | None = None,
    first_token: int | None = None,
    selected: Tensor | None = None,
    kept: Kept | None = None,
    backend: BackendName = "auto",
    accumulate: Accumulate = "owner",
) -> Tensor:
    """Attention of one block of queries over the paged past and the block's own keys and values, causal.

    Query c of sequence b stands at position `i = past.lengths[b] + c` and sees key j iff `j <= i`, `j > i - window`,
    `j >= documents[b, c]` and page `j // P` is in `selected[b, g, i // P - past.lengths[b] // P]`, each where given.
    A row that sees nothing is zero. In the backward, gradients of past keys and values are added to the past's gradient
    pages in place; k and v get their own gradient plus what later blocks left for them. `past` must then be as long as
    it was in the forward. When neither k nor v requires grad, no gradient page is touched.

    Shapes: q [B, C, H, D]; k, v [B, C, G, D], H a multiple of G; sinks [H], one extra logit a head;
        documents [B, C] int, position of the first token of each query's document;
        selected [B, G or 1, Q, K] int32 logical page ids, -1 padded
    Units:  window in tokens; first_token a position: a promise that no query sees a key before it
    Returns: [B, C, H, D] in q's dtype
    Raises: ValueError for anything that does not fit, before anything is touched, and for a backend that is not
        available; RuntimeError from the backward when the past changed since the forward
    Source: FlashAttention-2 (arXiv 2307.08691), PagedAttention (arXiv 2309.06180); oracle: reference.py
    In inference the tokens of several sequences come without padding, q [T, H, D] and k, v [T, G, D], in the order of
    `PagedKV.extend({sequence: tokens})`, after `append`: forward only, no documents, first_token or kept (packed.py).
    `kept`: mapping layer -> (out, lse). Absent: computed and set. Present: reused. The layer's backward deletes it.
    """
    if all(isinstance(x, Tensor) and x.ndim == 3 for x in (q, k, v)):
        return _packed(q, k, v, past, layer, scale, window, sinks, documents, first_token, selected, kept, backend)
    _check_tensors(q, k, v)
    lengths = _check_past(past, layer, q.shape[0])
    _check_options(scale, window, first_token, accumulate)
    _check_sinks(sinks, q, heads=q.shape[2])
    documents = _check_documents(documents, q)
    selected = _check_selected(selected, q, k, lengths, past.page_tokens)
    _check_kept(kept, layer, q)
    window = None if window is None else min(window, 2**31)  # beyond every position, and none overflows
    geometry = Geometry(float(scale), lengths, past.page_tokens, window, documents, selected)
    chosen = load_backend(auto.choose(q, k, geometry, past)[0] if backend == "auto" else backend)
    call = Call(past, layer, geometry, _first_page(geometry, first_token), chosen, accumulate, kept)
    return PagedAttention.apply(q, k, v, sinks, call)


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    past: PastSource,
    layer: int,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    documents: Tensor | None,
    first_token: int | None,
    selected: Tensor | None,
    kept: Kept | None,
    backend: BackendName,
) -> Tensor:
    """Tokens of several sequences without padding, forward only (packed.py)."""
    for name, value in (("documents", documents), ("first_token", first_token), ("kept", kept)):
        if value is not None:
            raise ValueError(
                f"paged_attention: {name} is for [B, C, H, D]; tokens without padding, [T, H, D], take none"
            )
    if backend != "auto":
        load_backend(backend)
    _check_options(scale, window, first_token, "owner")
    _check_sinks(sinks, q, heads=q.shape[1])
    more = {"scale": scale, "window": window, "sinks": sinks, "selected": selected, "backend": backend}
    return packed.packed_attention(paged_attention, q, k, v, past, layer, **more)  # type: ignore[arg-type]


def load_backend(name: str) -> Backend:
    """The module that holds a backend's two functions; it is imported here, when asked for, and not before."""
    if name not in _MODULES:
        raise ValueError(f"paged_attention: expected backend auto, {', '.join(_MODULES)}, got {name!r}")
    try:
        return importlib.import_module(f"{__package__}.{_MODULES[name]}")
    except ImportError as error:
        raise ValueError(
            f"paged_attention: backend {name!r} is not available here ({error}); install what it needs or ask for "
            'backend="reference"'
        ) from error


def _first_page(geometry: Geometry, first_token: int | None) -> int:
    """The first past page any query may see, as far as the host knows without asking the device."""
    page = geometry.page_tokens
    pages = -(-max(geometry.lengths) // page)
    first = first_token or 0
    if geometry.window is not None:
        # Query 0 reaches furthest back. A sequence whose window lies wholly in the own block bounds nothing.
        starts = [max(0, length - geometry.window + 1) for length in geometry.lengths]
        first = max(first, min((s for s, n in zip(starts, geometry.lengths) if s < n), default=pages * page))
    if first_token is None and geometry.documents is not None and geometry.documents.device.type == "cpu":
        first = max(first, int(geometry.documents.min()))
    return min(first // page, pages)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4 or 0 in x.shape:
            got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"paged_attention: expected {name} [B, C, heads, D] with no empty dimension, got {got}; without "
                "padding q, k and v are all [T, heads, D]"
            )
        if not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"paged_attention: expected q, k and v of one floating dtype on one device, got q {q.dtype} on "
                f"{q.device} and {name} {x.dtype} on {x.device}; cast or move them first"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"paged_attention: expected k and v of one shape, got {list(k.shape)} and {list(v.shape)}; values of "
            "another width are not supported"
        )
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"paged_attention: expected q and k of one batch, length and width, got {list(q.shape)} and {list(k.shape)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"paged_attention: expected query heads to be a multiple of KV heads, got {q.shape[2]} and {k.shape[2]}"
        )


def _check_past(past: PastSource, layer: int, batch: int) -> tuple[int, ...]:
    if not is_count(layer, 0):
        raise ValueError(f"paged_attention: expected layer to be an int >= 0, got {layer!r}")
    page_tokens = getattr(past, "page_tokens", None)
    if not is_count(page_tokens, 1):
        raise ValueError(
            f"paged_attention: expected a past with page_tokens, a positive int, got {type(past).__name__} with "
            f"{page_tokens!r}"
        )
    lengths = tuple(past.lengths)
    if len(lengths) != batch or not all(is_count(n, 0) for n in lengths):
        raise ValueError(f"paged_attention: expected past.lengths to be {batch} ints >= 0 (q's batch), got {lengths}")
    return lengths


def _check_options(scale: float, window: int | None, first_token: int | None, accumulate: Accumulate) -> None:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not math.isfinite(scale):
        raise ValueError(f"paged_attention: expected scale to be a finite number, got {scale!r}; often D ** -0.5")
    if window is not None and not is_count(window, 1):
        raise ValueError(f"paged_attention: expected window to be a positive int or None, got {window!r}")
    if first_token is not None and not is_count(first_token, 0):
        raise ValueError(f"paged_attention: expected first_token to be an int >= 0 or None, got {first_token!r}")
    if accumulate not in ("owner", "atomic"):
        raise ValueError(f"paged_attention: expected accumulate 'owner' or 'atomic', got {accumulate!r}")


def _check_sinks(sinks: Tensor | None, q: Tensor, heads: int) -> None:
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise ValueError(f"paged_attention: expected sinks to be a tensor [{heads}], got {type(sinks).__name__}")
    if tuple(sinks.shape) != (heads,) or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(
            f"paged_attention: expected sinks [{heads}] of a floating dtype on {q.device}, got {list(sinks.shape)} of "
            f"{sinks.dtype} on {sinks.device}"
        )


def _check_documents(documents: Tensor | None, q: Tensor) -> Tensor | None:
    if documents is None:
        return None
    if not isinstance(documents, Tensor):
        raise ValueError(f"paged_attention: expected documents to be a tensor [B, C], got {type(documents).__name__}")
    if documents.shape != q.shape[:2] or documents.device != q.device:
        raise ValueError(
            f"paged_attention: expected documents {list(q.shape[:2])} on {q.device}, got {list(documents.shape)} on "
            f"{documents.device}"
        )
    if documents.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"paged_attention: expected documents of int32 or int64, got {documents.dtype}")
    # Backends read one dtype, and add to what they read: beyond every position says the same, and nothing overflows.
    return documents.clamp(0, 2**31 - 2**10).to(torch.int32).contiguous()


def _check_selected(
    selected: Tensor | None, q: Tensor, k: Tensor, lengths: tuple[int, ...], page: int
) -> Tensor | None:
    if selected is None:
        return None
    if not isinstance(selected, Tensor):
        raise ValueError(f"paged_attention: expected selected to be a tensor, got {type(selected).__name__}")
    blocks = max((n + q.shape[1] - 1) // page - n // page + 1 for n in lengths)
    heads = (1, k.shape[2])
    shape = tuple(selected.shape)
    if len(shape) != 4 or shape[0] != q.shape[0] or shape[1] not in heads or shape[2] != blocks:
        raise ValueError(
            f"paged_attention: expected selected [{q.shape[0]}, {heads[1]} or 1, {blocks}, K] ({blocks} query blocks "
            f"cut at multiples of {page}), got {list(shape)}"
        )
    if selected.dtype != torch.int32 or selected.device != q.device:
        raise ValueError(
            f"paged_attention: expected selected of int32 on {q.device}, got {selected.dtype} on {selected.device}"
        )
    return listed(selected)


def _check_kept(kept: Kept | None, layer: int, q: Tensor) -> None:
    if kept is None or layer not in kept:
        return
    out, lse = kept[layer]
    batch, tokens, heads, _ = q.shape
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or lse.shape != (batch, heads, tokens):
        raise ValueError(
            f"paged_attention: kept[{layer}] holds out {list(out.shape)} {out.dtype} on {out.device} and lse "
            f"{list(lse.shape)}, q is {list(q.shape)} {q.dtype} on {q.device}; use one mapping for each block"
        )
