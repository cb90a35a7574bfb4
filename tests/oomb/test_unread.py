"""A layer's last product is left out of its second run where nobody reads it, and nowhere else."""

from __future__ import annotations

import types
from unittest import mock

import pytest
import torch
from tests.models import build, configs
from tests.numerics import gradient_errors, gradients
from tests.oomb.test_exact import tokens
from torch import nn

import oomb.replay
import oomb.unread
from oomb import ChunkConfig, chunked_backward

IDS = tokens(2, 29)
CHUNKS = 5


def step(model, recompute: str, **more) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    chunked_backward(model, IDS, config=ChunkConfig(chunk_tokens=6, page_tokens=4, recompute=recompute, **more))
    return gradients(model)


def left_out(model, **more) -> int:
    """How many products were; the gradients must be those of whole chunks."""
    expected = step(model, "chunk", **more)
    with mock.patch.object(oomb.replay, "unread", wraps=oomb.unread.unread) as calls:
        ours = step(model, "layer", **more)
    assert max(gradient_errors(ours, expected)) <= 1e-10
    return calls.call_count


@pytest.mark.parametrize("name", ["qwen2", "qwen2_window", "qwen3", "llama", "llama_tied"])
@pytest.mark.parametrize("more", [{}, {"gpu_kv_budget_bytes": 1, "gpu_keep_budget_bytes": 0}])
def test_of_all_layers_but_the_last_and_all_chunks_but_one(name, more):
    model = build(configs()[name])
    assert left_out(model, **more) == (CHUNKS - 1) * (model.config.num_hidden_layers - 1)


def test_a_bias_learns_and_frozen_weights_do_not():
    model = build(configs()["llama"])
    for layer in model.model.layers:
        down = layer.mlp.down_proj
        layer.mlp.down_proj = nn.Linear(down.in_features, down.out_features, bias=True, dtype=torch.float64)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    assert left_out(model)


class Own(torch.Tensor):
    """A weight that multiplies in its own way, as quantized ones do."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return 2.0 * func(*args, **(kwargs or {}))


def test_weights_of_another_kind_multiply_in_their_own_way():
    model = build(configs()["llama"])
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.detach().as_subclass(Own))
    assert not left_out(model)


@pytest.mark.parametrize("part", ["mlp", "mlp.down_proj"])
def test_parts_that_are_compiled(part):
    model = build(configs()["llama"])
    for layer in model.model.layers:
        layer.get_submodule(part).compile(backend="eager")
    assert not left_out(model)


def test_under_autocast():
    model = build(configs()["qwen2"], dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(model, "chunk")
        with mock.patch.object(oomb.replay, "unread", wraps=oomb.unread.unread) as calls:
            ours = step(model, "layer")
    assert calls.call_count and max(gradient_errors(ours, expected)) <= 1e-6


def layer_with(ending):
    """A decoder layer that ends with something else than an addition: ending(residual, what the MLP returned)."""

    def forward(self, hidden_states, attention_mask=None, position_ids=None, position_embeddings=None, **kwargs):
        kwargs.pop("past_key_values", None)
        residual = hidden_states
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        residual = residual + attended
        return ending(residual, self.mlp(self.post_attention_layernorm(residual)))

    return forward


def clamped_if_large(x):
    """What layers do that fear overflow: a decision about values of which a product left out is a part."""
    large = bool((x.detach().abs() > 1.0).any())
    return x.clamp(-1.0, 1.0) if large and x.shape[1] == 6 else x


ENDINGS = {
    "a norm": (lambda a, b: a + b / b.norm(dim=-1, keepdim=True), False),
    "a scale": (lambda a, b: (a + b) * 0.5, False),
    "twice": (lambda a, b: a + b + b, False),
    "a mask without gradient": (lambda a, b: a * (b.detach() > 0) + b, False),
    "in place": (lambda a, b: a.add_(b), True),
    "in place the other way": (lambda a, b: b.add_(a), True),
    "a look at the shape": (lambda a, b: a.expand(b.shape) + b, True),
    "a look at the sum": (lambda a, b: clamped_if_large(a + b), False),
    "a factor": (lambda a, b: torch.add(a, b, alpha=0.5), True),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_else_a_layer_may_do_with_it(name):
    ending, may = ENDINGS[name]
    model = build(configs()["qwen2"])
    for layer in model.model.layers:
        layer.forward = types.MethodType(layer_with(ending), layer)
    assert bool(left_out(model)) == may


def test_a_layer_that_changes_its_ways():
    """What the first chunk to be walked back, a shorter one, showed does not hold for the next: tried once a layer."""
    model = build(configs()["qwen2"])
    for layer in model.model.layers:
        layer.forward = types.MethodType(layer_with(lambda a, b: a + b if a.shape[1] < 6 else a + 1.0 * b), layer)
    assert left_out(model) == model.config.num_hidden_layers - 1
