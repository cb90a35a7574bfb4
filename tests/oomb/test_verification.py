"""`verify` passes where the gradient is right and names what is wrong where it is not."""

from __future__ import annotations

import re
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.models import build, configs
from torch import nn

from oomb import ChunkConfig, Unsupported, verification, verify
from oomb.cli.main import main
from oomb.hf import take_apart
from oomb.memory import Machine
from oomb.probe import outline

CONFIG = ChunkConfig(chunk_tokens=11, page_tokens=4)


@pytest.mark.parametrize("name", configs())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exact_models_pass(name, dtype):
    found = verify(build(configs()[name], dtype=dtype), config=CONFIG, tokens=50)
    assert found.passed, "\n".join(found.lines())
    assert found.loss_chunked == pytest.approx(found.loss_whole, rel=3e-2 if dtype == torch.bfloat16 else 1e-5)
    assert found.total.whole > 0 or dtype == torch.float64
    assert len(found.parameters) == len(list(build(configs()[name]).parameters()))


def lora():
    peft = get_peft_model(
        build(configs()["qwen3"], dtype=torch.float32), LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear")
    )
    for name, p in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, 0, 0.1)
    return peft


def test_adapters_and_autocast():
    found = verify(lora(), config=CONFIG, tokens=50, autocast=torch.bfloat16)
    assert found.passed and found.dtype == "bfloat16 autocast" and found.reference == "float64"
    assert all("lora" in one.name for one in found.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("victim", ["model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.down_proj.weight"])
@pytest.mark.parametrize("fault", ["scaled", "missing", "nan", "noisy"])
def test_a_wrong_gradient_is_named(monkeypatch, dtype, victim, fault):
    right = verification.chunked_backward

    def wrong(model, ids, **more):
        loss = right(model, ids, **more)
        p = dict(model.named_parameters())[victim]
        if fault == "missing":
            p.grad = None
        elif fault == "nan":
            p.grad[0, 0] = float("nan")
        elif fault == "scaled":
            p.grad *= 1.1 if dtype == torch.bfloat16 else 1.001
        else:
            p.grad += (
                torch.randn_like(p) * p.grad.norm() / p.numel() ** 0.5 * (0.1 if dtype == torch.bfloat16 else 1e-3)
            )
        return loss

    monkeypatch.setattr(verification, "chunked_backward", wrong)
    found = verify(build(configs()["qwen3"], dtype=dtype), config=CONFIG, tokens=50)
    assert not found.passed and found.culprit.name == victim and found.lines()[-1].startswith(f"FAILED      {victim}")


def test_the_model_is_left_as_it_was():
    model = lora()
    model.base_model.model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 7.0)
    verify(model, config=CONFIG, tokens=30)
    assert [module.training for module in model.modules()] == modes
    assert all(p.grad is None or bool((p.grad == 7).all()) for p in model.parameters())


def test_a_chunk_that_would_hold_everything_is_cut():
    found = verify(build(configs()["qwen3"]), tokens=64)
    assert found.chunk_tokens == 16 and found.tokens == 64


def test_sparse_attention_is_verified_as_dense():
    config = ChunkConfig(chunk_tokens=8, page_tokens=4, attention="sparse", top_k_pages=1, recent_pages=1)
    assert verify(build(configs()["qwen3"]), config=config, tokens=60).passed


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(Unsupported):
        verify(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="at most 65,536 tokens, got 5,000,000"):
        verify(build(configs()["qwen3"]), tokens=5_000_000)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_what_a_run_over_all_tokens_takes(name, attention):
    """Counted: everything that its graph holds in the wider precision, the loss included."""
    config, tokens = configs()[name], 300
    model = build(config, dtype=torch.float32)
    model.set_attn_implementation(attention)
    parts = take_apart(model)
    told = verification.whole_bytes(parts, outline(parts, 24), tokens, loaded=True)
    told -= 2 * sum(p.nbytes for p in model.parameters()) * 3  # a copy in float64, all gradients
    twin, held = model.double(), {}

    def note(saved):
        storage = saved.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes(), saved  # kept, or another would get its place
        return saved

    weights = {p.untyped_storage().data_ptr() for p in twin.parameters()}
    ids = torch.randint(config.vocab_size, (1, tokens))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        twin(input_ids=ids, labels=ids, use_cache=False)
    assert told == pytest.approx(sum(size for at, (size, _) in held.items() if at not in weights), rel=0.4)


def test_a_run_that_does_not_fit_is_refused_before_work_starts(capsys, monkeypatch):
    arguments = ["verify", "--device", "cpu", "--context", "96", "--chunk-tokens", "24", "--page-tokens", "8"]
    assert main(arguments) == 0
    assert re.search(r"^memory +0\.\d\d GiB, about, for all 96 tokens at once", capsys.readouterr().out)
    for name in ("load_model", "read_sequences"):
        monkeypatch.setattr(f"oomb.cli.verify.{name}", lambda *_, **__: pytest.fail("work has started"))
    for more in ([], ["--data", "stdlib"]):
        assert main([*arguments, "--context", "5000000", *more]) == 2
        assert "at most 65,536 tokens, got 5,000,000" in capsys.readouterr().err
    monkeypatch.setattr(Machine, "now", lambda device: Machine(None, 0, 2**20))
    assert main(arguments) == 2
    assert "that takes about" in (said := capsys.readouterr().err) and "there are 1,048,576" in said
    with pytest.raises(ValueError, match="there are 1,048,576"):
        verify(build(configs()["qwen3"]), tokens=2000)


def test_the_command(tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("some text " * 50)
    arguments = ["verify", "--device", "cpu", "--context", "96", "--chunk-tokens", "24", "--page-tokens", "8"]
    assert main(arguments) == 0
    assert "passed" in capsys.readouterr().out
    assert main([*arguments, "--data", str(tmp_path / "text.txt"), "--adapter", "lora", "--dtype", "mixed"]) == 0
    assert "lora" in capsys.readouterr().out
    assert main([*arguments, "--dry-run"]) == 0
    assert "nothing was compared" in capsys.readouterr().out
    right = verification.chunked_backward
    monkeypatch.setattr(verification, "chunked_backward", lambda *a, **k: right(*a, **k, scale=1.01))
    assert main(arguments) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main([*arguments, "--chunk-tokens", "none"]) == 2


def test_bench_times_several_chunk_lengths(capsys):
    assert main(["bench", "--device", "cpu", "--context", "1200", "--steps", "1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown[2:5]] == ["512", "1,024", "1,200"] and "1,200 random tokens" in shown[0]
    assert all(float(line.split()[1]) > 0 for line in shown[2:5])
    assert main(["bench", "--device", "cpu", "--context", "64", "--chunk-tokens", "16", "--dry-run"]) == 0
    assert "would time chunks of 16" in capsys.readouterr().out


class Packed(nn.Module):
    """A linear layer as quantizers leave it: whole numbers and a scale, products in bfloat16 whatever comes in."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.scale = linear.weight.detach().abs().max() / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def wide(self) -> torch.Tensor:
        return (self.weight.float() * self.scale).bfloat16()

    def forward(self, x):
        return nn.functional.linear(x.bfloat16(), self.wide()).to(x.dtype)

    def unpacked(self) -> nn.Linear:
        linear = nn.Linear(*self.weight.shape[::-1], bias=False, dtype=torch.bfloat16)
        linear.weight.data.copy_(self.wide())
        return linear


def quantized(layers: int, dtype: torch.dtype, *, way_back: bool = True) -> nn.Module:
    """A model with adapters over quantized weights, what stays wide in `dtype`: peft's preparation makes it float32."""
    config = configs()["qwen3"].to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    model = build(type(configs()["qwen3"])(**config), dtype=dtype)
    model.requires_grad_(False)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear) and child is not model.lm_head:
                setattr(module, name, nn.Sequential(Packed(child)))
    model.is_quantized = True

    def dequantize(self):
        if not way_back:
            raise NotImplementedError("none of this kind")
        for module in self.modules():
            if isinstance(module, nn.Sequential) and isinstance(module[0], Packed):
                module[0] = module[0].unpacked()
        self.is_quantized = False

    model.dequantize = MethodType(dequantize, model)
    for p in model.parameters():
        if p.is_floating_point():
            p.requires_grad_()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [3, 24])
def test_quantized_weights_are_held_to_what_they_stand_for(monkeypatch, dtype, layers):
    model = quantized(layers, dtype)
    found = verify(model, config=CONFIG, tokens=50)
    assert found.passed, "\n".join(found.lines())
    assert found.reference == "float32" and found.total.whole > 1e-3
    assert model.is_quantized and not any("weight" in one.name and "proj.0" in one.name for one in found.parameters)
    right = verification.chunked_backward

    def wrong(model, ids, **more):
        loss = right(model, ids, **more)
        model.model.layers[1].self_attn.q_norm.weight.grad *= 1.3
        return loss

    monkeypatch.setattr(verification, "chunked_backward", wrong)
    assert verify(model, config=CONFIG, tokens=50).culprit.name == "model.layers.1.self_attn.q_norm.weight"


def test_quantized_weights_without_a_way_back_are_refused():
    with pytest.raises(ValueError, match="wider precision, and these quantized weights have none: none of this kind"):
        verify(quantized(3, torch.float32, way_back=False), config=CONFIG, tokens=50)


def test_a_reference_that_is_another_model_shows_nothing(monkeypatch):
    """Packed weights that are unpacked wrongly: both runs are as far from it, and within what is allowed."""
    monkeypatch.setattr(Packed, "unpacked", lambda self: nn.Linear(*self.weight.shape[::-1], bias=False))
    found = verify(quantized(3, torch.bfloat16), config=CONFIG, tokens=50)
    assert not found.passed and found.culprit is found.total
    assert re.fullmatch(r"FAILED +the whole run is itself [0-9.e+]+ from float32: it shows nothing", found.lines()[-1])
