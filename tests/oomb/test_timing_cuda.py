"""Host pages on a GPU under delays: the same bits, whatever is slow. The simulator (test_host_tier.py) knows more
timings; here the streams, events and copies are real.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests.models import build, configs
from tests.numerics import gradient_errors, gradients
from tests.oomb.lanes import sleeping, watched
from tests.simulator import mutant

import oomb.host_tier
import oomb.storage
from oomb import ChunkConfig, chunked_backward

pytestmark = pytest.mark.cuda
REPETITIONS = 50
SLOW = (("in",), ("out",), ("compute",), ("in", "out"), ("in", "out", "compute"))
VOCAB = 61
# heads, KV heads, head dim, hidden, MLP, tokens, chunk: what is moved beside what is computed
CASES = {
    "huge copies": (8, 8, 128, 64, 64, 1920, 384),
    "huge compute": (8, 1, 64, 1024, 4096, 640, 128),
}


def case(name: str):
    heads, kv_heads, head_dim, hidden, mlp, tokens, chunk = CASES[name]
    config = configs()["qwen2"]
    config.num_hidden_layers, config.layer_types = 2, config.layer_types[:2]
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = heads, kv_heads, head_dim
    config.hidden_size, config.intermediate_size = hidden, mlp
    model = build(config, dtype=torch.bfloat16, device="cuda")
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))

    def step(**more) -> dict[str, torch.Tensor]:
        chunks = ChunkConfig(chunk_tokens=chunk, page_tokens=64, backend="triton", **more)
        chunked_backward(model, ids, config=chunks)
        return gradients(model)

    return step, chunk, tokens


def on_host(segment: int) -> dict[str, int]:
    return {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0, "segment_tokens": segment}


def differ(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    # torch adds the rows of an embedding's gradient in an order of its own
    return [name for name, grad in expected.items() if "embed" not in name and not torch.equal(ours[name], grad)]


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_under_any_delay(name):
    """With one segment as without offloading; with several as without a delay, and close to the other."""
    step, chunk, tokens = case(name)
    resident = step(gpu_kv_budget_bytes=1 << 34, gpu_keep_budget_bytes=1 << 34)
    assert not differ(step(gpu_kv_budget_bytes=1 << 34, gpu_keep_budget_bytes=1 << 34), resident), "no base to compare"
    segmented = step(**on_host(2 * chunk))
    assert gradient_errors(segmented, resident)[0] < 2e-2
    for repetition in range(REPETITIONS):
        slow = SLOW[repetition % len(SLOW)]
        segment, expected = ((tokens, resident), (2 * chunk, segmented))[repetition % 2]
        with watched(delay=sleeping(slow, repetition)):
            wrong = differ(step(**on_host(segment)), expected)
        assert not wrong, f"repetition {repetition}, {slow} slow, segments of {segment}: {wrong} differ"


# what is changed, what is slow, how much of it and by up to how many milliseconds, and whether segments are several
MUTANTS = {
    "reads before arrival": ('self.lanes.hold("compute", buffer.arrived)', "pass", ("in",), 0.3, 3, True),
    "gradients leave before they are added": (
        'self._copy("out", moves, used)', 'self._copy("out", moves)', ("compute",), 0.3, 3, True,
    ),
    "gradients' buffer filled before it is copied out": (
        "grads.free = pages.written[first] = self._copy", "pages.written[first] = self._copy", ("out",), 1.0, 30, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_shows(name):
    """The test above can fail: the same with one wait taken out of the real code."""
    original, replacement, slow, share, milliseconds, several = MUTANTS[name]
    step, chunk, tokens = case("huge copies")
    where = on_host(2 * chunk if several else tokens)
    expected = step(**where)
    tier = mutant("oomb.host_tier", original, replacement).HostTier
    for repetition in range(8):
        delay = sleeping(slow, repetition, milliseconds, share)
        with mock.patch.object(oomb.storage, "HostTier", tier), watched(delay=delay):
            if differ(step(**where, check_recompute=False), expected):
                return
    pytest.fail(f"{name}: nobody noticed")
