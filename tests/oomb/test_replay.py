"""Layers walked back one at a time: the same numbers as a chunk's whole graph, or a decoder that is left alone."""

from __future__ import annotations

import gc
import os
import types

import pytest
import torch
import torch.nn.functional as F
from tests.models import build, configs
from tests.numerics import gradient_errors, gradients
from tests.oomb.test_exact import tokens
from torch import nn
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from oomb import ChunkConfig, Unsupported, chunked_backward, chunked_loss

IDS = tokens(2, 29)
NOTHING_KEPT = {"gpu_keep_budget_bytes": 0}
ON_THE_HOST = {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 9000, "segment_tokens": 8}
PLACES = [{}, NOTHING_KEPT, ON_THE_HOST]


def config(**more) -> ChunkConfig:
    return ChunkConfig(**{"chunk_tokens": 6, "page_tokens": 4, **more})


def step(model, chunks: ChunkConfig, *, at_once: bool = True):
    """Loss, gradients and the random state after, from a fixed state before."""
    torch.manual_seed(7)
    if at_once:
        loss = chunked_backward(model, IDS, config=chunks)
    else:
        loss = chunked_loss(model, IDS, config=chunks)
        loss.backward()
    return float(loss.detach()), gradients(model), torch.get_rng_state()


def same_as_whole_chunks(make) -> None:
    """make: a fresh model; what is compared holds bit for bit but for the order in which shared weights are summed."""
    for more in PLACES:
        for at_once in (True, False):
            model = make()
            loss, dense, state = step(model, config(recompute="chunk", **more), at_once=at_once)
            again, ours, state_after = step(model, config(recompute="layer", **more), at_once=at_once)
            assert again == pytest.approx(loss, abs=1e-12)
            assert max(gradient_errors(ours, dense)) <= 1e-10
            assert torch.equal(state, state_after)


def dropout_inside(model) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, _args, out: F.dropout(out, 0.3, module.training))


def scaled_inputs(model) -> None:
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _module, args: (args[0] * 0.9, *args[1:]))


def scaled_gradients(model) -> None:
    for layer in model.model.layers:
        layer.register_full_backward_hook(lambda _module, given, _out: (given[0] * 0.5, *given[1:]))


def compiled(model) -> None:
    model.model.layers[1].compile(backend="eager")


def shared(model) -> None:
    model.model.layers[2].mlp = model.model.layers[0].mlp


def frozen(model) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})


def one_projection(model) -> None:
    model.requires_grad_(False)
    model.model.layers[1].self_attn.k_proj.requires_grad_(True)


def idle_parameter(model) -> None:
    """What could learn takes no part, as experts that no token chose."""
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    model.model.layers[0].idle = nn.Parameter(torch.zeros(3, dtype=torch.float64))


CHANGES = [
    dropout_inside, scaled_inputs, scaled_gradients, compiled, shared, frozen, one_projection, idle_parameter,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_users_do_to_layers(change):
    def make():
        model = build(configs()["qwen2"])
        change(model)
        return model

    same_as_whole_chunks(make)


def decoder(*, between=None, after=None, angles=None):
    """A decoder's forward, in the library's way, that does more than to chain its layers."""

    def forward(self, input_ids, position_ids=None, use_cache=None, attention_mask=None, **kwargs):
        hidden = embedded = self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1])[None]
        mask = create_causal_mask(self.config, hidden, None, None, position_ids=position_ids)
        rotary, outputs = self.rotary_emb(hidden, position_ids), []
        for i, layer in enumerate(self.layers):
            if between is not None and i:
                hidden = between(hidden, self.training)
            given = rotary if angles is None else angles(rotary, hidden)
            hidden = layer(hidden, attention_mask=mask, position_embeddings=given, position_ids=position_ids, **kwargs)
            outputs.append(hidden)
        if after is not None:
            hidden = after(embedded, outputs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    return forward


def with_decoder(**parts):
    model = build(configs()["qwen2"])
    model.model.forward = types.MethodType(decoder(**parts), model.model)
    return model


DECODERS = {
    "plain": {},
    "embeddings added at the end": {"after": lambda embedded, outputs: outputs[-1] + 0.5 * embedded},
    "an early output added at the end": {"after": lambda _, outputs: outputs[-1] + 0.5 * outputs[0]},
    "the last but one added at the end": {"after": lambda _, outputs: outputs[-1] + 0.5 * outputs[-2]},
    "angles from hidden states": {
        "angles": lambda rotary, hidden: tuple(x * (1 + 0.1 * hidden.abs().mean(-1, keepdim=True)) for x in rotary)
    },
    "a change between layers": {"between": lambda hidden, _: hidden * 0.5},
}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_that_do_more_than_chain_their_layers(name):
    same_as_whole_chunks(lambda: with_decoder(**DECODERS[name]))


BETWEEN = {
    "dropout": lambda hidden, training: F.dropout(hidden, 0.3, training),
    "a scale that norms hide": lambda hidden, training: hidden * 0.5 if training else hidden,
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize("chunk", [6, 64])
def test_what_happens_between_layers_in_training_only_is_refused(name, chunk):
    """The probe, in evaluation, saw a chain; one chunk stores no keys that a comparison could look at."""
    model = with_decoder(between=BETWEEN[name])
    with pytest.raises(Unsupported, match='recompute="chunk"'):
        chunked_backward(model, IDS, config=config(chunk_tokens=chunk, recompute="layer"))
    assert all(p.grad is None for p in model.parameters())
    chunked_backward(model, IDS, config=config(chunk_tokens=chunk, recompute="chunk"))
    model.eval()
    chunked_backward(model, IDS, config=config(chunk_tokens=chunk, recompute="layer"))


@pytest.mark.parametrize("budget", [0, 40_000, 50_500, 61_500, 72_500, 100_000, 10**6])
def test_any_budget_for_what_is_kept(budget):
    """Far into a sequence attention is kept before layers, whose outputs the walk then makes beside the budget."""
    model, ids = build(configs()["qwen2"]), tokens(1, 400)
    chunks = {"chunk_tokens": 40, "page_tokens": 8}
    chunked_backward(model, ids, config=ChunkConfig(**chunks, recompute="chunk"))
    dense = gradients(model)
    chunked_backward(model, ids, config=ChunkConfig(**chunks, recompute="layer", gpu_keep_budget_bytes=budget))
    assert max(gradient_errors(gradients(model), dense)) <= 1e-10


def live_tensors() -> int:
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def failed(model, chunks: ChunkConfig) -> None:
    hook = model.model.layers[1].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        chunked_backward(model, IDS, config=chunks)
    hook.remove()


ENDS = {
    "walked back": lambda model, chunks: chunked_backward(model, IDS, config=chunks),
    "dropped": lambda model, chunks: chunked_loss(model, IDS, config=chunks),
    "failed": failed,
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("more", [*PLACES, {"attention": "sparse", "top_k_pages": 1, "chunk_tokens": 8}])
def test_a_loss_lets_go_of_its_tensors_at_once(end, more):
    """Not when the garbage collector gets to them: it does not know how full a GPU is."""
    model = build(configs()["qwen2"])

    def run() -> None:
        ENDS[end](model, config(**more))
        model.zero_grad(set_to_none=True)

    run()
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        for _ in range(3):
            run()
        assert live_tensors() == before
    finally:
        gc.enable()
    assert not any("_compiled_call_impl" in vars(layer) for layer in model.model.layers)


def test_a_loss_of_the_same_model_within_a_loss():
    """A loss function may score with the model that is being trained."""
    model = build(configs()["qwen2"])

    def plain(logits, labels):
        return -logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    for more in PLACES:
        inner = [torch.no_grad, torch.enable_grad]

        def scored(logits, labels, more=more, inner=inner):
            for mode in inner:
                with mode():
                    chunked_loss(model, tokens(1, 17, seed=3), config=config(**more), loss_fn=plain)
            return plain(logits, labels)

        chunked_backward(model, IDS, config=config(**more), loss_fn=plain)
        alone = gradients(model)
        chunked_backward(model, IDS, config=config(**more), loss_fn=scored)
        assert max(gradient_errors(gradients(model), alone)) == 0


def test_what_a_hook_brings_in_learns_in_frozen_layers_too():
    """A vector that steers a frozen model belongs to no module."""
    model, steer = build(configs()["qwen2"]), torch.full((32,), 0.1, dtype=torch.float64, requires_grad=True)
    model.model.requires_grad_(False)
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, out: out + steer)
    found = []
    for recompute in ("chunk", "layer"):
        for more in PLACES:
            chunked_backward(model, IDS, config=config(recompute=recompute, **more))
            found.append(steer.grad)
            steer.grad = None
    assert all(torch.allclose(grad, found[0], rtol=1e-10) for grad in found) and bool(found[0].any())


def test_inference_mode_around_enabled_gradients():
    model = build(configs()["qwen2"])
    expected = float(chunked_loss(model, IDS, config=config()).detach())
    for more in PLACES:
        with torch.inference_mode(), torch.enable_grad():
            for entry in (chunked_loss, chunked_backward):
                assert float(entry(model, IDS, config=config(**more))) == pytest.approx(expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_that_drops_its_parents_loss(capfd):
    model = build(configs()["qwen2"])
    loss = chunked_loss(model, IDS, config=config(**ON_THE_HOST))
    child = os.fork()
    if child == 0:
        del loss
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    loss.backward()
    assert capfd.readouterr().err == ""
