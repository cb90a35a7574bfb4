"""Routers near a tie: two runs in 16 bits are compared with the same experts chosen, wherever scores allow it."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models import build
from transformers import Glm4MoeConfig, GptOssConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from oomb import ChunkConfig, Unsupported, api, chunked_backward, verification, verify
from oomb.choices import Choices, nearly_tied
from oomb.keep import Keep

SHAPE = {
    "hidden_size": 128, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
}  # fmt: skip
MANY = {
    "gpt-oss": GptOssConfig(**SHAPE, num_local_experts=64, num_experts_per_tok=4),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, num_experts=64, num_experts_per_tok=4),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=64, num_experts_per_tok=4),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=64, num_experts_per_tok=4),
    "glm4-moe, groups": Glm4MoeConfig(
        **SHAPE, n_routed_experts=64, num_experts_per_tok=4, n_group=8, topk_group=3, first_k_dense_replace=1
    ),
}
CONFIG = ChunkConfig(chunk_tokens=11, page_tokens=4)


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_experts_in_16_bits_are_not_refused(name, dtype):
    model = build(MANY[name], dtype=dtype)
    assert bool(chunked_backward(model, torch.randint(512, (1, 40)), config=CONFIG).isfinite())


@pytest.mark.parametrize("name", MANY)
def test_many_experts_in_16_bits_are_verified(name):
    found = verify(build(MANY[name], dtype=torch.bfloat16), config=CONFIG, tokens=50)
    assert found.passed, "\n".join(found.lines())


def test_free_choices_would_not_do(monkeypatch):
    """What is held against holding: some of these are far from themselves where each run chooses for itself.

    Which of them depends on how a processor rounds; about every second is.
    """
    monkeypatch.setattr("oomb.choices.nearly_tied", lambda scores, dim, found, ids, tolerance: found)
    with pytest.raises(Unsupported, match=r"attention differs|differs from the whole"):
        for seed, name in itertools.product(range(4), ("gpt-oss", "mixtral", "glm4-moe, groups")):
            model = build(MANY[name], dtype=torch.bfloat16, seed=seed)
            chunked_backward(model, torch.randint(512, (1, 40)), config=CONFIG)


class Crowded(torch.nn.Module):
    """Of every `every` experts one has no room left for a token, which one depends on how many came before it."""

    def __init__(self, router: torch.nn.Module, every: int) -> None:
        super().__init__()
        self.router, self.every = router, every

    def forward(self, hidden):
        logits, *_ = self.router(hidden)
        place, expert = torch.arange(len(logits))[:, None], torch.arange(logits.shape[-1])
        logits = logits - 3.0 * logits.abs().amax() * ((expert - place) % self.every == 0)
        values, ids = logits.topk(4, dim=-1)
        return logits, values.softmax(-1), ids


@pytest.mark.parametrize("every", [2, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_router_that_sees_other_tokens_is_refused(dtype, every):
    model = build(MANY["gpt-oss"], dtype=dtype)
    for layer in model.model.layers:
        layer.mlp.router = Crowded(layer.mlp.router, every)
    with pytest.raises(Unsupported):
        chunked_backward(model, torch.randint(512, (1, 40)), config=CONFIG)


@pytest.mark.parametrize("common", [0.0, 10.0, 100.0])
def test_what_all_scores_have_in_common_hides_nothing(common):
    """As balancing biases of trained models are: large, and nearly the same for all experts."""
    model = build(MANY["glm4-moe, groups"], dtype=torch.bfloat16)
    places = common + 0.2 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for layer in model.model.layers[1:]:
        gate = layer.mlp.gate
        del gate._buffers["e_score_correction_bias"]
        gate.e_score_correction_bias = torch.full((64,), common)

        def by_place(gate, args):
            gate.e_score_correction_bias = places[: args[0].numel() // args[0].shape[-1]]

        gate.by_place = by_place
    assert bool(chunked_backward(model, torch.randint(512, (1, 40)), config=CONFIG).isfinite())
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_pre_hook(layer.mlp.gate.by_place)
    with pytest.raises(Unsupported, match="differs from the whole"):
        chunked_backward(model, torch.randint(512, (1, 40)), config=CONFIG)


def test_verify_probes_before_it_holds(monkeypatch):
    """A probe among held layers would be held to the choices of other tokens."""
    probed, before, right = [], [], api.probe
    monkeypatch.setattr(api, "probe", lambda parts, length: (probed.append(length), right(parts, length))[1])
    monkeypatch.setattr(
        verification, "chunked_backward", lambda *a, **k: (before.append(len(probed)), chunked_backward(*a, **k))[1]
    )
    for runs, (autocast, dtype) in enumerate(((None, torch.bfloat16), (torch.bfloat16, torch.float32)), 1):
        verify(build(MANY["qwen3-moe"], dtype=dtype), config=CONFIG, tokens=50, autocast=autocast)
        assert len(probed) == runs == before[-1]


def test_verify_leaves_the_model_as_it_was_wherever_it_stops(monkeypatch):
    """In the reference, in the chunked run, in the whole one, forward and backward."""
    shape = SHAPE | {"num_hidden_layers": 3, "hidden_size": 32}
    model = build(Qwen3MoeConfig(**shape, num_experts=8, num_experts_per_tok=2), dtype=torch.bfloat16)
    model.model.layers[1].eval()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)

    def state():
        return (
            [(module.training, sorted(vars(module)), len(module._forward_hooks)) for module in model.modules()],
            [(id(p.grad), float(p.grad.sum())) for p in model.parameters()],
            torch._C._len_torch_dispatch_stack(),
        )

    verify(model, config=CONFIG, tokens=30)
    before, kind, done, stop = state(), type(model.model.layers[1].mlp), False, 0
    right = kind.forward
    while not done:
        left = iter(range(stop))

        def forward(self, *args, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return right(self, *args)

        monkeypatch.setattr(kind, "forward", forward)
        try:
            verify(model, config=CONFIG, tokens=30)
            done = True
        except KeyboardInterrupt:
            stop += 1
        assert state() == before
    assert stop > 3 * len(model.model.layers)


@pytest.mark.parametrize("past", [{}, {"gpu_kv_budget_bytes": 40_000, "segment_tokens": 12}, {"attention": "sparse"}])
@pytest.mark.parametrize("recompute", ["layer", "chunk"])
@pytest.mark.parametrize("name", ["gpt-oss", "olmoe"])
def test_both_passes_choose_alike(monkeypatch, name, recompute, past):
    """Nothing is held in training: the same experts, because every bit is the same, attention computed twice too."""
    nothing = range(9, 9)
    monkeypatch.setattr("oomb.placement.plan_keep", lambda *_, **__: Keep(nothing, nothing, 0, 0))
    model, chosen = build(MANY[name], dtype=torch.bfloat16), defaultdict(list)
    config = ChunkConfig(chunk_tokens=28, page_tokens=4, recompute=recompute, top_k_pages=2, recent_pages=2, **past)
    ids = torch.randint(512, (1, 100))
    chunked_backward(model, ids, config=config)  # what a probe chooses is not asked
    for place, layer in enumerate(model.model.layers):

        def forward(*args, place=place, right=layer.forward, **kwargs):
            choices = Choices(len(ids[0]))
            with choices.noted("it"):
                out = right(*args, **kwargs)
            chosen[place, int(kwargs["position_ids"][0, 0])] += [made.ids for made in choices.made["it"]]
            return out

        layer.forward = forward
    chunked_backward(model, ids, config=config)
    assert len(chosen) == 4 * len(model.model.layers)
    twice = [runs for runs in chosen.values() if len(runs) > 1]
    assert len(twice) >= 3 * (len(model.model.layers) - 1)  # a fill may leave the last out
    assert all(torch.equal(runs[0], other) for runs in twice for other in runs)


@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(4, 12), st.integers(1, 4), st.sampled_from([0, 1, -1]))
def test_only_near_ties_are_held(seed, rows, experts, k, dim):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, experts, generator=generator)
    other = scores + 0.02 * torch.randn(rows, experts, generator=generator)
    hidden = torch.rand(rows, experts, generator=generator) < 0.1
    scores, other = scores.masked_fill(hidden, -torch.inf), other.masked_fill(hidden, -torch.inf)
    if dim == 0:
        scores, other = scores.T.contiguous(), other.T.contiguous()
    found, ids = scores.topk(k, dim), other.topk(k, dim).indices
    values, taken = nearly_tied(scores, dim, (found.values, found.indices), ids, 0.1)
    assert torch.equal(values, scores.gather(dim, taken))
    assert torch.equal(values, values.sort(dim, descending=True).values)
    own = taken.sort(dim).values == found.indices.sort(dim).values
    theirs = taken.sort(dim).values == ids.sort(dim).values
    assert bool((own.all(dim) | theirs.all(dim)).all())
    gap = (found.values - values).abs().nan_to_num(0)
    assert bool((gap <= 0.1 + 1e-6).all())
    far = nearly_tied(scores, dim, (found.values, found.indices), (-scores).topk(k, dim).indices, 0.0)
    assert torch.equal(far[0], found.values)


def test_choices_belong_to_tokens():
    scores = torch.tensor([[1.0, 1.001, 0.0]]).expand(6, 3) + torch.arange(6.0)[:, None]
    other = torch.tensor([[1.001, 1.0, 0.0]]).expand(6, 3) + torch.arange(6.0)[:, None]
    choices = Choices(6)
    with choices.noted("a"):
        assert scores.topk(1).indices.tolist() == [[1]] * 6
    with choices.held("a", 2, 4, 0.1):
        assert other[2:4].topk(1).indices.tolist() == [[1]] * 2
        assert other[2:4].topk(1).indices.tolist() == [[0]] * 2  # chosen once only
    with choices.held("a", 0, 6, 0.1):
        assert other.topk(1, largest=False).indices.tolist() == [[2]] * 6
        assert other.T.topk(1, 0).indices.tolist() == [[0] * 6]  # another shape: not what was chosen
    with choices.held("b", 0, 6, 0.1):
        assert other.topk(1).indices.tolist() == [[0]] * 6
    with choices.held("a", 2, 4, 0.1):
        assert other[2:4].topk(2).indices.tolist() == [[0, 1]] * 2  # of another number: its own


AMONG_TOKENS = {
    "experts choose": lambda s: s.t().topk(2, 1),
    "experts choose a share": lambda s: s.t().topk(max(s.shape[0] // 4, 1), 1),
    "first dimension": lambda s: torch.topk(s, 2, 0),
    "three dimensions": lambda s: torch.topk(s[None], k=2, dim=-2),
    "as many as there are tokens": lambda s: s.topk(1 + s.shape[0] % 4),
    "flat": lambda s: s.flatten().topk(2),
}
ANYHOW = {
    "by name": lambda s: torch.topk(input=s, k=2, dim=-1, largest=True, sorted=True),
    "smallest": lambda s: torch.topk(s, k=2, sorted=False, largest=False),
    "unsorted": lambda s: torch.topk(s, 2, -1, True, False),
    "into": lambda s: torch.topk(s, 2, out=(torch.empty(0), torch.empty(0, dtype=torch.long))),
    "three dimensions": lambda s: s[None].topk(2),
    "transposed": lambda s: s.t().topk(2, 0),
    "none": lambda s: s.topk(0),
    "whole numbers": lambda s: (s * 100).long().topk(2),
    "nothing but infinities": lambda s: (s - torch.inf).topk(2),
    "not numbers": lambda s: (s * torch.nan).topk(2),
    "mapped": lambda s: torch.vmap(lambda row: row.topk(2))(s),
    "compiled": lambda s: torch.compile(lambda x: x.softmax(-1).topk(2), backend="aot_eager")(s),
}


@pytest.mark.parametrize("how", [*AMONG_TOKENS, *(f"rows, {name}" for name in ANYHOW)])
def test_every_kind_of_topk_goes_on(how):
    """Those among tokens choose freely; none fails, and none returns anything of another shape or kind."""
    ask = AMONG_TOKENS.get(how) or ANYHOW[how.removeprefix("rows, ")]
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(24, 8, generator=generator)
    other = scores + 0.03 * torch.rand(24, 8, generator=generator)
    choices = Choices(24)
    with choices.noted("a"):
        ask(scores)
    for start, stop in ((0, 7), (7, 14), (14, 21), (21, 24)):
        free = ask(other[start:stop])
        with choices.held("a", start, stop, 0.1):
            held = ask(other[start:stop])
        assert [(x.shape, x.dtype) for x in held] == [(x.shape, x.dtype) for x in free]
        if how in AMONG_TOKENS:
            assert torch.equal(held[1], free[1])


def test_ties_of_two_are_ties():
    """Of two scores the higher is above the mean by half of what they are apart: what counts is what it usually is."""
    scores = torch.tensor([[0.5, 0.5001], [0.0, 1.0], [1.0, 0.0]])
    choices = Choices(3)
    with choices.noted("a"):
        scores.topk(1)
    for start, row in enumerate(([0.5001, 0.5], [0.0, 1.0], [0.0, 1.0])):
        with choices.held("a", start, start + 1, 0.1):
            assert torch.tensor([row]).topk(1).indices.tolist() == [[1]]


def test_what_a_dtype_cannot_tell_apart_is_a_tie():
    """Scores of bfloat16 around 100 are 0.5 apart at least."""
    choices = Choices(2)
    with choices.noted("a"):
        torch.tensor([[100.5, 100.0, 98.0], [98.0, 100.0, 100.5]], dtype=torch.bfloat16).topk(1)
    with choices.held("a", 1, 2, 0.1):
        assert torch.tensor([[98.0, 100.5, 100.0]], dtype=torch.bfloat16).topk(1).indices.tolist() == [[2]]
