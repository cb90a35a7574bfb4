"""A loss or gradient that is not finite: where it began, for the message that ends the run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .api import PROFILE, chunked_loss
from .batch import IGNORED, Batch, prepare
from .config import ChunkConfig
from .hf import Parts, take_apart
from .loss import TokenLoss, cross_entropy
from .memory import Machine
from .placement import chunk_length

ADVICE = "try a smaller learning rate, a longer warm-up, or float32"


class _Found(Exception):
    def __init__(self, token: int) -> None:
        self.token = token  # how many tokens with a label came before it


def where_loss_breaks(
    model: nn.Module, batch: dict[str, Any], config: ChunkConfig, token_loss: TokenLoss | None
) -> str | None:
    """Run the batch once more, forward only, up to the first token whose loss is not finite.

    Returns: a phrase naming chunk and position; None if this run was finite (another draw of dropout, for one)
    """
    inner, seen = token_loss or cross_entropy, 0

    def watch(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal seen
        losses = inner(logits, labels)
        bad = (~torch.isfinite(losses)).nonzero()
        if len(bad):
            raise _Found(seen + int(bad[0]))
        seen += len(labels)
        return losses

    parts = take_apart(model)
    try:
        length = _length(parts, batch["input_ids"], config)
        with torch.no_grad():
            chunked_loss(model, **batch, config=replace(config, chunk_tokens=length), loss_fn=watch)
    except _Found as found:
        read = prepare(vocab_size=parts.vocab_size, label_size=parts.label_size, **batch)
        return _place(read, length, found.token)
    except Exception as error:  # the report must not hide what it reports
        return f"a second run ended in {type(error).__name__}: {error}"
    return None


def _length(parts: Parts, ids: Tensor, config: ChunkConfig) -> int:
    """Tokens a chunk of the step that was not finite, whose model is known by then."""
    _, profile = getattr(parts.causal, PROFILE)
    rows, tokens = ids.shape
    return chunk_length(config, parts, profile, tokens, batch=rows, train=True, machine=Machine.now(parts.device))


def _place(batch: Batch, chunk_tokens: int, token: int) -> str:
    for index, chunk in enumerate(batch.cut(chunk_tokens)):
        valid = (chunk.targets.flatten() != IGNORED).nonzero().flatten()
        if token < len(valid):
            row, column = divmod(int(valid[token]), chunk.targets.shape[1])
            return f"chunk {index}, position {chunk.start + column}" + (f" of sequence {row}" if row else "")
        token -= len(valid)
    raise AssertionError("fewer tokens than were seen")


def bad_gradients(model: nn.Module) -> str | None:
    """Names of parameters whose gradient is not finite, shortened; None where all are."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if not named or math.isfinite(float(nn.utils.get_total_norm([grad for _, grad in named]))):
        return None
    bad = [name for name, grad in named if not bool(torch.isfinite(grad).all())]
    if not bad:
        return "none by itself: their common norm overflows"
    return bad[0] if len(bad) == 1 else f"{bad[0]} and {len(bad) - 1} more"
