"""Storage of KV pages and gradient pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .page_table import PageTable, is_count


class PagePool:
    """Pages of keys and values for some layers, and gradient pages that come when they are first needed.

    All layers share one numbering of slots: a page is the same slot in each. A layer's gradient pages are allocated at
    its first backward, and stay for the next one; a page is zeroed when it gets its first contribution.

    Shapes: k[layer], v[layer] [slots, P, G, D]
    Units:  slots in pages; kv_heads and head_dim one int, or one per layer; grad_dtype by default float32, or float64
        for a float64 pool
    Raises: ValueError for a size that is not a positive int, or a dtype that is not floating
    """

    def __init__(
        self,
        *,
        layers: int,
        slots: int,
        page_tokens: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        if not is_count(layers, 1):
            raise ValueError(f"PagePool: expected layers to be a positive int, got {layers!r}")
        heads, dims = _per_layer("kv_heads", kv_heads, layers), _per_layer("head_dim", head_dim, layers)
        for name, value in (("dtype", dtype), ("grad_dtype", dtype if grad_dtype is None else grad_dtype)):
            if not isinstance(value, torch.dtype) or not value.is_floating_point or value.itemsize < 2:
                raise ValueError(f"PagePool: expected {name} to be a floating dtype of at least 16 bits, got {value!r}")
        grad_dtype = grad_dtype or torch.promote_types(dtype, torch.float32)
        self.table = PageTable(slots, page_tokens)
        self.layers, self.page_tokens, self.dtype, self.grad_dtype = layers, page_tokens, dtype, grad_dtype
        # Pages born under inference_mode could not be written by the next training step.
        with torch.inference_mode(False), torch.no_grad():
            shapes = [(slots, page_tokens, g, d) for g, d in zip(heads, dims)]
            self.k = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
            self.v = tuple(torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
            self._live = torch.zeros((layers, slots), dtype=torch.bool, device="cpu")  # gradient pages in use
        self.device = self.k[0].device
        self._grads: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages of keys and values in every layer: (from, to) slots, no target twice."""
        both = torch.tensor(copies, dtype=torch.int64, device="cpu").T.contiguous()
        if self.device.type == "cuda":
            both = both.pin_memory()  # so that the copy does not wait
        source, target = both.to(self.device, non_blocking=True)
        with torch.no_grad():
            for pages in (*self.k, *self.v):
                pages.index_copy_(0, target, pages[source])

    @property
    def has_grads(self) -> bool:
        """Whether some layer has gradient pages."""
        return any(grads is not None for grads in self._grads)

    def grads(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """A layer's gradient pages, [slots, P, G, D] each, or None before its first backward."""
        return self._grads[layer]

    def grad_live(self, layer: int, slots: Tensor) -> Tensor:
        """Which of these slots hold a gradient: slots int64 on the CPU, any shape; -1 holds none. Returns bool."""
        return self._live[layer][slots.clamp(min=0)] & (slots >= 0)

    def open_grads(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Make sure that these slots (int64 on the CPU) have gradient pages, zeroed if they had none."""
        grads = self._grads[layer]
        with torch.inference_mode(False), torch.no_grad():
            if grads is None:
                like_k, like_v = self.k[layer], self.v[layer]
                grads = (
                    torch.empty_like(like_k, dtype=self.grad_dtype),
                    torch.empty_like(like_v, dtype=self.grad_dtype),
                )
                self._grads[layer] = grads
            fresh = slots[~self._live[layer][slots]]
            if len(fresh):
                index = fresh.to(self.device)
                for pages in grads:
                    pages.index_fill_(0, index, 0.0)
                self._live[layer, fresh] = True
        return grads

    def zero_grad_rows(self, slot: int, first: int) -> None:
        """Zero a page's gradient from its row `first` on, in every layer where it has one."""
        for layer in self._live[:, slot].nonzero().flatten().tolist():
            for pages in self._grads[layer] or ():
                pages[slot, first:] = 0.0

    def drop_grads(self, slots: list[int]) -> None:
        """Freed slots hold no gradient any more."""
        if slots and self.has_grads:
            self._live[:, slots] = False


def _per_layer(name: str, value: int | Sequence[int], layers: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * layers
    if len(values) != layers or not all(is_count(n, 1) for n in values):
        raise ValueError(f"PagePool: expected {name} to be a positive int, or {layers} of them, got {value!r}")
    return values
