"""The page table against a model of itself, and what it refuses."""

import inspect
import pickle
import re
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from paged_kv import OutOfPages, PageTable, page_table

SLOTS, PAGE = 12, 4


def pages(tokens):
    return -(-tokens // PAGE)


class Machine(RuleBasedStateMachine):
    """The model: each sequence's tokens, all different, in a memory where the table must find them."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.table = PageTable(SLOTS, PAGE)
        self.tokens = {}
        self.memory = [[None] * PAGE for _ in range(SLOTS)]
        self.stamp = 0

    def used(self):
        return {slot for sequence in self.tokens for slot in self.table.slots(sequence)}

    def state(self):
        return {s: (self.table.slots(s), self.table.length(s)) for s in self.tokens}, self.table.free_pages

    @initialize(target=sequences, near=st.integers(0, SLOTS - 1))
    def begin(self, near):
        return self.add(near)

    @rule(target=sequences, near=st.integers(0, SLOTS - 1))
    def add(self, near):
        sequence = self.table.add(near)
        assert sequence not in self.tokens
        self.tokens[sequence] = []
        return sequence

    @rule(target=sequences, sequence=sequences, data=st.data())
    def fork(self, sequence, data):
        if sequence not in self.tokens:
            return multiple()
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        free = self.table.free_pages
        new = self.table.fork(sequence, length)
        assert new not in self.tokens and self.table.free_pages == free, "a fork takes no page"
        assert self.table.slots(new) == self.table.slots(sequence)[: pages(length)]
        self.tokens[new] = self.tokens[sequence][:length]
        return new

    @rule(chosen=st.lists(sequences, min_size=1, max_size=4), data=st.data())
    def extend(self, chosen, data):
        tokens = {s: data.draw(st.integers(0, 3 * PAGE)) for s in chosen if s in self.tokens}
        if not tokens:
            return
        before, free = self.state()
        owners = Counter(slot for s in self.tokens for slot in self.table.slots(s))
        needed = 0
        for s, n in tokens.items():  # one after the other: the last owner of a page keeps it
            needed += pages(len(self.tokens[s]) + n) - pages(len(self.tokens[s]))
            if n and len(self.tokens[s]) % PAGE and owners[self.table.slots(s)[-1]] > 1:
                owners[self.table.slots(s)[-1]] -= 1
                needed += 1
        if needed > free:
            with pytest.raises(OutOfPages) as caught:
                self.table.extend(tokens)
            assert (caught.value.needed, caught.value.free, caught.value.slots) == (needed, free, SLOTS)
            assert self.state() == (before, free)
            return
        in_use = self.used()
        copies = self.table.extend(tokens)
        assert self.table.free_pages == free - needed
        assert not in_use & {to for _, to in copies}, "a copy went to a page in use"
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for s, n in tokens.items():
            for _ in range(n):
                self.stamp += 1
                at = len(self.tokens[s])
                self.memory[self.table.slots(s)[at // PAGE]][at % PAGE] = self.stamp
                self.tokens[s].append(self.stamp)

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        if sequence not in self.tokens:
            return
        length = data.draw(st.integers(0, len(self.tokens[sequence])))
        before = self.used()
        freed = self.table.truncate(sequence, length)
        assert set(freed) == before - self.used() and len(set(freed)) == len(freed)
        del self.tokens[sequence][length:]
        for slot in freed:
            self.memory[slot] = [None] * PAGE

    @rule(sequence=consumes(sequences))
    def release(self, sequence):
        if sequence not in self.tokens:
            return multiple()
        before = self.used()
        freed = self.table.release(sequence)
        del self.tokens[sequence]
        assert set(freed) == before - self.used() and len(set(freed)) == len(freed)
        for call in (self.table.slots, self.table.length, self.table.release, self.table.shares):
            with pytest.raises(ValueError, match="no sequence"):
                call(sequence)
        with pytest.raises(ValueError, match="no sequence"):
            self.table.fork(sequence, 0)

    @invariant()
    def agrees(self):
        assert self.table.sequences == tuple(self.tokens)
        assert self.table.free_pages == SLOTS - len(self.used()), "a page leaked"
        owners = Counter(slot for s in self.tokens for slot in self.table.slots(s))
        for sequence, tokens in self.tokens.items():
            slots = self.table.slots(sequence)
            assert self.table.length(sequence) == len(tokens) and len(slots) == pages(len(tokens))
            assert len(set(slots)) == len(slots), "a page twice in one sequence"
            assert [self.memory[slots[i // PAGE]][i % PAGE] for i in range(len(tokens))] == tokens
            assert self.table.shares(sequence) == any(owners[slot] > 1 for slot in slots)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_fresh_table_hands_out_runs_even_when_sequences_take_turns():
    table = PageTable(24, 4)
    a, b, c = (table.add(near=i * 8) for i in range(3))
    for _ in range(8):
        table.extend({a: 4, b: 4, c: 4})
    for i, sequence in enumerate((a, b, c)):
        assert table.slots(sequence) == tuple(range(8 * i, 8 * i + 8))


def test_a_sequence_that_is_cut_back_and_grows_again_is_a_run_again():
    table = PageTable(16, 2)
    a = table.add()
    table.extend({a: 20})
    table.truncate(a, 7)
    table.extend({a: 25})
    assert table.slots(a) == tuple(range(16))


def test_every_slot_can_be_used_wherever_the_free_ones_lie():
    table = PageTable(6, 1)
    many = [table.add() for _ in range(6)]
    table.extend(dict.fromkeys(many, 1))
    for sequence in (many[1], many[4]):
        table.release(sequence)
    last = table.add(near=5)
    table.extend({last: 2})
    assert sorted(table.slots(last)) == [1, 4]
    assert table.free_pages == 0


def test_a_failed_extension_changes_nothing_for_any_sequence():
    table = PageTable(4, 2)
    a, b = table.add(), table.add()
    table.extend({a: 3})
    with pytest.raises(OutOfPages, match=r"3 more pages needed, 2 of 4 free"):
        table.extend({a: 1, b: 5})
    assert (table.length(a), table.length(b), table.free_pages) == (3, 0, 2)


def test_forks_share_until_one_of_them_writes():
    table = PageTable(6, 4)
    a = table.add()
    table.extend({a: 6})
    b, c = table.fork(a, 6), table.fork(a, 4)
    assert table.free_pages == 4 and table.slots(b) == (0, 1) and table.slots(c) == (0,)
    assert table.extend({c: 1}) == [], "whole pages are never copied"
    (copy,) = table.extend({a: 1, b: 1})
    assert copy[0] == 1 and (table.slots(a)[1] == 1) != (table.slots(b)[1] == 1), "the last owner keeps the page"
    assert table.free_pages == 2 and table.slots(a)[0] == table.slots(b)[0] == table.slots(c)[0] == 0
    assert set(table.release(a)) <= {1, copy[1]} and table.free_pages == 3
    with pytest.raises(ValueError, match=r"\[0, 7\]"):
        table.fork(b, 8)


def test_a_copy_that_does_not_fit_changes_nothing():
    table = PageTable(1, 4)
    a = table.add()
    table.extend({a: 2})
    b = table.fork(a, 1)
    with pytest.raises(OutOfPages, match="1 more pages needed, 0 of 1 free"):
        table.extend({b: 1})
    assert (table.length(b), table.slots(b), table.shares(a)) == (1, (0,), True)
    table.release(a)
    assert table.extend({b: 1}) == []


def test_out_of_pages_is_a_memory_error_and_survives_pickling():
    error = pickle.loads(pickle.dumps(OutOfPages(3, 1, 8)))
    assert isinstance(error, MemoryError) and "3" in str(error) and (error.needed, error.free, error.slots) == (3, 1, 8)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "4", None])
def test_sizes_must_be_positive_ints(bad):
    with pytest.raises(ValueError, match="slots"):
        PageTable(bad, 4)
    with pytest.raises(ValueError, match="page_tokens"):
        PageTable(4, bad)


@pytest.mark.parametrize("bad", [-1, 1.0, True, None])
def test_lengths_must_be_ints(bad):
    table = PageTable(4, 2)
    a = table.add()
    table.extend({a: 5})
    with pytest.raises(ValueError):
        table.extend({a: bad})
    with pytest.raises(ValueError):
        table.truncate(a, bad)
    with pytest.raises(ValueError):
        table.add(near=bad)
    with pytest.raises(ValueError):
        table.fork(a, bad)
    with pytest.raises(ValueError, match=r"\[0, 5\]"):
        table.truncate(a, 6)
    with pytest.raises(ValueError, match="no sequence"):
        table.extend({a: 1, 99: 1})
    assert table.length(a) == 5


def test_bookkeeping_knows_no_tensor():
    assert not re.search(r"^\s*(import|from) (torch|numpy)", inspect.getsource(page_table), re.MULTILINE)
