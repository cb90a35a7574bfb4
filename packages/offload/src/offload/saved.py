"""Saved activations in host memory, through autograd's saved-tensor hooks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offload.arena import Loan, PinnedArena
from offload.engine import Offloader


@contextmanager
def saved_on_host(offloader: Offloader, arena: PinnedArena, *, min_bytes: int = 65536) -> Iterator[None]:
    """While it is open, what autograd saves for backward goes to the arena and comes back when backward asks.

    Left where they are: parameters and other leaves that require grad, and views of them (they live on anyway); tensors
    under `min_bytes`; tensors on another device than the offloader's; tensor subclasses and sparse tensors. A tensor
    saved twice is stored once. What comes back has the values of the moment it was saved, the same shape and strides.

    The arena's bytes are given back as backward frees the graph, last saved first, so a training loop needs no
    `arena.reset()`; resetting or closing the arena before a graph's backward makes that backward raise ValueError.

    Memory that is written behind autograd's back (`.data`, custom kernels) between saving and backward comes back as it
    was when saved, unlike without the hooks.

    Units:  min_bytes in bytes
    Raises: ValueError for other arguments than these, or a closed arena; from the forward inside it, HostOutOfMemory
            when the arena is full; from backward, RuntimeError if a tensor left where it was has been modified since
    """
    if not isinstance(offloader, Offloader) or not isinstance(arena, PinnedArena):
        got = f"{type(offloader).__name__} and {type(arena).__name__}"
        raise ValueError(f"saved_on_host takes an Offloader and a PinnedArena, got {got}")
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool) or min_bytes < 0:
        raise ValueError(f"min_bytes must be an integer of at least 0, got {min_bytes!r}")
    arena._check_usable()
    store = _Store(offloader, arena, min_bytes)
    with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
        yield


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor left where it is. Detached: the graph must not hold itself alive."""

    tensor: Tensor
    version: int | None


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor's elements lie in memory, and how they are stored on the host.

    `core` is the shape without the repetitions of expanded dimensions. Elements that lie densely, in any order of the
    dimensions, are stored as they lie, `span` of them; elements with gaps between them are packed (span None).
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    core: tuple[int, ...]
    span: int | None

    @staticmethod
    def of(tensor: Tensor) -> _Layout:
        shape, stride = tuple(tensor.shape), tensor.stride()
        core = tuple(1 if step == 0 else n for n, step in zip(shape, stride))
        span = 1 + sum((n - 1) * step for n, step in zip(core, stride))
        return _Layout(shape, stride, core, span if span <= math.prod(core) else None)

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of what is stored."""
        return self.core if self.span is None else (self.span,)

    def elements(self, tensor: Tensor) -> Tensor:
        """The stored elements of a tensor of this layout, as a view."""
        stride = self.stride if self.span is None else (1,)
        return tensor.as_strided(self.stored, stride, tensor.storage_offset())

    def empty(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor of this layout."""
        reach = 1 + sum((n - 1) * step for n, step in zip(self.core, self.stride))
        return torch.empty(reach, dtype=dtype, device=device).as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class _Moved:
    """A tensor in the arena."""

    loan: Loan
    dtype: torch.dtype
    layout: _Layout

    @property
    def host(self) -> Tensor:
        return self.loan.bytes.view(self.dtype).view(self.layout.stored)


class _Store:
    def __init__(self, offloader: Offloader, arena: PinnedArena, min_bytes: int) -> None:
        self._offloader = offloader
        self._arena = arena
        self._min_bytes = min_bytes
        self._seen: dict[Hashable, tuple[StorageWeakRef, weakref.ref[Loan]]] = {}

    def pack(self, tensor: Tensor) -> _Kept | _Moved:
        source = tensor.detach()
        if not self._movable(tensor):
            return _Kept(source, _version(source))
        layout = _Layout.of(source)
        nbytes = math.prod(layout.stored) * source.dtype.itemsize
        if nbytes < self._min_bytes:
            return _Kept(source, _version(source))
        # The entry's weak reference keeps the storage's address from becoming another storage's while it is a key.
        storage = StorageWeakRef(source.untyped_storage())
        key = (storage.cdata, source.storage_offset(), source._version, source.dtype, layout)
        _, seen = self._seen.get(key, (None, None))
        loan = seen() if seen is not None else None
        if loan is None:
            loan = self._arena._lend(nbytes)
            self._offloader.write_back(_Moved(loan, source.dtype, layout).host, layout.elements(source)).wait()
            self._seen[key] = (storage, weakref.ref(loan, lambda _: self._seen.pop(key, None)))
        return _Moved(loan, source.dtype, layout)

    def unpack(self, packed: _Kept | _Moved) -> Tensor:
        if isinstance(packed, _Kept):
            if _version(packed.tensor) != packed.version:
                raise RuntimeError(
                    f"a tensor needed for backward, {tuple(packed.tensor.shape)}, was modified in place after it was "
                    f"saved (version {packed.version}, now {_version(packed.tensor)}): run backward before changing it"
                )
            return packed.tensor
        packed.loan.check()
        tensor = packed.layout.empty(packed.dtype, self._offloader.device)
        self._offloader.fetch(packed.layout.elements(tensor), packed.host).wait()
        return tensor

    def _movable(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.numel() == 0:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_inference() or tensor.device != self._offloader.device:
            return False
        root = tensor if tensor._base is None else tensor._base
        return not (isinstance(root, torch.nn.Parameter) or (root.is_leaf and root.requires_grad))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
