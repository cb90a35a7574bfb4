"""Sequences that come and go: what they hold under any order of calls, what they share, and what is refused."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from paged_kv import OutOfPages, PagedKV, PagePool, paged_attention

P, SLOTS, LAYERS = 4, 14, 2


def make(slots=SLOTS, **more):
    pool = PagePool(
        layers=LAYERS, slots=slots, page_tokens=P, kv_heads=1, head_dim=2, dtype=torch.float64, device="cpu"
    )  # fmt: skip
    for x in (*pool.k, *pool.v):
        x.fill_(torch.nan)
    return PagedKV(pool, **more)


@pytest.mark.parametrize("lengths", [(70, 70), (70, 3)])
def test_another_default_device_changes_nothing(lengths):
    """What is made on the host is made there whatever `torch.set_default_device` says: nothing else can be pinned."""

    def outputs():
        kv, drawn = make(slots=60), torch.Generator().manual_seed(0)
        sequences = [kv.add(), kv.add()]
        found = []
        for counts in (lengths, (1, 2)):
            kv.extend(dict(zip(sequences, counts)))
            new = torch.randn(sum(counts), 1, 2, generator=drawn, dtype=torch.float64, device="cpu")
            for layer in range(LAYERS):
                kv.append(layer, new, new)
                found.append(paged_attention(new, new, new, kv, layer, scale=1.0))
        kv.fork(sequences[0])
        kv.extend({sequences[0]: 1})  # writes to a page that is shared: it is copied first
        for layer in range(LAYERS):
            kv.append(layer, new[:1], new[:1])
            found.append(paged_attention(new[:1], new[:1], new[:1], kv, layer, scale=1.0))
        return found

    wanted = outputs()
    with torch.device("meta"):
        found = outputs()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def tensors(numbers):
    k = torch.tensor(numbers, dtype=torch.float64)[:, None, None].expand(-1, 1, 2)
    return k, -k


def write(kv, tokens):
    """Extend {sequence: numbers} and append them, other numbers in each layer."""
    kv.extend({s: len(numbers) for s, numbers in tokens.items()})
    for layer in range(LAYERS):
        kv.append(layer, *tensors([n + 0.5 * layer for numbers in tokens.values() for n in numbers]))


def read(kv, sequence, layer):
    """A sequence's tokens by its slots on the host."""
    slots = torch.tensor(kv.pool.table.slots(sequence), dtype=torch.int64)
    rows = kv.pool.k[layer][slots].flatten(0, 1)[: kv.length(sequence)]
    assert torch.equal(kv.pool.v[layer][slots].flatten(0, 1)[: kv.length(sequence)], -rows)
    return (rows[:, 0, 0] - 0.5 * layer).tolist()


class Machine(RuleBasedStateMachine):
    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.kv = make(max_sequences=5)
        self.tokens = {}
        self.stamp = 0

    @initialize(target=sequences)
    def begin(self):
        return self.add()

    @rule(target=sequences)
    def add(self):
        if len(self.tokens) == 5:
            with pytest.raises(ValueError, match="at most 5 sequences"):
                self.kv.add()
            return multiple()
        sequence = self.kv.add()
        self.tokens[sequence] = []
        return sequence

    @rule(target=sequences, sequence=sequences, data=st.data())
    def fork(self, sequence, data):
        if sequence not in self.tokens or len(self.tokens) == 5:
            return multiple()
        length = data.draw(st.none() | st.integers(0, len(self.tokens[sequence])))
        free = self.kv.pool.table.free_pages
        new = self.kv.fork(sequence, length)
        assert self.kv.pool.table.free_pages == free
        self.tokens[new] = self.tokens[sequence][:length]
        return new

    @rule(chosen=st.lists(sequences, min_size=1, max_size=4, unique=True), data=st.data())
    def extend(self, chosen, data):
        counts = {s: data.draw(st.integers(1, 2 * P)) for s in chosen if s in self.tokens}
        if not counts:
            return
        tokens = {}
        for s, n in counts.items():
            tokens[s] = [float(self.stamp + i) for i in range(n)]
            self.stamp += n
        before = self.kv.pool.table.free_pages, self.kv.tokens, self.kv.lengths
        try:
            write(self.kv, tokens)
        except OutOfPages as error:
            assert error.needed > error.free == before[0]
            assert before == (self.kv.pool.table.free_pages, self.kv.tokens, self.kv.lengths)
            return
        assert self.kv.tokens == tuple(counts.values())
        assert self.kv.lengths == tuple(len(self.tokens[s]) for s in counts)
        for s, numbers in tokens.items():
            self.tokens[s] += numbers
        step = self.kv.step()
        for row, s in zip(step.rows.tolist(), counts):
            slots = list(self.kv.pool.table.slots(s))
            assert step.table[row, : len(slots)].tolist() == slots, "the device has another table"

    @rule(sequence=sequences, data=st.data())
    def truncate(self, sequence, data):
        if sequence in self.tokens:
            length = data.draw(st.integers(0, len(self.tokens[sequence])))
            self.kv.truncate({sequence: length})
            del self.tokens[sequence][length:]
            assert self.kv.block is None

    @rule(sequence=consumes(sequences))
    def free(self, sequence):
        if sequence in self.tokens:
            self.kv.free(sequence)
            del self.tokens[sequence]
            for call in (self.kv.length, self.kv.free, self.kv.fork):
                with pytest.raises(ValueError, match="no sequence"):
                    call(sequence)
            for call in (self.kv.extend, self.kv.truncate):
                with pytest.raises(ValueError, match="no sequence"):
                    call({sequence: 0})

    @invariant()
    def holds(self):
        assert self.kv.sequences == tuple(self.tokens)
        for s, numbers in self.tokens.items():
            assert self.kv.length(s) == len(numbers)
            for layer in range(LAYERS):
                assert read(self.kv, s, layer) == numbers
        used = {slot for s in self.tokens for slot in self.kv.pool.table.slots(s)}
        assert self.kv.pool.table.free_pages == SLOTS - len(used)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_memory_is_proportional_to_live_tokens():
    kv = make(slots=200)
    a = kv.add()
    write(kv, {a: [1.0] * 301})
    forks = [kv.fork(a) for _ in range(50)]
    assert 200 - kv.pool.table.free_pages == 76
    for i, s in enumerate(forks):
        write(kv, {s: [2.0 + i]})
    assert 200 - kv.pool.table.free_pages == 75 + 51, "a page each beside the 75 whole ones"
    kv.free(a)
    for s in forks[1:]:
        kv.free(s)
    assert 200 - kv.pool.table.free_pages == 76
    assert read(kv, forks[0], 1) == [1.0] * 301 + [2.0]


def test_a_block_must_be_written_whole_before_the_next_and_before_a_fork():
    kv = make()
    a, b = kv.add(), kv.add()
    write(kv, {a: [0.0, 1.0], b: [2.0]})
    kv.extend({a: 2})
    kv.append(0, *tensors([5.0, 6.0]))
    with pytest.raises(ValueError, match=r"layers \[1\] of the open block were never appended"):
        kv.extend({b: 1})
    with pytest.raises(ValueError, match=r"\[0, 2\], the tokens that every layer has, got 4"):
        kv.fork(a)
    assert kv.length(kv.fork(a, 2)) == 2
    with pytest.raises(ValueError, match="already"):
        kv.append(0, *tensors([5.0, 6.0]))
    kv.free(b)
    kv.append(1, *tensors([5.5, 6.5]))
    assert read(kv, a, 1) == [0.0, 1.0, 5.0, 6.0]


def test_a_step_given_up_in_the_middle_is_cut_off_and_done_again():
    kv = make()
    a = kv.add()
    write(kv, {a: [0.0, 1.0]})
    kv.extend({a: 3})
    kv.append(0, *tensors([7.0, 7.0, 7.0]))
    kv.truncate({a: 2})
    with pytest.raises(ValueError, match="no block is open"):
        kv.append(1, *tensors([7.0, 7.0, 7.0]))
    write(kv, {a: [2.0]})
    assert read(kv, a, 0) == read(kv, a, 1) == [0.0, 1.0, 2.0]


def test_tokens_that_were_never_written_are_not_read():
    kv = make()
    a = kv.add()
    kv.extend({a: 3})
    kv.extend({a: 1})
    q, (k, v) = torch.zeros(1, 1, 2, dtype=torch.float64), tensors([1.0])
    with pytest.raises(ValueError, match="never appended"):
        kv.append(0, k, v)
    with pytest.raises(ValueError, match="append the block"):
        paged_attention(q, k, v, kv, 0, scale=1.0)
    kv.truncate({a: 0})
    write(kv, {a: [1.0]})


@pytest.mark.parametrize(
    "bad", [{}, {0: 0}, {0: -1}, {0: 1.0}, {0: True}, {0: None}, {99: 1}, {"0": 1}, {None: 1}, {True: 1}]
)
def test_what_extend_refuses(bad):
    kv = make()
    a = kv.add()
    assert a == 0
    write(kv, {a: [1.0]})
    before = kv.tokens, kv.lengths, kv.pool.table.free_pages
    with pytest.raises(ValueError, match=r"expected|no sequence"):
        kv.extend(bad)
    assert (kv.tokens, kv.lengths, kv.pool.table.free_pages) == before


def test_what_append_refuses_without_padding():
    kv = make()
    a, b = kv.add(), kv.add()
    kv.extend({a: 2, b: 1})
    k, v = tensors([1.0, 2.0, 3.0])
    for bad_k, bad_v in ((k[:2], v), (k, v[:2]), (k.float(), v), (k, v[:, :, :1]), (k.to("meta"), v)):
        with pytest.raises(ValueError, match=r"expected [kv] \[3, 1, 2\]"):
            kv.append(0, bad_k, bad_v)
    for bad_k, bad_v in ((None, v), (k, [1.0]), (k.numpy(), v)):
        with pytest.raises(ValueError, match=r"expected [kv] to be a tensor"):
            kv.append(0, bad_k, bad_v)
    for call in (
        lambda: kv.truncate({a: 3}),
        lambda: kv.truncate({a: -1}),
        lambda: kv.fork(a, 1),
        lambda: kv.fork(a, -1),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    assert kv.pool.k[0].isnan().all()


def test_a_cache_without_sequences_can_be_released_and_wants_a_pool():
    kv = make()
    kv.release()
    assert kv.contiguous and kv.sequences == kv.lengths == ()
    a = kv.add()
    write(kv, {a: [1.0]})
    kv.free(a)
    kv.release()
    assert kv.pool.table.free_pages == SLOTS and kv.max_sequences == 256
    for bad in (None, kv.pool.table):
        with pytest.raises(ValueError, match="expected a PagePool"):
            PagedKV(bad)


def test_sequences_of_another_cache_on_the_same_pool_are_not_ours():
    kv = make()
    other = PagedKV(kv.pool)
    stranger = other.add()
    with pytest.raises(ValueError, match="no sequence"):
        kv.extend({stranger: 1})


def test_training_refuses_pages_that_are_shared():
    kv = make()
    a = kv.add()
    write(kv, {a: [1.0] * 5})
    b = kv.fork(a)
    kv.extend({a: 1, b: 1})
    with pytest.raises(ValueError, match="share pages"):
        list(kv.segments(0, "forward")) and list(kv.segments(0, "backward"))
