"""What a mask of the library lets a token see, established by asking the mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .hf import Unsupported


def window_of(mask_function: Callable, length: int, device: torch.device) -> int | None:
    """The sliding window of a mask over `length` tokens; None for full causal attention.

    Raises: Unsupported when the mask is neither (bidirectional, blockwise, chunked, ...)
    """

    def see(q: Tensor, kv: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=torch.long, device=device)
        q, kv = torch.broadcast_tensors(q.to(device), kv.to(device))
        return torch.as_tensor(mask_function(zero, zero, q, kv), device=device).bool().expand(q.shape).cpu()

    powers = {2**i + j for i in range(length.bit_length() + 1) for j in (-1, 0, 1)}
    some = {length * i // 61 for i in range(61)}
    spots = torch.tensor(sorted(p for p in powers | some | {length - 1, length - 2} if 0 <= p < length), device="cpu")
    everything = torch.arange(length, device="cpu")
    last = torch.tensor(length - 1, device="cpu")
    try:
        visible = see(last, everything)
        first = int(visible.long().argmax())
        window = length - first if bool(visible.any()) else 0
        offsets = torch.tensor([0, 1, max(window - 1, 0), window, window + 1], device="cpu")
        near = (spots[:, None] - offsets).clamp_min(0)
        grids = [(last, everything), (spots[:, None], spots), (spots[:, None], near)]
        fits = all(bool((see(q, kv) == ((kv <= q) & (kv > q - window))).all()) for q, kv in grids)
    except Unsupported:
        raise
    except Exception as error:  # a mask that depends on more than two positions
        raise Unsupported(f"the model's mask could not be evaluated position by position: {error}") from error
    if window == 0:
        raise Unsupported("the model's mask lets a token see nothing, not even itself (a sliding window of 0?)")
    if not fits:
        raise Unsupported(
            "the model's mask is neither causal nor a causal sliding window (bidirectional, blockwise or "
            "chunked attention): "
            "it cannot be trained in chunks exactly"
        )
    return None if window == length else window
