"""What kernels read of a batch whose sequences come and go: page table and open block, on the device, updated in place.

Nothing here waits for the device. The table has a row a sequence and keeps its address for good, and so do the open
block's numbers, unless they are more than its buffer holds: a captured CUDA graph finds them where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .page_table import PageTable

_FIXED_TOKENS = 16  # tokens a sequence for which a block's numbers have a fixed address
_LONG = 64  # tokens from which on a tensor's rows are worked out by torch


@dataclass(frozen=True)
class Block:
    """The sequences that take part in a block, in the order of its tokens.

    Units: starts, ends: the block holds the tokens [start, end) of each
    """

    sequences: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self.starts, self.ends))


@dataclass(frozen=True)
class Step:
    """A block's numbers on the device, int64.

    Shapes: table [rows, N] int32, pages of every live sequence; rows, starts, firsts, counts [S]: of each sequence in
        the block its row of the table, its past, the place of its first token among the block's, and its tokens;
        places [T]: where each token is written, slot * P + row of the page
    `places_on_host`: the same places, on the CPU. `fixed`: the addresses are those of every block with as many
    sequences and tokens.
    """

    table: Tensor
    rows: Tensor
    starts: Tensor
    firsts: Tensor
    counts: Tensor
    places: Tensor
    places_on_host: Tensor
    fixed: bool


def places_of(table: PageTable, block: Block) -> Tensor:
    """Where each token of a block is written, slot * P + row of the page: [T] int64 on the CPU."""
    page = table.page_tokens
    if max(block.tokens) < _LONG:
        numbers: list[int] = []
        for sequence, start, end in zip(block.sequences, block.starts, block.ends):
            slots, first = table.slots(sequence, start // page), start // page
            numbers += [slots[i // page - first] * page + i % page for i in range(start, end)]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")
    parts = []
    for sequence, start, end in zip(block.sequences, block.starts, block.ends):
        own = torch.tensor(table.slots(sequence, start // page), dtype=torch.int64, device="cpu")
        places = own[:, None] * page + torch.arange(page, device="cpu")
        parts.append(places.flatten()[start % page :][: end - start])
    return torch.cat(parts)


class DeviceTable:
    """The device's copy of a page table, for at most `max_sequences` sequences at a time."""

    def __init__(self, table: PageTable, max_sequences: int, device: torch.device) -> None:
        self._table, self._device = table, device
        with torch.inference_mode(False):
            self.pages = torch.full((max_sequences, table.total_pages), -1, dtype=torch.int32, device=device)
            self._numbers = torch.zeros(max_sequences * (4 + _FIXED_TOKENS), dtype=torch.int64, device=device)
        self._rows: dict[int, int] = {}
        self._free_rows = list(range(max_sequences))[::-1]
        self._known: dict[int, int] = {}  # sequence -> its first pages that the device has

    def row(self, sequence: int) -> int:
        return self._rows[sequence]

    def forget(self, sequence: int) -> None:
        """The sequence is gone; its row is free for another."""
        row = self._rows.pop(sequence, None)
        if row is not None:
            self._free_rows.append(row)
            del self._known[sequence]

    def changed(self, sequence: int, first_page: int) -> None:
        """The sequence's pages from `first_page` on are no longer what the device has."""
        if sequence in self._known:
            self._known[sequence] = min(self._known[sequence], first_page)

    def step(self, block: Block) -> Step:
        """Bring the device up to date with a block that was just opened."""
        sequences, tokens = block.sequences, block.tokens
        for sequence in sequences:
            if sequence not in self._rows:
                self._rows[sequence], self._known[sequence] = self._free_rows.pop(), 0
        self._update_pages(sequences)
        firsts, total = [], 0
        for count in tokens:
            firsts.append(total)
            total += count
        rows = [self._rows[sequence] for sequence in sequences]
        numbers = torch.tensor((*rows, *block.starts, *firsts, *tokens), dtype=torch.int64, device="cpu")
        host = torch.cat((numbers, places_of(self._table, block)))
        fixed = len(host) <= len(self._numbers)
        on_device = self._numbers[: len(host)] if fixed else torch.empty_like(host, device=self._device)
        self._send(host, on_device)
        n = 4 * len(sequences)
        row, start, first, count = on_device[:n].view(4, -1)
        return Step(self.pages, row, start, first, count, on_device[n:], host[n:], fixed)

    def _update_pages(self, sequences: Sequence[int]) -> None:
        where: list[int] = []
        slots: list[int] = []
        for sequence in sequences:
            known = self._known[sequence]
            fresh = self._table.slots(sequence, known)
            if fresh:
                first = self._rows[sequence] * self._table.total_pages + known
                where += range(first, first + len(fresh))
                slots += fresh
                self._known[sequence] = known + len(fresh)
        if where:
            host = torch.tensor((where, slots), dtype=torch.int64, device="cpu")
            update = torch.empty_like(host, device=self._device)
            self._send(host, update)
            self.pages.view(-1).index_put_((update[0],), update[1].to(torch.int32))

    def _send(self, host: Tensor, target: Tensor) -> None:
        """Copy to the device without waiting: pinned memory is not reused before its copy is done."""
        with torch.no_grad():
            target.copy_(host.pin_memory() if self._device.type == "cuda" else host, non_blocking=True)
