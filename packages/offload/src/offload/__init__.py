"""Move any tensors between a GPU and one pinned block of host memory, beside what the GPU computes."""

from offload.arena import PinnedArena
from offload.engine import Offloader
from offload.host_memory import HostOutOfMemory, free_host_bytes
from offload.lanes import Lanes, lanes_for
from offload.saved import saved_on_host
from offload.shelf import Shelf

__all__ = [
    "HostOutOfMemory",
    "Lanes",
    "Offloader",
    "PinnedArena",
    "Shelf",
    "free_host_bytes",
    "lanes_for",
    "saved_on_host",
]
