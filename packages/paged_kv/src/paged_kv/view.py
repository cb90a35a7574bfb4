"""Some sequences' past in a pool, as attention reads it: one segment, and the columns of its page table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .past import Phase, Segment
from .pool import PagePool


@dataclass(frozen=True)
class _Columns:
    """The pages from some page on, ready for attention."""

    slots: Tensor  # [B, N] int32 on the device
    runs: tuple[int, ...] | None
    owned: Tensor  # int64 on the CPU: every slot in the table


class PoolView:
    """The first `lengths[b]` tokens of each sequence: a `PastSource` for as long as its pages stay where they are.

    Columns are made once, for all layers.
    """

    def __init__(self, pool: PagePool, sequences: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        self.pool, self.lengths = pool, lengths
        self._sequences = sequences
        self._columns: dict[int, _Columns] = {}

    @property
    def page_tokens(self) -> int:
        return self.pool.page_tokens

    @property
    def contiguous(self) -> bool:
        """Whether every sequence's past lies in consecutive slots, which vendor kernels need."""
        return self.columns(0).runs is not None

    def segments(self, layer: int, phase: Phase, first_page: int = 0) -> Iterator[Segment]:
        """The whole past of a layer as one segment; none when there is no past."""
        if first_page >= -(-max(self.lengths) // self.page_tokens):
            return
        if phase == "backward" and any(self.pool.table.shares(sequence) for sequence in self._sequences):
            raise ValueError(
                "PagedKV.segments: sequences that share pages (fork) have no gradient pages of their own; train "
                "without forks"
            )
        columns = self.columns(first_page)
        k, v = self.pool.k[layer], self.pool.v[layer]
        if phase == "forward":
            yield Segment(first_page, k, v, columns.slots, columns.runs)
        else:
            dk, dv = self.pool.open_grads(layer, columns.owned)
            yield Segment(first_page, k, v, columns.slots, columns.runs, dk, dv, columns.slots, columns.runs)

    def own_grad(self, layer: int) -> None:
        """A view has no open block."""

    def columns(self, first_page: int) -> _Columns:
        if first_page not in self._columns:
            page, table = self.page_tokens, self.pool.table
            counts = [max(0, -(-n // page) - first_page) for n in self.lengths]
            owned = [
                torch.tensor(table.slots(sequence, first_page)[:count], dtype=torch.int64, device="cpu")
                for sequence, count in zip(self._sequences, counts)
            ]
            slots = torch.nn.utils.rnn.pad_sequence(owned, batch_first=True, padding_value=-1).to(torch.int32)
            runs = None
            if all(bool((row.diff() == 1).all()) for row in owned):
                runs = tuple(int(row[0]) if len(row) else 0 for row in owned)
            if self.pool.device.type == "cuda":
                slots = slots.pin_memory()  # so that the copy does not wait
            slots = slots.to(self.pool.device, non_blocking=True)
            self._columns[first_page] = _Columns(slots, runs, torch.cat(owned))
        return self._columns[first_page]
