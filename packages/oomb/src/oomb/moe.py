"""The load-balancing loss of mixture-of-experts models, exact over a sequence that is never seen at once.

Switch Transformer's loss is E * sum_e f_e * P_e, f the share of assignments and P the mean router probability of
expert e
over all layers and real tokens. f carries no gradient. Once the fill has counted f over the whole sequence, the loss is
linear in the chunks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .hf import Unsupported


@dataclass(frozen=True)
class Router:
    """A model's load-balancing loss, as its config asks for it."""

    experts: int
    top_k: int
    coefficient: float


def router_of(causal: PreTrainedModel) -> Router | None:
    """The auxiliary loss the model adds when it is given labels, or None.

    Raises: Unsupported when the model asks for one that is not the Switch Transformer loss
    """
    if not getattr(causal.config, "output_router_logits", False):
        return None
    library = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
    name = type(causal).__name__
    names = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")
    if library is None or any(getattr(causal, attribute, None) is None for attribute in names):
        raise Unsupported(
            f"{name} asks for router losses (output_router_logits) of a kind that is not known; set it to False"
        )
    experts, top_k, coefficient = (getattr(causal, attribute) for attribute in names)
    router = Router(int(experts), int(top_k), float(coefficient))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 12, experts, generator=generator, dtype=torch.float32, device="cpu")
    logits = tuple(drawn)
    mask = torch.ones(2, 6, dtype=torch.float32, device="cpu")
    mask[1, 4:] = 0
    for real in (None, mask):
        ours = Balance(router)
        ours.count(logits, real)
        expected = library(logits, experts, top_k, real)
        if not torch.allclose(ours.loss(logits, real).float(), expected.float(), rtol=1e-4):
            raise Unsupported(
                f"{name} balances its experts by another loss than the Switch Transformer's; set "
                f"output_router_logits=False"
            )
    return router


@dataclass
class Balance:
    """Counts over the sequence so far, and the loss they make. Shapes: router logits [B * C, E], one per layer."""

    router: Router
    assigned: Tensor | None = None  # [E]
    probability: Tensor | None = None  # [E], without gradient
    rows: Tensor | float = 0.0
    counted: set[int] = field(default_factory=set)

    def count(self, logits: tuple[Tensor, ...], real: Tensor | None) -> None:
        """Add a chunk. Shapes: real [B, C] bool or None"""
        assigned, probability, rows = self._sums(logits, real)
        self.assigned = assigned if self.assigned is None else self.assigned + assigned
        self.probability = probability.detach() if self.probability is None else self.probability + probability.detach()
        self.rows = self.rows + rows

    def loss(self, logits: tuple[Tensor, ...], real: Tensor | None) -> Tensor:
        """The part of a counted chunk, with gradient, once everything is counted. Shapes: as `count`; 0-dim"""
        _, probability, _ = self._sums(logits, real)
        return self._loss(probability)

    def total(self) -> Tensor:
        """The loss over all that was counted, without gradient. Shapes: 0-dim"""
        assert self.probability is not None, "nothing was counted"
        return self._loss(self.probability)

    def _loss(self, probability: Tensor) -> Tensor:
        assert self.assigned is not None, "nothing was counted"
        return self.router.experts * (self.assigned * probability).sum() / (self.rows * self.rows)

    def _sums(self, logits: tuple[Tensor, ...], real: Tensor | None) -> tuple[Tensor, Tensor, Tensor | float]:
        wide = torch.promote_types(logits[0].dtype, torch.float32)
        device = logits[0].device
        weight = (
            torch.ones(logits[0].shape[0], dtype=wide, device=device)
            if real is None
            else real.reshape(-1).to(device, wide)
        )
        assigned = torch.zeros(self.router.experts, dtype=wide, device=device)
        probability = torch.zeros(self.router.experts, dtype=wide, device=device)
        for layer in logits:
            weights = layer.to(device).softmax(-1, dtype=wide)
            chosen = weights.topk(self.router.top_k, -1).indices
            one_hot = torch.zeros_like(weights).scatter_(-1, chosen, 1.0)
            assigned = assigned + (one_hot * weight[:, None]).sum(0)
            probability = probability + (weights * weight[:, None]).sum(0)
        return assigned.detach(), probability, weight.sum() * len(logits)
