"""Pool and resident past: what they store, when gradient pages live, and what they refuse."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_kv import OutOfPages, PagedKV, PagePool, PastSource

P = 4


def make_pool(slots=12, layers=2, **more):
    options = {"kv_heads": 2, "head_dim": 3, "dtype": torch.float32, "device": "cpu"} | more
    pool = PagePool(layers=layers, slots=slots, page_tokens=P, **options)
    for pages in (*pool.k, *pool.v):
        pages.fill_(torch.nan)
    return pool


def block(kv, layer=0, base=0.0):
    """Keys that name their position, values their negative; NaN in the padding."""
    heads, dim = kv.pool.k[layer].shape[2:]
    positions = torch.tensor(kv.lengths)[:, None] + torch.arange(max(kv.tokens))
    k = (positions + base).float()[:, :, None, None].expand(-1, -1, heads, dim).clone()
    for b, n in enumerate(kv.tokens):
        k[b, n:] = torch.nan
    return k.to(kv.pool.dtype), -k.to(kv.pool.dtype)


def write(kv, tokens, layers=None):
    kv.extend(tokens)
    for layer in range(kv.pool.layers) if layers is None else layers:
        kv.append(layer, *block(kv, layer, 100.0 * layer))


def read(kv, layer):
    """The past, token by token, through the segment's slots and through its runs."""
    found = [torch.empty(0)] * kv.batch
    for segment in kv.segments(layer, "forward"):
        assert segment.first_page == 0 and segment.slots.dtype == torch.int32 and segment.dk is None
        for b, length in enumerate(kv.lengths):
            pages = -(-length // P)
            row = segment.slots[b]
            assert (row[:pages] >= 0).all() and (row[pages:] == -1).all()
            tokens = segment.k[row[:pages].long()].flatten(0, 1)[:length]
            assert torch.equal(-segment.v[row[:pages].long()].flatten(0, 1)[:length], tokens)
            if segment.runs is not None:
                run = segment.runs[b]
                assert row[:pages].tolist() == list(range(run, run + pages))
            found[b] = tokens[:, 0, 0]
    return found


def grad_segment(kv, layer, first_page=0):
    (segment,) = kv.segments(layer, "backward", first_page)
    return segment


def test_a_resident_past_is_a_past_source():
    assert isinstance(PagedKV(make_pool(), 1), PastSource)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_what_was_appended_is_read_back_at_its_position(data):
    batch = data.draw(st.integers(1, 3))
    kv = PagedKV(make_pool(slots=10 * batch), batch)
    model = [0] * batch
    for _ in range(data.draw(st.integers(1, 6))):
        counts = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch).filter(any))
        if any(m + n > 40 for m, n in zip(model, counts)):
            break
        write(kv, counts)
        assert kv.tokens == tuple(counts) and kv.lengths == tuple(model)
        model = [m + n for m, n in zip(model, counts)]
        if data.draw(st.integers(0, 3)) == 0:
            model = [data.draw(st.integers(0, m)) for m in model]
            kv.truncate(model)
            assert kv.lengths == tuple(model) and not any(kv.tokens)
        assert kv.pool.table.free_pages == 10 * batch - sum(-(-m // P) for m in model)
        before = kv.lengths
        for layer in (0, 1):
            for b, tokens in enumerate(read(kv, layer)):
                assert tokens.tolist() == [100.0 * layer + i for i in range(before[b])]


def test_a_failed_extension_changes_nothing():
    kv = PagedKV(make_pool(slots=4), 2)
    write(kv, [3, 5])
    with pytest.raises(OutOfPages):
        kv.extend([2, 4])
    assert (kv.lengths, kv.tokens, kv.pool.table.free_pages) == ((0, 0), (3, 5), 1)
    kv.extend([1, 4])
    assert kv.lengths == (3, 5)


def test_two_batches_share_a_pool():
    pool = make_pool(slots=6)
    a, b = PagedKV(pool, 1), PagedKV(pool, 1)
    write(a, 10)
    write(b, 9)
    with pytest.raises(OutOfPages):
        b.extend(8)
    a.release()
    write(b, 8)
    b.extend(1)
    assert read(b, 0)[0].tolist() == list(range(17))


def test_the_first_page_of_a_segment_can_be_any():
    kv = PagedKV(make_pool(), 2)
    write(kv, [11, 5])
    kv.extend(1)
    (segment,) = kv.segments(0, "forward", 1)
    slots = [kv.pool.table.slots(s) for s in kv.pool.table.sequences]
    assert segment.first_page == 1
    assert segment.slots.tolist() == [list(slots[0][1:3]), [slots[1][1], -1]]
    (segment,) = kv.segments(0, "forward", 2)
    assert segment.slots.tolist() == [[slots[0][2]], [-1]] and segment.runs == (slots[0][2], 0)
    assert list(kv.segments(0, "forward", 3)) == [] == list(PagedKV(kv.pool, 1).segments(0, "backward"))


def test_the_open_block_is_not_past_even_in_a_shared_page():
    kv = PagedKV(make_pool(), 1)
    write(kv, 6)
    write(kv, 9)
    assert read(kv, 0)[0].tolist() == [0, 1, 2, 3, 4, 5]
    (segment,) = kv.segments(0, "forward")
    assert segment.slots.shape == (1, 2)


def test_tables_are_made_once_per_block():
    kv = PagedKV(make_pool(), 1)
    write(kv, 6)
    kv.extend(2)
    first, again = (next(iter(kv.segments(layer, "forward"))) for layer in (0, 1))
    assert first.slots is again.slots


def test_gradient_pages_are_zeroed_at_their_first_contribution_and_only_then():
    kv = PagedKV(make_pool(), 1)
    for n in (6, 5, 3):  # pages 0..3; blocks end inside pages 1, 2 and 3
        write(kv, n)
    assert kv.pool.grads(0) is None and kv.own_grad(0) is None
    segment = grad_segment(kv, 0)  # past [0, 11): pages 0, 1, 2
    assert kv.pool.grads(1) is None, "each layer on its own"
    dk = segment.dk[segment.grad_slots[0].long()]
    assert dk.dtype == torch.float32 and torch.equal(dk, torch.zeros(3, P, 2, 3))
    kv.pool.grads(0)[1].fill_(7.0)
    kv.pool.grads(0)[0].fill_(3.0)
    assert torch.equal(grad_segment(kv, 0).dk[0], torch.full((P, 2, 3), 3.0)), "kept at the second"
    own_k, own_v = kv.own_grad(0)  # the open block is [11, 14): row 3 of page 2, and page 3, which has no gradient
    assert own_k[0, :, 0, 0].tolist() == [3, 0, 0] and own_v[0, :, 0, 0].tolist() == [7, 0, 0]
    assert kv.own_grad(1) is None

    kv.rewind(6)  # block [6, 11): all of it in pages 1 and 2
    assert (kv.lengths, kv.tokens) == ((6,), (5,))
    assert kv.own_grad(0)[0][0, :, 0, 0].tolist() == [3] * 5
    kv.release()
    write(kv, 9)
    kv.extend(1)
    assert torch.equal(grad_segment(kv, 0).dk[:3], torch.zeros(3, P, 2, 3)), "zeroed again for the next sequence"


def test_only_pages_in_the_window_get_gradients():
    kv = PagedKV(make_pool(), 1)
    write(kv, 10)
    kv.extend(4)
    grad_segment(kv, 0, first_page=2)
    slots = torch.tensor(kv.pool.table.slots(kv.pool.table.sequences[0]))
    assert kv.pool.grad_live(0, slots).tolist() == [False, False, True, False]
    assert kv.own_grad(0)[0].shape == (1, 4, 2, 3)
    kv.rewind(0)
    for pages in kv.pool.grads(0):
        pages[slots[2]] = 5.0
        pages[slots[:2]] = torch.nan
    own = kv.own_grad(0)[0][0, :, 0, 0]
    assert own.tolist() == [0.0] * 8 + [5.0, 5.0]


def test_tokens_that_follow_on_a_page_with_gradients_begin_at_zero():
    """Truncated or never finished blocks must not leave their gradient to the tokens that take their place."""
    for cut in (lambda kv: kv.truncate(6), lambda kv: kv.rewind(2)):
        kv = PagedKV(make_pool(), 1)
        write(kv, 6)
        write(kv, 2)
        kv.extend(4)
        grad_segment(kv, 0)
        for pages in kv.pool.grads(0):
            pages.fill_(9.0)
        kv.rewind(6)
        cut(kv)
        kv.extend(2)
        assert kv.lengths == (6,) and kv.own_grad(0)[0][0, :, 0, 0].tolist() == [0.0, 0.0]
        assert kv.pool.grads(0)[0][kv.pool.table.slots(kv.pool.table.sequences[0])[1], :2, 0, 0].tolist() == [9.0, 9.0]


def test_own_gradients_of_unequal_sequences_are_zero_in_the_padding():
    kv = PagedKV(make_pool(slots=20), 3)
    write(kv, [4, 2, 1])
    write(kv, [5, 0, 2])
    kv.extend([1, 1, 0])
    grad_segment(kv, 1)
    for pages in kv.pool.grads(1):
        pages.fill_(2.0)
    kv.rewind([4, 2, 1])
    own = kv.own_grad(1)[0][..., 0, 0]
    assert own.tolist() == [[2.0] * 5, [0.0] * 5, [2.0] * 2 + [0.0] * 3]


def test_rewinding_frees_what_lies_wholly_beyond():
    kv = PagedKV(make_pool(), 1)
    for n in (6, 4, 5):
        write(kv, n)
    kv.extend(4)
    free = kv.pool.table.free_pages
    kv.rewind(10)
    assert kv.pool.table.free_pages == free + 1  # tokens [0, 15) need 4 pages, [0, 19) needed 5
    kv.rewind(6)
    assert kv.pool.table.free_pages == free + 2 and kv.tokens == (4,)
    kv.rewind(0)
    assert (kv.lengths, kv.tokens, kv.pool.table.free_pages) == ((0,), (6,), free + 3)
    kv.release()
    assert kv.pool.table.free_pages == 12


def test_layers_of_different_widths():
    pool = make_pool(kv_heads=[1, 3], head_dim=[2, 5])
    kv = PagedKV(pool, 1)
    write(kv, 7)
    kv.extend(1)
    assert [x.shape for x in pool.k] == [(12, P, 1, 2), (12, P, 3, 5)]
    assert read(kv, 1)[0].tolist() == [100 + i for i in range(7)]
    assert grad_segment(kv, 1).dv.shape == (12, P, 3, 5)


def test_gradient_dtypes():
    for dtype, asked, got in (
        (torch.bfloat16, None, torch.float32),
        (torch.float64, None, torch.float64),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    ):
        kv = PagedKV(make_pool(dtype=dtype, grad_dtype=asked), 1)
        write(kv, 2)
        kv.extend(1)
        assert grad_segment(kv, 0).dk.dtype == got


def test_a_pool_born_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        kv = PagedKV(make_pool(), 1)
        kv.extend(3)
        kv.append(0, *block(kv))
        kv.append(1, *block(kv))
    kv.extend(2)
    kv.append(0, *(x.requires_grad_() for x in block(kv)))
    assert not kv.pool.k[0].is_inference() and not kv.pool.k[0].requires_grad
    with torch.inference_mode():
        grad_segment(kv, 0)
    assert not kv.pool.grads(0)[0].is_inference()
    kv.rewind(0)
    kv.release()


def state(kv):
    return kv.lengths, kv.tokens, kv.pool.table.free_pages, [x.nan_to_num(-1.0).clone() for x in kv.pool.k]


def refused(kv, call, match):
    before = state(kv)
    with pytest.raises(ValueError, match=match):
        call()
    after = state(kv)
    assert before[:3] == after[:3] and all(torch.equal(a, b) for a, b in zip(before[3], after[3]))


def test_what_append_refuses():
    kv = PagedKV(make_pool(), 2)
    k, v = torch.zeros(2, 5, 2, 3), torch.zeros(2, 5, 2, 3)
    refused(kv, lambda: kv.append(0, k, v), "no block is open")
    kv.extend([5, 3])
    for bad_k, bad_v in (
        (k[:, :4], v), (k, v[:1]), (k[:, :, :1], v), (k, v[..., :2]), (k.double(), v), (k, v.half()), (k[0], v),
        (k.to("meta"), v),
    ):  # fmt: skip
        refused(kv, lambda k=bad_k, v=bad_v: kv.append(0, k, v), "expected [kv] ")
    for layer in (-1, 2, True, 0.0, "0"):
        refused(kv, lambda layer=layer: kv.append(layer, k, v), "expected a layer")
    kv.append(0, k, v)
    refused(kv, lambda: kv.append(0, k, v), "layer 0 was appended to this block already")
    refused(kv, lambda: kv.extend(1), r"layers \[1\] of the open block were never appended")
    kv.append(1, k, v)
    kv.extend(1)


def test_a_block_that_no_layer_was_appended_to_cannot_be_read_as_past():
    kv = PagedKV(make_pool(), 1)
    kv.extend(3)
    kv.extend(2)
    refused(kv, lambda: kv.segments(0, "forward"), "layer 0 has .0,. tokens, its past .3,.")
    refused(kv, lambda: kv.append(0, torch.zeros(1, 2, 2, 3), torch.zeros(1, 2, 2, 3)), "never appended")
    kv.rewind(0)
    write_again = block(kv)
    kv.append(0, *write_again)
    kv.append(1, *write_again)
    kv.extend(2)
    assert read(kv, 0)[0].tolist() == [0, 1, 2]


def test_a_reopened_block_is_written_already():
    kv = PagedKV(make_pool(), 1)
    write(kv, 5)
    write(kv, 5)
    kv.extend(1)
    kv.rewind(5)
    refused(kv, lambda: kv.append(0, *block(kv)), "already")
    kv.extend(3)  # and may become past again
    assert read(kv, 0)[0].tolist() == list(range(10))


@pytest.mark.parametrize("bad", [-1, [1], [1, 2, 3], [1, -1], True, 1.5, [1.0, 1], [True, 1], "12"])
def test_lengths_must_be_ints_one_or_one_per_sequence(bad):
    kv = PagedKV(make_pool(), 2)
    write(kv, [5, 4])
    write(kv, [1, 2])
    for method in (kv.extend, kv.rewind, kv.truncate):
        refused(kv, lambda method=method: method(bad), "one per sequence")


def test_what_rewind_truncate_and_extend_refuse():
    kv = PagedKV(make_pool(), 2)
    refused(kv, lambda: kv.extend(0), "at least one token")
    refused(kv, lambda: kv.extend([0, 0]), "at least one token")
    write(kv, [5, 4])
    write(kv, [1, 2])
    refused(kv, lambda: kv.rewind([5, 4]), "before its end")
    refused(kv, lambda: kv.rewind(5), "within the past")
    refused(kv, lambda: kv.truncate([6, 7]), "at most")
    refused(kv, lambda: kv.segments(2, "forward"), "expected a layer")
    refused(kv, lambda: kv.own_grad(-1), "expected a layer")
    refused(kv, lambda: kv.segments(0, "walk"), "phase")
    for page in (-1, 1.0, True):
        refused(kv, lambda page=page: kv.segments(0, "forward", page), "first_page")


@pytest.mark.parametrize(
    "bad",
    [
        {"layers": 0}, {"layers": True}, {"slots": 0}, {"page_tokens": -1}, {"page_tokens": 1.0}, {"kv_heads": 0},
        {"kv_heads": [1]}, {"kv_heads": [1, 2, 3]}, {"head_dim": [4, 0]}, {"head_dim": True}, {"dtype": torch.int32},
        {"grad_dtype": torch.int64}, {"dtype": "float32"}, {"dtype": None}, {"dtype": torch.float8_e4m3fn},
        {"grad_dtype": "float32"},
    ],
)  # fmt: skip
def test_what_a_pool_refuses(bad):
    good = {
        "layers": 2, "slots": 4, "page_tokens": 4, "kv_heads": 2, "head_dim": 3, "dtype": torch.float32, "device": "cpu"
    }  # fmt: skip
    PagePool(**good)
    with pytest.raises(ValueError, match="expected"):
        PagePool(**(good | bad))


@pytest.mark.parametrize("bad", [-1, True, 1.0, None])
def test_a_batch_is_a_number(bad):
    with pytest.raises(ValueError, match="batch"):
        PagedKV(make_pool(), bad)
    with pytest.raises(ValueError, match="max_sequences"):
        PagedKV(make_pool(), max_sequences=bad)
