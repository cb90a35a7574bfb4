"""Budgets: what they add up to, on a device of its own memory and where there is one memory for everything."""

from __future__ import annotations

import dataclasses
import re
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models import build, configs
from tests.oomb.test_exact import tokens
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from oomb import ChunkConfig, chunked_backward, loss, memory, placement
from oomb.config import AUTO_CHUNK_TOKENS
from oomb.hf import take_apart
from oomb.memory import MARGIN, Machine, rooms, working_bytes
from oomb.nonfinite import where_loss_breaks
from oomb.placement import chunk_length, place
from oomb.probe import outline
from oomb.storage import one_page_bytes
from oomb.token_losses import smoothed

GIB = 2**30
sizes = st.one_of(st.just("auto"), st.integers(1, 64 * GIB))


def outlined(config=None):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config or configs()["qwen2"])
    parts = take_apart(model.train())
    return parts, outline(parts, 1000)


@given(st.integers(0, 64 * GIB), st.integers(0, 16 * GIB), st.integers(0, 64 * GIB), sizes)
def test_where_there_is_one_memory_the_budgets_share_it(free, working, pages, kv):
    """An explicit budget for pages beside two that are auto once added up to 1.4 times what was free."""
    config = ChunkConfig(gpu_kv_budget_bytes=kv)
    found = rooms(config, Machine(None, 0, free), working=working, page_bytes=pages)
    near = pages if found.device_pages is None else min(found.device_pages, pages)
    taken = working + near + found.device_kept + found.host
    assert taken <= max(free, working + near)  # what was asked for in bytes is taken as it is


@given(st.integers(1 * GIB, 80 * GIB), st.integers(0, 8 * GIB), st.integers(0, 64 * GIB))
def test_on_a_device_pages_and_what_is_kept_leave_a_margin(free, working, pages):
    found = rooms(ChunkConfig(), Machine(free, 80 * GIB, GIB), working=working, page_bytes=pages)
    taken = working + min(found.device_pages, pages) + found.device_kept
    assert taken <= max(free - MARGIN * 80 * GIB, working)


@pytest.mark.parametrize("total, margin", [(8, 0.5), (24, 1.5), (40, 1.5), (80, 2.4), (141, 4.23)])
def test_small_devices_leave_room_for_fragments(total, margin):
    """A 7B LoRA step planned to 23.3 of 24 GiB took 23.7, and fragments another half."""
    room = Machine(total * GIB, total * GIB, None).room()
    assert total * GIB - room == pytest.approx(margin * GIB, rel=1e-6)


def test_chunks_get_shorter_until_what_a_step_takes_fits():
    parts, profile = outlined(
        Qwen2Config(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=8,
            num_key_value_heads=2, vocab_size=32000,
        )
    )  # fmt: skip
    ask = {"batch": 1, "train": True}

    def needs(length):
        taken = working_bytes(
            ChunkConfig(),
            parts,
            profile,
            length=65536,
            chunk_tokens=length,
            batch=1,
            train=True,
            layered=True,
            gpu=True,
        )
        return sum(taken.values())

    margin = GIB - Machine(GIB, GIB, GIB).room()
    for length in (8192, 4096, 2048, 1024):
        for free in (needs(length), needs(length) - 1):
            machine = Machine(free + margin, GIB, GIB)
            found = chunk_length(ChunkConfig(), parts, profile, 65536, machine=machine, **ask)
            assert found == (length if free == needs(length) else max(length // 2, 1024))
    none = Machine(0, GIB, GIB)
    assert chunk_length(ChunkConfig(chunk_tokens=5000), parts, profile, 65536, machine=none, **ask) == 5000
    sparse = ChunkConfig(attention="sparse", page_tokens=96)
    assert chunk_length(sparse, parts, profile, 65536, machine=none, **ask) == 960
    assert chunk_length(ChunkConfig(), parts, profile, 65536, machine=Machine(None, 0, 1), **ask) == 1024


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_share_of_the_device_is_all_there_is(name, monkeypatch):
    """Of a process that torch may not give more (set_per_process_memory_fraction)."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    for share, free, total in ((1.0, 73, 80), (0.25, 15, 20), (0.95, 71, 76), (2**64 / (80 * GIB), 73, 80)):
        monkeypatch.setattr(torch._C, "_cuda_getMemoryFraction", lambda index, share=share: share, raising=False)
        found = Machine.now(torch.device(name))
        assert (found.device_free, found.device_total) == (free * GIB, total * GIB)


@pytest.mark.parametrize("processes", [1, 4])
def test_processes_of_one_host_share_what_is_free_of_it(processes, monkeypatch):
    """All look at the same moment. Each keeps what it pinned: in the next step they have as much again."""
    held = 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 64 * GIB - processes * held)
    monkeypatch.setattr(memory, "spare_bytes", lambda: held)
    for _step in range(3):
        found = Machine.now(torch.device("cpu")).host_free
        assert found == 64 * GIB // processes
        held = found // 2


@pytest.mark.parametrize("chunks", [1, 2, 9])
def test_at_the_peak_the_last_chunk_is_done(chunks):
    parts, profile = outlined()
    bounds = [(i * 64, (i + 1) * 64) for i in range(chunks)]
    config = ChunkConfig(chunk_tokens=64, page_tokens=32)
    machine = Machine(GIB, GIB, GIB)
    placed = place(config, parts, profile, bounds, batch=1, chunk_tokens=64, train=True, machine=machine)
    assert len(placed.keep.layers) == chunks and placed.working["layer outputs"] == 0
    share = placed.keep.device_bytes * (1 if chunks == 1 else chunks - 1) // chunks
    assert placed.kept_bytes == share
    less = dataclasses.replace(config, gpu_keep_budget_bytes=0, host_budget_bytes=1)
    bare = place(less, parts, profile, bounds, batch=1, chunk_tokens=64, train=True, machine=machine)
    assert bare.kept_bytes == 0 and bare.working["layer outputs"] > 0


def test_layers_with_windows_store_few_pages():
    parts, profile = outlined(configs()["qwen2_window"])
    windows = [facts.window for facts in profile.layers.values()]
    assert windows == [None, 9, 9]
    bounds = [(i * 64, (i + 1) * 64) for i in range(4)]
    config, machine = ChunkConfig(chunk_tokens=64, page_tokens=8), Machine(GIB, GIB, GIB)
    placed = place(config, parts, profile, bounds, batch=1, chunk_tokens=64, train=True, machine=machine)
    a_page = one_page_bytes(profile.layers, 8, 1, torch.float32) // 3  # of one layer
    assert placed.near_bytes == (24 + 2 * 3) * a_page  # of each chunk with a later one the last page, eight tokens


class Packed(nn.Module):
    """A head as quantizers leave it: no weight, only its size."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.out_features = head.out_features
        self.register_buffer("packed", head.weight.detach().clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.packed.t()


def test_a_head_without_a_weight():
    model, ids, config = build(configs()["llama"]), tokens(2, 29), ChunkConfig(chunk_tokens=6, page_tokens=4)
    expected = chunked_backward(model, ids, config=config)
    model.lm_head = Packed(model.lm_head)
    torch.testing.assert_close(chunked_backward(model, ids, config=config), expected)


def test_a_loss_of_ones_own_gets_smaller_tiles():
    """It makes more of a logit than cross-entropy does, which is what a step is planned with."""
    tiles = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        tiles.append(len(rows))
        return rows

    rows, targets = torch.randn(1, 3 * 1024, 128), torch.zeros(1, 3 * 1024, dtype=torch.long)
    with mock.patch.object(loss, "TILE_LOGITS", 2048 * 128), torch.no_grad():
        for token_loss in (loss.cross_entropy, smoothed(0.1)):
            loss.tiled_loss(rows, targets, head, token_loss=token_loss, tile_tokens="auto", vocab_size=128)
    assert tiles == [2048, 1024, 1024, 1024, 1024]


def test_a_loss_that_is_not_finite_is_found_by_the_chunks_that_ran(monkeypatch):
    """Short ones, for lack of memory."""
    monkeypatch.setattr(Machine, "now", lambda device: Machine(0, GIB, GIB))
    monkeypatch.setattr(placement, "LEAST_CHUNK", 16)
    monkeypatch.setitem(AUTO_CHUNK_TOKENS, "cuda", 64)
    model, ids = build(configs()["llama"], dtype=torch.float32), tokens(2, 50) % 60
    ids[1, 35] = 60
    chunked_backward(model, ids)
    with torch.no_grad():
        model.model.embed_tokens.weight[60] = torch.inf
    where = where_loss_breaks(model, {"input_ids": ids}, ChunkConfig(), None)
    assert re.fullmatch(r"chunk 2, position 3[2-5] of sequence 1", where)
