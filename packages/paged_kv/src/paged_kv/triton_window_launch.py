"""Launches of the window kernels: which calls they serve, how keys are cut into tiles, and grids.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .past import Segment
from .triton_problem import Problem, Rows, check_pages
from .triton_tiles import Tile
from .triton_window import _window_dkdv_kernel, _window_dq_kernel
from .triton_window_forward import _window_fwd_kernel

_LOG2E = math.log2(math.e)


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


def serves_forward(p: Problem) -> bool:
    """Whether the window and the heads of a group are whole tiles of the forward's."""
    if not p.at_once:
        return False
    tile = p.tile("window fwd")
    return p.window % tile.keys == 0 and p.repeat % (tile.rows // tile.keys) == 0


def window_forward(p: Problem, segment: Segment | None, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
    """The whole forward in one launch: past, own block, sinks. A tile is `keys` queries of `rows / keys` heads."""
    tile = p.tile("window fwd")
    keys = _Keys.of(p, segment)
    constants = _constants(p, tile)
    del constants["WINDOW"]
    heads = tile.rows // tile.keys
    _window_fwd_kernel[triton.cdiv(p.tokens, tile.keys) * p.groups, p.batch](
        _boxes(p.q, tile.keys, heads), p.k, p.v, keys.k, keys.v, keys.slots, keys.lengths, keys.documents,
        lse if sinks is None else sinks, _boxes(out, tile.keys, heads), lse,
        p.length or 0, p.tokens, keys.columns, keys.first, max(p.geometry.scale * _LOG2E, 1e-30),
        QUERIES=tile.keys, LAST=p.window // tile.keys, SINKS=sinks is not None, STAGES=tile.stages, **constants,
    )  # fmt: skip


def window_dq(p: Problem, segment: Segment | None, dout: Tensor, out: Tensor, lse: Tensor, dq: Tensor) -> Rows:
    """dQ, and what the gradient of keys and sinks needs of each row: LSE and delta [B * H, C padded to whole tiles]."""
    tile = p.tile("window dq")
    keys = _Keys.of(p, segment)
    whole = p.tile("window dkdv").rows
    padded = triton.cdiv(p.tokens, whole) * whole
    shape = (p.batch * p.groups * p.repeat, padded)
    row_lse, delta = (torch.empty(shape, device=p.q.device, dtype=torch.float32) for _ in range(2))
    _window_dq_kernel[triton.cdiv(padded * p.repeat, tile.rows) * p.groups, p.batch](
        p.q, dout, out, lse, p.k, p.v, keys.k, keys.v, keys.slots, keys.lengths, keys.documents, row_lse, delta, dq,
        p.length or 0, p.tokens, padded, keys.columns, keys.first, p.sign * p.geometry.scale, p.geometry.scale * _LOG2E,
        **_row_constants(p, tile),
    )  # fmt: skip
    return Rows(p.q, dout, row_lse, delta)


def window_dkdv(p: Problem, rows: Rows, segment: Segment | None, dk: Tensor, dv: Tensor, accumulate: str) -> None:
    """dK and dV of a window's past keys, into their gradient pages, and of the own block's, into `dk` and `dv`."""
    tile = p.tile("window dkdv")
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
            _boxes(p.q, tile.rows), _boxes(rows.dout, tile.rows), p.k, p.v, keys.k, keys.v, keys.slots, grad_slots,
            keys.lengths, keys.documents, rows.lse, rows.delta, pages_dk, pages_dv, dk, dv,
            batch, p.length or 0, p.tokens, rows.lse.shape[1], keys.columns, keys.first, past_tiles,
            p.geometry.scale, p.geometry.scale * _LOG2E,
            BLOCK_N=tile.keys, PAST=past_tiles > 0, ATOMIC=accumulate == "atomic", STAGES=tile.stages,
            **_constants(p, tile),
        )  # fmt: skip


def _boxes(x: Tensor, queries: int, heads: int = 1) -> TensorDescriptor:
    """Boxes of neighbouring queries and heads in [B, C, H, D]."""
    if x.data_ptr() % 16:
        x = x.clone()
    return TensorDescriptor.from_tensor(x, [1, queries, heads, triton.next_power_of_2(x.shape[3])])


def _constants(p: Problem, tile: Tile) -> dict[str, Any]:
    return {
        "GROUPS": p.groups,
        "REPEAT": p.repeat,
        "HEAD_DIM": p.dim,
        "DIM": triton.next_power_of_2(p.dim),
        "PAGE": p.geometry.page_tokens,
        "BLOCK_M": tile.rows,
        "WINDOW": p.window,
        "DOCUMENTS": p.geometry.documents is not None,
        "UNIFORM": p.length is not None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": True,
        **registers_of(tile),
    }


def registers_of(tile: Tile) -> dict[str, int]:
    """The bound on a thread's registers that lets `per_sm` programs share a multiprocessor, if one is needed."""
    threads = 32 * tile.warps * tile.per_sm
    return {"maxnreg": 65536 // threads // 8 * 8} if threads > 256 else {}


def _row_constants(p: Problem, tile: Tile) -> dict[str, Any]:
    return _constants(p, tile) | tiling_of(p.window, tile, p.repeat)


def tiling_of(window: int, tile: Tile, repeat: int) -> dict[str, Any]:
    """How the keys that a tile of rows sees are cut, counted from the first that its first query sees."""
    queries = queries_of(tile.rows, repeat)
    widths = widths_of(window + queries - 1, tile.keys)
    starts = tuple(accumulate(widths[:-1], initial=0))
    edges = tuple(start < queries - 1 or start + width > window for start, width in zip(starts, widths))
    return {"QUERIES": queries, "STARTS": starts, "WIDTHS": widths, "EDGES": edges}


def queries_of(rows: int, repeat: int) -> int:
    """How many queries a tile of rows may touch."""
    return rows // repeat if rows % repeat == 0 else (rows - 2) // repeat + 2


def widths_of(span: int, most: int) -> tuple[int, ...]:
    """Powers of two from 16 to `most` that cover `span` keys, narrow ones first: the edges' masks cost by width."""
    widths: list[int] = []
    while span > 0:
        width = min(most, 1 << (span.bit_length() - 1))
        widths.append(max(width, 16))
        span -= widths[-1]
    return tuple(sorted(widths))
