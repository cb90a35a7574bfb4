"""The page table against a model of itself, and what it refuses."""

import inspect
import pickle
import re

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from paged_kv import OutOfPages, PageTable, page_table

SLOTS, PAGE = 12, 4


def pages(tokens):
    return -(-tokens // PAGE)


class Machine(RuleBasedStateMachine):
    """The model: lengths, and a stamp on each (sequence, page) that must stay in the slot where it was put."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.table = PageTable(SLOTS, PAGE)
        self.lengths = {}
        self.memory = [None] * SLOTS

    @rule(target=sequences, near=st.integers(0, SLOTS - 1))
    def add(self, near):
        sequence = self.table.add(near)
        assert sequence not in self.lengths
        self.lengths[sequence] = 0
        return sequence

    @rule(chosen=st.lists(sequences, min_size=1, max_size=3), data=st.data())
    def extend(self, chosen, data):
        tokens = {s: data.draw(st.integers(0, 3 * PAGE)) for s in chosen if s in self.lengths}
        if not tokens:
            return
        needed = {s: pages(self.lengths[s] + n) - pages(self.lengths[s]) for s, n in tokens.items()}
        before = {s: self.table.slots(s) for s in self.lengths}
        free = self.table.free_pages
        if sum(needed.values()) > free:
            with pytest.raises(OutOfPages) as caught:
                self.table.extend(tokens)
            assert (caught.value.needed, caught.value.free, caught.value.slots) == (sum(needed.values()), free, SLOTS)
            assert {s: self.table.slots(s) for s in self.lengths} == before
            return
        assert self.table.extend(tokens) == sum(needed.values())
        for s, n in tokens.items():
            assert self.table.slots(s)[: len(before[s])] == before[s]
            for i in range(len(before[s]), len(before[s]) + needed[s]):
                slot = self.table.slots(s)[i]
                assert self.memory[slot] is None, "a slot in use was handed out"
                self.memory[slot] = (s, i)
            self.lengths[s] += n

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        if sequence not in self.lengths:
            return
        length = data.draw(st.integers(0, self.lengths[sequence]))
        old = self.table.slots(sequence)
        freed = self.table.truncate(sequence, length)
        assert freed == list(old[pages(length) :])
        for slot in freed:
            self.memory[slot] = None
        self.lengths[sequence] = length

    @rule(sequence=consumes(sequences))
    def release(self, sequence):
        if sequence not in self.lengths:
            return multiple()
        old = self.table.slots(sequence)
        assert self.table.release(sequence) == list(old)
        for slot in old:
            self.memory[slot] = None
        del self.lengths[sequence]
        with pytest.raises(ValueError, match="no sequence"):
            self.table.slots(sequence)

    @invariant()
    def agrees(self):
        assert self.table.sequences == tuple(self.lengths)
        used = sum(m is not None for m in self.memory)
        assert self.table.free_pages == SLOTS - used
        for sequence, length in self.lengths.items():
            assert self.table.length(sequence) == length
            slots = self.table.slots(sequence)
            assert len(slots) == pages(length)
            assert [self.memory[slot] for slot in slots] == [(sequence, i) for i in range(len(slots))]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


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
    with pytest.raises(ValueError, match=r"\[0, 5\]"):
        table.truncate(a, 6)
    with pytest.raises(ValueError, match="no sequence"):
        table.extend({a: 1, 99: 1})
    assert table.length(a) == 5


def test_bookkeeping_knows_no_tensor():
    assert not re.search(r"^\s*(import|from) (torch|numpy)", inspect.getsource(page_table), re.MULTILINE)
