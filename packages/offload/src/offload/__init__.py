"""Move any tensors between a GPU and one pinned block of host memory."""

from offload.arena import PinnedArena
from offload.engine import Handle, Offloader
from offload.host_memory import HostOutOfMemory
from offload.saved import saved_on_host

__all__ = ["Handle", "HostOutOfMemory", "Offloader", "PinnedArena", "saved_on_host"]
