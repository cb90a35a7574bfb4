"""The records that the launches of one call share: its tensors, the rows of its backward, partial results.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .past import Geometry, Segment
from .triton_backward import _prepare_bwd_kernel
from .triton_tiles import Tile, tile_for

INTERPRETED = not isinstance(_prepare_bwd_kernel, triton.JITFunction)
_ROW_PADDING = 128  # LSE and delta are padded to whole row tiles of the backward, of any size


@dataclass(frozen=True)
class Problem:
    """What all launches of one call share: tensors that are contiguous and aligned."""

    q: Tensor
    k: Tensor
    v: Tensor
    geometry: Geometry  # with a scale above zero: its sign is in q
    sign: float  # 0, where q is zero too, for a scale of zero

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Problem:
        if geometry.window is not None and geometry.window >= max(geometry.lengths) + q.shape[1]:
            geometry = replace(geometry, window=None)  # it hides nothing, and sums with it could overflow
        sign = math.copysign(1.0, geometry.scale)
        if abs(geometry.scale) < torch.finfo(torch.float32).tiny:  # times it, a hidden score of -inf would be NaN
            q, sign, geometry = torch.zeros_like(q), 0.0, replace(geometry, scale=1.0)
        elif sign < 0.0:  # the kernels take the largest product for the largest score
            q, geometry = -q, replace(geometry, scale=-geometry.scale)
        q, k, v = (aligned(x.contiguous()) for x in (q, k, v))
        return Problem(q, k, v, geometry, sign)

    @property
    def length(self) -> int | None:
        """The one length of all sequences, if they have one."""
        return self.geometry.lengths[0] if len(set(self.geometry.lengths)) == 1 else None

    @cached_property
    def lengths(self) -> Tensor:
        """[B] int32 on the device, made when a kernel asks for it."""
        if self.length is not None:  # a fill kernel takes the number as an argument: no copy to the device, no wait
            return torch.full((self.batch,), self.length, dtype=torch.int32, device=self.q.device)
        return torch.tensor(self.geometry.lengths, dtype=torch.int32, device="cpu").to(self.q.device, non_blocking=True)

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def groups(self) -> int:
        return self.k.shape[2]

    @property
    def repeat(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    @property
    def dim(self) -> int:
        return self.q.shape[3]

    @property
    def rows(self) -> int:
        return self.tokens * self.repeat

    @property
    def documents(self) -> Tensor:
        """The kernels' argument; any int32 tensor stands in where there are none."""
        return self.lengths if self.geometry.documents is None else self.geometry.documents

    @property
    def window(self) -> int:
        return self.geometry.window or 0

    def tile(self, kernel: str) -> Tile:
        capability = (9, 0) if INTERPRETED else torch.cuda.get_device_capability(self.q.device)
        return tile_for(kernel, triton.next_power_of_2(self.dim), self.q.dtype, capability)

    @property
    def at_once(self) -> bool:
        """Whether the window kernels serve this: what a tile of rows sees fits the chip at once."""
        dim = triton.next_power_of_2(self.dim)
        if self.geometry.window is None or dim > 128 or self.geometry.window * dim > 2**14:
            return False
        if INTERPRETED:
            return True
        large = torch.cuda.get_device_capability(self.q.device)[0] in (9, 10)
        return large and self.q.dtype != torch.float32

    def disjoint(self, segment: Segment) -> bool:
        """Whether the host knows that no gradient page belongs to two sequences."""
        if segment.grad_runs is None:
            return False
        page = self.geometry.page_tokens
        pages = [min(-(-n // page) - segment.first_page, segment.slots.shape[1]) for n in self.geometry.lengths]
        runs = sorted((run, run + n) for run, n in zip(segment.grad_runs, pages) if n > 0)
        return all(end <= start for (_, end), (start, _) in pairwise(runs))

    @property
    def boxes(self) -> bool:
        """Whether the host describes boxes, for the chip to fetch; older ones get pointers (triton_boxes.py)."""
        return INTERPRETED or torch.cuda.get_device_capability(self.q.device)[0] >= 9

    def keys_of(self, pages: Tensor, block: int) -> TensorDescriptor | Tensor:
        """Tiles of one head's tokens in [slots, P, G, D]; the own block is read as one long page a sequence."""
        check_pages(pages)
        if not self.boxes:
            return pages
        slots, tokens, groups, dim = pages.shape
        strides = [tokens * groups * dim, dim, groups * dim, 1]
        width = triton.next_power_of_2(dim)
        return TensorDescriptor(pages, [slots, groups, tokens, dim], strides, [1, 1, block, width])

    def slots(self, tile: Tile) -> int:
        """How many programs run at once."""
        if INTERPRETED:
            return tile.per_sm
        return tile.per_sm * torch.cuda.get_device_properties(self.q.device).multi_processor_count

    def constants(self, tile: Tile) -> dict[str, Any]:
        geometry = self.geometry
        return {
            "GROUPS": self.groups,
            "REPEAT": self.repeat,
            "HEAD_DIM": self.dim,
            "DIM": triton.next_power_of_2(self.dim),
            "PAGE": geometry.page_tokens,
            "BLOCK_M": tile.rows,
            "BLOCK_N": min(tile.keys, geometry.page_tokens),
            "WINDOW": geometry.window is not None,
            "DOCUMENTS": geometry.documents is not None,
            "STAGES": tile.stages,
            "POINTERS": not self.boxes,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
            "enable_fp_fusion": True,
        }


@dataclass(frozen=True)
class Partial:
    """A float32 output over some of the keys and its LSE: what launches pass on, or what is merged."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(p: Problem, *parts: int) -> Partial:
        make = partial(torch.empty, device=p.q.device, dtype=torch.float32)
        return Partial(make(*parts, *p.q.shape), make(*parts, p.batch, p.q.shape[2], p.tokens))


@dataclass(frozen=True)
class Rows:
    """What the backward reads of each row.

    Shapes: q, dout [B * G, M, D] and stats, LSE in base 2 and delta, [B * G, M or more, 2] float32 where they were laid
        out by rows, M = C * R; else q, dout [B, C, H, D] and stats [B * H / S, C * S or more, 2], S heads of a token in
        a row
    """

    q: Tensor
    dout: Tensor
    stats: Tensor

    def sources(self, p: Problem, block: int) -> tuple[TensorDescriptor | Tensor, ...]:
        """q and dout as kernels read them, `block` rows at a time."""
        if not p.boxes:
            return self.q, self.dout
        box = [1, block, triton.next_power_of_2(p.dim)]
        return tuple(TensorDescriptor.from_tensor(x, box) for x in (self.q, self.dout))

    @staticmethod
    def prepare(p: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> Rows:
        """Lay q and dout out by rows: every key tile reads them all, so this pays."""
        blocks = p.batch * p.groups
        padded = triton.cdiv(p.rows, _ROW_PADDING) * _ROW_PADDING
        q_rows, dout_rows = (p.q.new_empty(blocks, p.rows, p.dim) for _ in range(2))
        stats = torch.empty(blocks, padded, 2, device=p.q.device, dtype=torch.float32)
        block = 64
        with on_device(p.q):
            _prepare_bwd_kernel[(padded // block, p.groups, p.batch)](
                p.q, out, dout, lse, q_rows, dout_rows, stats, p.tokens, padded,
                GROUPS=p.groups, REPEAT=p.repeat, HEAD_DIM=p.dim, DIM=triton.next_power_of_2(p.dim), BLOCK_M=block,
                num_warps=4,
            )  # fmt: skip
        return Rows(q_rows, dout_rows, stats)


def aligned(x: Tensor) -> Tensor:
    """Kernels fetch 16 bytes at once; a view may begin anywhere."""
    return x.clone() if x.data_ptr() % 16 else x


def on_device(q: Tensor) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()


def check_pages(pages: Tensor) -> None:
    if not pages.is_contiguous() or pages.data_ptr() % 16:
        raise ValueError(
            'paged_attention, backend "triton": expected contiguous pages that start at a multiple of 16 bytes, got '
            f"strides {pages.stride()}"
        )
