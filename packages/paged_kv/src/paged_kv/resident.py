"""The resident past: sequences whose pages are all in one pool. Training walks it back, inference serves from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .device_table import Block, DeviceTable, Step, places_of
from .page_table import is_count
from .past import Phase, Segment
from .pool import PagePool
from .sequences import Lengths, Sequences
from .view import PoolView


class PagedKV(Sequences):
    """Sequences in a pool of pages: the `PastSource` of training and the cache of inference.

    Tokens come in blocks. `extend` opens the next block, `append` writes it, layer by layer, and attention reads it
    and what lies before it.

    Training has `batch` sequences from the start, all in every block: `extend` takes one number of tokens or one a
    sequence, tensors are padded on the right to the longest, and what is in the padding is not stored. It walks back by
    `rewind`, which reopens the block before and frees what lies beyond it; a page that straddles two blocks, and its
    gradient, stays until its first token's block is done.

    In inference sequences come and go: `add`, `fork`, `free`. `extend({sequence: tokens})` opens a block for some of
    them, prompts and single tokens mixed, and tensors hold the block's tokens one sequence after the other, [T, …].
    Forks share pages until one of them writes.

    Units: lengths, tokens: of each sequence in the open block its past and its tokens in the block; with no block open
        of every sequence
    """

    def __init__(self, pool: PagePool, batch: int = 0, *, max_sequences: int = 256) -> None:
        super().__init__(pool, batch, max_sequences)
        self._block: Block | None = None
        self._appended: set[int] = set()  # layers that have the open block
        self._step: Step | None = None
        self._views: dict[tuple[int, ...] | None, PoolView] = {}
        self._padded_places: tuple[Tensor, Tensor] | None = None
        self._holes: bool | None = None

    @property
    def block(self) -> Block | None:
        return self._block

    @property
    def lengths(self) -> tuple[int, ...]:
        if self._block is not None:
            return self._block.starts
        return tuple(self.pool.table.length(sequence) for sequence in self._written)

    @property
    def tokens(self) -> tuple[int, ...]:
        return (0,) * self.batch if self._block is None else self._block.tokens

    @property
    def contiguous(self) -> bool:
        """Whether every sequence's past lies in consecutive slots, which vendor kernels need."""
        return not self._in_block or self.view().contiguous

    def extend(self, tokens: Lengths | Mapping[int, int]) -> None:
        """Open the next block; the block before it becomes past. The pages are taken and shared ones copied, or nothing
        is changed.

        Units: tokens: of the block, one int for all sequences or one per sequence (then 0 is allowed, not for all), or
            sequence -> tokens for some, at least 1 each, in the order of the block
        Raises: OutOfPages if the pages do not all fit; ValueError if only some layers of the open block were written
        """
        counts = self._per_sequence("extend", tokens, self.sequences)
        packed = isinstance(tokens, Mapping)
        if not any(counts.values()) or (packed and not all(counts.values())):
            raise ValueError(f"PagedKV.extend: expected at least one token{' each' if packed else ''}, got {tokens!r}")
        if any(self.tokens) and 0 < len(self._appended) < self.pool.layers:
            missing = [layer for layer in range(self.pool.layers) if layer not in self._appended]
            raise ValueError(f"PagedKV.extend: layers {missing} of the open block were never appended, others were")
        table, page = self.pool.table, self.page_tokens
        starts = {sequence: table.length(sequence) for sequence in counts}
        copies = table.extend(counts)
        if copies:
            self.pool.copy_pages(copies)
            for sequence, start in starts.items():
                self._pages_changed(sequence, start // page)
        self._settle()
        self._open(Block(tuple(counts), tuple(starts.values()), tuple(n + starts[s] for s, n in counts.items())))
        for sequence, start in starts.items() if self.pool.has_grads else ():
            # The new tokens may share a page with older ones that have a gradient; theirs starts at zero.
            if counts[sequence] and start % page:
                self.pool.zero_grad_rows(table.slots(sequence, start // page)[0], start % page)
        if packed:
            self.step()  # now, so that a captured graph finds the block when it is replayed

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the open block's keys and values of one layer, once.

        Shapes: k, v [B, C, G, D], C the longest sequence's tokens, or [T, G, D], all tokens in the block's order; in
            the pool's dtype on its device
        Raises: ValueError if anything differs, the block was appended already, or an earlier one never was
        """
        self.check_layer(layer)
        if self._block is None:
            raise ValueError("PagedKV.append: no block is open; call extend(tokens) first")
        pages, tokens = (self.pool.k[layer], self.pool.v[layer]), self._block.tokens
        for name, x in (("k", k), ("v", v)):
            if not isinstance(x, Tensor):
                raise ValueError(f"PagedKV.append: expected {name} to be a tensor, got {type(x).__name__}")
        packed = k.ndim == 3
        shape = (*((sum(tokens),) if packed else (len(tokens), max(tokens))), *pages[0].shape[2:])
        for name, x in (("k", k), ("v", v)):
            if tuple(x.shape) != shape or x.dtype != self.pool.dtype or x.device != self.pool.device:
                raise ValueError(
                    f"PagedKV.append: expected {name} {list(shape)} {self.pool.dtype} on {self.pool.device}, got "
                    f"{list(x.shape)} {x.dtype} on {x.device}"
                )
        self._check_unwritten(layer)
        places = self._places()[1]
        with torch.no_grad():
            for target, x in zip(pages, (k, v)):
                rows = x.detach() if packed else self._without_padding(x.detach())
                target.view(-1, *target.shape[2:]).index_copy_(0, places, rows)
        self._appended.add(layer)

    def appended(self, layer: int) -> bool:
        """Whether the open block was appended to this layer."""
        return layer in self._appended

    def mark_appended(self, layers: Iterable[int]) -> None:
        """These layers' share of the open block was written by other means: a captured graph that was replayed."""
        layers = tuple(layers)
        for layer in layers:
            self._check_unwritten(layer)
        self._appended.update(layers)

    def unmark_appended(self) -> None:
        """The open block may be written once more, to every layer."""
        self._appended = set()

    def rewind(self, start: Lengths) -> None:
        """Reopen the block [start, old start) and free the pages and gradient pages wholly beyond it.

        Units: start: position of the reopened block's first token, one int for all sequences or one per sequence
        Raises: ValueError if a start lies beyond the past, or the block would be empty
        """
        old, sequences = self.lengths, self._in_block
        starts = tuple(self._per_sequence("rewind", start, sequences).values())
        if any(s > n for s, n in zip(starts, old)) or starts == old:
            raise ValueError(f"PagedKV.rewind: expected starts within the past {old} and before its end, got {starts}")
        self._settle()
        self._cut(dict(zip(sequences, old)))
        self._open(Block(sequences, starts, old))
        if all(self._written[sequence] >= end for sequence, end in zip(sequences, old)):
            self._appended = set(range(self.pool.layers))

    def segments(self, layer: int, phase: Phase, first_page: int = 0) -> Iterator[Segment]:
        """The whole past of a layer as one segment (see `PastSource`); none when there is no past.

        Raises: ValueError if a block of the past was never appended to this layer
        """
        self.check_layer(layer)
        if phase not in ("forward", "backward"):
            raise ValueError(f'PagedKV.segments: expected phase "forward" or "backward", got {phase!r}')
        if not is_count(first_page, 0):
            raise ValueError(f"PagedKV.segments: expected first_page to be an int >= 0, got {first_page!r}")
        if self._lacking():
            written = tuple(self._written[sequence] for sequence in self._in_block)
            raise ValueError(
                f"PagedKV.segments: layer {layer} has {written} tokens, its past {self.lengths}; append every block "
                "before the next is opened"
            )
        return self.view().segments(layer, phase, first_page)

    def own_grad(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """What later blocks left for the open block: [B, C, G, D] each in the gradient dtype, zero in the padding;
        None when nothing was left."""
        self.check_layer(layer)
        grads = self.pool.grads(layer)
        if grads is None or self._block is None:
            return None
        on_host, places = self._places()
        live = self.pool.grad_live(layer, on_host // self.page_tokens)
        if not live.any():
            return None
        dead = None if live.all() else ~live[:, None, None].to(places.device)
        rows = [pages.view(-1, *pages.shape[2:])[places] for pages in grads]
        dk, dv = (self._with_padding(x if dead is None else x.masked_fill_(dead, 0.0)) for x in rows)
        return dk, dv

    def step(self) -> Step:
        """The open block's numbers on the device; sent once, for all layers."""
        assert self._block is not None
        if self._step is None:
            if self._device is None:
                self._device = DeviceTable(self.pool.table, self._most, self.pool.device)
            self._step = self._device.step(self._block)
        return self._step

    def view(self, indices: tuple[int, ...] | None = None) -> PoolView:
        """The past of some of the open block's sequences, by their place in it; None: of all."""
        if indices not in self._views:
            sequences, lengths = self._in_block, self.lengths
            if indices is not None:
                sequences, lengths = (tuple(x[i] for i in indices) for x in (sequences, lengths))
            self._views[indices] = PoolView(self.pool, sequences, lengths)
        return self._views[indices]

    @property
    def _in_block(self) -> tuple[int, ...]:
        return self.sequences if self._block is None else self._block.sequences

    def _open(self, block: Block) -> None:
        self._block, self._appended = block, set()
        self._forget_derived()

    def _settle(self) -> None:
        if self._block is not None and len(self._appended) == self.pool.layers:
            for sequence, start, end in zip(self._block.sequences, self._block.starts, self._block.ends):
                if self._written[sequence] >= start:
                    self._written[sequence] = end

    def _close(self, sequences: set[int]) -> None:
        self._settle()
        if self._block is not None and sequences.isdisjoint(self._block.sequences):
            return  # its pages stay where they are, and so does all that was sent to the device
        self._block, self._appended = None, set()
        self._forget_derived()

    def _forget_derived(self) -> None:
        """Forget what was derived from the page table."""
        self._views = {}
        self._step = self._padded_places = self._holes = None

    def _lacking(self) -> bool:
        """Whether some of the past was never written."""
        if self._holes is None:
            self._holes = any(self._written[s] < start for s, start in zip(self._in_block, self.lengths))
        return self._holes

    def _check_unwritten(self, layer: int) -> None:
        if layer in self._appended:
            raise ValueError(f"PagedKV.append: layer {layer} was appended to this block already")
        if self._lacking():
            raise ValueError(f"PagedKV.append: layer {layer} lacks an earlier block, which was never appended")

    def _places(self) -> tuple[Tensor, Tensor]:
        """Where the open block's tokens are, [T] slot * P + row: on the host and on the device."""
        assert self._block is not None
        if self._step is not None:
            return self._step.places_on_host, self._step.places
        if self._padded_places is None:
            on_host = places_of(self.pool.table, self._block)
            self._padded_places = on_host, on_host.to(self.pool.device)
        return self._padded_places

    def _padding(self) -> tuple[tuple[int, int], Tensor | None]:
        """(B, C) of the padded block, and which of its B * C rows hold tokens; None: all do."""
        tokens = torch.tensor(self.tokens, device="cpu")
        shape = (len(self.tokens), max(self.tokens))
        if len(set(self.tokens)) == 1:
            return shape, None
        index = (torch.arange(shape[1], device="cpu") < tokens[:, None]).flatten().nonzero()[:, 0]
        return shape, index.to(self.pool.device)

    def _without_padding(self, x: Tensor) -> Tensor:
        index = self._padding()[1]
        return x.flatten(0, 1) if index is None else x.flatten(0, 1)[index]

    def _with_padding(self, x: Tensor) -> Tensor:
        shape, index = self._padding()
        if index is not None:
            padded = x.new_zeros((shape[0] * shape[1], *x.shape[1:]))
            x = padded.index_copy_(0, index, x)
        return x.unflatten(0, shape)

    def check_layer(self, layer: int) -> None:
        """Raises: ValueError if the pool has no such layer"""
        if not is_count(layer, 0) or layer >= self.pool.layers:
            raise ValueError(f"PagedKV: expected a layer in [0, {self.pool.layers}), got {layer!r}")
