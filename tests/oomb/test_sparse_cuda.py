"""Sparse layers with pages on the host, on a GPU under delays: the bits of everything resident, whatever is slow."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests.models import build, configs
from tests.numerics import gradients
from tests.oomb.lanes import WatchedLanes, sleeping
from tests.oomb.test_timing_cuda import CASES, SLOW, VOCAB, differ
from tests.simulator import mutant, poison

import oomb.host
import oomb.storage
from offload import lanes_for
from oomb import ChunkConfig, chunked_backward

pytestmark = pytest.mark.cuda
REPETITIONS = 20
PAGE = 64


class Poisoned(WatchedLanes):
    """Memory that comes from the lanes holds NaN: what is not fetched must not be read."""

    def empty(self, shape, dtype):
        return poison(self.inner.empty(shape, dtype))


def case(name: str, device: str = "cuda", backend: str = "triton", dtype: torch.dtype = torch.bfloat16):
    """A step as a function of its budgets, and its tokens."""
    heads, kv_heads, head_dim, hidden, mlp, tokens, chunk = CASES[name]
    config = configs()["qwen2"]
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv_heads, head_dim
    config.hidden_size, config.intermediate_size = hidden, mlp
    model = build(config, dtype=dtype, device=device)
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    chosen = {"attention": "sparse", "top_k_pages": 4, "recent_pages": 2, "sink_pages": 1, "page_tokens": PAGE}

    def step(delay=None, **more) -> dict[str, torch.Tensor]:
        lanes = lambda place: Poisoned(lanes_for(place), delay=delay)  # noqa: E731
        with mock.patch.object(oomb.host, "lanes_for", lanes):
            chunked_backward(model, ids, config=ChunkConfig(chunk_tokens=chunk, backend=backend, **chosen, **more))
        return gradients(model)

    page_bytes = 2 * config.num_hidden_layers * PAGE * kv_heads * head_dim * (2 + 4)
    return step, tokens, page_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_under_any_delay(name):
    step, tokens, page_bytes = case(name)
    resident = step(gpu_kv_budget_bytes=1 << 34, gpu_keep_budget_bytes=1 << 34)
    assert not differ(step(gpu_kv_budget_bytes=1 << 34, gpu_keep_budget_bytes=1 << 34), resident), "no base to compare"
    for repetition in range(REPETITIONS):
        slow = SLOW[repetition % len(SLOW)]
        budgets = {
            "gpu_kv_budget_bytes": (1, 3 * page_bytes)[repetition % 2],
            "gpu_keep_budget_bytes": (0, 1 << 34)[repetition // 2 % 2],
            "gpu_selection_budget_bytes": (0, None)[repetition // 3 % 2],
            "segment_tokens": (tokens, 7 * PAGE, 4 * tokens)[repetition % 3],
        }
        wrong = differ(step(delay=sleeping(slow, repetition), **budgets), resident)
        assert not wrong, f"repetition {repetition}, {slow} slow, {budgets}: {wrong} differ"


MUTANTS = {
    "reads before arrival": ('self.lanes.hold("compute", buffer.arrived)', "pass", ("in",)),
    "what was guessed is taken for all": ("self._fetch_rest(buffers[0], unit)", "pass", ()),
    "gradients leave before they are added": ('run("out", work, after=(used,))', 'run("out", work)', ("compute",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_mistake_shows(name):
    """The test above can fail."""
    original, replacement, slow = MUTANTS[name]
    step, tokens, _ = case("huge copies")
    budgets = {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0, "segment_tokens": tokens}
    expected = step(**budgets)
    tier = mutant("oomb.host_tier", original, replacement).HostTier
    for repetition in range(20):
        with mock.patch.object(oomb.storage, "HostTier", tier):
            delay = sleeping(slow, repetition, milliseconds=3)
            if differ(step(delay=delay, **budgets, check_recompute=False), expected):
                return
    pytest.fail(f"{name}: nobody noticed")
