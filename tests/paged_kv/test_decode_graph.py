"""A captured decode step gives what the step gives, at every length, for other sequences, and refuses other blocks."""

import pytest
import torch
from torch.nn import functional as F

from paged_kv import DecodeGraph, PagedKV, PagePool, paged_attention

LAYERS, HEADS, GROUPS, DIM, WIDTH = 2, 8, 2, 64, 96


def make(slots=40, device="cuda", dtype=torch.bfloat16):
    pool = PagePool(
        layers=LAYERS, slots=slots, page_tokens=64, kv_heads=GROUPS, head_dim=DIM, dtype=dtype, device=device
    )  # fmt: skip
    for x in (*pool.k, *pool.v):
        x.fill_(torch.nan)
    return PagedKV(pool, max_sequences=8)


class Model:
    """Two layers over hidden states; the first has a window, the second sinks."""

    def __init__(self, device="cuda", dtype=torch.bfloat16):
        make = torch.Generator(device).manual_seed(0)
        shape = (LAYERS, WIDTH, (HEADS + 2 * GROUPS) * DIM)
        self.qkv = torch.randn(shape, generator=make, device=device, dtype=dtype) / WIDTH**0.5
        shape = (LAYERS, HEADS * DIM, WIDTH)
        self.out = torch.randn(shape, generator=make, device=device, dtype=dtype) / (HEADS * DIM) ** 0.5
        self.sinks = torch.randn(HEADS, generator=make, device=device)

    def __call__(self, kv, x):
        for layer in range(LAYERS):
            q, k, v = F.rms_norm(x @ self.qkv[layer], (shape := self.qkv.shape[2],)).view(-1, shape // DIM, DIM).split(
                (HEADS, GROUPS, GROUPS), 1
            )  # fmt: skip
            kv.append(layer, k, v)
            options = {"window": 50} if layer == 0 else {"sinks": self.sinks}
            out = paged_attention(q, k, v, kv, layer, scale=DIM**-0.5, **options)
            x = x + out.flatten(1) @ self.out[layer]
        return x


def test_a_graph_needs_a_device():
    kv = make(device="cpu", dtype=torch.float32)
    kv.extend({kv.add(): 1})
    with pytest.raises(ValueError, match="CUDA device, got cpu"):
        DecodeGraph(kv, lambda: None)


@pytest.mark.cuda
@torch.no_grad()
def test_a_replayed_step_is_the_step():
    model = Model()
    eager, graphed = make(), make()
    prompts = (1, 63, 130)
    ids = {kv: [kv.add() for _ in prompts] for kv in (eager, graphed)}
    x = torch.randn(sum(prompts), WIDTH, device="cuda", dtype=torch.bfloat16)
    for kv, sequences in ids.items():
        kv.extend(dict(zip(sequences, prompts)))
        model(kv, x)
        sequences.append(kv.fork(sequences[1], 40))
        kv.extend({sequences[3]: 1})
        model(kv, x[:1])
    static = torch.zeros(3, WIDTH, device="cuda", dtype=torch.bfloat16)
    graph = None
    for step in range(150):  # over page ends, with a fork, and with another sequence taking part now and then
        members = [0, 1, 3] if step % 3 else [3, 2, 0]
        rows = torch.randn(3, WIDTH, device="cuda", dtype=torch.bfloat16)
        eager.extend({ids[eager][i]: 1 for i in members})
        expected = model(eager, rows)
        graphed.extend({ids[graphed][i]: 1 for i in members})
        static.copy_(rows)
        if graph is None:
            graph = DecodeGraph(graphed, lambda: model(graphed, static))
            got = graph.output
        else:
            got = graph.replay()
        assert torch.equal(got, expected), f"step {step}"
    assert [graphed.length(s) for s in ids[graphed]] == [eager.length(s) for s in ids[eager]]

    with pytest.raises(ValueError, match="already"):
        graph.replay()
    graphed.extend({ids[graphed][0]: 1, ids[graphed][1]: 1})
    with pytest.raises(ValueError, match="captured for a block of"):
        graph.replay()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@torch.no_grad()
def test_a_graph_on_another_device_than_the_current_one():
    found = []
    for device in ("cuda:0", "cuda:1"):
        model, kv, x = Model(device), make(device=device), torch.ones(1, WIDTH, device=device, dtype=torch.bfloat16)
        sequence = kv.add()
        kv.extend({sequence: 1})
        graph = DecodeGraph(kv, lambda model=model, kv=kv, x=x: model(kv, x))
        kv.extend({sequence: 1})
        found.append(graph.replay().cpu())
    assert torch.cuda.current_device() == 0 and torch.equal(*found)


@pytest.mark.cuda
@torch.no_grad()
def test_what_cannot_be_captured_is_refused():
    model, kv = Model(), make()
    x = torch.randn(70, WIDTH, device="cuda", dtype=torch.bfloat16)
    a = kv.add()
    kv.extend({a: 70})
    with pytest.raises(ValueError, match="would keep the lengths"):
        DecodeGraph(kv, lambda: model(kv, x))
    kv = make()
    kv.extend({kv.add(): 1})
    with pytest.raises(ValueError, match=r"appended to layers \[0\]"):
        DecodeGraph(kv, lambda: kv.append(0, *x.new_zeros(2, 1, GROUPS, DIM)))
    with pytest.raises(ValueError, match="just opened"):
        model(kv, x[:1])
        DecodeGraph(kv, lambda: model(kv, x[:1]))
