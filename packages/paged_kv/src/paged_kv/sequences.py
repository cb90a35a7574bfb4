"""Sequences that come and go in one pool, sharing pages where they were forked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from .device_table import DeviceTable
from .page_table import is_count
from .pool import PagePool

Lengths = int | Sequence[int]


class Sequences(ABC):
    """Which sequences a cache holds and how much of each every layer has. What a block is, its subclass knows.

    Units: lengths in tokens
    """

    def __init__(self, pool: PagePool, batch: int, max_sequences: int) -> None:
        if not isinstance(pool, PagePool):
            raise ValueError(f"PagedKV: expected a PagePool, got {type(pool).__name__}")
        for name, value, least in (("batch", batch, 0), ("max_sequences", max_sequences, 1)):
            if not is_count(value, least):
                raise ValueError(f"PagedKV: expected {name} to be an int >= {least}, got {value!r}")
        self.pool = pool
        self._most = max(max_sequences, batch)
        self._written: dict[int, int] = {}  # sequence -> its first tokens that every layer has
        self._device: DeviceTable | None = None
        spread = pool.table.total_pages
        for b in range(batch):
            self._written[pool.table.add(near=b * spread // batch)] = 0

    @property
    def page_tokens(self) -> int:
        return self.pool.page_tokens

    @property
    def sequences(self) -> tuple[int, ...]:
        """The ids of the live sequences, oldest first."""
        return tuple(self._written)

    @property
    def batch(self) -> int:
        return len(self._written)

    @property
    def max_sequences(self) -> int:
        """How many sequences there may be at a time."""
        return self._most

    def length(self, sequence: int) -> int:
        """Tokens of a sequence, those of the open block included."""
        self._known("length", sequence)
        return self.pool.table.length(sequence)

    def add(self) -> int:
        """A new, empty sequence.

        Returns: its id, never used before in this pool
        Raises: ValueError if there are `max_sequences` already
        """
        self._room("add")
        sequence = self.pool.table.add()
        self._written[sequence] = 0
        return sequence

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with another's first `length` tokens (None: all), in the same pages.

        Returns: its id
        Raises: ValueError for tokens that were not appended to every layer yet, or `max_sequences` sequences
        """
        self._known("fork", sequence)
        self._settle()
        written = self._written[sequence]
        length = self.length(sequence) if length is None else length
        if not is_count(length, 0) or length > written:
            raise ValueError(
                f"PagedKV.fork: expected a length in [0, {written}], the tokens that every layer has, got {length!r}"
            )
        self._room("fork")
        new = self.pool.table.fork(sequence, length)
        self._written[new] = length
        return new

    def free(self, sequence: int) -> None:
        """Forget a sequence and give its pages back. If it was in the open block, no block is open after it."""
        self._known("free", sequence)
        self._close({sequence})
        self.pool.drop_grads(self.pool.table.release(sequence))
        del self._written[sequence]
        if self._device is not None:
            self._device.forget(sequence)

    def truncate(self, length: Lengths | Mapping[int, int]) -> None:
        """Keep the first `length` tokens as past; no block is open after it. Pages wholly beyond are let go of.

        Units: length: one int for all sequences, one per sequence, or sequence -> length for some
        Raises: ValueError if a sequence is shorter than that
        """
        lengths = self._per_sequence("truncate", length, self.sequences)
        held = tuple(self.pool.table.length(sequence) for sequence in lengths)
        if any(n > most for n, most in zip(lengths.values(), held)):
            raise ValueError(f"PagedKV.truncate: expected at most {held} tokens, got {tuple(lengths.values())}")
        self._close(set(self._written))
        self._cut(lengths)

    def release(self) -> None:
        """Give every page and gradient page back; every sequence is empty and may be filled again."""
        if self._written:
            self.truncate(0)

    @abstractmethod
    def _settle(self) -> None:
        """Count what the open block wrote as written."""

    @abstractmethod
    def _close(self, sequences: set[int]) -> None:
        """No block that holds one of these is open any more."""

    def _cut(self, lengths: Mapping[int, int]) -> None:
        for sequence, length in lengths.items():
            freed = self.pool.table.truncate(sequence, length)
            self.pool.drop_grads(freed)
            self._written[sequence] = min(self._written[sequence], length)
            self._pages_changed(sequence, -(-length // self.page_tokens))

    def _pages_changed(self, sequence: int, first_page: int) -> None:
        if self._device is not None:
            self._device.changed(sequence, first_page)

    def _room(self, method: str) -> None:
        if len(self._written) >= self._most:
            raise ValueError(
                f"PagedKV.{method}: expected at most {self._most} sequences at a time; free some, or give PagedKV a "
                "larger max_sequences"
            )

    def _known(self, method: str, sequence: int) -> None:
        if not is_count(sequence, 0) or sequence not in self._written:
            raise ValueError(f"PagedKV.{method}: no sequence {sequence!r} here; it was freed, or never added")

    def _per_sequence(self, method: str, value: Lengths | Mapping[int, int], all_of: tuple[int, ...]) -> dict[int, int]:
        """Sequence -> tokens, of whatever form the caller gave it in."""
        if isinstance(value, Mapping):
            for sequence in value:
                self._known(method, sequence)
            numbers = dict(value)
        else:
            values = tuple(value) if isinstance(value, Sequence) else (value,) * len(all_of)
            numbers = dict(zip(all_of, values)) if len(values) == len(all_of) else {}
        if not numbers or not all(is_count(n, 0) for n in numbers.values()):
            raise ValueError(
                f"PagedKV.{method}: expected an int >= 0, or {len(all_of)} of them (one per sequence), or "
                f"{{sequence: int}}, got {value!r}"
            )
        return numbers
