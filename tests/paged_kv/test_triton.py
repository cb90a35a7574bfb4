"""The Triton backend in the interpreter, against dense attention in float64. Races and bfloat16: test_cuda.py."""

import itertools
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.numerics import relative
from tests.paged_kv.backend_case import Case
from tests.paged_kv.oracle import Problem, SplitPast, poisoned, pool_for
from tests.paged_kv.test_reference import Largest, expected, walk, weight_for

from paged_kv import (
    PagedKV,
    function,
    paged_attention,
    triton_attention,
    triton_launch,
    triton_merge,
    triton_problem,
    triton_window_launch,
)
from paged_kv.triton_tiles import Tile, tile_for

pytestmark = pytest.mark.skipif(not triton_problem.INTERPRETED, reason="kernels are compiled in this process")

# Small tiles, so that small problems have edges, middles and several waves.
TILES = {
    "plain": {
        "fwd": Tile(32, 32, 4, 2, parts=2),
        "dkdv": Tile(32, 16, 4, 2),
        "dq": Tile(16, 32, 4, 2),
        "window fwd": Tile(16, 16, 4, 1),
        "window dkdv": Tile(32, 16, 4, 2),
        "window dq": Tile(32, 32, 4, 2),
    },
    "ahead": {
        "fwd": Tile(16, 16, 4, 2, per_sm=60, ahead=True),
        "dkdv": Tile(16, 64, 4, 2),
        "dq": Tile(64, 16, 4, 2),
        "window fwd": Tile(32, 16, 4, 2, widest=16),
        "window dkdv": Tile(16, 32, 4, 2),
        "window dq": Tile(16, 16, 4, 1, widest=32),
    },
    "split": {  # so many programs at once that keys and rows are shared out
        "fwd": Tile(64, 16, 4, 2, per_sm=60, parts=2),
        "dkdv": Tile(64, 32, 4, 2, per_sm=60),
        "dq": Tile(64, 32, 4, 2, per_sm=60),
        "window fwd": Tile(32, 32, 4, 1, per_sm=2),
        "window dkdv": Tile(64, 64, 4, 2, per_sm=2),
        "window dq": Tile(64, 16, 4, 1, per_sm=2),
    },
}


def with_tiles(name):
    def tile_for(kernel, *a, **k):
        return TILES[name][kernel.split(",")[0].removeprefix("narrow ")]

    return mock.patch.object(triton_problem, "tile_for", tile_for)


@st.composite
def cases(draw):
    batch = draw(st.integers(1, 2))
    groups = draw(st.integers(1, 2))
    return Case(
        batch=batch,
        tokens=draw(st.sampled_from([1, 7, 16, 33])),
        heads=groups * draw(st.sampled_from([1, 2, 3, 8])),
        groups=groups,
        page=draw(st.sampled_from([64, 128])),
        lengths=tuple(draw(st.lists(st.sampled_from([0, 1, 64, 100, 129, 200]), min_size=batch, max_size=batch))),
        window=draw(st.none() | st.sampled_from([1, 5, 16, 40, 64, 140, 160])),
        documents=draw(st.sampled_from([None, "some"])),
        scale=draw(st.sampled_from([0.15, 0.0, -0.2])),
        split=draw(st.none() | st.just(1)),
        shuffle=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        seed=draw(st.integers(0, 999)),
    )


@settings(max_examples=10, deadline=None)
@given(cases(), st.sampled_from(sorted(TILES)), st.sampled_from(["owner", "atomic"]))
@example(Case(lengths=(300,), tokens=9), "split", "owner")
@example(Case(lengths=(130,), window=300, tokens=40), "ahead", "owner")
@example(Case(lengths=(200, 70), batch=2, documents="some", window=60), "plain", "owner")
def test_equals_dense_attention(case, tiles, accumulate):
    with with_tiles(tiles), poisoned():
        ours = case.run(triton_attention, accumulate=accumulate)
    case.check(ours)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-40, -1e-38, 1e-30])
def test_a_scale_of_zero_or_nearly(scale, window):
    """Every score is zero, those of hidden keys are not; where one key is seen LSE is zero, not about that."""
    case = Case(lengths=(70,), tokens=5, heads=2, groups=1, scale=scale, window=window)
    with with_tiles("plain"):
        ours = case.run(triton_attention)
    if abs(scale) < 1e-30:
        case.scale = 0.0
        case.check(ours)
    assert all(x.isfinite().all() for x in ours)


@pytest.mark.parametrize("tokens", [5, 40])  # few rows and many take different tiles
@pytest.mark.parametrize("dim", triton_attention.HEAD_DIMS)
def test_every_head_dim(dim, tokens):
    """80, 96 and 192 are padded inside: the padding must not read the next head."""
    case = Case(dim=dim, heads=7, groups=1, tokens=tokens, lengths=(70,), dtype=torch.float16, scale=dim**-0.5)
    case.check(case.run(triton_attention))


@pytest.mark.parametrize(
    "options",
    [
        {"lengths": (0,), "tokens": 33},
        {"lengths": (200, 9), "batch": 2, "tokens": 40, "split": 1},
        {"lengths": (150,), "dim": 80, "heads": 7, "groups": 1, "page": 128},
        {"lengths": (200, 70), "batch": 2, "documents": "some", "window": 60, "shuffle": True},
    ],
    ids=["no past", "segments", "padded heads", "documents"],
)
def test_chips_that_fetch_no_boxes(options):
    """The same numbers through pointers, as on chips before sm_90; those take the other kernels for small windows."""
    with with_tiles("plain"), mock.patch.object(triton_problem.Problem, "at_once", False):
        Case(**options).check_without_boxes()


@pytest.mark.parametrize("window", [None, 20, 64])
def test_the_tiles_of_the_table(window):
    case = Case(tokens=30, heads=14, groups=2, lengths=(260,), page=128, window=window, dtype=torch.float16)
    case.check(case.run(triton_attention))


def test_sequences_that_share_a_page_are_both_counted():
    case = Case(batch=2, lengths=(64, 64), tokens=8)
    case.table[1] = case.table[0]
    case.pages_k[case.table[0, 0]] = case.past_k[0]
    case.past_k[1], case.past_v[1] = case.past_k[0], case.past_v[0]
    case.pages_v[case.table[0, 0]] = case.past_v[0]
    grads = case.run(triton_attention)[5:]
    slot = int(case.table[0, 0])
    true = case.dense()
    for pages, past in zip(grads, true[5:]):
        added = (pages - case.earlier)[slot].double()
        assert torch.allclose(added, past[:64] + past[64:], atol=1e-5)


def test_launches_know_whether_sequences_may_share_a_page():
    case = Case(batch=2, lengths=(100, 70), shuffle=False)
    grads = (case.earlier, case.earlier)
    problem = triton_problem.Problem.of(case.q, case.k, case.v, case.geometry)
    (segment,) = case.segments(grads)
    assert problem.disjoint(segment)
    case.runs = (0, 1)
    (segment,) = case.segments(grads)
    assert not problem.disjoint(segment)
    case.runs = None
    (segment,) = case.segments(grads)
    assert not problem.disjoint(segment)


def test_pages_before_the_first_one_are_not_read():
    case = Case(lengths=(200,), window=30, tokens=20)
    whole = case.run(triton_attention)
    case.pages_k[case.table[0, :2]] = torch.nan
    case.pages_v[case.table[0, :2]] = torch.nan
    from_second = case.run(triton_attention, first_page=2)
    for a, b in zip(whole, from_second):
        assert torch.equal(a, b)


def test_a_page_that_is_not_there_counts_for_nothing():
    case = Case(lengths=(200,), tokens=20)
    hole = int(case.table[0, 1])
    case.table[0, 1] = -1
    out, lse, dq, dk, dv, past_dk, past_dv = case.run(triton_attention)
    assert torch.equal(past_dk[hole], case.earlier[hole]) and torch.equal(past_dv[hole], case.earlier[hole])
    keep = torch.ones(220, dtype=torch.bool)
    keep[64:128] = False
    keys, values = (torch.cat((a[0], b[0])).double() for a, b in ((case.past_k, case.k), (case.past_v, case.v)))
    scores = torch.einsum("ihd,jhd->hij", case.q[0].double(), keys.repeat_interleave(2, 1)) * case.scale
    seen = (torch.arange(220)[None] <= 200 + torch.arange(20)[:, None]) & keep
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    true = torch.einsum("hij,jhd->ihd", weights, values.repeat_interleave(2, 1))
    assert (out[0].double() - true).abs().max() < 1e-5
    assert all(x.isfinite().all() for x in (lse, dq, dk, dv))


# through the public call


@pytest.mark.parametrize("split", [None, 1])
def test_a_walk_through_the_public_call(split):
    make = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(shape, generator=make, dtype=torch.float64).float()

    problem = Problem(
        q=random(2, 90, 6, 64), k=random(2, 90, 2, 64), v=random(2, 90, 2, 64), lengths=(90, 70), page=64, scale=0.1,
        window=50, sinks=random(6),
    )  # fmt: skip
    exact = Problem(**(vars(problem) | {n: getattr(problem, n).double() for n in ("q", "k", "v", "sinks")}))
    for p in (problem, exact):
        for x in p.leaves:
            x.requires_grad_()
    weight = weight_for(problem)
    kv = PagedKV(pool_for(problem, shuffle=3), 2)
    past_of = (lambda kv: SplitPast(kv, split)) if split else (lambda kv: kv)
    out, grads = walk(problem, [(40, 40), (33, 0), (17, 30)], past_of, kv, weight.float(), backend="triton")
    true = expected(exact, weight)
    for a, b in zip((out, *grads), (true[0], *true[1])):
        assert float((a.double() - b).norm() / b.norm()) < 2e-6


def test_nothing_of_the_size_of_the_past_is_allocated():
    """The host side alone: the interpreter copies every argument. test_cuda.py measures the real peak."""
    case = Case(lengths=(60000,), tokens=1, heads=1, groups=1, dtype=torch.float16)
    grads = (case.earlier.clone(), case.earlier.clone())
    with ExitStack() as stack:
        largest = stack.enter_context(Largest())
        for module in (triton_launch, triton_problem, triton_window_launch):
            kernels = [name for name in vars(module) if name.endswith("_kernel")]
            stack.enter_context(mock.patch.multiple(module, **{name: mock.MagicMock() for name in kernels}))
        out, lse = triton_attention.forward(case.q, case.k, case.v, case.segments(), case.geometry)
        triton_attention.backward(
            case.dout, case.q, case.k, case.v, out, lse, case.segments(grads), case.geometry,
            past_grad=True, accumulate="owner",
        )  # fmt: skip
    assert largest.numel < case.pages_k.numel() // 64


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split": 1},
        {"lengths": (700,), "tokens": 3},
        {"lengths": (900, 700), "batch": 2, "tokens": 20, "heads": 7, "groups": 1, "split": 4},
        {"documents": "some", "tokens": 25, "heads": 5, "groups": 1},
        {"window": 30},
        {"window": 32, "split": 1},
        {"window": 32, "scale": 0.0},
        {"window": 64, "documents": "some", "batch": 2, "lengths": (70, 5)},
    ],
)
def test_sinks_inside_the_kernel_are_sinks_applied_afterwards(options):
    case = Case(**({"lengths": (100,)} | options))
    sinks = torch.linspace(-3, 3, case.heads)
    with with_tiles("split"):
        plain = triton_attention.forward(case.q, case.k, case.v, case.segments(), case.geometry)
        out, lse = triton_attention.forward(
            case.q, case.k, case.v, case.segments(), case.geometry, sinks=sinks
        )  # fmt: skip
    true = function._apply_sinks(plain[0].clone(), plain[1], sinks)
    assert torch.allclose(out, true[0], atol=1e-6) and torch.allclose(lse, true[1], atol=1e-5)
    grad = sinks_grad(case, out, lse, sinks)
    assert torch.allclose(grad, function._sinks_grad(case.dout, out, lse, sinks), atol=1e-5)
    nothing = torch.full_like(sinks, -torch.inf)
    out, lse = triton_attention.forward(case.q, case.k, case.v, case.segments(), case.geometry, sinks=nothing)
    assert torch.equal(lse.isneginf(), plain[1].isneginf()) and torch.allclose(out, plain[0], atol=1e-6)
    assert not sinks_grad(case, out, lse, nothing).any()


def sinks_grad(case, out, lse, sinks):
    grads = (case.earlier.clone(), case.earlier.clone())
    inputs = (case.dout, case.q, case.k, case.v, out, lse, case.segments(grads), case.geometry)
    return triton_attention.backward_with_sinks(*inputs, sinks=sinks, past_grad=True, accumulate="owner")[3]


# refusals


@pytest.mark.parametrize(
    "change, match",
    [
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.bfloat16}, "interpreter"),
        ({"dim": 32}, "head dim in .*got 32"),
        ({"dim": 112}, "head dim in .*got 112"),
        ({"page": 32}, "pages of 64 or 128 tokens, got 32"),
    ],
)
def test_what_is_not_supported_is_refused_before_anything_runs(change, match):
    case = Case(**({"grad_dtype": torch.float32} | change))
    with pytest.raises(ValueError, match=match):
        triton_attention.forward(case.q, case.k, case.v, case.segments(), case.geometry)
    grads = (case.earlier.clone(), case.earlier.clone())
    lse = torch.zeros(1, case.heads, case.tokens)
    with pytest.raises(ValueError, match=match):
        triton_attention.backward(
            case.dout, case.q, case.k, case.v, case.q, lse, case.segments(grads), case.geometry,
            past_grad=True, accumulate="owner",
        )  # fmt: skip
    assert all(torch.equal(x, case.earlier) for x in grads)


@pytest.mark.parametrize("window", [None, 20, 64])
def test_pages_in_an_unusual_layout_are_refused(window):
    case = Case(window=window)
    case.pages_k = case.pages_k.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous pages"):
        case.run(triton_attention)


def test_atomic_additions_need_float32_pages():
    case = Case(grad_dtype=torch.float16)
    with pytest.raises(ValueError, match="float32 gradient pages"):
        case.run(triton_attention, accumulate="atomic")
    case.check(case.run(triton_attention))


@pytest.mark.parametrize("which", ["gap", "end"])
def test_a_past_with_pages_missing_is_noticed(which):
    case = Case(lengths=(300,), split=1)
    segments = list(case.segments())
    del segments[2 if which == "gap" else -1]
    with pytest.raises(RuntimeError, match="page"):
        triton_attention.forward(case.q, case.k, case.v, iter(segments), case.geometry)


# parts


def test_without_past_gradients_only_own_and_query_gradients_are_computed():
    case = Case(lengths=(100,))
    full = case.run(triton_attention)
    out, lse = full[:2]
    part = triton_attention.backward(
        case.dout, case.q, case.k, case.v, out, lse, case.segments(), case.geometry, past_grad=False, accumulate="owner"
    )
    for a, b in zip(full[2:5], part):
        assert torch.equal(a, b)


def test_inputs_in_any_layout():
    case = Case()
    plain = case.run(triton_attention)
    for name in ("q", "k", "v", "dout"):
        x = getattr(case, name)
        setattr(case, name, x.transpose(1, 2).contiguous().transpose(1, 2))
    for a, b in zip(plain, case.run(triton_attention)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens, best", [(4096, 1), (2048, 2), (1024, 4), (1, 33)])
def test_splits_fill_the_last_wave_and_stop_there(tokens, best):
    """On 132 multiprocessors, 28 heads over 64K keys: near the time of evenly spread work, within the memory bound."""
    case = Case(tokens=tokens, heads=28, groups=4, dim=128, lengths=(0,), page=128)
    problem = triton_problem.Problem.of(case.q, case.k, case.v, case.geometry)
    with mock.patch.object(triton_problem.Problem, "slots", lambda self, tile: 132):
        splits = triton_launch._splits(problem, Tile(128, 128, 8, 3), mock.Mock(limit=65536))
    assert splits == min(best, 32) and splits * problem.q.numel() * 4 <= max(2**26, problem.q.numel() * 4)


def test_merging_two_and_many_parts():
    make = torch.Generator().manual_seed(2)
    parts = torch.randn(5, 2, 7, 3, 80, generator=make)
    lse = torch.randn(5, 2, 3, 7, generator=make) * 5
    lse[:, 0, 1, 2] = -torch.inf
    lse[1:, 1, 2, 3] = -torch.inf
    parts[1:, 1, 3, 2] = 7.0  # weight zero
    weights = (lse - lse.logsumexp(0)).exp().nan_to_num(0.0).permute(0, 1, 3, 2)[..., None]
    true = (weights * parts).sum(0)
    out, total = torch.full_like(parts[0], torch.nan), torch.full_like(lse[0], torch.nan)
    triton_merge.merge_parts(parts, lse, out, total)
    assert torch.allclose(out, true, atol=1e-6) and torch.allclose(total, lse.logsumexp(0), atol=1e-6)
    a, a_lse = parts[0].clone(), lse[0].clone()
    for part, part_lse in zip(parts[1:], lse[1:]):
        out, total = torch.full_like(a, torch.nan), torch.full_like(a_lse, torch.nan)
        triton_merge.merge_two(a, a_lse, part, part_lse, out, total)
        a, a_lse = out, total
    assert torch.allclose(a, true, atol=1e-6) and torch.allclose(a_lse, lse.logsumexp(0), atol=1e-6)


def test_adding_to_pages_stops_where_the_tokens_do():
    make = torch.Generator().manual_seed(3)
    dk, dv = (torch.randn(100, 2, 80, generator=make) for _ in range(2))
    pages = [torch.ones(4, 64, 2, 80) for _ in range(2)]
    triton_merge.add_to_pages(dk, dv, torch.tensor([3, 1], dtype=torch.int32), *pages)
    for grad, page in zip((dk, dv), pages):
        true = torch.ones(4, 64, 2, 80)
        true[3] += grad[:64]
        true[1, :36] += grad[64:]
        assert torch.equal(page, true)


@pytest.mark.parametrize(("tokens", "name"), [(64, "narrow fwd"), (65, "fwd")])
def test_chunks_of_few_rows_take_a_tile_of_few_rows(tokens, name):
    case = Case(tokens=tokens, heads=2, groups=1, lengths=(0,))
    with with_tiles("plain"), mock.patch.object(triton_problem, "tile_for", wraps=triton_problem.tile_for) as asked:
        triton_attention.forward(case.q, case.k, case.v, case.segments(), case.geometry)
    assert [call.args[0] for call in asked.call_args_list] == [name]


def test_the_table_has_a_tile_for_everything():
    for kernel in ("fwd", "narrow fwd", "dkdv", "dq"):
        for dim in (64, 128, 256):
            for dtype in triton_attention.DTYPES:
                for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
                    tile = tile_for(kernel, dim, dtype, capability)
                    assert kernel.endswith("fwd") or 128 % tile.rows == 0  # LSE and delta are padded to 128 rows
                    assert tile.rows % tile.parts == 0 and not (tile.ahead and tile.parts > 1)
    for kernel in ("window fwd", "window dkdv", "window dq", "window dq, more keys"):
        for dim in (64, 128):
            tile_for(kernel, dim, torch.bfloat16, (9, 0))


@pytest.mark.parametrize("repeat, heads", [(1, 1), (3, 1), (7, 1), (2, 2), (6, 2), (4, 4), (8, 4), (20, 4)])
def test_tiles_of_keys_cover_what_a_tile_of_rows_sees(repeat, heads):
    for window, widest in itertools.product((1, 5, 100, 128, 200, 256), (16, 64, 128)):
        tiling = triton_window_launch.tiling_of(window, Tile(64, 16, 4, 1, widest=widest), repeat)
        assert (tiling["SHARE"], tiling["QUERIES"]) == (heads, 64 // heads)
        widths, span = tiling["WIDTHS"], window + 64 // heads
        assert sum(widths) >= span > sum(widths) - 16
        assert all(16 <= w <= widest and w & (w - 1) == 0 for w in widths)
        assert tiling["STARTS"] == tuple(sum(widths[:i]) for i in range(len(widths)))


@pytest.mark.parametrize(
    "options, small",
    [
        ({"window": 64}, True),
        ({"window": 128, "dim": 128}, True),
        ({"window": 100}, True),
        ({"window": 64, "heads": 6}, True),
        ({"window": 192, "dim": 128}, False),  # keys and values would not fit
        ({"window": 64, "dim": 256}, False),
        ({"window": 256, "lengths": (200,)}, False),  # it hides nothing
        ({"window": None}, False),
    ],
)
def test_which_windows_are_small(options, small):
    case = Case(**({"lengths": (500,)} | options))
    assert triton_problem.Problem.of(case.q, case.k, case.v, case.geometry).at_once is small


@pytest.mark.parametrize("dim", [192, 256])
def test_a_small_window_of_wide_heads(dim):
    case = Case(dim=dim, window=64, tokens=10, heads=2, groups=1, lengths=(100,))
    with with_tiles("plain"):
        case.check(case.run(triton_attention))


@pytest.mark.parametrize("repeat, window, held", [(7, 64, True), (8, 64, True), (7, 128, False)])
@pytest.mark.parametrize("accumulate", ["owner", "atomic"])
def test_a_window_with_the_tiles_of_the_table(repeat, window, held, accumulate):
    """Past, the edge between past and own block, and rows that see their own block only; uneven lengths. Where
    registers do not hold all weights of a row, delta comes from the output."""
    case = Case(
        batch=2, tokens=window + 56, heads=repeat, groups=1, lengths=(200, 9), window=window, page=64,
        dtype=torch.float16, grad_dtype=torch.float32,
    )  # fmt: skip
    tile_of = triton_problem.Problem.of(case.q, case.k, case.v, case.geometry).tile
    assert triton_window_launch.dq_tiling(tile_of, window, repeat, 64)[1]["HELD"] is held
    case.check(case.run(triton_attention, accumulate=accumulate))


@pytest.mark.parametrize("repeat, window, held", [(8, 64, True), (7, 128, False), (4, 300, False)])
def test_the_gradient_of_sinks(repeat, window, held):
    """Registers that hold all weights of a row know delta; other kernels know what the rounded output says of it."""
    case = Case(tokens=90, heads=repeat, groups=1, lengths=(400,), window=window, page=64, dtype=torch.float16)
    ours, exact, rounded = case.sinks_grads(torch.linspace(-2, 2, repeat))
    assert relative(ours, exact if held else rounded) < 1e-4


@pytest.mark.parametrize("window", [None, 64])
def test_memory_that_starts_anywhere(window):
    case = Case(tokens=20, heads=8, groups=1, lengths=(70,), window=window, dtype=torch.float16)
    plain = case.run(triton_attention)
    for name in ("q", "k", "v", "dout"):
        x = getattr(case, name)
        setattr(case, name, torch.cat((x.new_full((1,), torch.nan), x.flatten()))[1:].view(x.shape))
    for a, b in zip(plain, case.run(triton_attention)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", [{}, {"window": 64}, {"selected": torch.zeros(1, 1, 1, 1, dtype=torch.int32)}])
def test_a_dimension_of_one_may_have_any_stride(options):
    """Such a tensor is contiguous, whatever the stride says: one sequence of a batch that is laid out oddly."""
    case = Case(tokens=20, heads=4, groups=2, lengths=(70,), window=options.get("window"))
    geometry = replace(case.geometry, selected=options.get("selected"))
    with mock.patch.object(Case, "geometry", geometry):
        plain = case.run(triton_attention)
        for name in ("q", "k", "v", "dout"):
            x = getattr(case, name)
            odd = x.new_empty(3 * x.numel()).as_strided(x.shape, (x.numel() + 3, *x.stride()[1:])).copy_(x)
            assert odd.is_contiguous()
            setattr(case, name, odd)
        for a, b in zip(plain, case.run(triton_attention)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("window", [None, 64, 150])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_documents_that_start_beyond_every_position(backend, window, dtype):
    """The largest number hides everything, the smallest nothing; neither it nor a sum with it wraps around."""
    case = Case(tokens=12, lengths=(200,), heads=2, groups=1)
    starts = torch.zeros(1, case.tokens, dtype=dtype)
    starts[:, 4:8], starts[:, 8:] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    segments = lambda layer, phase, first: case.segments(first_page=first)  # noqa: E731
    past = SimpleNamespace(page_tokens=case.page, lengths=case.lengths, segments=segments)
    options = {"scale": case.scale, "window": window, "backend": backend}
    with with_tiles("plain"):
        out = paged_attention(case.q, case.k, case.v, past, 0, documents=starts, **options)
        plain = paged_attention(case.q, case.k, case.v, past, 0, **options)
    assert not out[:, 4:8].any()
    torch.testing.assert_close(out[:, :4], plain[:, :4])
    torch.testing.assert_close(out[:, 8:], plain[:, 8:])


def test_the_public_call_reaches_the_backend():
    case = Case(lengths=(0,))
    pool = pool_for(Problem(case.q, case.k, case.v, (case.tokens,), 64, 0.1))
    kv = PagedKV(pool, 1)
    kv.extend(case.tokens)
    with mock.patch.object(triton_attention, "forward", wraps=triton_attention.forward) as forward:
        out = paged_attention(case.q, case.k, case.v, kv, 0, scale=case.scale, backend="triton")
    assert forward.call_count == 1
    assert torch.equal(out, case.run(triton_attention)[0])
