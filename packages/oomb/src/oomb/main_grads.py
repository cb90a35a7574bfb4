"""Parameter gradients summed over chunks in float32, whatever the parameters' own precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def main_grads(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it, each gradient that arrives is added to a float32 sum; at the end the sum is rounded once into `.grad`.

    What `.grad` held before is part of the sum. If the walk fails, `.grad` is what it was before.
    """
    low = [p for p in parameters if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    before = [p.grad for p in low]
    sums: dict[nn.Parameter, Tensor] = {p: p.grad.float() for p in low if p.grad is not None}

    def collect(p: nn.Parameter) -> None:
        grad, p.grad = p.grad, None
        assert grad is not None
        if p in sums:
            sums[p].add_(grad)
        else:
            sums[p] = grad.float()

    hooks = [p.register_post_accumulate_grad_hook(collect) for p in low]
    for p in low:
        p.grad = None
    try:
        yield
    except BaseException:
        for p, grad in zip(low, before, strict=True):
            p.grad = grad
        raise
    else:
        for p, grad in sums.items():
            p.grad = grad.to(p.dtype)
    finally:
        for hook in hooks:
            hook.remove()
