"""The losses of single chunks, and their sum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def checked_loss(loss: Any, where: str) -> Tensor | None:
    """What a step returned as its loss, or a ValueError that says which chunk returned something else."""
    if loss is None:
        return None
    if not isinstance(loss, Tensor):
        raise ValueError(f"{where}: expected the loss to be a 0-dim tensor or None, got {type(loss).__name__}")
    if loss.dim() != 0 or not loss.is_floating_point():
        raise ValueError(
            f"{where}: expected the loss to be a 0-dim floating-point tensor or None, "
            f"got {loss.dtype} of shape {tuple(loss.shape)}; sum it over the chunk"
        )
    return loss


class LossSum:
    """A sum over chunks in at least float32, returned in the dtype that the losses have."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._dtype: torch.dtype | None = None

    def add(self, loss: Tensor | None) -> None:
        """Add a chunk's loss; None adds nothing."""
        if loss is None:
            return
        term = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
        self._sum = term if self._sum is None else self._sum + term.to(self._sum.device)
        self._dtype = loss.dtype if self._dtype is None else torch.promote_types(self._dtype, loss.dtype)

    @property
    def empty(self) -> bool:
        """Whether no chunk has had a loss."""
        return self._sum is None

    def value(self, device: torch.device) -> Tensor:
        """The sum as a new tensor; a float32 zero on `device` if no chunk had a loss."""
        if self._sum is None:
            return torch.zeros((), device=device)
        return self._sum.to(self._dtype, copy=True)
