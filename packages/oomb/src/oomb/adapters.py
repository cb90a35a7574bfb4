"""Adapters by peft: put on a model, and counted where there are no weights."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from .bare import bare_model
from .quiet import quiet

RANK = 16


def lora(targets: str | list[str] = "all-linear", rank: int = RANK, **more: Any) -> Any:
    """peft's config of such adapters. Raises: ValueError where peft is not installed"""
    from .trainer_checks import require  # which imports the Trainer

    require("peft", "adapter='lora'")
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM", **more)


def with_adapters(model: Any, settings: Any) -> Any:
    """Raises: ValueError in one line where peft cannot put them on"""
    from peft import get_peft_model

    try:
        with quiet():
            return get_peft_model(model, settings)
    except ValueError as error:
        raise ValueError(f"lora_targets: {error}") from error


def adapter_parameters(
    model_config: PretrainedConfig, dtype: torch.dtype, settings: Any = None, rank: int = RANK
) -> tuple[nn.Parameter, ...]:
    """What would learn of a model with adapters, without memory: peft decides which layers and experts get one.

    settings: peft's; default: LoRA of `rank` on every linear layer, which can be told without peft too
    """
    with torch.device("meta"), quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run's own adapters say it again
        model = bare_model(model_config, dtype)
        if settings is None and importlib.util.find_spec("peft") is None:
            linear = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.get_output_embeddings()]
            shapes = [shape for m in linear for shape in ((rank, m.in_features), (m.out_features, rank))]
            return tuple(nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)
        model = with_adapters(model, lora(rank=rank) if settings is None else settings)
    return tuple(p for p in model.parameters() if p.requires_grad)
