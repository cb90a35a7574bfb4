"""Which backend `backend="auto"` takes, and why."""

from __future__ import annotations

from torch import Tensor

from .past import Geometry, PastSource


def choose(q: Tensor, k: Tensor, geometry: Geometry, past: PastSource) -> tuple[str, str]:
    """Pick a backend for one call from shape, device and geometry.

    Shapes: q [B, C, H, D]; k [B, C, G, D]
    Returns: the backend's name, and the reason in words
    """
    if not q.is_cuda:
        return "reference", f"the tensors are on {q.device.type}, where plain torch is the only backend of full speed"
    return "reference", "no kernel is known for this call"
