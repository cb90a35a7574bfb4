"""Sparse attention through the whole trainer: what is attended to depends on the sequence and the budget, on nothing
else.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.dense import dense_loss
from tests.models import build, configs
from tests.numerics import gradient_errors, gradients, relative
from tests.oomb.test_exact import tokens
from tests.simulator import poison

from offload.lanes import InlineLanes
from oomb import ChunkConfig, api, chunked_backward, chunked_loss, memory, selection
from oomb import step as step_module
from oomb.cli.main import main
from oomb.storage import TieredPast
from oomb.tiny import byte_tokenizer
from sparse_pages import PageSummary

NAMES = ["qwen2", "qwen2_window", "gpt_oss", "qwen3_moe"]


def sparse(chunk: int, *, page: int = 4, top_k: int = 1, recent: int = 1, sinks: int = 1, **more) -> ChunkConfig:
    return ChunkConfig(
        chunk_tokens=chunk,
        page_tokens=page,
        attention="sparse",
        top_k_pages=top_k,
        recent_pages=recent,
        sink_pages=sinks,
        **more,
    )


def step(model, ids, config, entry=chunked_loss, **arguments):
    loss = entry(model, ids, config=config, **arguments)
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("entry", [chunked_loss, chunked_backward])
def test_loss_and_gradient_do_not_depend_on_the_chunk(name, entry):
    model, ids = build(configs()[name]), tokens(2, 43)
    loss, reference = step(model, ids, sparse(64))
    for chunk in (4, 8, 20):
        other, grads = step(model, ids, sparse(chunk), entry)
        assert relative(other, loss) <= 1e-10
        assert max(gradient_errors(grads, reference)) <= 1e-10
    _, dense = step(model, ids, ChunkConfig(chunk_tokens=8, page_tokens=4))
    assert gradient_errors(dense, reference)[0] > 1e-3, "nothing was left out"


@settings(deadline=None, max_examples=15)
@given(
    name=st.sampled_from(NAMES),
    length=st.integers(2, 40),
    page=st.sampled_from([1, 2, 4]),
    parts=st.sampled_from([(40, 1, 0), (0, 40, 0), (0, 1, 40), (14, 14, 14)]),
    per_head=st.booleans(),
    padded=st.booleans(),
)
def test_a_budget_that_covers_everything_is_dense(name, length, page, parts, per_head, padded):
    model, ids = build(configs()[name]), tokens(2, length)
    mask = (torch.arange(length) < torch.tensor([length, max(length // 2, 2)])[:, None]).long() if padded else None
    top_k, recent, sinks = parts
    config = sparse(8 * page, page=page, top_k=top_k, recent=recent, sinks=sinks, select_per_head=per_head)
    loss, grads = step(model, ids, config, attention_mask=mask)
    expected = dense_loss(model, ids, attention_mask=mask)
    expected.backward()
    assert relative(loss, expected) <= 1e-12
    assert max(gradient_errors(grads, gradients(model))) <= 1e-10


def test_gradient_against_finite_differences():
    """The selection is held, so the gradient is that of the loss wherever the selection does not change."""
    model, ids = build(configs()["qwen3"]), tokens(1, 43)
    config = sparse(8)
    _, grads = step(model, ids, config)
    name, p = next((n, p) for n, p in model.named_parameters() if "layers.0.self_attn.v_proj" in n)
    direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
    with torch.no_grad():
        p += 1e-4 * direction
        up = float(chunked_loss(model, ids, config=config))
        p -= 2e-4 * direction
        down = float(chunked_loss(model, ids, config=config))
    assert (up - down) / 2e-4 == pytest.approx(float((grads[name] * direction).sum()), rel=1e-3)


@pytest.mark.parametrize("change", [{"gpu_kv_budget_bytes": 1, "segment_tokens": 8}, {"gpu_keep_budget_bytes": 10**9}])
def test_where_pages_live_and_what_is_kept_changes_nothing(change):
    model, ids = build(configs()["gpt_oss"]), tokens(2, 43)
    _, reference = step(model, ids, sparse(8))
    _, grads = step(model, ids, sparse(8, **change))
    assert max(gradient_errors(grads, reference)) <= 1e-12
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, grads = step(model, ids, sparse(8, **change))
    assert max(gradient_errors(grads, reference)) <= 1e-10


@pytest.fixture
def poisoned_lanes(monkeypatch):
    """Memory that comes from the lanes holds NaN: pages that were not fetched, if anything read them."""
    empty = InlineLanes.empty
    monkeypatch.setattr(InlineLanes, "empty", lambda self, shape, dtype: poison(empty(self, shape, dtype)))


def resident_and_not(name, length, draw_budget, equal, **more):
    """The step with everything resident, and with what a budget leaves on the device."""
    device_pages, segment_pages, lists_on_host = draw_budget
    config = configs()[name]
    if more.get("backend") == "triton":
        config.head_dim, config.hidden_size, config.num_hidden_layers = 64, 64, 2
        config.num_attention_heads, config.num_key_value_heads = 2, 1
        config.layer_types = config.layer_types[:2]
    page = more.pop("page")
    model = build(config, dtype=more.pop("dtype"))
    layers = config.num_hidden_layers
    ids = tokens(1 if more.get("backend") == "triton" else 2, length)
    _, resident = step(model, ids, sparse(2 * page, page=page, **more))
    # a page's bytes: keys and values, and float32 or wider gradients of both
    wide = torch.promote_types(next(model.parameters()).dtype, torch.float32).itemsize
    token = 2 * layers * config.num_key_value_heads * config.head_dim * 2 * wide
    budgets = {
        "gpu_kv_budget_bytes": max(device_pages * len(ids) * page * token, 1),
        "segment_tokens": segment_pages * page,
        "gpu_selection_budget_bytes": 0 if lists_on_host else None,
    }
    _, moved = step(model, ids, sparse(2 * page, page=page, **budgets, **more))
    for key, grad in resident.items():
        assert equal(moved[key], grad), key


budgets = st.tuples(st.integers(0, 4), st.integers(1, 9), st.booleans())


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(NAMES), length=st.integers(9, 44), budget=budgets, per_head=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)  # fmt: skip
def test_wherever_pages_live_the_gradient_is_the_same(name, length, budget, per_head, dtype, poisoned_lanes):
    """The reference sums the past in tiles that begin with a segment, so it is the same but for the order of sums."""
    close = {torch.float64: 1e-12, torch.float32: 1e-4}[dtype]
    equal = lambda a, b: float((a - b).norm()) <= close * max(float(b.norm()), 1e-3)  # noqa: E731
    resident_and_not(name, length, budget, equal, dtype=dtype, page=4, select_per_head=per_head)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
@pytest.mark.parametrize("budget", [(0, 9, True), (1, 1, False)])
@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_wherever_pages_live_the_bits_are_the_same(name, budget, poisoned_lanes):
    """Triton's kernels, interpreted: what they carry from segment to segment is all they know."""
    resident_and_not(name, 330, budget, torch.equal, dtype=torch.float32, page=64, backend="triton")


def test_the_first_sparse_layer_leaves_those_before_it_dense():
    model, ids = build(configs()["qwen2"]), tokens(1, 43)
    _, dense = step(model, ids, ChunkConfig(chunk_tokens=8, page_tokens=4))
    _, all_dense = step(model, ids, sparse(8, first_sparse_layer=3))
    assert max(gradient_errors(all_dense, dense)) <= 1e-12
    _, one_dense = step(model, ids, sparse(8, first_sparse_layer=1))
    _, none_dense = step(model, ids, sparse(8))
    assert gradient_errors(one_dense, none_dense)[0] > 1e-4


def test_where_selections_live_and_how_pages_are_scored():
    model, ids = build(configs()["gpt_oss"]), tokens(2, 43)
    _, reference = step(model, ids, sparse(8))
    _, on_host = step(model, ids, sparse(8, gpu_selection_budget_bytes=0))
    assert all(torch.equal(on_host[name], grad) for name, grad in reference.items())
    _, bounds = step(model, ids, sparse(8, scorer="minmax"))
    assert gradient_errors(bounds, reference)[0] > 1e-4

    class LastKey:
        def page_features(self, keys):
            return keys[:, :, -1]

        def query_features(self, queries):
            return queries

    _, own = step(model, ids, sparse(8, scorer=LastKey()))
    assert gradient_errors(own, reference)[0] > 1e-4


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("more", [{}, {"scorer": "minmax", "first_sparse_layer": 1}, {"select_per_head": True}])
def test_the_plan_counts_what_is_kept_of_a_selection(name, dtype, more, monkeypatch):
    made = []
    plain = api.Selection
    monkeypatch.setattr(api, "Selection", lambda *args: made.append(plain(*args)) or made[-1])
    model, config = build(configs()[name], dtype=dtype), sparse(8, top_k=3, recent=2, **more)
    with torch.no_grad():
        chunked_loss(model, tokens(2, 43), config=config)
    (kept,) = made
    profile = api.profile_of(api.take_apart(model), 43)
    lists = sum(ids.nbytes for ids, _ in kept.kept.values())
    features = [s._features[:, : s.pages] for s in kept.summaries.values()]
    assert memory._selection_bytes(config, profile, 2, 43) == kept.device_bytes
    assert kept.device_bytes == lists + sum(-(-43 // 4) * x[:, 0].nbytes for x in features)


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_padding_chooses_nothing(name):
    """A padded row gets the loss and gradient that it gets alone, whatever stands in its padding."""
    model, ids = build(configs()[name]), tokens(2, 43)
    lengths = (43, 21)  # the second ends within a block
    alone = [step(model, ids[b : b + 1, :n], sparse(8), num_items=60) for b, n in enumerate(lengths)]
    mask = (torch.arange(43) < torch.tensor(lengths)[:, None]).long()
    for seed in range(3):
        filler = torch.randint(0, 20, ids.shape, generator=torch.Generator().manual_seed(seed))
        padded = torch.where(mask.bool(), ids, filler)
        loss, grads = step(model, padded, sparse(8), attention_mask=mask, num_items=60)
        assert relative(loss, alone[0][0] + alone[1][0]) <= 1e-10
        whole = {key: alone[0][1][key] + alone[1][1][key] for key in grads}
        assert max(gradient_errors(grads, whole)) <= 1e-10


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
@pytest.mark.parametrize("chunk", [4, 12, 64])
def test_packed_documents_choose_their_own_pages(name, chunk):
    """Documents that begin with a page get the loss and gradient that they get alone: sinks and budget are theirs."""
    model, lengths = build(configs()[name]), (20, 16, 13)
    ids = tokens(1, sum(lengths))
    cuts = torch.tensor(lengths).cumsum(0)
    documents = torch.bucketize(torch.arange(sum(lengths)), cuts, right=True)[None]
    parts = [step(model, part, sparse(8), num_items=46) for part in ids.split(lengths, 1)]
    loss, grads = step(model, ids, sparse(chunk), document_ids=documents, num_items=46)
    assert relative(loss, sum(part for part, _ in parts)) <= 1e-10
    whole = {key: sum(part[key] for _, part in parts) for key in grads}
    assert max(gradient_errors(grads, whole)) <= 1e-10


def test_documents_within_blocks_do_not_depend_on_the_chunk():
    model, ids = build(configs()["qwen2"]), tokens(2, 43)
    documents = torch.bucketize(torch.arange(43), torch.tensor([5, 14, 30]), right=True).expand(2, -1)
    loss, reference = step(model, ids, sparse(64), document_ids=documents)
    for chunk in (4, 20):
        other, grads = step(model, ids, sparse(chunk), document_ids=documents)
        assert relative(other, loss) <= 1e-10 and max(gradient_errors(grads, reference)) <= 1e-10


@pytest.mark.parametrize(
    "change, match",
    [
        ({"scorer": "median"}, "scorer must be one of mean, minmax, got 'median'"),
        ({"scorer": object()}, "scorer must be one of"),
        ({"top_k_pages": 2**16}, "at most 65536 pages"),
        ({"recent_pages": 0}, "recent_pages must be a whole number of at least 1"),
        ({"gpu_selection_budget_bytes": -1}, "gpu_selection_budget_bytes"),
    ],
)
def test_bad_settings(change, match):
    with pytest.raises(ValueError, match=match):
        ChunkConfig(attention="sparse", **change)


def test_pages_are_chosen_once_and_found_again(monkeypatch):
    """Once for each chunk and layer, checkpointing or not; the walk reads what the fill chose."""
    chosen, read = Counter(), {}
    choose, attend = selection.select_pages, step_module.paged_attention

    def watched(q, summary, **options):
        chosen[id(summary), options["past_pages"]] += 1
        return choose(q, summary, **options)

    def reading(q, k, v, past, layer, *, selected, **options):
        read.setdefault((layer, past.start), []).append(selected)
        return attend(q, k, v, past, layer, selected=selected, **options)

    monkeypatch.setattr(selection, "select_pages", watched)
    monkeypatch.setattr(step_module, "paged_attention", reading)
    model, ids = build(configs()["qwen2"]), tokens(2, 43)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    step(model, ids, sparse(8, gpu_selection_budget_bytes=100))
    assert set(chosen.values()) == {1} and len(chosen) == 6 * len(model.model.layers)
    assert all(len(lists) >= 2 for (_, start), lists in read.items() if start < 40)  # the last chunk runs once
    assert all(torch.equal(lists[0], other) for lists in read.values() for other in lists[1:])


def test_windowed_layers_choose_nothing_and_fetch_their_window_only(monkeypatch):
    model, ids = build(configs()["gpt_oss"]), tokens(1, 60)
    windows = [layer for layer, kind in enumerate(model.config.layer_types) if kind == "sliding_attention"]
    assert windows and len(windows) < len(model.config.layer_types)
    firsts, asked = {}, set()
    segments, choose = TieredPast.segments, PageSummary.append

    def watched(self, layer, phase, first_page=0):
        firsts.setdefault(layer, set()).add((self.start, first_page))
        return segments(self, layer, phase, first_page)

    monkeypatch.setattr(TieredPast, "segments", watched)
    monkeypatch.setattr(PageSummary, "append", lambda self, k: (asked.add(id(self)), choose(self, k))[1])
    step(model, ids, sparse(8))
    assert len(asked) == len(model.config.layer_types) - len(windows)
    for layer in windows:  # a window of 9 tokens, pages of 4
        assert all(first >= max(start - 8, 0) // 4 for start, first in firsts[layer])


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("kind", ["qwen2", "gpt_oss"])
def test_the_command_line(kind, device, tmp_path, capsys):
    """Sizes that the kernels take."""
    pytest.importorskip("datasets", reason="oomb train reads its data through datasets")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "model")
    config = configs()[kind]
    config.vocab_size, config.head_dim, config.hidden_size = len(tokenizer), 64, 128
    build(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(300)))
    paths = [
        "--model",
        str(tmp_path / "model"),
        "--data",
        str(tmp_path / "text.txt"),
        "--output",
        str(tmp_path / "out"),
    ]
    sizes = ["--context", "512", "--chunk-tokens", "128", "--page-tokens", "64", "--steps", "2", "--device", device]
    budget = ["--attention", "sparse", "--top-k-pages", "1", "--recent-pages", "2", "--scorer", "minmax"]
    budget += ["--gpu-selection-budget-bytes", "1KB", "--gpu-kv-budget-bytes", "1MB", "--segment-tokens", "128"]
    code = main(["train", *paths, *sizes, *budget, "--generate-tokens", "0"])
    assert code == 0, capsys.readouterr().err
    settings = (tmp_path / "out" / "settings.yaml").read_text()
    assert "attention: sparse" in settings and "scorer: minmax" in settings


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen2", "gpt_oss"])
def test_on_a_gpu(name, dtype):
    """The kernels against the reference on the same selections; twice the same bits; the host changes none."""
    config = configs()[name]
    config.head_dim, config.hidden_size = 64, 128
    model, ids = build(config, dtype=dtype, device="cuda"), tokens(2, 700).cuda()
    mask = (torch.arange(700) < torch.tensor([[700], [450]])).long().cuda()

    def run(backend, **more):
        return step(model, ids, sparse(192, page=64, top_k=2, backend=backend, **more), attention_mask=mask)[1]

    ours = run("auto")
    assert gradient_errors(run("triton", gpu_selection_budget_bytes=0), ours) == (0.0, 0.0)
    if dtype == torch.float32:  # in bfloat16 another order of sums is rounded to other scores, and other pages chosen
        assert gradient_errors(run("auto", gpu_kv_budget_bytes=2**20), ours)[0] <= 1e-5
        assert gradient_errors(run("reference"), ours)[0] <= 1e-5
