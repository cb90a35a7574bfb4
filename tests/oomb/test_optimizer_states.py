"""The states that are planned are those that a real optimizer makes in a step, by every name that the Trainer takes."""

from __future__ import annotations

import pytest
import torch
from tests.models import build, configs
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from oomb import plan
from oomb.optimizer_states import Optimizer
from oomb.trainer_checks import refuse_optimizer

NAMES = [kind.value for kind in OptimizerNames if "lomo" not in kind.value and "layerwise" not in kind.value]
ELSEWHERE = ("xla", "npu", "anyprecision", "stable_adamw")  # run on no CPU
ROUGH = ("galore", "apollo", "grok")  # what they project, or keep on the host, is not counted
OPTIONS = ["momentum=0.9", "momentum=0.9, centered=true", "momentum=0"]
CASES = [(name, None) for name in NAMES if not any(mark in name for mark in ELSEWHERE + ROUGH)]
CASES += [(name, options) for name in ("sgd", "rmsprop") for options in OPTIONS]


def sizes(held, seen):
    """Bytes of the tensors in an optimizer's states, counters and shared tables of codes left out."""
    if isinstance(held, dict):
        return sum(sizes(value, seen) for name, value in held.items() if not str(name).startswith("qmap"))
    if not isinstance(held, torch.Tensor) or held.numel() == 1 or id(held) in seen:
        return 0
    seen.add(id(held))
    if hasattr(held, "__tensor_flatten__"):
        return sizes({name: getattr(held, name) for name in held.__tensor_flatten__()[0]}, seen)
    return held.numel() * held.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_states_are_those_that_a_step_makes(name, options, dtype, tmp_path):
    try:
        refuse_optimizer(name)
    except ValueError as missing:
        pytest.skip(str(missing))
    config = configs()["qwen2"]
    config.intermediate_size = 3 * 64  # parameters of more than 4,096 numbers and of fewer
    model = build(config, dtype=dtype)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), optim=name, optim_args=options, use_cpu=True, report_to="none"
    )
    optimizer = Trainer(model, arguments).create_optimizer()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    if hasattr(optimizer, "train"):
        optimizer.train()
    optimizer.step()
    seen: set[int] = set()
    real = sum(sizes(state, seen) for state in optimizer.state.values())
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    known = Optimizer.of(name, options)
    assert sum(known.state_bytes(p, embedding=id(p) in tables) for p in model.parameters()) == real
    planned = plan(config, 64, dtype=dtype, optim=name, optim_args=options, device="cpu", host_bytes=2**30)
    assert planned.host["optimizer"] == real


def test_names_and_options_that_nobody_knows():
    with pytest.raises(ValueError, match="closest: adamw_8bit"):
        Optimizer.of("adamw_8bits")
    with pytest.raises(ValueError, match=r"like momentum=0\.9"):
        Optimizer.of("sgd", "momentum")
