"""`oomb verify`: dense against chunked gradients of the user's own model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from oomb.bare import bare
from oomb.data import find_source
from oomb.job import choose_device, choose_dtype
from oomb.model_loading import load_config, load_model, load_tokenizer
from oomb.sequences import read_sequences
from oomb.train_config import TINY, TrainConfig
from oomb.verification import check_room, verify

CONTEXT = 512


def run(settings: Mapping[str, Any], *, dry_run: bool = False) -> int:
    """Returns: 0 if the gradients agree, 1 if not"""
    transformers.utils.logging.disable_progress_bar()
    given = {"model": TINY, "context": CONTEXT} | dict(settings)
    named = "data" in given
    config = TrainConfig.from_settings({"data": "stdlib"} | given)
    device = choose_device(config.device)
    dtype, mixed = choose_dtype(config.dtype, device)
    tokenizer = load_tokenizer(config) if named else None
    model_config = load_config(config, tokenizer)
    bare_parts, profile = bare(model_config, config.context, dtype=dtype)
    bare_parts.causal.requires_grad_(config.adapter == "none")
    print(f"memory      {check_room(bare_parts, profile, config.context, device, loaded=False)}", flush=True)
    ids = None
    if tokenizer is not None:
        vocabulary = model_config.get_text_config().vocab_size
        data = read_sequences(find_source(config), tokenizer, config, vocabulary, wanted=1)
        ids = torch.tensor(data.rows[0]["input_ids"], dtype=torch.long, device="cpu")[None]
    torch.manual_seed(config.seed)
    model = load_model(config, model_config, dtype, device)
    if dry_run:
        print(f"dry run     {type(model).__name__} was loaded, nothing was compared")
        return 0
    _wake_adapters(model)
    autocast = torch.bfloat16 if mixed else None
    found = verify(model, ids, config=config.chunks, tokens=config.context, autocast=autocast)
    print("\n".join(found.lines()))
    return 0 if found.passed else 1


def _wake_adapters(model: torch.nn.Module) -> None:
    """New adapters multiply by zero, and half of their gradients vanish: give them something to differ in."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name and not bool(p.any()):
                p.normal_(0, 0.02)
