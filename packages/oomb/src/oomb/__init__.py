"""Train causal language models on contexts far longer than one GPU's activations could hold, with exact gradients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import chunked_backward, chunked_loss
    from .config import ChunkConfig
    from .hf import Unsupported
    from .hf_trainer import ChunkTrainerMixin, OombTrainer
    from .planner import plan
    from .verification import verify

__all__ = [
    "ChunkConfig",
    "ChunkTrainerMixin",
    "OombTrainer",
    "Unsupported",
    "chunked_backward",
    "chunked_loss",
    "plan",
    "verify",
]

_HOMES = {
    "ChunkConfig": "config",
    "ChunkTrainerMixin": "hf_trainer",
    "OombTrainer": "hf_trainer",
    "Unsupported": "hf",
    "chunked_backward": "api",
    "chunked_loss": "api",
    "plan": "planner",
    "verify": "verification",
}


def __getattr__(name: str) -> object:
    """Import torch and transformers when something is first asked for: `oomb --help` needs neither."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
