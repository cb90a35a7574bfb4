"""Move any tensors between a GPU and one pinned block of host memory, beside what the GPU computes."""

from offload.arena import PinnedArena
from offload.engine import Offloader
from offload.host_memory import HostOutOfMemory
from offload.lanes import Lanes, Mark, lanes_for
from offload.saved import saved_on_host
from offload.shelf import Shelf

__all__ = ["HostOutOfMemory", "Lanes", "Mark", "Offloader", "PinnedArena", "Shelf", "lanes_for", "saved_on_host"]
