"""Losses that a Trainer asks for, as losses per token: what a tile of a chunk can compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from .batch import IGNORED
from .loss import TokenLoss, cross_entropy

BatchLoss = Callable[..., Any]  # compute_loss_func(outputs, labels, num_items_in_batch=...) -> 0-dim
PROBE_TOKENS, PROBE_SPLIT, PROBE_VOCAB, PROBE_ITEMS = 9, 4, 13, 8.0


def smoothed(epsilon: float) -> TokenLoss:
    """The Trainer's label smoothing: the label keeps 1 - epsilon, epsilon is spread over the vocabulary."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        surprise = -wide.log_softmax(-1)
        own = surprise.gather(-1, labels[:, None])[:, 0]
        return (1 - epsilon) * own + epsilon * surprise.mean(-1)

    return loss


def dynamic(logits: Tensor, labels: Tensor) -> Tensor:
    """TRL's loss_type="dft" (arXiv 2508.05629): cross-entropy weighted by the probability of the label."""
    losses = cross_entropy(logits, labels)
    return losses * torch.exp(-losses.detach())


def from_batch_loss(function: BatchLoss, num_items: float) -> TokenLoss:
    """A Trainer's `compute_loss_func`, called on a tile as it would be on a batch of that many tokens.

    The function shifts labels by itself, so the tile comes with one row more than it has labels. What it returns is
    spread evenly over the tile's tokens: only their sum is used.
    """

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        value = _call(function, logits, labels, num_items)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"compute_loss_func must return one loss, got {value!r:.200}")
        return (value.reshape(()) * (num_items / len(labels))).expand(len(labels))

    return loss


def _call(function: BatchLoss, logits: Tensor, labels: Tensor, num_items: float) -> Any:
    if torch.is_autocast_enabled(logits.device.type):  # as accelerate hands them to the stock Trainer's
        logits = logits.float()
    shifted = torch.cat([labels.new_full((1,), IGNORED), labels])[None]
    rows = torch.cat([logits, logits.new_zeros(1, logits.shape[1])])[None]
    items = torch.tensor(num_items, device=logits.device)
    return function(CausalLMOutputWithPast(logits=rows), shifted, num_items_in_batch=items)


def refuse_if_not_a_sum(function: BatchLoss) -> None:
    """Raises: ValueError if the function's value on some tokens is not the sum of its values on parts of them

    Chunks can honour a loss only if it is a sum over tokens, divided by `num_items_in_batch` and nothing else.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(PROBE_TOKENS, PROBE_VOCAB, generator=generator, dtype=torch.float64, device="cpu")
    labels = torch.randint(PROBE_VOCAB, (PROBE_TOKENS,), generator=generator, device="cpu")
    parts = ((logits[:PROBE_SPLIT], labels[:PROBE_SPLIT]), (logits[PROBE_SPLIT:], labels[PROBE_SPLIT:]))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            whole = float(_call(function, logits, labels, PROBE_ITEMS))
            summed = sum(float(_call(function, *part, PROBE_ITEMS)) for part in parts)
            halved = float(_call(function, logits, labels, 2 * PROBE_ITEMS))
        except Exception as error:
            raise ValueError(
                "compute_loss_func must take (outputs, labels, num_items_in_batch) and read nothing of the outputs but "
                f"their logits, because chunks have nothing else; on a small batch it raised {type(error).__name__}: "
                f"{error}"
            ) from error
    close = 1e-5 * max(abs(whole), 1e-30)
    if not abs(whole - summed) <= close or not abs(whole - 2 * halved) <= close:
        raise ValueError(
            f"compute_loss_func is not a sum over tokens divided by num_items_in_batch: on {PROBE_TOKENS} tokens it "
            f"gives {whole:.6g}, on {PROBE_SPLIT} and {PROBE_TOKENS - PROBE_SPLIT} of them {summed:.6g} together, and "
            f"with twice the items {halved:.6g}. A sequence that is never whole cannot be given any other loss"
        )
