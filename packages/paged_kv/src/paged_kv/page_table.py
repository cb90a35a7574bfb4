"""Bookkeeping of pages: which slots hold which sequence's tokens. Pure Python; it knows no tensor."""

from __future__ import annotations

from collections.abc import Mapping


class OutOfPages(MemoryError):
    """More pages were asked for than are free; nothing was changed.

    Units: needed, free and slots in pages
    """

    def __init__(self, needed: int, free: int, slots: int) -> None:
        super().__init__(needed, free, slots)
        self.needed, self.free, self.slots = needed, free, slots

    def __str__(self) -> str:
        return (
            f"{self.needed} more pages needed, {self.free} of {self.slots} free; "
            "release sequences, or make the pool larger"
        )


class PageTable:
    """Sequences of tokens in pages of a fixed number of slots.

    A sequence of n tokens has `ceil(n / page_tokens)` slots; its i-th page (logical id i) is in `slots(sequence)[i]`.
    A sequence grows into the slot behind its last one when that is free, so pages of a fresh table form runs. Forks
    share pages: a slot is free again when its last owner lets go of it, and a page that several own is copied before
    one of them writes to it. Every method either succeeds as a whole or raises and changes nothing.

    Units: slots and pages in pages, lengths in tokens
    Source: PagedAttention (arXiv 2309.06180)
    """

    def __init__(self, slots: int, page_tokens: int) -> None:
        for name, value in (("slots", slots), ("page_tokens", page_tokens)):
            if not is_count(value, 1):
                raise ValueError(f"PageTable: expected {name} to be a positive int, got {value!r}")
        self.page_tokens = page_tokens
        self._free = bytearray(b"\1") * slots
        self._free_pages = slots
        self._owners: dict[int, int] = {}  # slot -> sequences that have it, where there is more than one
        self._slots: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._near: dict[int, int] = {}
        self._next = 0

    @property
    def total_pages(self) -> int:
        return len(self._free)

    @property
    def free_pages(self) -> int:
        return self._free_pages

    @property
    def sequences(self) -> tuple[int, ...]:
        return tuple(self._slots)

    def add(self, near: int = 0) -> int:
        """A new, empty sequence. Its first page is looked for from slot `near` on, to keep sequences out of each
        other's way.

        Returns: the sequence's id, never used before in this table
        """
        if not is_count(near, 0) or near >= self.total_pages:
            raise ValueError(f"PageTable.add: expected near in [0, {self.total_pages}), got {near!r}")
        sequence = self._next
        self._next += 1
        self._slots[sequence], self._lengths[sequence], self._near[sequence] = [], 0, near
        return sequence

    def fork(self, sequence: int, length: int) -> int:
        """A new sequence that begins with another's first `length` tokens, in the same pages. It takes none.

        Returns: the new sequence's id
        """
        self._known(sequence)
        if not is_count(length, 0) or length > self._lengths[sequence]:
            raise ValueError(f"PageTable.fork: expected a length in [0, {self._lengths[sequence]}], got {length!r}")
        new = self.add(self._near[sequence])
        self._slots[new] = self._slots[sequence][: self._pages(length)]
        self._lengths[new] = length
        for slot in self._slots[new]:
            self._owners[slot] = self._owners.get(slot, 1) + 1
        return new

    def length(self, sequence: int) -> int:
        self._known(sequence)
        return self._lengths[sequence]

    def slots(self, sequence: int, first_page: int = 0) -> tuple[int, ...]:
        """The sequence's slots in logical order, from its page `first_page` on."""
        self._known(sequence)
        return tuple(self._slots[sequence][first_page:])

    def shares(self, sequence: int) -> bool:
        """Whether another sequence has one of its pages too."""
        self._known(sequence)
        return bool(self._owners) and any(slot in self._owners for slot in self._slots[sequence])

    def extend(self, tokens: Mapping[int, int]) -> list[tuple[int, int]]:
        """Make room for more tokens at the end of some sequences: for all of them, or for none.

        A sequence whose last page has room but other owners gets a page of its own in its place.

        Units: tokens: sequence -> tokens to add
        Returns: (slot, slot) pairs: what the first holds must be copied to the second before anything is written
        Raises: OutOfPages if they do not all fit; ValueError for an unknown sequence or a negative number
        """
        needed: dict[int, int] = {}
        shared: list[int] = []
        leaving: dict[int, int] = {}  # slot -> owners that are about to go
        for sequence, count in tokens.items():
            self._known(sequence)
            if not is_count(count, 0):
                raise ValueError(f"PageTable.extend: expected an int >= 0 of tokens, got {count!r}")
            needed[sequence] = self._pages(self._lengths[sequence] + count) - len(self._slots[sequence])
            if count and self._lengths[sequence] % self.page_tokens:
                last = self._slots[sequence][-1]
                if self._owners.get(last, 1) - leaving.get(last, 0) > 1:  # the last one to stay needs no copy
                    leaving[last] = leaving.get(last, 0) + 1
                    shared.append(sequence)
        total = sum(needed.values()) + len(shared)
        if total > self._free_pages:
            raise OutOfPages(total, self._free_pages, self.total_pages)
        copies = [self._replace_last(sequence) for sequence in shared]
        for sequence, pages in needed.items():
            for _ in range(pages):
                self._slots[sequence].append(self._take(sequence))
            self._lengths[sequence] += tokens[sequence]
        return copies

    def truncate(self, sequence: int, length: int) -> list[int]:
        """Cut a sequence to its first `length` tokens and let go of the pages that lie wholly beyond.

        Returns: the slots that became free
        """
        self._known(sequence)
        if not is_count(length, 0) or length > self._lengths[sequence]:
            raise ValueError(f"PageTable.truncate: expected a length in [0, {self._lengths[sequence]}], got {length!r}")
        keep = self._pages(length)
        dropped = self._slots[sequence][keep:]
        del self._slots[sequence][keep:]
        self._lengths[sequence] = length
        freed = [slot for slot in dropped if self._let_go(slot)]
        for slot in freed:
            self._free[slot] = 1
        self._free_pages += len(freed)
        return freed

    def release(self, sequence: int) -> list[int]:
        """Forget a sequence. Returns: the slots that became free."""
        freed = self.truncate(sequence, 0)
        del self._slots[sequence], self._lengths[sequence], self._near[sequence]
        return freed

    def _replace_last(self, sequence: int) -> tuple[int, int]:
        old = self._slots[sequence].pop()
        last = self._let_go(old)
        assert not last, "extend counted the owners"
        new = self._take(sequence)
        self._slots[sequence].append(new)
        return old, new

    def _let_go(self, slot: int) -> bool:
        """One owner less; whether none is left."""
        owners = self._owners.get(slot, 1) - 1
        if owners > 1:
            self._owners[slot] = owners
        else:
            self._owners.pop(slot, None)
        return owners == 0

    def _take(self, sequence: int) -> int:
        owned = self._slots[sequence]
        wanted = owned[-1] + 1 if owned else self._near[sequence]
        slot = self._free.find(1, wanted)
        if slot < 0 or (owned and slot != wanted):
            slot = self._free.find(1)  # no run to go on with: fill the lowest gap
        assert slot >= 0, "extend counted the free pages"
        self._free[slot] = 0
        self._free_pages -= 1
        return slot

    def _pages(self, length: int) -> int:
        return -(-length // self.page_tokens)

    def _known(self, sequence: int) -> None:
        if not isinstance(sequence, int) or isinstance(sequence, bool) or sequence not in self._slots:
            raise ValueError(f"PageTable: no sequence {sequence!r}; it was released, or never added")


def is_count(value: object, least: int) -> bool:
    """An int of at least that much; True and False are no ints here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
