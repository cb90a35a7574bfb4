"""Attention of a mixed batch, forward only: prompts, parts of prompts and single tokens in one call.

Sequences with a few tokens go through the decode kernel, all in one launch; the others are blocks over their past, as
in training, and go through its backends at its speed. Nothing here waits for the device.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from .device_table import Block
from .past import listed
from .resident import PagedKV

Attend = Callable[..., Tensor]


def packed_attention(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: PagedKV,
    layer: int,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    selected: Tensor | None,
    backend: str,
) -> Tensor:
    """`paged_attention` over the open block of a `PagedKV`, whose keys and values were appended to this layer.

    `attend` is attention of padded blocks, [B, C, H, D].
    Shapes: q [T, H, D]; k, v [T, G, D]: the block's tokens, one sequence after the other; sinks [H];
        selected [S, G or 1, Q, K] int32 for the block's S sequences, Q the most query blocks that one of them has
    Returns: [T, H, D]
    Raises: ValueError for anything that does not fit
    """
    block = _check(q, k, v, sinks, kv, layer)
    selected = _check_selected(selected, k, block, kv)
    tokens = block.tokens
    few, most = _decoded(q, k, kv, tokens, backend)
    groups: dict[int, list[int]] = {}
    for s, count in enumerate(tokens):
        if count and s not in few:
            groups.setdefault(count, []).append(s)
    if groups and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "paged_attention: a captured graph would keep the lengths of this block: only sequences with a few tokens, "
            f'served by the decode kernel, can be captured; got {tokens} tokens with backend "{backend}"'
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if few:
        kernel = importlib.import_module(f"{__package__}.triton_decode")
        kernel.decode(
            q.contiguous(), kv.pool.k[layer], kv.pool.v[layer], out, kv.step(), most,
            scale=float(scale), window=window, sinks=sinks, selected=selected,
        )  # fmt: skip
    for count, members in groups.items():
        options = {"scale": scale, "window": window, "sinks": sinks, "backend": backend}
        if selected is not None:
            options["selected"] = _lists_of(selected, block, members, kv.page_tokens)
        _attend_group(attend, (q, k, v), out, kv, layer, members, count, options)
    return out


def _decoded(q: Tensor, k: Tensor, kv: PagedKV, tokens: tuple[int, ...], backend: str) -> tuple[set[int], int]:
    """Which sequences the decode kernel serves, and the most tokens one of them has."""
    if backend not in ("auto", "triton"):
        return set(), 0
    if backend == "auto" and not q.is_cuda:
        return set(), 0
    try:
        kernel = importlib.import_module(f"{__package__}.triton_decode")
        obstacle = kernel.why_not(q, k.shape[1], kv.page_tokens)
    except ImportError as error:
        obstacle = f"not available here ({error})"
    if obstacle is not None:
        if backend == "triton":
            raise ValueError(f'paged_attention, backend "triton": {obstacle}; use backend="reference"')
        return set(), 0
    few = {s for s, count in enumerate(tokens) if 0 < count <= kernel.MAX_TOKENS}
    return few, max((tokens[s] for s in few), default=0)


def _attend_group(
    attend: Attend,
    tensors: tuple[Tensor, ...],
    out: Tensor,
    kv: PagedKV,
    layer: int,
    members: list[int],
    count: int,
    options: dict,
) -> None:
    """Sequences with equally many tokens, as one padded batch without padding."""
    assert kv.block is not None
    ends = list(accumulate(kv.block.tokens))
    places = [slice(ends[s] - count, ends[s]) for s in members]
    view = kv.view(tuple(members))
    if len(members) == 1:
        parts = [x[None, places[0]] for x in tensors]
    else:
        parts = [torch.stack([x[place] for place in places]) for x in tensors]
    result = attend(*parts, view, layer, **options)
    for place, rows in zip(places, result):
        out[place] = rows


def _lists_of(selected: Tensor, block: Block, members: list[int], page: int) -> Tensor:
    blocks = max(_query_blocks(block, s, page) for s in members)
    rows = selected[:, :, :blocks]
    return rows if len(members) == len(block.sequences) else torch.stack([rows[s] for s in members])


def _query_blocks(block: Block, s: int, page: int) -> int:
    return (block.ends[s] - 1) // page - block.starts[s] // page + 1


def _check(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kv: PagedKV, layer: int) -> Block:
    if not isinstance(kv, PagedKV):
        raise ValueError(
            f"paged_attention: tokens without padding, [T, H, D], need a PagedKV, got {type(kv).__name__}; other pasts "
            "take [B, C, H, D]"
        )
    kv.check_layer(layer)
    block = kv.block
    if block is None:
        raise ValueError("paged_attention: no block is open; call extend({sequence: tokens}) and append first")
    groups, dim = kv.pool.k[layer].shape[2:]
    total = sum(block.tokens)
    for name, x, heads in (("q", q, None), ("k", k, groups), ("v", v, groups)):
        shape = (total, x.shape[1] if heads is None and x.ndim == 3 else heads, dim)
        if tuple(x.shape) != shape or x.dtype != kv.pool.dtype or x.device != kv.pool.device:
            text = f"[{total}, {'heads' if heads is None else heads}, {dim}]"
            raise ValueError(
                f"paged_attention: expected {name} {text} {kv.pool.dtype} on {kv.pool.device} (the open block has "
                f"{total} tokens), got {list(x.shape)} {x.dtype} on {x.device}"
            )
    if not q.shape[1] or q.shape[1] % groups:
        raise ValueError(f"paged_attention: expected query heads to be a multiple of {groups}, got {q.shape[1]}")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, sinks)):
        raise ValueError(
            "paged_attention: tokens without padding, [T, H, D], have no backward: call it under torch.no_grad(), or "
            "train with [B, C, H, D]"
        )
    if not kv.appended(layer):
        raise ValueError(f"paged_attention: append the block's keys and values to layer {layer} first")
    return block


def _check_selected(selected: Tensor | None, k: Tensor, block: Block, kv: PagedKV) -> Tensor | None:
    if selected is None:
        return None
    if not isinstance(selected, Tensor):
        raise ValueError(f"paged_attention: expected selected to be a tensor, got {type(selected).__name__}")
    blocks = max(_query_blocks(block, s, kv.page_tokens) for s in range(len(block.sequences)))
    shape = tuple(selected.shape)
    if len(shape) != 4 or shape[0] != len(block.sequences) or shape[1] not in (1, k.shape[1]) or shape[2] != blocks:
        raise ValueError(
            f"paged_attention: expected selected [{len(block.sequences)}, {k.shape[1]} or 1, {blocks}, K] (sequences "
            f"of the block; query blocks cut at multiples of {kv.page_tokens}), got {list(shape)}"
        )
    if selected.dtype != torch.int32 or selected.device != k.device:
        raise ValueError(
            f"paged_attention: expected selected of int32 on {k.device}, got {selected.dtype} on {selected.device}"
        )
    return listed(selected)
