"""A paged KV cache with gradient pages, and attention over it, forward and backward."""

from .attention import paged_attention
from .decode_graph import DecodeGraph
from .page_table import OutOfPages, PageTable
from .past import PastSource, Segment
from .pool import PagePool
from .resident import PagedKV

__all__ = ["paged_attention", "PagePool", "PagedKV", "DecodeGraph", "PageTable", "PastSource", "Segment", "OutOfPages"]
