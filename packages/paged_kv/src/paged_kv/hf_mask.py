"""What transformers' masks let a token see: handed through the model in place of a mask, and checked by asking them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.cache_utils import Cache, CacheLayerMixin
except ImportError as error:
    raise ImportError(
        "paged_kv.hf_cache needs transformers, which oomb-paged-kv does not bring: pip install 'oomb-paged-kv[hf]'"
    ) from error

__all__ = ["AttentionInterface", "AttentionMaskInterface", "Cache", "CacheLayerMixin", "NotServed", "Seen", "seen_by"]


class NotServed(ValueError, AttributeError):
    """The model asks for something that is not there, and may have asked whether it is."""


@dataclass(frozen=True)
class Seen:
    """Causal, within a window if there is one, and without what `valid` hides.

    Shapes: valid [B, columns] bool; None: nothing is hidden
    """

    window: int | None
    valid: Tensor | None

    def __getattr__(self, name: str) -> Any:
        raise NotServed(
            f"PagedCache: the model asks its attention mask for {name!r}: it computes with the mask, of which there is "
            "a description only"
        )


def seen_by(
    *_: Any,
    kv_length: int,
    mask_function: Callable,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **__: Any,
) -> Seen:
    """The mask function that transformers calls, once a kind of layer and forward pass.

    Raises: ValueError for a mask that is neither causal nor a causal sliding window
    """
    return Seen(_window_of(mask_function, getattr(config, "sliding_window", None), kv_length), attention_mask)


def _window_of(mask_function: Callable, window: int | None, length: int) -> int | None:
    """None for causal, or the window, whichever the mask agrees with on positions up to `length` and far beyond."""
    spots = {2**i + j for i in range(length.bit_length() + 6) for j in (-1, 0, 1)} | {length - 1, length, 3 * length}
    q = torch.tensor(sorted(spots), device="cpu")[:, None]
    reach = {0, 1, 2, 5, 100} | {max(0, (window or 0) + j) for j in (-2, -1, 0, 1)}
    kv = torch.cat(((q - torch.tensor(sorted(reach), device="cpu")).clamp_min(0), (q + 1), q // 2, q * 0), 1)
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    try:
        seen = torch.as_tensor(mask_function(zero, zero, q.expand_as(kv), kv), device="cpu").bool().expand(kv.shape)
    except Exception as error:  # a mask that depends on more than two positions
        raise ValueError(
            f"PagedCache: the model's mask could not be evaluated position by position: {error}"
        ) from error
    causal = kv <= q
    if torch.equal(seen, causal):
        return None
    if window is not None and torch.equal(seen, causal & (kv > q - window)):
        return window
    raise ValueError(
        "PagedCache: the model's mask is neither causal nor a causal sliding window (bidirectional, blockwise or "
        "chunked attention)"
    )
