"""Train causal language models on contexts far longer than one GPU's activations could hold, with exact gradients."""

from .api import chunked_backward, chunked_loss
from .config import ChunkConfig
from .hf import Unsupported

__all__ = ["ChunkConfig", "Unsupported", "chunked_backward", "chunked_loss"]
