"""The records that the launches of one call share: its tensors, the rows of its backward, partial results.

Letters: B batch · C chunk tokens · P tokens a page · H query heads · G KV heads · R = H / G · D head dim
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .past import Geometry
from .triton_backward import _prepare_bwd_kernel
from .triton_tiles import Tile, tile_for

INTERPRETED = not isinstance(_prepare_bwd_kernel, triton.JITFunction)
_ROW_PADDING = 128  # LSE and delta are padded to whole row tiles of any size


@dataclass(frozen=True)
class Problem:
    """What all launches of one call share."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor  # [B] int32 on the device
    geometry: Geometry  # with a scale >= 0: its sign is in q
    sign: float

    @staticmethod
    def of(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Problem:
        lengths = geometry.lengths
        if geometry.window is not None and geometry.window >= max(lengths) + q.shape[1]:
            geometry = replace(geometry, window=None)  # it hides nothing, and sums with it could overflow
        if len(set(lengths)) == 1:  # a fill kernel takes the number as an argument: no copy to the device, no wait
            on_device = torch.full((len(lengths),), lengths[0], dtype=torch.int32, device=q.device)
        else:
            on_device = torch.tensor(lengths, dtype=torch.int32).to(q.device, non_blocking=True)
        sign = math.copysign(1.0, geometry.scale)
        if sign < 0.0:  # the kernels take the largest product for the largest score
            q, geometry = -q, replace(geometry, scale=-geometry.scale)
        return Problem(q.contiguous(), k.contiguous(), v.contiguous(), on_device, geometry, sign)

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
        return tile_for(kernel, triton.next_power_of_2(self.dim), self.q.dtype, capability, narrow=self.narrow)

    @property
    def narrow(self) -> bool:
        """A window of a few tiles: one masked loop beats several short ones."""
        return self.geometry.window is not None and self.geometry.window <= 256

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
            "ONE_LOOP": self.narrow,
            "STAGES": tile.stages,
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
    """What the backward reads of each row. A small window reads q and dout once or twice: they stay where they are.

    Shapes: q, dout [B * G, C * R, D] when packed, else [B, C, H, D]; lse, delta [B * G, padded rows] float32
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    packed: bool

    def sources(self, tile: Tile) -> tuple[TensorDescriptor | Tensor, TensorDescriptor | Tensor]:
        if not self.packed:
            return self.q, self.dout
        block = [1, tile.rows, triton.next_power_of_2(self.q.shape[2])]
        return TensorDescriptor.from_tensor(self.q, block), TensorDescriptor.from_tensor(self.dout, block)

    @staticmethod
    def prepare(p: Problem, dout: Tensor, out: Tensor, lse: Tensor) -> Rows:
        blocks = p.batch * p.groups
        padded = triton.cdiv(p.rows, _ROW_PADDING) * _ROW_PADDING
        packed = not p.narrow
        dout = dout.contiguous()
        q_rows, dout_rows = p.q, dout
        if packed:
            q_rows, dout_rows = (p.q.new_empty(blocks, p.rows, p.dim) for _ in range(2))
        row_lse, delta = (torch.empty(blocks, padded, device=p.q.device, dtype=torch.float32) for _ in range(2))
        block = 64
        with on_device(p.q):
            _prepare_bwd_kernel[(padded // block, p.groups, p.batch)](
                p.q, out.contiguous(), dout, lse.contiguous(), q_rows, dout_rows, row_lse, delta, p.tokens, padded,
                GROUPS=p.groups, REPEAT=p.repeat, HEAD_DIM=p.dim, DIM=triton.next_power_of_2(p.dim), BLOCK_M=block,
                PACK=packed, num_warps=4,
            )  # fmt: skip
        return Rows(q_rows, dout_rows, row_lse, delta, packed)


def on_device(q: Tensor) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext()
