"""The Triton backend over listed pages in the interpreter, against dense attention in float64."""

from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.paged_kv.oracle import Problem, SplitPast, poisoned, pool_for
from tests.paged_kv.sparse_case import SparseCase
from tests.paged_kv.test_reference import Largest, expected, walk, weight_for

from paged_kv import (
    PagedKV,
    Segment,
    function,
    reference,
    triton_attention,
    triton_problem,
    triton_sparse,
    triton_sparse_lists,
)
from paged_kv.past import Geometry
from paged_kv.triton_tiles import Tile, tile_for

pytestmark = pytest.mark.skipif(not triton_problem.INTERPRETED, reason="kernels are compiled in this process")

TILES = {
    "small": {
        "fwd": Tile(128, 32, 4, 2, parts=2), "narrow fwd": Tile(32, 32, 4, 2, parts=2), "rest fwd": Tile(32, 32, 4, 2),
        "dkdv": Tile(32, 16, 4, 2), "dq": Tile(16, 32, 4, 2),
    },
    "large": {kernel: Tile(64, 64, 4, 2) for kernel in ("dkdv", "dq")}
    | {kernel: Tile(128, 64, 4, 2) for kernel in ("fwd", "narrow fwd")},
}  # fmt: skip


def with_tiles(name):
    return mock.patch.object(triton_problem, "tile_for", lambda kernel, *a, **k: TILES[name][kernel])


@st.composite
def cases(draw):
    batch = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 2))
    return SparseCase(
        batch=batch,
        tokens=draw(st.sampled_from([1, 7, 64, 70, 130])),
        heads=groups * draw(st.sampled_from([1, 2, 3])),
        groups=groups,
        page=draw(st.sampled_from([64, 128])),
        lengths=tuple(draw(st.lists(st.sampled_from([0, 1, 64, 128, 200, 256]), min_size=batch, max_size=batch))),
        window=draw(st.none() | st.sampled_from([1, 40, 140, 300])),
        documents=draw(st.sampled_from([None, None, "some"])),
        scale=draw(st.sampled_from([0.15, -0.2])),
        split=draw(st.none() | st.integers(1, 2)),
        shuffle=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        seed=draw(st.integers(0, 999)),
        entries=draw(st.sampled_from([1, 2, 4])),
        per_head=draw(st.booleans()),
        kind=draw(st.sampled_from(["random", "random", "ascending", "hot", "all", "none"])),
    )


@settings(max_examples=8, deadline=None)
@given(cases(), st.sampled_from(sorted(TILES)), st.sampled_from([1, 2, 100]))
@example(SparseCase(lengths=(256,), tokens=128, entries=4, kind="ascending"), "large", 100)
@example(SparseCase(lengths=(100,), tokens=200, entries=4, kind="hot"), "small", 1)
@example(SparseCase(lengths=(200, 70), batch=2, tokens=70, documents="some", window=60, kind="all"), "small", 2)
@example(SparseCase(lengths=(0,), tokens=130, entries=3, kind="all", per_head=True), "small", 1)
def test_equals_dense_attention(case, tiles, share):
    with with_tiles(tiles), poisoned(), mock.patch.object(triton_sparse._Launch, "_share", lambda self, tile: share):
        ours = case.run(triton_attention)
    case.check(ours)


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (0,), "tokens": 130, "kind": "all"},
        {"lengths": (200, 70), "batch": 2, "tokens": 70, "split": 1, "shuffle": True, "kind": "hot"},
        {"lengths": (150,), "dim": 80, "heads": 7, "groups": 1, "documents": "some", "kind": "all"},
    ],
    ids=["no past", "segments", "padded heads"],
)
def test_chips_that_fetch_no_boxes(options):
    """The same numbers through pointers, as on chips before sm_90."""
    with with_tiles("small"):
        SparseCase(entries=3, **options).check_without_boxes()


@pytest.mark.parametrize("dim, heads", [(80, 7), (96, 2), (256, 1)])
def test_head_dims_that_are_padded_inside(dim, heads):
    case = SparseCase(dim=dim, heads=heads, groups=1, tokens=70, lengths=(150,), dtype=torch.float16, scale=dim**-0.5)
    case.check(case.run(triton_attention))


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"documents": "some"}, {"scale": -0.2}], ids=str)
def test_however_the_past_is_cut_the_bits_are_the_same(options):
    case = SparseCase(lengths=(640,), tokens=64, entries=6, page=64, kind="ascending", **options)
    sinks = torch.linspace(-3, 3, case.heads)

    def with_sinks():
        return triton_attention.forward(case.q, case.k, case.v, case.segments(), case.geometry, sinks=sinks)

    whole, whole_sinks = case.run(triton_attention), with_sinks()
    case.check(whole)
    for split in (1, 2, 9):
        case.split = split
        for a, b in zip(case.run(triton_attention), whole):
            assert torch.equal(a, b)
        assert all(torch.equal(a, b) for a, b in zip(with_sinks(), whole_sinks))


@pytest.mark.parametrize(
    "dim, page, repeat, options",
    [
        (128, 64, 7, {"lengths": (134,), "tokens": 64, "window": 64}),
        (128, 64, 7, {"lengths": (192,), "tokens": 64, "split": 1}),
        (80, 128, 3, {"lengths": (128, 0), "batch": 2, "tokens": 128, "documents": "some"}),
        (128, 64, 8, {"lengths": (64,), "tokens": 128}),
        (64, 64, 7, {"lengths": (64,), "tokens": 64}),
    ],
)
def test_wide_and_narrow_tiles_give_the_same_bits(dim, page, repeat, options, monkeypatch):
    case = SparseCase(
        page=page, heads=repeat, groups=1, dim=dim, entries=4, kind="all", dtype=torch.float16, **options
    )  # fmt: skip
    results, cuts = [], set()
    for chip in (1, 132):

        def cut(p, blocks, chip=chip):
            assert blocks == case.selected.shape[2]
            cuts.add(tuple(found := cut_of(chip, dim, page, repeat, blocks, batch=p.batch)))
            return found

        monkeypatch.setattr(triton_sparse, "row_tiles", cut)
        with poisoned():
            results.append(case.run(triton_attention))
        case.check(results[-1])
    assert len(cuts) == (1 if dim == 64 else 2)
    for a, b in zip(*results):
        assert torch.equal(a, b)


CHIPS = [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
ROW_TILES = triton_sparse.row_tiles


def cut_of(multiprocessors, dim, page, repeat, blocks=1, groups=1, batch=1, capability=(9, 0)):
    """What row_tiles says on a chip of so many multiprocessors."""
    shape = (batch, page * blocks, groups)
    q, k = torch.empty(*shape[:2], groups * repeat, dim, dtype=torch.float16), torch.empty(*shape, dim)
    p = triton_problem.Problem.of(q, k, k, Geometry(1.0, (0,) * batch, page))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_problem.Problem, "slots", lambda self, tile: multiprocessors * tile.per_sm)
        patch.setattr(
            triton_problem, "tile_for", lambda kernel, dim, dtype, _: tile_for(kernel, dim, dtype, capability)
        )
        return ROW_TILES(p, blocks)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([64, 80, 128, 256]), st.sampled_from([64, 128]), st.integers(1, 16), st.integers(1, 60),
    st.sampled_from([1, 2, 8]), st.sampled_from([1, 3]), st.sampled_from([1, 108, 132]), st.sampled_from(CHIPS),
)  # fmt: skip
@example(128, 128, 7, 32, 4, 1, 132, (9, 0))
@example(128, 128, 7, 32, 1, 4, 132, (9, 0))
@example(128, 128, 7, 32, 4, 1, 132, (10, 0))
@example(128, 128, 7, 16, 4, 1, 132, (9, 0))
def test_rows_are_cut_so_that_none_is_lost_and_no_multiprocessor_is_late(
    dim, page, repeat, blocks, groups, batch, multiprocessors, capability
):
    cut = cut_of(multiprocessors, dim, page, repeat, blocks, groups, batch, capability)
    firsts = [first for _, first, _ in cut]
    assert [*firsts, page * repeat] == [0, *(first + count for _, first, count in cut)]
    padded = 1 << (dim - 1).bit_length()
    narrow, wide = (tile_for(kernel, padded, torch.float16, capability) for kernel in ("narrow fwd", "fwd"))
    assert len({min(tile.keys, page) for tile, _, _ in cut} | {min(narrow.keys, page)}) == 1  # or bits would differ

    def most_rows(cut):
        programs = [(tile.rows, blocks * groups * batch * -(-count // tile.rows)) for tile, _, count in cut]
        return sum(rows * -(-n // multiprocessors) for rows, n in programs)

    whole = [(narrow, 0, page * repeat)]
    assert most_rows(cut) <= most_rows(whole)
    if cut == whole and wide.rows > narrow.rows and page * repeat % wide.rows == 0:
        assert most_rows(whole) < most_rows([(wide, 0, page * repeat)])
    if (dim, page, repeat, multiprocessors) == (128, 128, 7, 132) and capability[0] in (9, 10) and blocks in (16, 32):
        assert [tile.rows for tile, _, _ in cut] == ([256, 128] if blocks == 32 else [128])  # as they were measured


@pytest.mark.parametrize("backend", [triton_attention, reference], ids=["triton", "reference"])
def test_pages_that_no_list_names_are_never_read(backend):
    case = SparseCase(lengths=(320,), tokens=64, entries=3, page=64, groups=1)
    case.selected = torch.tensor([[[[1, 3, 5]]]], dtype=torch.int32)
    before = case.run(backend)
    unlisted = case.table[0, [0, 2, 4]].long()
    assert torch.equal(before[5][unlisted], case.earlier[unlisted])
    case.pages_k[unlisted], case.pages_v[unlisted], case.earlier[unlisted] = torch.nan, torch.nan, torch.nan
    after = case.run(backend)
    for a, b in zip(before[:5], after[:5]):
        assert torch.equal(a, b)
    assert after[5][unlisted].isnan().all() and after[6][unlisted].isnan().all()


def test_a_page_that_is_not_there_counts_for_nothing():
    case = SparseCase(lengths=(256,), tokens=64, entries=4, page=64, groups=1, heads=2)
    case.selected = torch.tensor([[[[0, 1, 2, 4]]]], dtype=torch.int32)
    with_hole = SparseCase(lengths=(256,), tokens=64, entries=4, page=64, groups=1, heads=2)
    with_hole.selected = torch.tensor([[[[0, -1, 2, 4]]]], dtype=torch.int32)
    case.table = case.table.clone()
    case.table[0, 1] = -1
    for a, b in zip(case.run(triton_attention), with_hole.run(triton_attention)):
        assert torch.equal(a, b)


def test_an_empty_list_sees_nothing():
    case = SparseCase(lengths=(100,), tokens=20, kind="none")
    for lists in (case.selected, case.selected[..., :0]):
        case.selected = lists.contiguous()
        out, lse, *grads = case.run(triton_attention)
        assert not out.any() and lse.isneginf().all() and not any(x.any() for x in grads[:3])
        assert all(torch.equal(x, case.earlier) for x in grads[3:])


def test_sequences_that_share_a_page_are_both_counted():
    case = SparseCase(batch=2, lengths=(64, 64), tokens=64, kind="all")
    case.table[1] = case.table[0]
    case.pages_k[case.table[0, 0]], case.pages_v[case.table[0, 0]] = case.past_k[0], case.past_v[0]
    case.past_k[1], case.past_v[1] = case.past_k[0], case.past_v[0]
    grads, true, slot = case.run(triton_attention)[5:], case.dense(), int(case.table[0, 0])
    for pages, past in zip(grads, true[5:]):
        assert torch.allclose((pages - case.earlier)[slot].double(), past[:64] + past[64:], atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split": 1, "lengths": (200,), "heads": 7, "groups": 1, "tokens": 30},
        {"documents": "some", "heads": 3, "groups": 1},
        {"kind": "none"},
    ],
)
def test_sinks_inside_the_kernel_are_sinks_applied_afterwards(options):
    case = SparseCase(**({"lengths": (100,)} | options))
    sinks = torch.linspace(-3, 3, case.heads)
    call = (case.q, case.k, case.v)
    with with_tiles("small"):
        plain = triton_attention.forward(*call, case.segments(), case.geometry)
        out, lse = triton_attention.forward(*call, case.segments(), case.geometry, sinks=sinks)
    true = function._apply_sinks(plain[0].clone(), plain[1], sinks)
    assert torch.allclose(out, true[0], atol=1e-6) and torch.allclose(lse, true[1], atol=1e-5)


@pytest.mark.parametrize("split", [None, 1])
def test_a_walk_through_the_public_call(split):
    make = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64).float()

    lists = torch.randint(-1, 3, (2, 2, 3, 2), generator=make, dtype=torch.int32)
    problem = Problem(
        q=random(2, 170, 6, 64), k=random(2, 170, 2, 64), v=random(2, 170, 2, 64), lengths=(170, 130), page=64,
        scale=0.1, sinks=random(6), selected=lists,
    )  # fmt: skip
    exact = Problem(**(vars(problem) | {n: getattr(problem, n).double() for n in ("q", "k", "v", "sinks")}))
    for p in (problem, exact):
        for x in p.leaves:
            x.requires_grad_()
    weight = weight_for(problem)
    kv = PagedKV(pool_for(problem, shuffle=3), 2)
    past_of = (lambda kv: SplitPast(kv, split)) if split else (lambda kv: kv)
    out, grads = walk(problem, [(90, 64), (33, 0), (47, 66)], past_of, kv, weight.float(), backend="triton")
    true = expected(exact, weight)
    for a, b in zip((out, *grads), (true[0], *true[1])):
        assert float((a.double() - b).norm() / b.norm()) < 2e-6


def million(entries=24, tokens=128, page=64):
    """A past of a million tokens, of which only the listed pages have memory: 16,384 columns, 40 slots."""
    columns, blocks = 2**20 // page, tokens // page
    draw = torch.Generator().manual_seed(0)
    picked = torch.randperm(columns, generator=draw)[: entries - 1].sort().values
    table = torch.full((1, columns), -1, dtype=torch.int32)
    table[0, picked] = torch.randperm(entries - 1, generator=draw).to(torch.int32)
    own = columns + torch.arange(blocks)
    lists = torch.cat((picked.expand(blocks, -1), own[:, None]), 1).to(torch.int32)[None, None]
    make = lambda *shape: torch.randn(shape, generator=draw)  # noqa: E731
    pages = [make(entries - 1, page, 1, 64) for _ in range(2)]
    tensors = [make(1, tokens, heads, 64) for heads in (2, 1, 1)]
    geometry = Geometry(0.1, (2**20,), page, selected=lists.contiguous())
    grads = [torch.zeros_like(pages[0]) for _ in range(2)]
    segment = Segment(0, *pages, table, None, *grads, table, None)
    return tensors, geometry, segment, grads, picked


def test_a_table_of_a_million_tokens(monkeypatch):
    """Against the reference over the listed pages alone, laid side by side."""
    tensors, geometry, segment, grads, picked = million()
    monkeypatch.setattr(triton_sparse_lists, "_COLUMNS", 512)  # fewer, wider programs: the interpreter minds them
    out, lse = triton_attention.forward(*tensors, [segment], geometry)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    ours = triton_attention.backward(
        dout, *tensors, out, lse, [segment], geometry, past_grad=True, accumulate="owner"
    )  # fmt: skip
    near = segment.slots[:, picked]
    dense = Geometry(0.1, (len(picked) * 64,), 64, selected=None)
    own_only = torch.arange(len(picked)).expand(1, 1, 2, -1)
    own = len(picked) + torch.arange(2)[None, None, :, None]
    dense = replace(dense, selected=torch.cat((own_only, own), 3).to(torch.int32))
    true_grads = [torch.zeros_like(x) for x in grads]
    small = Segment(0, segment.k, segment.v, near, None, *true_grads, near, None)
    true_out, true_lse = reference.forward(*tensors, [small], dense)
    true = reference.backward(
        dout, *tensors, true_out, true_lse, [small], dense, past_grad=True, accumulate="owner"
    )  # fmt: skip
    for a, b in zip((out, lse, *ours, *grads), (true_out, true_lse, *true, *true_grads)):
        assert float((a - b).norm() / b.norm()) < 1e-5


def test_memory_is_that_of_the_lists():
    """Nothing as large as pages times query blocks, nor as the past; the host side alone."""
    tensors, geometry, segment, *_ = million(tokens=8192)
    with ExitStack() as stack:
        largest = stack.enter_context(Largest())
        for module in (triton_sparse, triton_sparse_lists, triton_problem):
            kernels = [name for name in vars(module) if name.endswith("_kernel")]
            stack.enter_context(mock.patch.multiple(module, **{name: mock.MagicMock() for name in kernels}))
        out, lse = triton_attention.forward(*tensors, [segment], geometry)
        triton_attention.backward(
            tensors[0], *tensors, out, lse, [segment], geometry, past_grad=True, accumulate="owner"
        )  # fmt: skip
    table, blocks, parts = segment.slots.shape[1], 128, triton_sparse._PARTS_BYTES // 4
    assert largest.numel <= max(tensors[0].numel(), 5 * (table + blocks), parts)
    assert largest.numel < table * blocks * 64


# the inverse by itself


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 90), st.integers(1, 5), st.integers(0, 999))
def test_the_inverse_against_loops(blocks, entries, columns, share, seed):
    draw = torch.Generator().manual_seed(seed)
    page, length = 4, 4 * columns
    lists = torch.randint(-2, columns + blocks, (1, 2, blocks, entries), generator=draw).to(torch.int32)
    table = torch.arange(columns, dtype=torch.int32)[None]
    table[0, columns // 2] = -1
    lengths = torch.tensor([length], dtype=torch.int32)
    ranked = triton_sparse_lists.ranked(lists, table, columns, 0, lengths, blocks * page, page=page)
    got = triton_sparse_lists.readers_of(
        ranked, table, table, columns, blocks, 0, lengths, page=page, share=share, past_grad=True
    )  # fmt: skip
    for s in range(2):
        items, whole = [], []
        for z in range(columns + blocks):
            mine = [r for r in range(blocks) if z in lists[0, s, r] and z <= columns + r]
            if z == columns // 2:
                mine = []
            end = int(got.ends[0, 0, s, z])
            assert got.readers[0, s, end - len(mine) : end].tolist() == mine
            assert int(got.counts[0, 0, s, z]) == len(mine)
            whole += [z] * (len(mine) // share)
            items += [z] * (len(mine) % share > 0)
        expected_items = whole + items[::-1]
        assert got.items[0, s, : len(expected_items)].tolist() == expected_items
        split = [z for z in range(columns + blocks) if int(got.counts[0, 0, s, z]) > share]
        assert got.split[0, s, : len(split)].tolist() == split
        assert int(got.ends[3, 0, s, -1]) <= got.most_parts


# refusals


def test_gradient_pages_that_atomics_cannot_add_to_are_refused_here_too():
    case = SparseCase(grad_dtype=torch.float16, kind="all")
    with pytest.raises(ValueError, match="float32 gradient pages"):
        case.run(triton_attention, accumulate="atomic")
    case.check(case.run(triton_attention))
