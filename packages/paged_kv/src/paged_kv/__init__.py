"""A paged KV cache with gradient pages, and attention over it, forward and backward."""

from .attention import paged_attention
from .past import PastSource, Segment

__all__ = ["paged_attention", "PastSource", "Segment"]
