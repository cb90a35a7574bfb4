"""The resident past: a batch of sequences whose pages are all in one pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .page_table import is_count
from .past import Phase, Segment
from .pool import PagePool

Lengths = int | Sequence[int]


@dataclass(frozen=True)
class _Columns:
    """The past's pages from some page on, ready for attention."""

    slots: Tensor  # [B, N] int32 on the device
    runs: tuple[int, ...] | None
    owned: Tensor  # int64 on the CPU: every slot in the table


class PagedKV:
    """The past of a batch of sequences, resident in a pool: the `PastSource` of training and the cache of inference.

    Tokens come in blocks. `extend` opens the next block, `append` writes it, layer by layer, and attention reads what
    lies before it. Training walks back by `rewind`, which reopens the block before and frees what lies beyond it;
    a page that straddles two blocks, and its gradient, stays until its first token's block is done.

    A sequence may get fewer tokens than the others: the block is padded on the right to the longest, and what is in the
    padding is not stored.

    Units: lengths, tokens [B] in tokens: what is past, and what the open block holds
    """

    def __init__(self, pool: PagePool, batch: int) -> None:
        if not is_count(batch, 1):
            raise ValueError(f"PagedKV: expected batch to be a positive int, got {batch!r}")
        self.pool, self.batch = pool, batch
        spread = pool.table.total_pages
        self._ids = [pool.table.add(near=b * spread // batch) for b in range(batch)]
        self._starts = self._ends = (0,) * batch
        self._written = [self._ends] * pool.layers
        self._cleared()

    @property
    def page_tokens(self) -> int:
        return self.pool.page_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._starts

    @property
    def contiguous(self) -> bool:
        """Whether every sequence's past lies in consecutive slots, which vendor kernels need."""
        return self._columns(0).runs is not None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self._starts, self._ends))

    def extend(self, tokens: Lengths) -> None:
        """Open the next block; the block before it becomes past.

        Units: tokens: of the block, one int for all sequences or one per sequence (then 0 is allowed, not for all)
        Raises: OutOfPages if the pages do not all fit; ValueError if only some layers of the open block were written
        """
        counts = self._per_sequence("extend", tokens)
        if not any(counts):
            raise ValueError("PagedKV.extend: expected at least one token, got none")
        missing = [layer for layer, written in enumerate(self._written) if written != self._ends]
        if any(self.tokens) and 0 < len(missing) < self.pool.layers:
            raise ValueError(f"PagedKV.extend: layers {missing} of the open block were never appended, others were")
        self.pool.table.extend(dict(zip(self._ids, counts)))
        self._starts, self._ends = self._ends, tuple(end + n for end, n in zip(self._ends, counts))
        self._cleared()
        for b, start in enumerate(self._starts):
            # The new tokens may share a page with older ones that have a gradient; theirs starts at zero.
            if counts[b] and start % self.page_tokens:
                slot = int(self._slots[b, start // self.page_tokens])
                self.pool.zero_grad_rows(slot, start % self.page_tokens)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the open block's keys and values of one layer, once.

        Shapes: k, v [B, C, G, D] in the pool's dtype on its device, C the longest sequence's tokens
        Raises: ValueError if anything differs, the block was appended already, or an earlier one never was
        """
        self._check_layer(layer)
        pages = self.pool.k[layer], self.pool.v[layer]
        shape = (self.batch, max(self.tokens), *pages[0].shape[2:])
        if not any(self.tokens):
            raise ValueError("PagedKV.append: no block is open; call extend(tokens) first")
        for name, x in (("k", k), ("v", v)):
            if tuple(x.shape) != shape or x.dtype != self.pool.dtype or x.device != self.pool.device:
                raise ValueError(
                    f"PagedKV.append: expected {name} {list(shape)} {self.pool.dtype} on {self.pool.device}, got "
                    f"{list(x.shape)} {x.dtype} on {x.device}"
                )
        if self._written[layer] != self._starts:
            done = self._written[layer] == self._ends
            raise ValueError(
                f"PagedKV.append: layer {layer} "
                + ("was appended to this block already" if done else "lacks an earlier block, which was never appended")
            )
        flat, valid = self._open_rows()
        with torch.no_grad():
            for target, x in zip(pages, (k, v)):
                rows = x.detach().flatten(0, 1) if valid.all() else x.detach()[valid.to(x.device)]
                target.view(-1, *target.shape[2:]).index_copy_(0, flat[valid].to(target.device), rows)
        self._written[layer] = self._ends

    def rewind(self, start: Lengths) -> None:
        """Reopen the block [start, old start) and free the pages and gradient pages wholly beyond it.

        Units: start: position of the reopened block's first token, one int for all sequences or one per sequence
        Raises: ValueError if a start lies beyond the past, or the block would be empty
        """
        starts = self._per_sequence("rewind", start)
        if any(s > old for s, old in zip(starts, self._starts)) or starts == self._starts:
            raise ValueError(
                f"PagedKV.rewind: expected starts within the past {self._starts} and before its end, got {starts}"
            )
        ends = self._starts
        self._cut(ends)
        self._starts, self._ends = starts, ends

    def truncate(self, length: Lengths) -> None:
        """Keep the first `length` tokens as past; no block is open after it. Pages wholly beyond are freed.

        Raises: ValueError if a sequence is shorter than that
        """
        lengths = self._per_sequence("truncate", length)
        if any(n > end for n, end in zip(lengths, self._ends)):
            raise ValueError(f"PagedKV.truncate: expected at most {self._ends} tokens, got {lengths}")
        self._cut(lengths)
        self._starts = self._ends = lengths

    def release(self) -> None:
        """Give every page and gradient page back; the batch is empty and may be filled again."""
        self.truncate(0)

    def segments(self, layer: int, phase: Phase, first_page: int = 0) -> Iterator[Segment]:
        """The whole past of a layer as one segment (see `PastSource`); none when there is no past.

        Raises: ValueError if a block of the past was never appended to this layer
        """
        self._check_layer(layer)
        if phase not in ("forward", "backward"):
            raise ValueError(f'PagedKV.segments: expected phase "forward" or "backward", got {phase!r}')
        if not is_count(first_page, 0):
            raise ValueError(f"PagedKV.segments: expected first_page to be an int >= 0, got {first_page!r}")
        if any(n < start for n, start in zip(self._written[layer], self._starts)):
            raise ValueError(
                f"PagedKV.segments: layer {layer} has {self._written[layer]} tokens, its past {self._starts}; append "
                "every block before the next is opened"
            )
        pages = -(-max(self._starts) // self.page_tokens)
        return self._yield_segment(layer, phase, first_page) if first_page < pages else iter(())

    def _yield_segment(self, layer: int, phase: Phase, first_page: int) -> Iterator[Segment]:
        columns = self._columns(first_page)
        k, v = self.pool.k[layer], self.pool.v[layer]
        if phase == "forward":
            yield Segment(first_page, k, v, columns.slots, columns.runs)
        else:
            dk, dv = self.pool.open_grads(layer, columns.owned)
            yield Segment(first_page, k, v, columns.slots, columns.runs, dk, dv, columns.slots, columns.runs)

    def own_grad(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """What later blocks left for the open block: [B, C, G, D] each in the gradient dtype, zero in the padding;
        None when nothing was left."""
        self._check_layer(layer)
        grads = self.pool.grads(layer)
        if grads is None or not any(self.tokens):
            return None
        flat, valid = self._open_rows()
        live = self.pool.grad_live(layer, flat // self.page_tokens) & valid
        if not live.any():
            return None
        dk, dv = (pages.view(-1, *pages.shape[2:])[flat.clamp(min=0).to(pages.device)] for pages in grads)
        if not live.all():
            dead = ~live[..., None, None].to(dk.device)
            dk, dv = dk.masked_fill_(dead, 0.0), dv.masked_fill_(dead, 0.0)
        return dk, dv

    def _cut(self, lengths: tuple[int, ...]) -> None:
        for sequence, length in zip(self._ids, lengths):
            self.pool.drop_grads(self.pool.table.truncate(sequence, length))
        self._written = [tuple(map(min, written, lengths)) for written in self._written]
        self._cleared()

    def _cleared(self) -> None:
        """Forget what was derived from the page table."""
        tables = [torch.tensor(self.pool.table.slots(sequence), dtype=torch.int64) for sequence in self._ids]
        self._slots = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)  # [B, N]
        self._column_cache: dict[int, _Columns] = {}
        self._rows: tuple[Tensor, Tensor] | None = None

    def _columns(self, first_page: int) -> _Columns:
        """The past's columns from `first_page` on; made once per extend or rewind, for all layers."""
        if first_page not in self._column_cache:
            ends = torch.tensor([-(-n // self.page_tokens) for n in self._starts])
            slots = self._slots[:, first_page : int(ends.max())].clone()
            slots[torch.arange(first_page, int(ends.max())) >= ends[:, None]] = -1
            owned = [row[row >= 0] for row in slots]
            runs = None
            if all(bool((row.diff() == 1).all()) for row in owned):
                runs = tuple(int(row[0]) if len(row) else 0 for row in owned)
            device_slots = slots.to(torch.int32).to(self.pool.device)
            self._column_cache[first_page] = _Columns(device_slots, runs, torch.cat(owned))
        return self._column_cache[first_page]

    def _open_rows(self) -> tuple[Tensor, Tensor]:
        """Where the open block's tokens are: slot * P + row, and which are no padding; [B, C] on the CPU."""
        if self._rows is None:
            counts = torch.tensor(self.tokens)[:, None]
            offsets = torch.arange(int(counts.max()))
            valid = offsets < counts
            positions = torch.tensor(self._starts)[:, None] + offsets
            page = (positions // self.page_tokens).clamp(max=self._slots.shape[1] - 1)
            rows = self._slots.gather(1, page) * self.page_tokens + positions % self.page_tokens
            self._rows = rows.masked_fill_(~valid, -1), valid
        return self._rows

    def _per_sequence(self, method: str, value: Lengths) -> tuple[int, ...]:
        values = tuple(value) if isinstance(value, Sequence) else (value,) * self.batch
        if len(values) != self.batch or not all(is_count(n, 0) for n in values):
            raise ValueError(
                f"PagedKV.{method}: expected an int >= 0, or {self.batch} of them (one per sequence), got {value!r}"
            )
        return values

    def _check_layer(self, layer: int) -> None:
        if not is_count(layer, 0) or layer >= self.pool.layers:
            raise ValueError(f"PagedKV: expected a layer in [0, {self.pool.layers}), got {layer!r}")
