"""Chunk-recurrent autograd: the exact gradient of a long sequence with the graph of one chunk in memory."""

from chunk_recur.function import chunk_recurrent, chunk_recurrent_backward
from chunk_recur.state import ChunkStore, Phase, State

__all__ = ["chunk_recurrent", "chunk_recurrent_backward", "State", "ChunkStore", "Phase"]
__version__ = "0.1.0"
