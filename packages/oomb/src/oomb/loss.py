"""Cross-entropy through the model's own head, a tile of tokens at a time: T x V logits never exist."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .batch import IGNORED, to_device
from .hf import PREPARED, Parts, Unsupported
from .unread import replaced

TokenLoss = Callable[[Tensor, Tensor], Tensor]  # (logits [N, V], labels [N]) -> [N]
TILE_LOGITS = 2**27  # logits alive at once with loss_tile_tokens="auto": 512 MiB in float32
TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Head:
    """Logits as the model itself makes them from hidden states: scaling, soft caps, adapters on the head included.

    The causal LM's forward is called with a decoder that answers with the given hidden states.
    """

    parts: Parts
    output_type: type

    def __call__(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [N, E] -> logits [N, V]"""
        causal, decoder, answered = self.parts.causal, self.parts.decoder, []

        def answer(*_args, **_kwargs):
            answered.append(True)
            return self.output_type(last_hidden_state=hidden[None])

        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        # accelerate has what it prepared return float32: twice the bytes, and nothing more in them
        plain = vars(causal).get(PREPARED)
        with _replaced(decoder, answer), nullcontext() if plain is None else replaced(causal, "forward", plain):
            logits = causal(input_ids=ids, use_cache=False).logits[0]
        if not answered:
            raise Unsupported(f"{type(causal).__name__} computes its logits around its decoder")
        return logits


@contextmanager
def _replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Another forward for a module, and none of its hooks: they ran when the hidden states were made."""
    before = vars(module).get("forward")
    hooks = {name: getattr(module, name) for name in ("_forward_hooks", "_forward_pre_hooks")}
    try:
        module.forward = forward
        for name in hooks:
            setattr(module, name, OrderedDict())
        yield
    finally:
        for name, own in hooks.items():
            setattr(module, name, own)
        if before is None:
            del module.forward
        else:
            module.forward = before


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The default loss of a token. Shapes: logits [N, V], labels [N] -> [N]"""
    if TRITON and logits.is_cuda:
        from . import triton_cross_entropy

        if logits.dtype in triton_cross_entropy.DTYPES:
            return triton_cross_entropy.cross_entropy(logits, labels)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels, reduction="none")


def tiled_loss(
    hidden: Tensor,
    targets: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    token_loss: TokenLoss,
    tile_tokens: int | str,
    vocab_size: int,
) -> Tensor:
    """Sum of the token losses over a chunk's valid labels; when there are none, zero, but connected to all that made
    it.

    Shapes: hidden [B, C, E]; targets [B, C] on the host
    Returns: 0-dim, float32 or wider
    """
    rows = hidden.flatten(0, 1)
    flat = targets.flatten()
    valid = (flat != IGNORED).nonzero().flatten()
    if len(valid) == 0:
        return (head(rows[:1]) * 0).sum(dtype=torch.promote_types(hidden.dtype, torch.float32))
    if len(valid) < len(flat):
        rows, flat = rows.index_select(0, to_device(valid, rows.device)), flat[valid]
    largest = int(flat.max())
    flat = to_device(flat, rows.device)
    tile = _auto_tile(vocab_size, _share(rows, token_loss)) if tile_tokens == "auto" else tile_tokens

    def part(rows: Tensor, labels: Tensor) -> Tensor:
        logits = head(rows)
        if logits.shape[-1] <= largest:  # a kernel would read beyond the row
            raise ValueError(f"there is a label {largest}, and the model makes only {logits.shape[-1]} logits a token")
        losses = token_loss(logits, labels)
        _check_losses(losses, logits, labels)
        return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))

    tiles = zip(rows.split(tile), flat.split(tile), strict=True)
    if not torch.is_grad_enabled():
        return torch.stack([part(*pair) for pair in tiles]).sum()
    return torch.stack([checkpoint(part, *pair, use_reentrant=False) for pair in tiles]).sum()


def _share(rows: Tensor, token_loss: TokenLoss) -> float:
    """How large a tile may be: twice where the loss makes nothing in float32 (the head's gradient is then added up less
    often), half where it is not ours: label smoothing takes 20 bytes a logit, cross-entropy 12.
    """
    if token_loss is not cross_entropy:
        return 0.5
    return 2.0 if TRITON and rows.is_cuda and rows.dtype.itemsize == 2 else 1.0


def _auto_tile(vocab_size: int, share: float) -> int:
    tokens = int(share * TILE_LOGITS) // vocab_size
    return tokens // 128 * 128 or max(tokens, 1)  # whole tiles of a matrix product, if there is room for one


def _check_losses(losses: object, logits: Tensor, labels: Tensor) -> None:
    expected = f"loss_fn must return one floating-point loss per token, shape {tuple(labels.shape)}"
    if not isinstance(losses, Tensor):
        raise ValueError(f"{expected}; got {type(losses).__name__}")
    if losses.shape != labels.shape or not losses.is_floating_point():
        raise ValueError(f"{expected}; got {tuple(losses.shape)} of {losses.dtype}")
    if logits.requires_grad and not losses.requires_grad:
        raise ValueError("loss_fn returned losses that are cut off from the logits: nothing would be learned")
