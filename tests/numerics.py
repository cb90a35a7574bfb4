"""How errors are measured."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def relative(a: Tensor, b: Tensor) -> float:
    """Distance of a from the reference b, in units of b's length; NaN anywhere is infinitely far."""
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    error = float((a - b).norm() / b.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Take the gradients off a model."""
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def gradient_errors(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> tuple[float, float]:
    """Relative error over all parameters together, and that of the worst single one.

    A parameter whose gradient vanishes beside the others (queries that see one key: softmax is then constant) has only
    rounding noise left, which is as large as that of the others: it is measured against 1e-5 of the whole.
    """
    assert ours.keys() == reference.keys(), sorted(ours.keys() ^ reference.keys())
    whole = torch.cat([g.double().flatten().cpu() for g in reference.values()])
    total = relative(torch.cat([g.double().flatten().cpu() for g in ours.values()]), whole)
    floor = max(float(whole.norm()) * 1e-5, 1e-300)

    def single(name: str) -> float:
        a, b = ours[name].double().cpu(), reference[name].double().cpu()
        error = float((a - b).norm() / b.norm().clamp_min(floor))
        return error if error == error else float("inf")

    return total, max(single(name) for name in reference)
