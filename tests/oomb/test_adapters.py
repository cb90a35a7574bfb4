"""The adapters that are planned are those that peft puts on: on the modules that were named, and on experts."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests.models import build, configs
from transformers import LlamaForCausalLM

from oomb import adapters, job, plan
from oomb.adapters import adapter_parameters, lora, with_adapters
from oomb.model_loading import adapter_settings
from oomb.train_config import TrainConfig

peft = pytest.importorskip("peft")
GIB = 2**30


@pytest.mark.parametrize("name", ["qwen3", "llama_tied", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"targets": ["q_proj", "v_proj"], "rank": 4},
        {"rank_pattern": {"q_proj": 2, "down_proj": 32}},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_what_learns_is_what_peft_makes_learn(name, settings):
    config = configs()[name]
    real = with_adapters(build(config, dtype=torch.bfloat16), lora(**settings))
    learning = sum(p.nbytes for p in real.parameters() if p.requires_grad)
    more = {"adapters": True, "adapter_config": lora(**settings), "device": "cpu", "host_bytes": GIB}
    assert plan(config, 64, **more).host["adapters"] == 2 * learning  # weights and gradients
    both = plan(config, 64, optim="adamw_torch", **more)
    assert both.host["adapters"] == 4 * learning
    experts = any("experts" in name for name, p in real.named_parameters() if p.requires_grad)
    assert experts == (name == "qwen3_moe" and "targets" not in settings)


def test_a_run_is_planned_with_its_own_adapters():
    settings = {"model": "tiny", "context": 256, "data": "stdlib", "adapter": "lora", "rates": "none"}
    config = TrainConfig.from_settings(settings | {"lora_targets": "q_proj, v_proj", "lora_rank": 3})
    found = job.plan_step(config, configs()["qwen3"], torch.device("cpu"))
    real = with_adapters(build(configs()["qwen3"], dtype=torch.float32), adapter_settings(config))
    assert found.host["adapters"] == 16 * sum(p.numel() for p in real.parameters() if p.requires_grad)


def test_modules_that_are_not_there_are_refused_as_a_run_refuses_them():
    config = TrainConfig.from_settings(
        {"model": "tiny", "context": 256, "data": "stdlib", "adapter": "lora", "lora_targets": "no_such_module"}
    )
    with pytest.raises(ValueError, match=r"^lora_targets: Target modules"):
        job.plan_step(config, configs()["qwen3"], torch.device("cpu"))


def test_what_peft_will_have_to_change_is_not_the_users_to_know(recwarn):
    """It asks a model for what transformers is about to rename."""

    class Renamed(LlamaForCausalLM):
        @property
        def is_gradient_checkpointing(self):
            warnings.warn("`is_gradient_checkpointing` is deprecated", FutureWarning, stacklevel=2)
            return True

    with_adapters(Renamed(configs()["llama"]), lora())
    assert not [warning for warning in recwarn if warning.category is FutureWarning]


def test_without_peft_every_linear_layer_but_the_head_is_counted(monkeypatch):
    config = configs()["qwen3"]
    known = adapter_parameters(config, torch.bfloat16, rank=5)
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None)
    assert sorted(tuple(p.shape) for p in known) == sorted(
        tuple(p.shape) for p in adapter_parameters(config, torch.bfloat16, rank=5)
    )


def test_over_a_base_in_four_bits_the_rest_is_wide():
    """peft casts to float32 what is not packed: norms, embeddings, the head."""
    config, model = configs()["llama"], build(configs()["llama"], dtype=torch.bfloat16)
    packed = type("Params4bit", (torch.nn.Parameter,), {})
    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight = packed(module.weight.detach(), requires_grad=False)
    model.is_loaded_in_4bit = True
    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    four = [p.numel() for p in model.parameters() if p.dtype == torch.bfloat16]
    assert four and all(type(p) is packed for p in model.parameters() if p.dtype == torch.bfloat16)
    rest = sum(p.nbytes for p in model.parameters() if p.dtype == torch.float32)
    found = plan(config, 64, adapters=True, quantized=True, device="cpu", host_bytes=GIB)
    assert found.host["weights"] == rest + sum(int(0.53 * count) for count in four)
