"""What surrounds a step: adapters, accumulation, precision, modes, failures; and the model as it was found."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from tests.dense import dense_loss
from tests.models import build, configs
from tests.numerics import gradient_errors, gradients, relative
from tests.oomb.test_exact import tokens
from tests.oomb.two_processes import in_two_processes

import oomb.step
from oomb import ChunkConfig, chunked_backward, chunked_loss

CONFIG = ChunkConfig(chunk_tokens=6, page_tokens=4)


def lora(name: str, dropout: float = 0.0, targets=("q_proj", "v_proj", "down_proj")):
    model = get_peft_model(
        build(configs()[name]),
        LoraConfig(r=2, lora_dropout=dropout, target_modules=list(targets), task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_B" in key:
                p.normal_(0, 0.3)
    return model.double()


@pytest.mark.parametrize("targets", [("q_proj",), ("k_proj",), ("v_proj",), ("q_proj", "v_proj", "down_proj")])
def test_lora_on_a_frozen_base(targets):
    """With adapters on q alone no layer's first keys need gradients: pages must still be right."""
    model, ids = lora("qwen2", targets=targets), tokens(2, 23)
    loss = chunked_loss(model, ids, config=CONFIG)
    loss.backward()
    ours = gradients(model)
    dense_loss(model, ids).backward()
    dense = gradients(model)
    assert set(ours) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert max(gradient_errors(ours, dense)) <= 1e-10


@pytest.mark.parametrize("entry", [chunked_loss, chunked_backward])
def test_lora_dropout_is_the_same_in_both_passes(entry):
    """With checkpointing, kept outputs or another budget the same masks are drawn: one seed, one result."""
    model, ids = lora("qwen2", dropout=0.4), tokens(1, 23)

    def step(seed, **change):
        torch.manual_seed(seed)
        loss = entry(model, ids, config=ChunkConfig(chunk_tokens=6, page_tokens=4, **change))
        if loss.requires_grad:
            loss.backward()
        return gradients(model)

    reference = step(7)
    others = [
        step(7, gpu_kv_budget_bytes=1),
        step(7, gpu_keep_budget_bytes=0, host_budget_bytes=1),
        step(7, recompute="chunk"),
    ]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    others.append(step(7))
    for other in others:
        assert max(gradient_errors(other, reference)) <= 1e-10
    assert max(gradient_errors(step(8), reference)) > 1e-3, "dropout was not active"


def test_dropout_gradient_against_finite_differences():
    """If the masks of fill and walk differed, the gradient would not be that of the loss.

    The bound is that of the library's norms, which compute in float32.
    """
    model, ids = lora("qwen2", dropout=0.4), tokens(1, 17)

    def loss():
        torch.manual_seed(3)
        return chunked_loss(model, ids, config=CONFIG)

    loss().backward()
    grads = gradients(model)
    name, p = next((n, p) for n, p in model.named_parameters() if p.requires_grad and "v_proj.lora_B" in n)
    direction = torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype)
    with torch.no_grad():
        p += 1e-3 * direction
        up = float(loss())
        p -= 2e-3 * direction
        down = float(loss())
    assert (up - down) / 2e-3 == pytest.approx(float((grads[name] * direction).sum()), rel=1e-3)


def test_accumulation_equals_one_batch():
    model = build(configs()["qwen3"])
    first, second = tokens(1, 20, 1), tokens(1, 14, 2)
    for ids in (first, second):
        chunked_loss(model, ids, num_items=32, config=CONFIG).backward()
    ours = gradients(model)
    sum(dense_loss(model, ids, num_items=32) for ids in (first, second)).backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10


def test_several_losses_alive_and_summed():
    model = build(configs()["qwen3"])
    a, b = (chunked_loss(model, tokens(1, 20, seed), config=CONFIG) for seed in (1, 2))
    (2 * a + b).backward()
    ours = gradients(model)
    (2 * dense_loss(model, tokens(1, 20, 1)) + dense_loss(model, tokens(1, 20, 2))).backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10
    with pytest.raises(RuntimeError):
        a.backward()


@pytest.mark.parametrize("entry", [chunked_loss, chunked_backward])
@pytest.mark.parametrize(("length", "chunks"), [(20, 4), (6, 1)])
def test_progress_counts_every_chunk_of_both_passes(entry, length, chunks):
    model, told = build(configs()["qwen3"]), []
    loss = entry(model, tokens(1, length), config=CONFIG, progress=lambda *step: told.append(step))
    if loss.requires_grad:
        loss.backward()
    steps = 2 * chunks - 1
    assert told == [(done, steps) for done in range(1, steps + 1)]
    told.clear()
    with torch.no_grad():
        entry(model, tokens(1, length), config=CONFIG, progress=lambda *step: told.append(step))
    assert told == [(done, chunks) for done in range(1, chunks + 1)]


def test_scale():
    model, ids = build(configs()["qwen3"]), tokens(1, 20)
    plain = chunked_backward(model, ids, config=CONFIG)
    reference = gradients(model)
    scaled = chunked_backward(model, ids, scale=8.0, config=CONFIG)
    assert float(plain) == float(scaled)
    assert all(torch.allclose(g, 8 * reference[n], rtol=1e-12) for n, g in gradients(model).items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe_balanced"])
def test_forward_only_and_training_after_it(mode, name):
    model, ids = build(configs()[name]), tokens(2, 23)
    expected = dense_loss(model, ids)
    for entry in (chunked_loss, chunked_backward):
        with mode():
            loss = entry(model, ids, config=CONFIG)
        assert not loss.requires_grad
        assert relative(loss, expected) <= 1e-10
    chunked_backward(model, ids, config=CONFIG)
    ours = gradients(model)
    expected.backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10


def test_autocast_bfloat16():
    model, wide = build(configs()["qwen3"], dtype=torch.float32), build(configs()["qwen3"])
    wide.load_state_dict(model.state_dict())
    ids = tokens(2, 23)
    dense_loss(wide, ids).backward()
    exact = gradients(wide)
    with torch.autocast("cpu", torch.bfloat16):
        dense_loss(model, ids).backward()
    low = gradients(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_loss(model, ids, config=CONFIG)
    loss.backward()
    assert gradient_errors(gradients(model), exact)[0] <= 2 * gradient_errors(low, exact)[0]


def test_fp32_main_gradients_do_not_round_per_chunk():
    wide, ids = build(configs()["qwen3"]), tokens(1, 60)
    model = copy.deepcopy(wide).to(torch.bfloat16)
    wide.load_state_dict(model.state_dict())
    dense_loss(wide, ids).backward()
    exact = gradients(wide)
    errors = {}
    for main in (False, True):
        chunked_backward(model, ids, config=ChunkConfig(chunk_tokens=1, page_tokens=4, fp32_main_grads=main))
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        errors[main] = gradient_errors(gradients(model), exact)[0]
    assert errors[True] < errors[False]


def test_fp32_main_gradients_add_to_what_was_there_and_survive_a_failure(monkeypatch):
    model, ids = build(configs()["qwen3"], dtype=torch.bfloat16), tokens(1, 20)
    config = ChunkConfig(chunk_tokens=6, page_tokens=4, fp32_main_grads=True)
    chunked_backward(model, ids, config=config)
    once = {n: p.grad.clone() for n, p in model.named_parameters()}
    chunked_backward(model, ids, config=config)
    assert all(torch.allclose(p.grad.float(), 2 * once[n].float(), rtol=2e-2) for n, p in model.named_parameters())
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    monkeypatch.setattr(oomb.step, "tiled_loss", interrupted(oomb.step.tiled_loss, at=3))
    with pytest.raises(KeyboardInterrupt):
        chunked_backward(model, ids, config=config)
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters())


def interrupted(function, at: int):
    calls = []

    def wrapper(*args, **kwargs):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize("at", range(1, 8))
def test_an_interrupt_anywhere_leaves_the_next_step_right(monkeypatch, at):
    model, ids = build(configs()["gpt_oss"]), tokens(1, 23)
    own = model.config._attn_implementation
    with monkeypatch.context() as patch:
        patch.setattr(oomb.step, "tiled_loss", interrupted(oomb.step.tiled_loss, at))
        with pytest.raises(KeyboardInterrupt):
            chunked_loss(model, ids, config=CONFIG).backward()
    assert model.config._attn_implementation == own
    model.zero_grad()
    chunked_loss(model, ids, config=CONFIG).backward()
    ours = gradients(model)
    dense_loss(model, ids).backward()
    assert max(gradient_errors(ours, gradients(model))) <= 1e-10


def test_the_model_generates_as_before():
    config = configs()["gpt_oss"]
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config.max_position_embeddings = 16
    model = build(config, dtype=torch.float32).eval()
    prompt, state = tokens(1, 8), {k: v.clone() for k, v in model.state_dict().items()}

    def generate():
        return model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)

    before, own = generate(), model.config._attn_implementation
    chunked_backward(model.train(), tokens(1, 40), config=CONFIG)
    assert model.training and model.config._attn_implementation == own
    assert torch.equal(generate(), before)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert not any("forward" in vars(m) for m in model.modules())


def test_changed_weights_between_the_passes_are_noticed():
    model, ids = build(configs()["qwen2"]), tokens(1, 23)
    loss = chunked_loss(model, ids, config=CONFIG)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="k_proj"):
        loss.backward()


@pytest.mark.parametrize("entry", [chunked_loss, chunked_backward])
def test_a_layer_that_computes_something_else_in_the_walk_is_named(entry):
    """Whatever the cause, the recomputed keys show it."""
    model, ids = build(configs()["qwen2"]), tokens(1, 23)
    key = model.model.layers[1].self_attn.k_proj
    key.register_forward_hook(lambda _module, _args, out: out * 1.1 if torch.is_grad_enabled() else None)
    with pytest.raises(RuntimeError, match="layer 1: keys or values recomputed"):
        loss = entry(model, ids, config=CONFIG)
        loss.backward()


def test_prompt_learning_is_refused():
    model = get_peft_model(build(configs()["qwen2"]), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="prompt learning"):
        chunked_loss(model, tokens(1, 12), config=CONFIG)


def _reduced(rank: int, _folder: Path) -> list[dict[str, torch.Tensor]]:
    dist.init_process_group("gloo")
    model = build(configs()["qwen2"])
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    labels = tokens(1, 23, rank)
    labels[:, :7] = -100  # the only chunk that reduces has no label: the head must take part all the same
    chunked_backward(ddp, tokens(1, 23, rank), labels=labels, config=CONFIG)
    first = gradients(model)
    chunked_loss(ddp, tokens(1, 23, rank), labels=labels, config=CONFIG).backward()
    return [first, gradients(model)]


def test_data_parallel_over_two_processes(tmp_path):
    results = in_two_processes(_reduced, tmp_path)
    model = build(configs()["qwen2"])
    labels = [tokens(1, 23, rank).index_fill(1, torch.arange(7), -100) for rank in range(2)]
    sum(dense_loss(model, tokens(1, 23, rank), labels=labels[rank]) / 2 for rank in range(2)).backward()
    dense = gradients(model)
    for ours in [*results[0], *results[1]]:
        assert max(gradient_errors(ours, dense)) <= 1e-10
