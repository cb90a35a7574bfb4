"""A model without weights: all that can be told from its config."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from .hf import Parts, take_apart
from .probe import Profile, outline
from .quiet import quiet


def bare_model(model_config: PretrainedConfig, dtype: torch.dtype) -> Any:
    """Raises: ValueError for a config that makes no model"""
    with torch.device("meta"), quiet():
        try:
            return AutoModelForCausalLM.from_config(_still(model_config), dtype=dtype)
        except Exception as error:  # whatever a library's constructor makes of sizes that contradict each other
            raise ValueError(f"no model can be made from this config: {type(error).__name__}: {error}") from error


def bare(
    model_config: PretrainedConfig, tokens: int, *, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> tuple[Parts, Profile]:
    """Such a model as a step knows it, and what its attention looks like over so many tokens.

    Raises: ValueError for a config that makes no model; Unsupported for one that cannot be run in chunks
    """
    parts = take_apart(bare_model(model_config, dtype).train())
    return parts, _under_autocast(outline(parts, tokens), autocast)


def _still(model_config: PretrainedConfig) -> PretrainedConfig:
    """A config of its own, with rotary frequencies that look at no position: there are none without weights."""
    still = copy.deepcopy(model_config)
    rope = getattr(still.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        theta = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        still.get_text_config().rope_parameters = {"rope_type": "default"} | theta
    return still


def _under_autocast(profile: Profile, autocast: torch.dtype | None) -> Profile:
    """Attention computes in the dtype of autocast; what layers hand on stays as wide as the weights."""
    if autocast is None:
        return profile
    return replace(profile, layers={i: replace(facts, dtype=autocast) for i, facts in profile.layers.items()})
