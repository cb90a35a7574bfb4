"""The studies of quality run on a CPU at small sizes and measure what they say; the long steps fit the GPU."""

from __future__ import annotations

import importlib
import json
import math
from unittest import mock

import pytest
import torch
from benchmarks import peak, recall, sparse_quality
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models import build, configs

from oomb import ChunkConfig, chunked_backward, plan
from oomb.checkpoint import save_checkpoint
from oomb.hf import attention_installed
from oomb.tiny import byte_tokenizer, tiny_model

GIB = 2**30
TEXT = torch.arange(4096, dtype=torch.uint8) % recall.TEXT


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.integers(8, 20), st.integers(1, 9), st.integers(0, 2**31))
def test_every_question_has_its_card_and_no_other(pairs, per_pair, values, seed):
    task = recall.Task(pairs * per_pair // 4 * 4, pairs, 8, values)
    ids, answer = task.batch(TEXT, 3, seed)
    assert torch.equal(answer, task.is_answer(ids)) and (answer.sum(1) == pairs).all()
    for row, where in zip(ids, answer):
        cards = {int(n): at for at, n in enumerate(row - recall.TEXT - task.keys - task.values) if n >= 0}
        assert len(cards) == pairs and max(cards.values()) < task.tokens // 4
        known = dict(divmod(card, values) for card in cards)
        assert len(known) == pairs, "two cards of one key"
        for at in where.nonzero().flatten().tolist():
            assert at > task.tokens - task.tokens // 4
            assert int(row[at]) - recall.TEXT - task.keys == known[int(row[at - 1]) - recall.TEXT]


@pytest.mark.parametrize("way", ["dense", "sparse, mean", "sparse, minmax", "recent"])
def test_generating_over_pages_is_the_model(way):
    """With a budget for every page all ways are the model's own attention, in chunks and token by token."""
    task = recall.Task(96, 4, 4, 4)
    model, (ids, _) = recall.make_model(task, 32, 2, 16).eval(), task.batch(TEXT, 2, 0)
    chunks = dict(recall.kinds(chunk_tokens=32, page_tokens=8, top_k=10, recent=2))[way]
    decoder, parts = recall.Decoder(model, chunks, 2, 96), [32, 27] + [1] * 37
    with torch.no_grad():
        true = model(ids).logits
    with attention_installed(model):
        ours = [decoder(part) for part in ids.split(parts, 1)]
    ends = torch.tensor(parts).cumsum(0) - 1
    torch.testing.assert_close(torch.stack(ours, 1), true[:, ends], atol=1e-5, rtol=1e-5)


def test_a_model_of_recent_pages_does_not_see_the_cards():
    """Changing a card changes no answer's logits where only recent pages are read, and some where all are."""
    task = recall.Task(256, 4, 4, 4)
    model, (ids, _) = recall.make_model(task, 32, 1, 16).eval(), task.batch(TEXT, 1, 0)
    other = ids.clone()
    other[:, :64] = 0
    changed = {}
    for way, chunks in recall.kinds(chunk_tokens=64, page_tokens=8, top_k=2, recent=2):
        with attention_installed(model):
            first, second = (recall.Decoder(model, chunks, 1, 256)(x) for x in (ids, other))
        changed[way] = not torch.equal(first, second)
    assert changed["dense"] and not changed["recent"]


def test_recall_runs(tmp_path):
    sizes = {
        "tokens": 128, "chunk-tokens": 32, "page-tokens": 8, "width": 32, "layers": 1, "pairs": 4, "keys": 4,
        "values": 4, "rows": 2, "steps": 3, "every": 2,
    }  # fmt: skip
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    assert recall.main([*words, "--small", "--device", "cpu", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "recall.json").read_text())
    assert list(found["curves"]) == ["dense", "sparse, mean", "sparse, minmax", "recent"]
    assert [row["step"] for row in found["curves"]["dense"]] == [0, 2, 3]
    assert list(found["recall"]["recent"]) == ["dense", "recent"]
    assert (tmp_path / "recall.png").read_bytes()[:4] == b"\x89PNG"


def test_what_queries_pay_to_pages():
    q, k = torch.randn(1, 24, 4, 8), torch.randn(1, 24, 2, 8)
    share = sparse_quality.paid(q, k, block=2, page=8)
    true = torch.zeros(3)
    for head in range(4):
        for at in range(16, 24):
            weights = (k[0, : at + 1, head // 2] @ q[0, at, head] / math.sqrt(8)).softmax(0)
            true += torch.stack([part.sum() for part in weights.split(8)]) / 32
    torch.testing.assert_close(share, true)


def test_sparse_quality_runs(tmp_path):
    """With a budget for all pages nothing differs and everything is caught; no rule catches more than the best."""
    save_checkpoint(tmp_path / "model", tiny_model(256, 0), byte_tokenizer())
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}\n" for i in range(200)))
    paths = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path)]
    sizes = ["--cases", "256x8", "--budgets", "2", "32", "--chunk-tokens", "64", "--device", "cpu"]
    assert sparse_quality.main([*paths, *sizes]) == 0
    (case,) = json.loads((tmp_path / "sparse_quality.json").read_text())["cases"]
    for row in case["rows"]:
        assert row["caught"] <= case["best"][str(row["pages"])] + 1e-6
        if row["pages"] == 32:
            assert row["error"] < 1e-5 and row["caught"] == pytest.approx(1.0, abs=1e-5)
        else:
            assert 1e-3 < row["error"] < 2.0 and 0 < row["cosine"] < 1
    assert (tmp_path / "sparse_quality.png").read_bytes()[:4] == b"\x89PNG"


def test_budgets_read_equally_many_pages():
    for rule in sparse_quality.RULES:
        assert sum(sparse_quality.budget(rule, 8).values()) == 8 + sparse_quality.SINKS + sparse_quality.RECENT


def test_what_is_alive_at_the_peak_of_a_trace():
    def event(action, address, size, line):
        return {"action": action, "addr": address, "size": size, "frames": [{"filename": __file__, "line": line}]}

    trace = [
        event("alloc", 1, 30, 1), event("alloc", 2, 50, 2), event("free_completed", 2, 50, 0),
        event("alloc", 2, 60, 3), event("free_requested", 2, 60, 0), event("alloc", 3, 5, 1),
        event("free_completed", 2, 60, 0), event("alloc", 4, 40, 4),
    ]  # fmt: skip
    bytes_, held = peak.fullest(trace)
    assert bytes_ == 95 and sorted(held.values()) == [35, 60]


@pytest.fixture
def sparse_step(monkeypatch):
    """The script, which finds its neighbours as a script does."""
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("sparse_step")


def test_every_sparse_step_is_its_models_and_has_room(sparse_step):
    """By the plan of an H200; and what a row takes of the host is pinned before its clock starts."""
    billions = {("7b", 28): 7.6, ("gpt-oss", 24): 20.9}
    for name, row in sparse_step.ROWS.items():
        if row.config is None:
            continue
        with mock.patch.object(sparse_step.AutoModelForCausalLM, "from_config") as built:
            sparse_step.MODELS[row.model](row.layers)
        found = plan(
            built.call_args[0][0], row.tokens, config=ChunkConfig(**row.config), gpu_bytes=139 * GIB,
            host_bytes=124 * GIB,
        )  # fmt: skip
        assert found.obstacle is None and found.plain is None, (name, found.obstacle, found.plain)
        if (row.model, row.layers) in billions:
            assert found.gpu["weights"] / 2e9 == pytest.approx(billions[row.model, row.layers], abs=0.05)
        assert sum(found.host.values()) <= row.pin_gib * GIB <= 112 * GIB, name


def test_pages_read_are_those_of_the_last_chunk(sparse_step):
    """Of the layers that choose, whatever lies between them."""
    model = build(configs()["gpt_oss"], dtype=torch.float32)
    config = ChunkConfig(chunk_tokens=16, page_tokens=4, attention="sparse", top_k_pages=2, recent_pages=1)
    layers = sparse_step.choosing_layers(model.config)
    with sparse_step.watched_lists(layers) as lists:
        chunked_backward(model, torch.randint(0, 61, (1, 64)), config=config)
    assert 0 < layers < model.config.num_hidden_layers and len(lists) == layers
    assert all(ids[..., 0, :].max() == 48 // 4 for ids in lists)  # the first block of the last chunk reads its own page
