"""Launches of the window kernels: which calls they serve, how keys are cut into tiles, and grids.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .past import Segment
from .triton_problem import Problem, Rows, aligned, check_pages
from .triton_tiles import Tile
from .triton_window_backward import _window_dkdv_kernel, _window_dq_kernel
from .triton_window_forward import _window_fwd_kernel

_LOG2E = math.log2(math.e)
DKDV_HEADS = 2  # of a group a step, where they divide it: 256 bytes that lie in a row


@dataclass(frozen=True)
class _Keys:
    """The keys as the kernels read them; without a segment the own block stands in for pages and is never read."""

    k: Tensor
    v: Tensor
    slots: Tensor
    columns: int
    first: int
    lengths: Tensor  # or, when the launch knows the length and has no documents, any int32 tensor
    documents: Tensor

    @staticmethod
    def of(p: Problem, segment: Segment | None) -> _Keys:
        if segment is None:
            return _Keys(p.k, p.v, p.lengths, 0, 0, p.lengths, p.documents)
        check_pages(segment.k)
        check_pages(segment.v)
        slots = segment.slots.contiguous()
        lengths = slots if p.length is not None else p.lengths
        documents = slots if p.geometry.documents is None else p.geometry.documents
        first = segment.first_page * p.geometry.page_tokens
        return _Keys(segment.k, segment.v, slots, slots.shape[1], first, lengths, documents)


def window_forward(p: Problem, segment: Segment | None, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """The whole forward in one launch: past, own block, sinks."""
    tile = p.tile("window fwd")
    keys = _Keys.of(p, segment)
    tiling = tiling_of(p.window, tile, p.repeat)
    _window_fwd_kernel[triton.cdiv(p.tokens, tiling["QUERIES"]) * p.groups, p.batch](
        _boxes(p.q, tiling), p.k, p.v, keys.k, keys.v, keys.slots, keys.lengths, keys.documents,
        lse if sinks is None else sinks, _boxes(out, tiling), lse,
        p.length or 0, p.tokens, keys.columns, keys.first, p.geometry.scale * _LOG2E,
        SINKS=sinks is not None, **_constants(p, tile, tiling),
    )  # fmt: skip


def window_dq(p: Problem, segment: Segment | None, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor) -> Rows:
    """dQ, and what the gradients of keys and sinks need of each row: LSE and delta.

    Shapes: stats [B * H / S, padded * S, 2]: a step of dK, dV takes S heads, and whole tiles of queries
    """
    tile, tiling = dq_tiling(p.tile, p.window, p.repeat, p.dim)
    keys = _Keys.of(p, segment)
    whole = p.tile("window dkdv").rows
    padded = triton.cdiv(p.tokens, whole) * whole
    together = heads_of(p.tile("window dkdv"), p.repeat, DKDV_HEADS)["SHARE"]
    shape = (p.batch * p.groups * p.repeat // together, padded * together, 2)
    stats = torch.empty(shape, device=p.q.device, dtype=torch.float32)
    boxes = [_boxes(x, tiling) for x in (p.q, dout, out, dq)]
    _window_dq_kernel[triton.cdiv(padded, tiling["QUERIES"]) * p.groups, p.batch](
        *boxes, lse, p.k, p.v, keys.k, keys.v, keys.slots, keys.lengths, keys.documents, stats,
        p.length or 0, p.tokens, padded, keys.columns, keys.first, p.sign * p.geometry.scale, p.geometry.scale * _LOG2E,
        TOGETHER=together, **_constants(p, tile, tiling),
    )  # fmt: skip
    return Rows(p.q, dout, stats)


def window_dkdv(p: Problem, rows: Rows, segment: Segment | None, dk: Tensor, dv: Tensor, accumulate: str) -> None:
    """dK and dV of a window's past keys, into their gradient pages, and of the own block's, into `dk` and `dv`."""
    tile = p.tile("window dkdv")
    heads = heads_of(tile, p.repeat, DKDV_HEADS)
    keys = _Keys.of(p, segment)
    past_tiles = 0
    pages_dk, pages_dv, grad_slots = dk, dv, keys.slots
    if segment is not None:
        assert segment.dk is not None and segment.dv is not None and segment.grad_slots is not None
        past_tiles = triton.cdiv(min(p.window - 1, max(p.geometry.lengths)), tile.keys)
        pages_dk, pages_dv, grad_slots = segment.dk, segment.dv, segment.grad_slots.contiguous()
    programs = (past_tiles + triton.cdiv(p.tokens, tile.keys)) * p.groups
    # Sequences that may share a page must not add to it at the same time.
    together = p.batch == 1 or segment is None or p.disjoint(segment)
    for batch, count in [(0, p.batch)] if together else [(b, 1) for b in range(p.batch)]:
        _window_dkdv_kernel[programs, count](
            _boxes(p.q, heads), _boxes(rows.dout, heads), p.k, p.v, keys.k, keys.v, keys.slots, grad_slots,
            keys.lengths, keys.documents, rows.stats, pages_dk, pages_dv, dk, dv,
            batch, p.length or 0, p.tokens, rows.stats.shape[1] // heads["SHARE"], keys.columns, keys.first, past_tiles,
            p.geometry.scale, p.geometry.scale * _LOG2E,
            BLOCK_N=tile.keys, PAST=past_tiles > 0, ATOMIC=accumulate == "atomic", **_constants(p, tile, heads),
        )  # fmt: skip


def _boxes(x: Tensor, rows: dict[str, Any]) -> TensorDescriptor:
    """Boxes of neighbouring queries and heads in [B, C, H, D], contiguous."""
    x = aligned(x)
    _, tokens, heads, dim = x.shape
    strides = [tokens * heads * dim, heads * dim, dim, 1]  # a dimension of one may have any stride, which boxes refuse
    return TensorDescriptor(x, x.shape, strides, [1, rows["QUERIES"], rows["SHARE"], triton.next_power_of_2(dim)])


def _constants(p: Problem, tile: Tile, rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {
        "GROUPS": p.groups,
        "REPEAT": p.repeat,
        "HEAD_DIM": p.dim,
        "DIM": triton.next_power_of_2(p.dim),
        "PAGE": p.geometry.page_tokens,
        "WINDOW": p.window,
        "DOCUMENTS": p.geometry.documents is not None,
        "UNIFORM": p.length is not None,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
        **registers_of(tile, rows),
    }


def registers_of(tile: Tile, rows: dict[str, Any]) -> dict[str, int]:
    """The bound on a thread's registers that lets `per_sm` programs share a multiprocessor, if one is needed.

    More queries than the tile's, for want of heads, see more keys: they get the registers that they ask for.
    """
    threads = 32 * tile.warps * tile.per_sm
    return {"maxnreg": 65536 // threads // 8 * 8} if threads > 256 and rows["QUERIES"] <= tile.keys else {}


def heads_of(tile: Tile, repeat: int, heads: int) -> dict[str, Any]:
    """A tile's rows are QUERIES queries of SHARE heads: `heads` of them, as far as that divides a group."""
    share = math.gcd(repeat, heads)
    return {"SHARE": share, "QUERIES": tile.rows // share}


def tiling_of(window: int, tile: Tile, repeat: int) -> dict[str, Any]:
    """What a tile's rows are, and how the keys that they see are cut: a window before them, and their own."""
    rows = heads_of(tile, repeat, tile.rows // tile.keys)
    widths = widths_of(window + rows["QUERIES"], tile.widest)
    starts = tuple(accumulate(widths[:-1], initial=0))
    return rows | {"STARTS": starts, "WIDTHS": widths}


def dq_tiling(tile_of: Callable[[str], Tile], window: int, repeat: int, dim: int) -> tuple[Tile, dict[str, Any]]:
    """HELD: of the 255 registers of 128 threads there are enough for 64 rows' weights, their gradients and dQ."""
    for kernel in ("window dq", "window dq, more keys"):
        tile = tile_of(kernel)
        tiling = tiling_of(window, tile, repeat)
        tiling["HELD"] = sum(tiling["WIDTHS"]) + triton.next_power_of_2(dim) // 2 <= 192
        if tiling["HELD"]:
            break
    return tile, tiling


def widths_of(span: int, most: int) -> tuple[int, ...]:
    """Powers of two from 16 to `most` that cover `span` keys, wide ones first."""
    widths: list[int] = []
    while span > 0:
        widths.append(max(min(most, 1 << (span.bit_length() - 1)), 16))
        span -= widths[-1]
    return tuple(widths)
